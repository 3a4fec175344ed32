"""Snapshots that were begun and are not sealed yet, and what became of them.

Owns the list of them and what is learned when one ends: torn leaves, changed constants, lost snapshots.
Never waits but where `wait` is called, at the end of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flashckpt import _native
from flashckpt.capture.constants import Constants
from flashckpt.capture.copy_policy import CopyPolicy, Way
from flashckpt.capture.planner import PreparedCopies
from flashckpt.capture.slot_writer import SlotWriter
from flashckpt.events import log
from flashckpt.memory.slot import SlotState

_WAIT_SLICE_S = 60.0


@dataclass(slots=True, eq=False)
class PendingSnapshot:
    """One snapshot on its way. The copies holds its tensors, and is let go when its copies have ended;
    the names and ways of its leaves are kept, for those that the keeper finds torn. `ordered`: it answers an
    order for the next boundary."""

    step: int
    target: SlotWriter
    generation: int
    copies: PreparedCopies | None
    names: list[str]
    ways: list[Way]
    ordered: bool = False


class InFlight:
    """on_lost is called for a snapshot that will never be; on_changed when ways must be chosen again."""

    def __init__(
        self,
        policy: CopyPolicy,
        constants: Constants,
        sealer: _native.Sealer,
        on_lost: Callable[[PendingSnapshot], None],
        on_changed: Callable[[], None],
    ) -> None:
        self._policy, self._constants, self._sealer = policy, constants, sealer
        self._on_lost, self._on_changed = on_lost, on_changed
        self._pending: list[PendingSnapshot] = []
        # The newest sealed of each slot, until the keeper is known to have found no leaf of it torn.
        self._sealed: dict[str, PendingSnapshot] = {}
        self._failures: dict[int, tuple[str, bool]] = {}
        self.sealed = 0
        self.lost = 0

    def add(self, snapshot: PendingSnapshot) -> None:
        self._pending.append(snapshot)

    def running(self) -> bool:
        """Whether copies of a device are still on their way."""
        return any(each.copies.transfers for each in self._pending if each.copies)

    def poll(self) -> None:
        """Look, without waiting, at what was sealed or refused, and at what the keeper found torn."""
        for snapshot in list(self._pending):
            state = snapshot.target.state(snapshot.generation)
            if state is SlotState.WRITING:
                continue
            self._pending.remove(snapshot)
            copies, snapshot.copies = snapshot.copies, None
            assert copies is not None
            copies.landed()
            if state is SlotState.SEALED:
                self._was_sealed(snapshot, copies)
            else:
                self._was_refused(snapshot, copies)
        for snapshot in list(self._sealed.values()):
            self._look_for_tears(snapshot)

    def wait(self) -> None:
        """Until nothing is on its way: the only place where the host waits for copies. What the keeper has
        found torn meanwhile is known afterwards."""
        self.poll()
        while self._pending:
            drained = self._sealer.drain(_WAIT_SLICE_S)
            if not drained:
                log.warning("The copies of step %d have been running for a minute.", self._pending[0].step)
            self.poll()
            for snapshot in list(self._pending) if drained else ():
                # The sealer has nothing left, and this one is not decided: nobody will ever decide it.
                snapshot.target.slot.abandon(snapshot.target.owner, snapshot.generation)
                self.poll()

    def forget(self) -> None:
        """The slots are others from here on."""
        self._pending.clear()
        self._sealed.clear()

    def drop(self, target: SlotWriter) -> None:
        """Nothing is under way to this slot, and nothing is to be heard of it any more."""
        self._sealed.pop(target.slot.name, None)

    def _was_sealed(self, snapshot: PendingSnapshot, copies: PreparedCopies) -> None:
        target = snapshot.target
        self.sealed += 1
        if target.generation != snapshot.generation:
            return  # written again already: there is nothing left to look at
        if self._constants_changed(snapshot, copies):
            # The region holds other bytes of them: the digests would have it discarded, later.
            word = target.slot.state()
            if word.generation == snapshot.generation:
                target.slot.free(word)
            target.forget()
            self.sealed -= 1
            self._lose(snapshot)
        else:
            self._sealed[target.slot.name] = snapshot

    def _was_refused(self, snapshot: PendingSnapshot, copies: PreparedCopies) -> None:
        """Not sealed, or sealed and discarded by the keeper's audit before this was asked."""
        target = snapshot.target
        reason, copied = self.failure_of(target)
        generation, found = target.slot.torn
        torn = list(found) if generation == snapshot.generation else []
        if reason:
            # Without its copies the table is empty: no leaf is to blame.
            torn = target.empty_entries() if copied else []
        if reason and not torn:
            log.error("The snapshot of step %d was not sealed: %s.", snapshot.step, reason)
        target.forget()
        changed = self._constants_changed(snapshot, copies)
        self._tear(snapshot, [leaf for leaf in torn if leaf not in changed])
        self._lose(snapshot)

    def failure_of(self, target: SlotWriter) -> tuple[str, bool]:
        """Why a slot was not sealed, and whether its copies had ended all the same."""
        self._failures.update({word: (why, copied) for word, why, copied in self._sealer.failures()})
        return self._failures.pop(target.slot.word_address, ("", True))

    def _constants_changed(self, snapshot: PendingSnapshot, copies: PreparedCopies) -> set[int]:
        """Constants that were written since the capture before, which is no fault of how they are copied."""
        target = snapshot.target
        if target.generation != snapshot.generation:
            return set()
        changed = {*copies.changed_constants(target.table)}
        if changed:
            changed -= {*target.empty_entries()}
        for index in changed:
            self._constants.changed(snapshot.names[index])
        if changed:
            self._on_changed()
        return changed

    def _look_for_tears(self, snapshot: PendingSnapshot) -> None:
        """Leaves that the keeper's audit found to differ from their digests."""
        target = snapshot.target
        if target.generation != snapshot.generation:
            return
        generation, leaves = target.slot.torn
        if generation != snapshot.generation:
            return
        del self._sealed[target.slot.name]
        target.forget()
        self._tear(snapshot, leaves)
        self._lose(snapshot)

    def _tear(self, snapshot: PendingSnapshot, leaves: Iterable[int]) -> None:
        # The keeper's words are believed no further than there are leaves. A list, so that every one is told.
        known = [leaf for leaf in leaves if leaf < len(snapshot.names)]
        if any([self._policy.tear(snapshot.names[leaf], snapshot.ways[leaf]) for leaf in known]):
            self._on_changed()

    def _lose(self, snapshot: PendingSnapshot) -> None:
        self.lost += 1
        self._on_lost(snapshot)
