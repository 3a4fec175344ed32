"""What decides beside the loops of several ranks, alike on all of them, and how it begins: `JointPace`."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flashckpt import _native
from flashckpt.capture.schedule import Schedule
from flashckpt.errors import BoundaryError, FlashckptError, OptionError, PersistError
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.ranks.board import MOST_RANKS, Board
from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.exchange import Exchange
from flashckpt.ranks.job import KeyValues
from flashckpt.ranks.liveness import ProcessId
from flashckpt.ranks.messages import NONE, Announcement, Call, Refused
from flashckpt.ranks.pacing import Cadence, Outcome, Pacing, SnapshotSlots
from flashckpt.ranks.schedule import Followed
from flashckpt.ranks.snapshots import Snapshots
from flashckpt.ranks.stop import Asked, JointStop, StopPolicy

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S = 0.002
# How long save() outside of an iteration waits for ranks that live and have not called it: they may be busy,
# or wait themselves, in a collective, for one that calls it alone. When that is said.
CALL_PATIENCE_S, _WORD_AFTER_S = 300.0, 30.0
# A call that is withdrawn is decided within a few rounds, unless rank 0 is gone.
_WITHDRAWAL_S = 10.0
# After a rank has let its run go: as long as rank 0's end waits for the others.
_LAST_WORD_S = 5.0
_BOARD = "board-"


class Together(Protocol):
    """Each rank does something, and all know that all could."""

    def __call__(self, what: str, deed: Callable[[], T], /) -> T: ...


@dataclass(frozen=True, kw_only=True)
class JobPlace:
    """What a Pacing of several ranks is made of. `node` are the ranks of this node, the first of them its
    leader; `nodes` those of all nodes, on rank 0 alone. `store` is the job's, on leaders alone, for as long
    as rank 0 has the run; `runtime` the run's folder on this node. `together` and `led` are the group's."""

    rank: int
    world: int
    node: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    store: KeyValues | None
    runtime: RuntimeFolder
    attempt: AttemptName
    cadence: Cadence
    together: Together
    led: Together


class JointPace:
    """Of one of several ranks. `exchange` is its node's, on the leader."""

    is_alone = False

    def __init__(self, memory: _native.Mapping, place: JobPlace, exchange: Exchange | None) -> None:
        options = place.cadence.options
        self._memory, self._node, self._rank = memory, place.node, place.rank
        self._grace_s, self._exchange = max(options.grace_s, 1.0), exchange
        # One for each thread that reads it: the background thread, and below the training thread.
        self._heard, self._board = Board(memory, place.node), Board(memory, place.node)
        self._row = self._board.row_of(place.rank)
        self._row.live(ProcessId.of(os.getpid()))
        self._followed = Followed(self._row, options.overhead, is_automatic=place.cadence.every == "auto")
        self.schedule: Schedule = self._followed
        self._snapshots = Snapshots(self._heard, self._row, place.attempt.number, self._followed.budget)
        self._stop: JointStop | None = None
        self._called: set[int] = set()
        self._expected: set[int] = set()
        self._refusals: list[FlashckptError] = []
        self._closed = False
        self._every = place.cadence.every
        if exchange is not None:
            exchange.start()

    def stop_policy(self, signals: Asked) -> StopPolicy:
        self._stop = JointStop(signals, Board(self._memory, self._node), self._row, self._grace_s)
        return self._stop

    # ---- the background thread

    def look(self, slots: SnapshotSlots) -> None:
        if self._stop is not None:
            self._stop.look()
        announced = self._heard.announced
        self._followed.follow(announced.terms)
        with slots.held() as held:
            self._snapshots.look(held, slots.writable)
        slots.mark(self._snapshots.complete, self._snapshots.void)
        self._judge_own(announced)
        self._say_spacing(announced)

    def _say_spacing(self, announced: Announcement) -> None:
        """Once, where an order cannot be kept: the outcome of a snapshot takes longer than that."""
        if self._rank or not announced.terms or not isinstance(self._every, int):
            return
        if self._every < announced.terms[-1].every:
            log.info(
                "every=%d: all ranks take a snapshot every %d steps. Until all know that all have one it "
                "keeps a slot, and here that takes longer than so many steps",
                self._every,
                announced.terms[-1].every,
            )
            self._every = None

    def _judge_own(self, announced: Announcement) -> None:
        for refused in announced.refused:
            if refused.ordinal in self._called:
                self._called.discard(refused.ordinal)
                self._expected.discard(refused.ordinal)
                self._refuse(_not_alike(refused))
        # A copy, taken at once: the training thread adds to it.
        for ordinal in [each for each in tuple(self._expected) if each <= announced.decided]:
            self._expected.discard(ordinal)
            if announced.is_void(ordinal):
                who = announced.missed[1] if announced.missed[0] == ordinal else NONE
                self._refuse(PersistError(_not_taken(who)))

    def _refuse(self, error: FlashckptError) -> None:
        log.error("%s", error)
        self._refusals.append(error)

    # ---- the training thread

    def settle(self, ordinal: int) -> None:
        self._row.settle(ordinal)

    def is_settled(self, ordinal: int) -> bool:
        return self._row.settled >= ordinal

    def save_inside(self, ordinal: int) -> None:
        if ordinal not in self._called:
            self._called.add(ordinal)
            self._row.call_save(ordinal, Call.INSIDE)

    def save_outside(self, ordinal: int, until_s: float) -> None:
        self._row.call_save(ordinal, Call.OUTSIDE)
        until_s, is_withdrawn = min(until_s, time.monotonic() + CALL_PATIENCE_S), False
        word_s = time.monotonic() + _WORD_AFTER_S
        while (announced := self._board.announced).agreed < ordinal:
            refused = next((each for each in announced.refused if each.ordinal == ordinal), None)
            if refused is not None:
                raise _not_alike(refused)
            gone = self._gone(announced)
            if time.monotonic() > until_s or gone is not None:
                if is_withdrawn or gone is not None:
                    raise _not_alike(Refused(ordinal, self._rank, NONE if gone is None else gone))
                # It may be agreed on in this very moment: rank 0 says which came first.
                self._row.withdraw(ordinal)
                is_withdrawn, until_s = True, time.monotonic() + _WITHDRAWAL_S
            if time.monotonic() > word_s:
                log.warning("save() was called %.0f s ago, and waits for ranks that have not", _WORD_AFTER_S)
                word_s = math.inf
            time.sleep(_PAUSE_S)

    def expect(self, ordinal: int) -> None:
        self._expected.add(ordinal)

    def refusal(self) -> FlashckptError | None:
        return self._refusals.pop(0) if self._refusals else None

    def outcome(self, ordinal: int, until_s: float) -> Outcome:
        word_s = time.monotonic() + _WORD_AFTER_S
        if self._is_unconfirmed:
            until_s = min(until_s, time.monotonic() + self._grace_s)
        while (announced := self._board.announced).decided < ordinal:
            if time.monotonic() > until_s or self._died(announced) is not None:
                return Outcome(is_known=False, newest=0)
            if self._gone(announced) is not None:  # what it had sealed may be decided in this moment
                until_s = min(until_s, time.monotonic() + _LAST_WORD_S)
            if time.monotonic() > word_s:
                log.warning("wait() or save() waits for ranks that are not at its boundary yet")
                word_s = math.inf
            time.sleep(_PAUSE_S)
        return Outcome(True, max((each for each in announced.complete if each <= ordinal), default=0))

    def is_persisted(self, ordinal: int) -> bool:
        return self._row.newest_persisted >= ordinal

    @property
    def committed(self) -> tuple[int, ...]:
        return self._heard.announced.committed

    @property
    def failed(self) -> int:
        return self._board.announced.failed

    def began_from_storage(self) -> None:
        self._snapshots.began_from_storage()

    @property
    def held_whole(self) -> int:
        return self._board.held_whole

    @property
    def awaits_others(self) -> bool:
        return not (self._is_unconfirmed or self.lost)

    @property
    def _is_unconfirmed(self) -> bool:
        return self._stop is not None and self._stop.is_unconfirmed

    @property
    def lost(self) -> str:
        died = self._died(self._board.announced)
        return "" if died is None else _rank(died)

    def _died(self, announced: Announcement) -> int | None:
        """A rank that is dead. That this node's leader is, nobody else would say here."""
        leader = self._board.rows[0]
        if leader.has_died or self._board.is_lost:
            return leader.rank if leader.has_died else 0
        return None if announced.gone.died == NONE else announced.gone.died

    def _gone(self, announced: Announcement) -> int | None:
        """One that passes no boundary any more, or tells of none: a leader that has ended hears nothing for
        its node."""
        died, leader = self._died(announced), self._board.rows[0]
        if died is not None:
            return died
        if leader.is_ended:
            return leader.rank
        return None if announced.gone.ended == NONE else announced.gone.ended

    def close(self, *, closed: bool) -> None:
        if not self._closed:
            self._closed = True
            self._row.end()
            if self._exchange is not None:
                self._exchange.close(in_order=closed)


