"""`JointCoordination`: what a rank decides with others beside its loop, alike on all ranks.

Owns the rank's side: the schedule that it follows (`Followed`), its stop (`JointStop`), and one round of its
background thread (`Snapshots`), which publishes what was sealed and missed and writes to the slots' control
pages what was announced. Touches no bytes of snapshots. The leader of the node exchanges messages
(leader.py)."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flashckpt import _native
from flashckpt._native import xxh3_64
from flashckpt.capture.schedule import Budget, Schedule
from flashckpt.errors import BoundaryError, DamagedError, FlashckptError, OptionError, PersistError
from flashckpt.format.checked_json import compact
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Sealed, Slot, SlotState
from flashckpt.ranks.coordination import (
    CALLED_WORD,
    Asked,
    Coordination,
    SnapshotPolicy,
    SnapshotSlots,
    StopPolicy,
)
from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.job import Job
from flashckpt.ranks.leader import Exchange
from flashckpt.ranks.liveness import ProcessId, group_failure
from flashckpt.ranks.messages import NONE, Announcement, Refused
from flashckpt.ranks.node_state import MOST_RANKS, NodeState, RankRow, Table

log = logging.getLogger(__name__)

_DIGEST_BYTES = 8
_STOP_PAUSE_S = 0.001
# Codes of stops beside the numbers of signals, which are below 65.
_CODES = {CALLED_WORD: 100, "notice file": 101}
_PAUSE_S = 0.002
# The longest wait of a save() outside of an iteration for living ranks: they may be busy, or wait in a
# collective for the rank that calls it alone. Then when a wait is logged.
CALL_TIMEOUT_S, _LOG_AFTER_S = 300.0, 30.0
# A withdrawn call is decided within a few rounds, unless rank 0 is gone.
_WITHDRAWAL_S = 10.0
# After a rank has released its run: as long as rank 0's end waits for the others.
_LAST_WORD_S = 5.0
_BOARD = "board-"


class JointCoordination(Coordination):
    """The coordination of one of several ranks. exchange: its node's, on the leader only."""

    # The outcome of a snapshot waits for this.
    poll_s = 0.05
    full_reason = "every slot holds what other ranks may have, too, and not all of them answer"
    order_binds = True
    group_failure = staticmethod(group_failure)

    def __init__(
        self,
        memory: _native.Mapping,
        job: Job,
        attempt: AttemptName,
        snapshot_policy: SnapshotPolicy,
        exchange: Exchange | None,
    ) -> None:
        options = snapshot_policy.options
        self._memory, self._node, self._rank = memory, job.node, job.rank
        self._grace_s, self._exchange = max(options.grace_s, 1.0), exchange
        # One for each thread that reads it: the background thread and the training thread.
        self._background_state, self._node_state = NodeState(memory, job.node), NodeState(memory, job.node)
        self._row = self._node_state.row_of(job.rank)
        self._row.live(ProcessId.of(os.getpid()))
        self._followed = Followed(self._row, options.overhead)
        self.schedule: Schedule = self._followed
        self._snapshots = Snapshots(self._background_state, self._row, attempt.number, self._followed.budget)
        self._stop: JointStop | None = None
        self._requested = 0
        self._closed = False
        self._every = snapshot_policy.every
        if exchange is not None:
            exchange.start()

    def stop_policy(self, signals: Asked) -> StopPolicy:
        self._stop = JointStop(signals, NodeState(self._memory, self._node), self._row, self._grace_s)
        return self._stop

    # ---- the background thread

    def poll(self, slots: SnapshotSlots) -> None:
        if self._stop is not None:
            self._stop.poll()
        announced = self._background_state.announced
        self._followed.follow(announced)
        with slots.held() as held:
            self._snapshots.poll(held, slots.writable)
        slots.mark(self._snapshots.complete, self._snapshots.incomplete)
        self._log_spacing(announced)

    def _log_spacing(self, announced: Announcement) -> None:
        """Log once that `every` cannot be kept, because a snapshot is undecided for longer."""
        if self._rank == 0 and isinstance(self._every, int) and self._every < announced.every:
            log.info(
                "every=%d: all ranks take a snapshot every %d steps. A snapshot keeps a slot until all ranks "
                "know that all have it, and that takes longer than so many steps",
                self._every,
                announced.every,
            )
            self._every = None

    # ---- the training thread

    def settle(self, boundary_index: int) -> None:
        self._row.settled = boundary_index

    def is_settled(self, boundary_index: int) -> bool:
        return self._row.settled >= boundary_index

    def request_save(self, boundary_index: int) -> None:
        if boundary_index != self._requested:
            self._requested = boundary_index
            self._row.request_save(boundary_index)

    def unanswered_save(self) -> FlashckptError | None:
        announced, boundary_index = self._node_state.announced, self._requested
        entered = self._row.progress.entered
        # At the end of a loop the present boundary is not settled, and its own snapshot answers the call.
        is_open = announced.decided < boundary_index or self._row.settled < entered
        if announced.newest_complete >= boundary_index or entered < boundary_index or is_open:
            return None
        who = announced.missed[1] if announced.missed[0] >= boundary_index else NONE
        return PersistError(
            f"The snapshot that save() ordered is not taken yet: {_rank(who)} has none of its boundary, and "
            "a step counts if all ranks have it. All ranks take and persist one a few boundaries ahead. "
            "Training is not affected, and earlier steps are intact. Call wait() some iterations later."
        )

    def save_outside(self, boundary_index: int, until_s: float) -> None:
        self._row.outside = boundary_index
        until_s, is_withdrawn = min(until_s, time.monotonic() + CALL_TIMEOUT_S), False
        log_at_s = time.monotonic() + _LOG_AFTER_S
        while (announced := self._node_state.announced).agreed < boundary_index:
            if announced.refused.boundary_index >= boundary_index:
                raise _not_alike(announced.refused)
            gone = self._gone(announced)
            if time.monotonic() > until_s or gone is not None:
                if is_withdrawn or gone is not None:
                    raise _not_alike(Refused(boundary_index, self._rank, NONE if gone is None else gone))
                # Rank 0 may agree at this moment, so it decides which came first.
                self._row.withdrawn = boundary_index
                is_withdrawn, until_s = True, time.monotonic() + _WITHDRAWAL_S
            if time.monotonic() > log_at_s:
                log.warning("save() waits since %.0f s for ranks that have not called it", _LOG_AFTER_S)
                log_at_s = math.inf
            time.sleep(_PAUSE_S)

    def is_unchanged(self, is_fresh: bool, is_as_captured: Callable[[], bool]) -> bool:
        # The captures of one rank decide nothing: all must give the boundary the same step number.
        return is_fresh

    def outcome(self, boundary_index: int, until_s: float) -> int | None:
        log_at_s = time.monotonic() + _LOG_AFTER_S
        if self._is_unconfirmed:
            until_s = min(until_s, time.monotonic() + self._grace_s)
        while (announced := self._node_state.announced).decided < boundary_index:
            if time.monotonic() > until_s or self._died(announced) is not None:
                return None
            if self._gone(announced) is not None:  # its seals may be decided at this moment
                until_s = min(until_s, time.monotonic() + _LAST_WORD_S)
            if time.monotonic() > log_at_s:
                log.warning("wait() or save() waits for ranks that have not reached its boundary")
                log_at_s = math.inf
            time.sleep(_PAUSE_S)
        return max((each for each in announced.complete if each <= boundary_index), default=0)

    def is_persisted(self, boundary_index: int) -> bool:
        return self._row.persisted >= boundary_index

    @property
    def holds_whole(self) -> bool:
        return bool(self._node_state.holds_whole)

    @property
    def awaits_others(self) -> bool:
        return not (self._is_unconfirmed or self.lost)

    @property
    def _is_unconfirmed(self) -> bool:
        return self._stop is not None and self._stop.is_unconfirmed

    @property
    def lost(self) -> str:
        died = self._died(self._node_state.announced)
        return "" if died is None else _rank(died)

    def _died(self, announced: Announcement) -> int | None:
        """Return a dead rank. Also checks this node's leader, whose death no other process here reports."""
        leader = self._node_state.rows[0]
        if leader.has_died or self._node_state.is_lost:
            return leader.rank if leader.has_died else 0
        return None if announced.gone.died == NONE else announced.gone.died

    def _gone(self, announced: Announcement) -> int | None:
        """Return a rank that passes no more boundaries, or reports none: a leader that has ended receives
        nothing for its node."""
        died, leader = self._died(announced), self._node_state.rows[0]
        if died is not None:
            return died
        if leader.is_ended:
            return leader.rank
        return None if announced.gone.ended == NONE else announced.gone.ended

    def close(self, *, closed: bool) -> None:
        if not self._closed:
            self._closed = True
            self._row.is_ended = 1
            if self._exchange is not None:
                self._exchange.close(in_order=closed)


