"""The snapshots of one rank, as rank 0 has to know of them, and what was decided of them, as the slots have
to.

One round of the rank's background thread: which boundaries were sealed and which were missed is read off the
slots' control pages and published; what was announced is written to the pages. Touches no snapshot's bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flashckpt.capture.schedule import Budget
from flashckpt.errors import DamagedError
from flashckpt.memory.slot import Sealed, Slot, SlotState
from flashckpt.ranks.board import Board, RankRow, Table
from flashckpt.ranks.messages import MOST_COMMITTED, Announcement
from flashckpt.ranks.node_table import NodeTable


@dataclass
class HeldBoundaries:
    """What stands in a rank's slots: snapshots of this attempt by boundary; whether one is being written;
    whether one is on its way to its seal, written or unconfirmed."""

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
    """The newest boundary up to which every one was sealed or missed. settled, begun: the rank's words,
    read in this order and before the slots. One snapshot is on its way at most, and it is the one begun
    last."""
    return begun - 1 if is_begun and begun <= settled else settled


class Snapshots:
    """Of the rank that the row is of. By their `order`: `complete` is the newest that all ranks have, if one
    of this attempt is; `void` are those that not all have, so that they may be overwritten."""

    def __init__(
        self,
        board: Board,
        row: RankRow,
        attempt_number: int,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._row, self._attempt, self._budget = board, row, attempt_number, budget
        self._clock = clock
        self._asked: dict[int, Sealed] = {}
        self._committed: list[int] = []
        self._table = NodeTable() if len(board.ranks) > 1 else None
        self._tables: dict[int, Table] = {}
        self._begun, self._begun_s, self._landing_s = 0, 0.0, 0.0
        self.complete = (attempt_number, 0)
        self.void: frozenset[tuple[int, int]] = frozenset()

    def look(self, slots: Sequence[Slot], writable: int) -> None:
        """One round. slots: all that the rank has; writable: how many of them captures may be written to."""
        settled, begun = self._row.settled, self._row.begun
        held = HeldBoundaries.of(slots, self._attempt)
        announced = self._board.announced
        self._time(begun, held)
        self._note_committed(held)
        self._apply(announced, slots, held)
        budget = self._budget
        self._row.measure(writable, budget.plain_s or 0.0, budget.cost_s or 0.0, self._landing_s)
        judged = judged_until(settled, begun, is_begun=held.is_begun)
        self._row.publish(judged, self._compared(held, announced.decided))
        self._row.hear(announced.number)

    def _compared(self, held: HeldBoundaries, decided: int) -> dict[int, Table]:
        """Of the boundaries that are sealed and not decided, what is compared in their node. What cannot be
        read is not sealed."""
        before, self._tables = self._tables, {}
        for ordinal, sealed in held.sealed.items():
            if ordinal > decided:
                with contextlib.suppress(DamagedError):
                    if ordinal in before:
                        self._tables[ordinal] = before[ordinal]
                    else:
                        table = self._table.table(sealed) if self._table else Table(step=sealed.step)
                        self._tables[ordinal] = table
        return self._tables

    def _apply(self, announced: Announcement, slots: Sequence[Slot], held: HeldBoundaries) -> None:
        # Before the word that lets others be overwritten: what is to be persisted is not given away.
        for ordinal in announced.persist:
            self._ask(ordinal, held)
        void = {each for each in held.sealed if announced.is_void(each)}
        for ordinal in void:
            sealed = held.sealed[ordinal]
            sealed.slot.request_persist_after(sealed.generation, 0)
        self.void = frozenset((self._attempt, each) for each in void)
        newest = announced.newest_complete
        self.complete = (self._attempt, newest)
        # While there is none, what all ranks went on from stays: slots say that since they were given.
        for slot in slots if newest else ():
            if slot.complete != self.complete:
                slot.set_complete(*self.complete)
        self._follow_persists(slots)

    def _note_committed(self, held: HeldBoundaries) -> None:
        """Whoever asked for it: what is in storage may be what all nodes have there."""
        new = {ordinal for ordinal, sealed in held.sealed.items() if sealed.is_persisted}
        if not new <= {*self._committed}:
            self._committed = sorted(new.union(self._committed))[-MOST_COMMITTED:]
            self._row.commit(self._committed)

    def began_from_storage(self) -> None:
        """What the attempt went on from is in this node's storage."""
        self._committed = sorted({0, *self._committed})[-MOST_COMMITTED:]
        self._row.commit(self._committed)

    def _ask(self, ordinal: int, held: HeldBoundaries) -> None:
        sealed = held.sealed.get(ordinal)
        if sealed is None:
            return
        if sealed.slot.asked != sealed.generation and not sealed.is_persisted:
            sealed.slot.request_persist(sealed.generation)
        self._asked[ordinal] = sealed

    def _follow_persists(self, slots: Sequence[Slot]) -> None:
        for ordinal, sealed in list(self._asked.items()):
            if sealed.slot not in slots:
                pass  # it was let go, and may be unmapped
            elif sealed.is_persisted:
                self._row.persisted(max(ordinal, self._row.newest_persisted))
            elif sealed.slot.failed[0] == sealed.generation:
                self._row.failed(max(ordinal, self._row.newest_failed))
            else:
                continue
            del self._asked[ordinal]

    def _time(self, begun: int, held: HeldBoundaries) -> None:
        """How long the newest snapshot takes from its beginning to its seal, to the accuracy of a round."""
        if begun != self._begun:
            self._begun, self._begun_s = begun, self._clock()
        elif held.is_writing:
            self._landing_s = max(self._landing_s, self._clock() - self._begun_s)