def begin(place: JobPlace) -> Pacing:
    """What decides beside the loops of several ranks. All of them call it, at the end of `attach`."""
    leads = place.rank == place.node[0]
    name = f"{_BOARD}{place.attempt}-{place.node[0]:05d}"

    def make() -> None:
        if len(place.node) > MOST_RANKS:
            raise OptionError(
                f"{len(place.node)} ranks share a node; {MOST_RANKS} are the most that can. Nothing was "
                "started. Start fewer ranks on each node."
            )
        if leads:
            _make_board(place, name)

    place.together("the words that the ranks of a node share", make)
    memory = place.together("the words that the ranks of a node share", lambda: _mapped(place, name))
    exchange: Exchange | None = None

    def ready() -> None:
        nonlocal exchange
        if leads:
            place.runtime.remove(name)
            exchange = _exchange(place, Board(memory, place.node))

    # What rank 0 has announced stands in the store before anybody reads it.
    place.together("what rank 0 announces", ready)
    return JointPace(memory, place, exchange)


def _make_board(place: JobPlace, name: str) -> None:
    for old in place.runtime.names():
        if old.startswith(_BOARD):  # of a leader that was killed while it attached
            place.runtime.remove(old)
    descriptor = place.runtime.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        # Every byte is there: a touch can never be SIGBUS.
        os.posix_fallocate(descriptor, 0, Board.num_bytes(len(place.node)))
        Board(_native.Mapping(descriptor, Board.num_bytes(len(place.node))), place.node).format()
    finally:
        os.close(descriptor)