def begin(
    job: Job, runtime: RuntimeFolder, attempt: AttemptName, snapshot_policy: SnapshotPolicy
) -> Coordination:
    """Begin the decisions beside the loops of several ranks. All of them call it, at the end of `attach`.
    runtime: the run's folder on this node."""
    leads, num_bytes = job.rank == job.node[0], NodeState.num_bytes(len(job.node))
    name = f"{_BOARD}{attempt}-{job.node[0]:05d}"

    def make() -> None:
        if len(job.node) > MOST_RANKS:
            raise OptionError(
                f"{len(job.node)} ranks share a node; {MOST_RANKS} are the most that can. Nothing was "
                "started. Start fewer ranks on each node."
            )
        if leads:
            for old in runtime.names():
                if old.startswith(_BOARD):  # of a leader that was killed during attach
                    runtime.remove(old)
            descriptor = runtime.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                # Every byte is allocated: no access raises SIGBUS.
                os.posix_fallocate(descriptor, 0, num_bytes)
                NodeState(_native.Mapping(descriptor, num_bytes), job.node).format()
            finally:
                os.close(descriptor)

    def mapped() -> tuple[_native.Mapping, Exchange | None]:
        descriptor = runtime.open_file(name)
        try:
            memory = _native.Mapping(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        # Rank 0 creates its key in the store before another rank reads it.
        return memory, _exchange(job, NodeState(memory, job.node), snapshot_policy) if leads else None

    what = "the words that the ranks of a node share"
    job.together(what, make)
    memory, exchange = job.together(what, mapped)
    if leads:
        runtime.remove(name)
    return JointCoordination(memory, job, attempt, snapshot_policy, exchange)


def _exchange(job: Job, node_state: NodeState, policy: SnapshotPolicy) -> Exchange:
    decider = None
    if job.rank == 0:
        decider = Decider(
            job.nodes, policy.every, policy.persist_every, policy.options.overhead, has_cache=policy.has_cache
        )
    store = None if len(job.node) == job.world else job.store
    exchange = Exchange(node_state, store, job.node[0], decider, job.nodes)
    if decider is not None:
        exchange.publish_first()
    return exchange


def _not_alike(refused: Refused) -> BoundaryError:
    return BoundaryError(
        f"save() was called outside of an iteration by rank {refused.caller} and not by "
        f"{_rank(refused.absent)}. It took no snapshot, and training is not affected. Outside of an "
        "iteration call save() on every rank; in an iteration one rank may call it for all."
    )


def _rank(number: int) -> str:
    return "another rank" if number == NONE else f"rank {number}"


# ---- the schedule


class Followed(Schedule):
    """The schedule of one of several ranks, from the announcements of rank 0. All ranks follow the same
    one, so nothing stays due once a boundary qualifies: one that this rank cannot take is missed, and
    incomplete for all. It never requests persisting: rank 0 does once all ranks have a
    snapshot."""

    every_step = False

    def __init__(self, row: RankRow, overhead: float) -> None:
        self._row = row
        self.budget = Budget(overhead)
        self._announced = Announcement()
        self._is_due = False

    def follow(self, announced: Announcement) -> None:
        """Follow this announcement from now on. Called by any one thread."""
        self._announced = announced

    def due(self, step: int, boundary_index: int) -> bool:
        announced = self._announced
        is_regular = any(each and step % each == 0 for each in (announced.every, announced.also))
        self._is_due = self._is_due or is_regular or boundary_index == announced.save_at
        return self._is_due

    def qualifies(self) -> None:
        # Within an accumulation no rank can take one. Each rank takes this one or misses it.
        self._is_due = False

    def begins(self, boundary_index: int) -> None:
        self._row.begun = boundary_index

    def captured(self, *, ordered: bool) -> None:
        self.budget.taken(ordered=True)  # rank 0 limits the cost for all


# ---- the stop


class JointStop(StopPolicy):
    """The stop policy of one of several ranks. If any is requested to stop, all end at one boundary, a few
    ahead of the fastest rank: ranks that end at different boundaries hang in a collective. Rank 0 proposes
    the boundary, and all promise to wait at it before it holds. Owns the waiting; the promises belong to the
    node's leader."""

    def __init__(
        self,
        signals: Asked,
        node_state: NodeState,
        row: RankRow,
        grace_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(signals)
        self._node_state, self._row, self._grace_s = node_state, row, grace_s
        self._clock, self._sleep = clock, sleep
        self._ends_at: int | None = None

    @property
    def reason(self) -> str | None:
        own = super().reason
        if own is not None or self._ends_at is None:
            return own
        stop = self._node_state.announced.stop
        return f"{_word(stop.reason)} (rank {stop.rank})" if stop.number else None

    @property
    def is_asked(self) -> bool:
        return self._ends_at is not None or super().reason is not None

    @property
    def is_near(self) -> bool:
        return self._ends_at is not None

    def enter(self, boundary_index: int) -> None:
        """Enter a boundary. At a promised one, wait until it is known whether all end there. Without an
        answer until the end of the grace period, or if rank 0 is gone, this rank ends there too."""
        self.poll()
        while not self._row.enter(boundary_index):
            # The loop has ended and the program continues: the promise was kept.
            assert self._ends_at is not None, "a promised boundary was left before it was decided"
            self._row.lift(self._row.progress.limit)
        if (
            self._ends_at is None
            and self._row.progress.limit == boundary_index
            and self._ends_at_promised(boundary_index)
        ):
            self._ends_at = boundary_index

    def poll(self) -> None:
        """Request a stop at the node's leader, if this rank is to stop. Any thread."""
        if super().reason is not None and not self._row.stop_asked:
            self._row.stop_asked = _code(super().reason or CALLED_WORD)

    def stops_at(self, boundary_index: int) -> bool:
        return self._ends_at is not None and boundary_index >= self._ends_at

    def _ends_at_promised(self, boundary_index: int) -> bool:
        """Wait at a boundary; return whether the loop ends there."""
        until_s = min(self._clock() + self._grace_s, self._signals.deadline_s)
        while self._row.progress.limit == boundary_index:
            if self._node_state.confirmed == boundary_index:
                return True
            if self._node_state.is_lost or self._clock() >= until_s:
                log.warning(
                    "the ranks' stop at this boundary was not confirmed (%s): this rank ends here, and never "
                    "continues alone. Its sealed snapshots are intact; a step counts if all ranks have it",
                    "rank 0 is gone" if self._node_state.is_lost else "not all have answered in time",
                )
                self.is_unconfirmed = True
                self._signals.expedite(self._grace_s)
                return True
            self._sleep(_STOP_PAUSE_S)
            until_s = min(until_s, self._signals.deadline_s)  # a signal may arrive meanwhile
        return False


def _code(reason: str) -> int:
    return _CODES[reason] if reason in _CODES else int(signal.Signals[reason])


def _word(code: int) -> str:
    words = {each.value: each.name for each in signal.Signals} | {_CODES[word]: word for word in _CODES}
    return words.get(code, f"reason {code}")


# ---- one round of the background thread


class NodeTable:
    """Computes the `Table` of one rank's snapshots. Reads the metadata of a plan once: with ten thousand
    leaves that takes longer than a short step. Touches no leaf's bytes."""

    def __init__(self) -> None:
        self._plan_id: int | None = None
        self._divided: NDArray[np.int64] = np.array([], dtype=np.int64)
        self._plan_digest = 0

    def table(self, sealed: Sealed) -> Table:
        """Return the table of a rank's own snapshot. Raises DamagedError. Meaningless if the slot is written
        again meanwhile."""
        record = sealed.record
        if record.plan_id != self._plan_id:
            metadata = sealed.slot.metadata(sealed)
            divided, leaves = metadata.divided(), metadata.leaves
            self._divided = np.array([index for index, _ in divided], dtype=np.int64)
            rows = [[repr(leaves[index].content), owner] for index, owner in divided]
            self._plan_digest = xxh3_64(compact(rows))
            self._plan_id = record.plan_id
        if not len(self._divided):
            return Table(step=sealed.step)
        start = record.metadata_bytes - record.values_bytes - _DIGEST_BYTES * record.table_count
        view = sealed.slot.metadata_view[start : start + _DIGEST_BYTES * record.table_count]
        digests: NDArray[np.uint64] = np.frombuffer(view, dtype=np.uint64)[self._divided]
        found = xxh3_64(self._plan_digest.to_bytes(_DIGEST_BYTES, "little") + digests.tobytes())
        return Table(found or 1, sealed.step)


@dataclass
class HeldBoundaries:
    """The contents of a rank's slots. sealed: snapshots of this attempt by boundary. is_writing: one is being
    written; is_begun: one is being written or unconfirmed."""

    sealed: dict[int, Sealed] = field(default_factory=dict)
    is_writing: bool = False
    is_begun: bool = False

    @classmethod
    def of(cls, slots: Iterable[Slot], attempt_number: int) -> HeldBoundaries:
        found = cls()
        for slot in slots:
            try:
                state, sealed = slot.state().state, slot.sealed()
            except DamagedError:
                continue
            if state.is_begun:
                found.is_begun = True
                found.is_writing = found.is_writing or state is SlotState.WRITING
            elif sealed is not None and sealed.record.attempt_number == attempt_number:
                found.sealed[sealed.boundary] = sealed
        return found


def judged_until(settled: int, begun: int, *, is_begun: bool) -> int:
    """Return the newest boundary up to which every one was sealed or missed. settled, begun: the rank's
    words, read in this order and before the slots. At most one snapshot is unfinished, the one begun last."""
    return begun - 1 if is_begun and begun <= settled else settled


class Snapshots:
    """The snapshots of the rank of a row. complete: (attempt number, boundary) of the newest that all ranks
    have, with boundary 0 if this attempt has no snapshot; incomplete: those that may be overwritten."""

    def __init__(
        self,
        node_state: NodeState,
        row: RankRow,
        attempt_number: int,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_state, self._row, self._attempt, self._budget = node_state, row, attempt_number, budget
        self._clock = clock
        self._asked: dict[int, Sealed] = {}
        self._table = NodeTable() if len(node_state.ranks) > 1 else None
        self._tables: dict[int, Table] = {}
        self._begun, self._begun_s, self._landing_s = 0, 0.0, 0.0
        self.complete = (attempt_number, 0)
        self.incomplete: frozenset[tuple[int, int]] = frozenset()

    def poll(self, slots: Sequence[Slot], writable: int) -> None:
        """Do one round. slots: all of the rank; writable: to how many of them captures may be written."""
        settled, begun = self._row.settled, self._row.begun
        held = HeldBoundaries.of(slots, self._attempt)
        announced = self._node_state.announced
        self._time(begun, held)
        self._apply(announced, slots, held)
        self._follow_persists(slots)
        row, plain_s, cost_s = self._row, self._budget.plain_s or 0.0, self._budget.cost_s or 0.0
        times_ns = (int(each * 1e9) for each in (plain_s, cost_s, self._landing_s))
        row.slots, (row.plain_ns, row.cost_ns, row.landing_ns) = writable, times_ns
        judged = judged_until(settled, begun, is_begun=held.is_begun)
        self._row.publish(judged, self._compared(held, announced.decided))
        self._row.acknowledged = announced.number

    def _compared(self, held: HeldBoundaries, decided: int) -> dict[int, Table]:
        """Return the tables of the boundaries that are sealed and undecided. An unreadable one counts as not
        sealed."""
        before, self._tables = self._tables, {}
        for boundary_index, sealed in held.sealed.items():
            if boundary_index > decided:
                with contextlib.suppress(DamagedError):
                    if boundary_index in before:
                        self._tables[boundary_index] = before[boundary_index]
                    else:
                        table = self._table.table(sealed) if self._table else Table(step=sealed.step)
                        self._tables[boundary_index] = table
        return self._tables

    def _apply(self, announced: Announcement, slots: Sequence[Slot], held: HeldBoundaries) -> None:
        # Before the word that lets snapshots be overwritten: those to persist must not be.
        for boundary_index in announced.persist:
            self._ask(boundary_index, held, home=boundary_index not in announced.cached)
        incomplete = {each for each in held.sealed if announced.is_incomplete(each)}
        for boundary_index in incomplete:
            sealed = held.sealed[boundary_index]
            sealed.slot.request_persist_after(sealed.generation, 0)
        self.incomplete = frozenset((self._attempt, each) for each in incomplete)
        newest = announced.newest_complete
        self.complete = (self._attempt, newest)
        # Until there is one, the resumed snapshot stays complete: slots have it since their creation.
        for slot in slots if newest else ():
            if slot.complete != self.complete:
                slot.set_complete(*self.complete)

    def _ask(self, boundary_index: int, held: HeldBoundaries, *, home: bool) -> None:
        sealed = held.sealed.get(boundary_index)
        if sealed is None:
            return
        if sealed.slot.asked != sealed.generation and not sealed.is_persisted:
            sealed.slot.request_persist(sealed.generation, home=home)
        if home:
            self._asked[boundary_index] = sealed

    def _follow_persists(self, slots: Sequence[Slot]) -> None:
        """Follow the requests for the home. A snapshot may be overwritten in memory once the cache has it."""
        for boundary_index, sealed in list(self._asked.items()):
            slot = sealed.slot
            if slot not in slots:
                pass  # it was released, and may be unmapped
            elif sealed.is_persisted or slot.home_ended >= (self._attempt, boundary_index):
                self._row.persisted = max(boundary_index, self._row.persisted)
            elif slot.failed == sealed.generation:
                self._row.failed = max(boundary_index, self._row.failed)
            else:
                continue
            del self._asked[boundary_index]

    def _time(self, begun: int, held: HeldBoundaries) -> None:
        """Measure the time of the newest snapshot from its beginning to its seal, with the accuracy of a
        round."""
        if begun != self._begun:
            self._begun, self._begun_s = begun, self._clock()
        elif held.is_writing:
            self._landing_s = max(self._landing_s, self._clock() - self._begun_s)
