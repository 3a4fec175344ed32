"""A node's leader: its thread exchanges messages with rank 0 through the job's store, publishes for the ranks
of the node what their rows hold, and acts for them on what rank 0 announced.

Owns the thread, the store's keys and the promises of its ranks: their words are in shared memory, so no rank
has to be asked. Over the network it sends and reads once in half a second, in one request each, whatever the
number of ranks; more often while a stop is asked for. A lost store (rank 0 has died) stops no training and
raises nothing: the schedule stays as it was, and the store is retried."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from flashckpt.errors import DamagedError
from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.liveness import KeyValues
from flashckpt.ranks.messages import (
    MOST_OPEN,
    MOST_SAVES,
    NONE,
    Announcement,
    Answer,
    Gone,
    NodeMessage,
    StopState,
)
from flashckpt.ranks.node_state import NodeState, RankRow, Table
from flashckpt.threads import start_thread

log = logging.getLogger(__name__)

_ROUND_S, _ALONE_ROUND_S, _EXPEDITED_ROUND_S = 0.5, 0.05, 0.02
# After rank 0 has died it does not return in the same attempt; a network may.
_LOST_AFTER_S = 20.0
_LONGEST_PAUSE_S = 5.0
# The longest wait of rank 0's end for nodes that have not ended.
_PARTING_S = 5.0
_ANNOUNCED_KEY = "pace/announced"
_LIVENESS_CHECK_S = 0.5


class Leader:
    """The part of a node's leader that has no thread and no connection."""

    def __init__(self, node_state: NodeState, clock: Callable[[], float] = time.monotonic) -> None:
        self._node_state, self._number, self._clock = node_state, 0, clock
        self._answered = (0, Answer.NONE)
        self._limit = NONE
        self._died, self._checked_s = NONE, -math.inf

    @property
    def is_expedited(self) -> bool:
        """Whether a stop is requested or proposed, and not decided."""
        stop = self._node_state.announced.stop
        is_open = stop.state in (StopState.NONE, StopState.INCOMPLETE)
        is_asked = is_open and any(row.stop_asked for row in self._node_state.rows)
        return is_asked or stop.state is StopState.PROPOSED

    def act_on(self, announced: Announcement) -> None:
        """Publish an announcement to the node and act on its stop. A late or repeated one changes nothing."""
        if not self._node_state.announce(announced):
            return
        stop = announced.stop
        if stop.number > self._answered[0]:
            self._lift()  # a newer proposal implies that the one before is void
        if stop.state is StopState.PROPOSED and stop.number > self._answered[0]:
            promised = [row.is_ended or row.promise(stop.boundary_index) for row in self._node_state.rows]
            self._answered = stop.number, Answer.PROMISED if all(promised) else Answer.REFUSED
            self._limit = stop.boundary_index
        elif stop.state is StopState.INCOMPLETE:
            self._lift()
        elif stop.state is StopState.CONFIRMED:
            self._node_state.confirmed = stop.boundary_index

    def _lift(self) -> None:
        for row in self._node_state.rows if self._limit != NONE else ():
            row.lift(self._limit)
        self._limit = NONE

    def message(self) -> NodeMessage:
        """Return the present contents of the rows. Reads `judged` of each rank before its seals and its calls
        of save(), so that the message is complete for each boundary that it counts as judged."""
        rows, self._number = self._node_state.rows, self._number + 1
        judged = min(row.judged for row in rows)
        sealed = [row.sealed for row in rows]
        alike = sorted(_alike(sealed))[-MOST_OPEN:]
        in_all = set.intersection(*map(set, sealed))
        if any(len({tables[boundary_index].digest for tables in sealed}) > 1 for boundary_index in in_all):
            self._node_state.holds_whole = 1
        requests = sorted(set().union(*(row.requests for row in rows)))[-MOST_SAVES:]
        outside = [(row.outside, row.rank) for row in rows]
        return NodeMessage(
            number=self._number,
            acknowledged=min(row.acknowledged for row in rows),
            entered_high=max(row.progress.entered for row in rows),
            judged=judged,
            sealed=tuple(alike),
            steps=tuple(sealed[0][boundary_index].step for boundary_index in alike),
            missed=_missed(rows, sealed, judged),
            slots=min(row.slots for row in rows),
            plain_ns=min((row.plain_ns for row in rows if row.plain_ns), default=0),
            cost_ns=max(row.cost_ns for row in rows),
            landing_ns=max(row.landing_ns for row in rows),
            stop_asked=next(((row.stop_asked, row.rank) for row in rows if row.stop_asked), (0, NONE)),
            promise=self._answered,
            requests=tuple(requests),
            outside=max(outside, key=lambda pair: pair[0]),
            not_outside=min(outside),
            withdrawn=max(row.withdrawn for row in rows),
            persisted=rows[0].persisted,
            failed=rows[0].failed,
            is_ended=all(row.is_ended for row in rows),
            gone=Gone(self._dead_rank(), next((row.rank for row in rows if row.is_ended), NONE)),
        )

    def _dead_rank(self) -> int:
        """Return a rank whose process has died, or NONE. Messages may follow each other fast, so the system
        is queried at most twice a second."""
        now_s = self._clock()
        if now_s - self._checked_s >= _LIVENESS_CHECK_S:
            self._checked_s = now_s
            self._died = next((row.rank for row in self._node_state.rows if row.has_died), NONE)
        return self._died