def _mapped(place: JobPlace, name: str) -> _native.Mapping:
    descriptor = place.runtime.open_file(name)
    try:
        return _native.Mapping(descriptor, Board.num_bytes(len(place.node)))
    finally:
        os.close(descriptor)


def _exchange(place: JobPlace, board: Board) -> Exchange:
    cadence, decider = place.cadence, None
    if place.rank == 0:
        decider = Decider(place.nodes, cadence.every, cadence.persist_every, cadence.options.overhead)
    is_one = len(place.node) == place.world
    exchange = Exchange(board, None if is_one else place.store, place.node[0], decider, place.nodes)
    if decider is not None:
        exchange.publish_first()
    return exchange


def _not_alike(refused: Refused) -> BoundaryError:
    return BoundaryError(
        f"save() was called by rank {refused.caller} and not by {_rank(refused.absent)} at the same place "
        "of the program. Nothing of it is persisted, and all ranks go on alike: a step counts where all have "
        "it. Call save() on every rank, or on none."
    )


def _not_taken(rank: int) -> str:
    return (
        f"A snapshot that save() ordered is not persisted: {_rank(rank)} could not take it, or took it as "
        "another step, and a step counts where all ranks have it. Training was not touched, and earlier "
        "steps stand. Call save() on all ranks again."
    )


def _rank(number: int) -> str:
    return "another rank" if number == NONE else f"rank {number}"
