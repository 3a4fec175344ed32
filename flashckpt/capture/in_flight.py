"""What was begun and is not sealed yet, and what became of it: snapshots, and the region of constants.

Owns the list of them and what is learned when one ends: torn leaves, changed constants, lost snapshots.
Never waits but where `wait` is called, at the end of runs.

Owns the rule after which a snapshot of several ranks on devices is sealed (docs/capture.md, "An abort").
NCCL's watchdog aborts a collective first and ends the process later. In between the device computes with
half-reduced gradients, and clone, digest and copy succeed. An abort can only change a snapshot whose copies
end after it. So a snapshot stays UNCONFIRMED until, after its copies have ended, the training thread enters
another boundary or waits in order, and no process group reports an error then. If the trainer dies before, it
is discarded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from flashckpt import _native, crashpoints
from flashckpt.capture.constants import NO_VALUES, Constants
from flashckpt.capture.copies import PreparedCopies
from flashckpt.capture.copy_policy import CopyPolicy
from flashckpt.capture.plan import ConstantsRegion
from flashckpt.capture.planner import Planner
from flashckpt.capture.slot_writer import SlotWriter
from flashckpt.errors import KeeperError
from flashckpt.memory.slot import Slot, SlotState

log = logging.getLogger(__name__)

_TORN = "its bytes are not those of its boundary"
_WAIT_SLICE_S = 60.0
_REGION_TRIES = 3


class PendingSnapshot:
    """One snapshot on its way. `copies` hold its tensors, and are let go of when they have ended; the names
    and ways of its leaves are kept, for those that the keeper finds torn. `ordered`: it answers an order for
    the next boundary."""

    def __init__(self, step: int, target: SlotWriter, copies: PreparedCopies, *, ordered: bool) -> None:
        self.step, self.target, self.generation, self.ordered = step, target, target.generation, ordered
        self.copies: PreparedCopies | None = copies
        self.names, self.ways = copies.names, copies.ways


class InFlight:
    """on_lost is called for a snapshot that will never be. group_failure returns why collectives may have
    been aborted, or ""; it is None for a process that trains alone: its snapshots need no confirmation.
    lost_reason says why the last snapshot was lost."""

    def __init__(
        self,
        planner: Planner,
        policy: CopyPolicy,
        constants: Constants,
        sealer: _native.Sealer,
        on_lost: Callable[[PendingSnapshot], None],
        group_failure: Callable[[], str] | None,
    ) -> None:
        self._planner, self._policy, self._constants = planner, policy, constants
        self._sealer, self._on_lost, self._group_failure = sealer, on_lost, group_failure
        self._pending: list[PendingSnapshot] = []
        self._unconfirmed: list[PendingSnapshot] = []
        # The newest sealed of each slot, until the keeper is known to have found no leaf of it torn.
        self._sealed: dict[str, PendingSnapshot] = {}
        self._failures: dict[int, tuple[str, bool]] = {}
        self.sealed = 0
        self.lost = 0
        self.lost_reason = ""

    def add(self, snapshot: PendingSnapshot) -> None:
        self._pending.append(snapshot)

    def confirms(self, copies: PreparedCopies) -> bool:
        """Whether a snapshot made by these is to be confirmed before it counts."""
        return self._group_failure is not None and copies.uses_devices

    def running(self) -> bool:
        """Whether copies of a device are still on their way, or not confirmed."""
        is_copying = any(each.copies.on_devices for each in self._pending if each.copies)
        return is_copying or bool(self._unconfirmed)

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
            if state is SlotState.UNCONFIRMED:
                self._unconfirmed.append(snapshot)
            elif state is SlotState.SEALED:
                self._was_sealed(snapshot)
            else:
                self._was_refused(snapshot, copies)
        for snapshot in list(self._sealed.values()):
            self._look_for_tears(snapshot)

    def confirm(self) -> None:
        """Seal the snapshots that `poll` has found complete, or lose them where a process group has failed.

        Called where the training thread enters a boundary, or waits: never for an end by an exception."""
        # Asked after the copies have ended: an abort from now on changes nothing that was copied.
        failure = self._group_failure() if self._unconfirmed and self._group_failure is not None else ""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for snapshot in unconfirmed:
            target, generation = snapshot.target, snapshot.generation
            if not failure and target.slot.confirm(target.owner, generation):
                self._was_sealed(snapshot)
                continue
            target.slot.abandon(target.owner, generation)
            reason = failure or "its slot was taken away before it was confirmed"
            if reason != self.lost_reason:
                log.error("The snapshot of step %d was discarded: %s.", snapshot.step, reason)
            self._lose(snapshot, reason)

    def wait(self) -> None:
        """Until nothing is on its way: the only place where the host waits for copies. What the keeper has
        found torn meanwhile is known afterwards."""
        self.drain()
        self.confirm()

    def drain(self) -> None:
        """The same for an end that may be abnormal: what is not confirmed yet stays so."""
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
        self._unconfirmed.clear()
        self._sealed.clear()

    def drop(self, target: SlotWriter) -> None:
        """Nothing is under way to this slot, and nothing is to be heard of it any more."""
        self._sealed.pop(target.slot.name, None)

    def _was_sealed(self, snapshot: PendingSnapshot) -> None:
        target = snapshot.target
        self.sealed += 1
        if target.generation == snapshot.generation:  # else it was written again already
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
        changed = self._constants_changed(snapshot, copies)
        why = _TORN
        if reason and not torn and not changed:
            log.error("The snapshot of step %d was not sealed: %s.", snapshot.step, reason)
            why = reason
        target.forget()
        self._tear(snapshot, [leaf for leaf in torn if leaf not in changed])
        self._lose(snapshot, why)

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
            self._planner.drop()
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
        self._lose(snapshot, _TORN)

    def _tear(self, snapshot: PendingSnapshot, leaves: Iterable[int]) -> None:
        # The keeper's words are believed no further than there are leaves. A list, so that every one is told.
        known = [leaf for leaf in leaves if leaf < len(snapshot.names)]
        if any([self._policy.tear(snapshot.names[leaf], snapshot.ways[leaf]) for leaf in known]):
            self._planner.drop()

    def _lose(self, snapshot: PendingSnapshot, reason: str) -> None:
        self.lost += 1
        self.lost_reason = reason
        self._on_lost(snapshot)


class RegionCopy:
    """The copy of what is constant into the region that all slots name. Owns its mapping, until `end`.

    A capture like any other, of the constants alone: bytes of host memory are copied at the boundary itself
    (a thread of our own must not read tensors whose storage the program may free), those of a device before
    anything may write them."""

    def __init__(
        self, region: Slot, owner: int, constants: Constants, sealer: _native.Sealer, in_flight: InFlight
    ) -> None:
        self.nonce = region.header.nonce
        self._region, self._target = region, SlotWriter(region, owner)
        self._constants, self._sealer, self._in_flight = constants, sealer, in_flight
        self._copies: PreparedCopies | None = None
        self._tries = 0

    def is_over(self, planner: Planner, step: int, attempt: tuple[int, int], *, wait: bool) -> bool:
        """Whether the region is sealed, or given up; it is begun if it is not. Copies of a device are waited
        for only to `wait`."""
        if self._constants.planned is None:  # given up since it was asked for
            return True
        try:
            copies = self._copies or self._begin(planner.of_constants(), step, attempt)
            state = self._state(copies, wait=wait)
            if state is SlotState.FREE:
                self._try_again(copies)
            if state is not SlotState.SEALED:
                return False
            digests = tuple(self._target.table.tolist())
            layout = copies.plan.image.shard
            self._constants.filled(ConstantsRegion(self._region.name, self.nonce, layout, digests))
            crashpoints.point("share.sealed")
        except KeeperError as error:
            log.warning("each slot has a copy of what never changes: %s", error)
            self._constants.give_up()
        return True

    def end(self) -> None:
        """Nothing here touches the region's bytes again: captures only compare digests."""
        if self._copies is not None:
            self._copies.wait()
            if self._state(self._copies, wait=True) is SlotState.WRITING:
                return  # it stays mapped: somebody may still write to it
            self._copies.plan.release()
        self._target.release()
        self._region.close()

    def _begin(self, copies: PreparedCopies, step: int, attempt: tuple[int, int]) -> PreparedCopies:
        """Raises KeeperError where the region is not to be had any more, or too small."""
        fits = self._region.size.holds(copies.plan.room(len(NO_VALUES)))
        if not fits or not self._target.begin():
            raise KeeperError(f"{self._region.name} cannot be written.")
        self._tries += 1
        try:
            copies.write(self._target, NO_VALUES, self._sealer, step, attempt)
        except BaseException:
            copies.plan.release()
            raise
        self._copies = copies
        return copies

    def _state(self, copies: PreparedCopies, *, wait: bool) -> SlotState:
        """WRITING while it is on its way, SEALED, or FREE where it could not be sealed."""
        if wait or not copies.on_devices:
            self._sealer.drain(_WAIT_SLICE_S)
        return self._target.state(self._target.generation)

    def _try_again(self, copies: PreparedCopies) -> None:
        """It could not be sealed: the next try is without what was written meanwhile."""
        reason, copied = self._in_flight.failure_of(self._target)
        for index in self._target.empty_entries() if copied else ():
            self._constants.changed(copies.names[index])
        copies.plan.release()
        self._copies = None
        if self._tries >= _REGION_TRIES:
            raise KeeperError(
                f"their region could not be sealed ({reason or 'they are written all the time'})."
            )