def _alike(sealed: Sequence[dict[int, Table]]) -> set[int]:
    """Return the boundaries that all ranks have sealed with the same table. For any other boundary, a
    leaf that a rank has left to another may be in no slot."""
    first = sealed[0].items()
    return {at for at, table in first if all(tables.get(at) == table for tables in sealed)}


def _missed(rows: Sequence[RankRow], sealed: Sequence[dict[int, Table]], judged: int) -> tuple[int, int]:
    """Return the newest boundary that some ranks have sealed and one rank has missed, or sealed with another
    table, and this rank."""
    for boundary_index in sorted(set().union(*sealed), reverse=True):
        table = next(tables[boundary_index] for tables in sealed if boundary_index in tables)
        pairs = zip(rows, sealed, strict=True)
        without = next((row.rank for row, tables in pairs if tables.get(boundary_index) != table), None)
        if boundary_index <= judged and without is not None:
            return boundary_index, without
    return 0, NONE


# ---- the thread


class Exchange:
    """The leader's thread. leader: the rank that leads this node. decider: on rank 0 only, where `nodes` are
    all nodes. store: None in a job of one node."""

    def __init__(
        self,
        node_state: NodeState,
        store: KeyValues | None,
        leader: int,
        decider: Decider | None,
        nodes: Sequence[tuple[int, ...]] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_state, self._store, self._key = node_state, store, _key(leader)
        self._others = [_key(ranks[0]) for ranks in nodes[1:]]
        self._leader, self._decider, self._clock = Leader(node_state), decider, clock
        self._round_s = _ROUND_S if store is not None else _ALONE_ROUND_S
        self._silent_since_s: float | None = None
        self._ended = threading.Event()
        self._failures, self._parting_s = 0, 0.0
        self._thread: threading.Thread | None = None

    def publish_first(self) -> None:
        """Create the keys that other ranks read. Called by rank 0 before any other rank begins."""
        assert self._decider is not None
        self._publish(self._decider.announced)
        for key in self._others:
            self._set(key, b"")

    def start(self) -> None:
        self._thread = start_thread("flashckpt-ranks", self._run)

    def close(self, *, in_order: bool) -> None:
        """Do one more round, so that the others receive the end of this node. At an orderly end of the run
        (`in_order`) rank 0 waits a few seconds for theirs."""
        self._parting_s = _PARTING_S if in_order and self._decider is not None else 0.0
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _PARTING_S)

    # ---- the thread

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s()):
            self.round()
        until_s = self._clock() + self._parting_s
        self.round()
        while self._clock() < until_s and self._decider is not None and not self._decider.all_have_ended:
            time.sleep(_EXPEDITED_ROUND_S)
            self.round()

    def _pause_s(self) -> float:
        if self._failures:
            return float(min(self._round_s * 2**self._failures, _LONGEST_PAUSE_S))
        return _EXPEDITED_ROUND_S if self._leader.is_expedited else self._round_s

    def round(self) -> None:
        """Exchange messages once. Logs a failure of the store once it has lasted for a while."""
        try:
            if self._decider is not None:
                self._decide()
            else:
                self._follow()
        except Exception as error:  # a lost store raises many kinds, and none may reach the training
            self._failed(error)
        else:
            if self._silent_since_s is not None and self._node_state.is_lost:
                log.warning("rank 0 answers again: snapshots of all ranks continue")
            self._silent_since_s, self._failures = None, 0
            self._node_state.is_lost = 0

    def _decide(self) -> None:
        assert self._decider is not None
        rows = self._store.multi_get(self._others) if self._store is not None else []
        messages = [self._leader.message(), *map(_read, rows)]
        before = self._decider.announced
        announced = self._decider.round(messages, self._clock())
        self._leader.act_on(announced)
        if announced is not before:
            self._publish(announced)

    def _follow(self) -> None:
        assert self._store is not None
        [data] = self._store.multi_get([_ANNOUNCED_KEY])
        self._leader.act_on(Announcement.unpacked(_bytes(data)))
        self._set(self._key, self._leader.message().packed())
        if self._node_state.announced.is_ended:
            self._ended.set()

    def _publish(self, announced: Announcement) -> None:
        self._set(_ANNOUNCED_KEY, announced.packed())

    def _set(self, key: str, data: bytes) -> None:
        if self._store is not None:
            self._store.set(key, data.hex())

    def _failed(self, error: Exception) -> None:
        now = self._clock()
        self._failures += 1
        if self._silent_since_s is None:
            self._silent_since_s = now
            log.debug("the ranks' store cannot be reached: %s", error)
        elif now - self._silent_since_s > _LOST_AFTER_S and not self._node_state.is_lost:
            self._node_state.is_lost = 1
            log.warning(
                "rank 0 has not answered for %.0f s (%s): training continues, and no further snapshot is "
                "known to be complete until it does. The newest complete one stays in memory.",
                now - self._silent_since_s,
                error,
            )


def _key(leader: int) -> str:
    return f"pace/{leader}"


def _bytes(text: bytes) -> bytes:
    return bytes.fromhex(text.decode())


def _read(text: bytes) -> NodeMessage | None:
    """Decode a node's message; None for a missing or invalid message."""
    if not text:
        return None
    try:
        return NodeMessage.unpacked(_bytes(text))
    except (DamagedError, ValueError) as error:
        log.debug("the message of a node is ignored: %s", error)
        return None
