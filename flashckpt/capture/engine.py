"""The capture of one rank at a boundary.

Owns the order: poll the copies in flight, ask schedule and hooks, prepare the copies, fill a slot, pass it to
the sealer. The training thread waits only for its own copies of host memory; `wait` and an ordered capture
also wait for copies in flight. Never decides how a leaf is copied (`Planner`, `CopyPolicy`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

from flashckpt import _native, crashpoints
from flashckpt.capture.constants import NO_VALUES, Constants, ConstantsChanged, region_size
from flashckpt.capture.copies import CopyPolicy, Planner, PreparedCopies, Walkable, describe
from flashckpt.capture.devices import Device
from flashckpt.capture.finite import FiniteCheck
from flashckpt.capture.hooks import StepHooks
from flashckpt.capture.plan import ConstantsRegion, Sharing
from flashckpt.capture.schedule import Intervals, Schedule
from flashckpt.capture.slot_writer import HeartbeatWriter, SlotWriter, SlotWriters
from flashckpt.errors import KeeperError, PersistError
from flashckpt.memory.memory_budget import NO_NODE
from flashckpt.memory.region import SlotSize
from flashckpt.memory.slot import Slot, SlotRing, SlotState
from flashckpt.options import Options

log = logging.getLogger(__name__)


# Boundaries to wait for an optimizer's state before slots are sized without it.
_MOST_STATELESS = 8
_NO_MEMORY = "the device has no memory left for a snapshot's buffers"


class Verdict(str, Enum):
    CAPTURED = "captured"
    NOT_DUE = "not due"
    NOT_QUALIFIED = "not qualified"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class BoundaryResult:
    """The result of a boundary. reason: why nothing was captured, for a log. A captured state becomes a
    snapshot when its slot is sealed."""

    verdict: Verdict
    step: int
    reason: str = ""

    @property
    def captured(self) -> bool:
        return self.verdict is Verdict.CAPTURED


class Capture:
    """Snapshots of one state into slots.

    schedule: decides which boundaries are captured.
    attempt: (number, nonce) of this attempt.
    optimizers: those of the state.
    owner: this process's index in the owner tables of the slots, by slot name if they differ.
    known: leaf name -> digest in the snapshot from which the state was restored.
    constants: the names of the constants in that snapshot; region: the region that it names.
    sharing: the treatment of leaves that other ranks hold too.
    group_failure: see `InFlight`.
    ordinal: the boundary index, the same on all ranks, written into each snapshot. The caller counts it.
    """

    def __init__(
        self,
        tree: Walkable,
        ring: SlotRing | None,
        sealer: _native.Sealer,
        options: Options,
        devices: Sequence[Device] = (),
        *,
        schedule: Schedule,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        attempt: tuple[int, int] = (0, 0),
        owner: int | Mapping[str, int] = 1,
        known: Mapping[str, int] = MappingProxyType({}),
        constants: Collection[str] = (),
        region: ConstantsRegion | None = None,
        sharing: Sharing | None = None,
        group_failure: Callable[[], str] | None = None,
    ) -> None:
        self._sealer, self._devices, self._attempt = sealer, devices, attempt
        self._optimizers = optimizers
        self.hooks = StepHooks(self._optimizers, lambda: self._planner.gate(), devices)
        self.schedule = schedule
        threads = options.threads or torch.get_num_threads()
        self._constants = Constants(self._optimizers, devices, threads, known, constants, region)
        self._region_copy: RegionCopy | None = None
        self._sharing = sharing
        self._policy = CopyPolicy(self._optimizers, self._constants)
        self._intervals = Intervals(self.schedule.budget, devices)
        self._skipped, self._skipped_step = 0, -1
        self.boundary_index = 0
        self._writers = SlotWriters(devices)
        self.heartbeat = HeartbeatWriter(self._writers.by_name)
        self.finite = FiniteCheck(self._writers.by_name)
        self._planner = Planner(
            tree, self._policy, self.hooks, self._constants, devices, options.device_memory, threads, sharing,
        )  # fmt: skip
        self._in_flight = InFlight(
            self._planner, self._policy, self._constants, sealer, self._lost, group_failure
        )
        self._ordered = False
        # Whether a batch follows the present boundary is unknown: its snapshot waits for `confirm`.
        self._is_provisional = False
        self._requested: PendingSnapshot | None = None
        self._captured_step = -1
        self.lost_step: int | None = None  # `_captured_step`, once its snapshot is lost
        self._call_s = 0.0
        self._step, self._entered = -1, (-1, -1)
        if ring is not None:
            self.set_slots(ring, owner)

    # ---- slots

    def set_slots(self, ring: SlotRing, owner: int | Mapping[str, int] = 1) -> None:
        """Write to these slots from now on. owner: this process's index in the owner tables, by slot name if
        they differ. Waits for the copies into the old slots and for their seals, so that the caller can unmap
        the old slots."""
        self._in_flight.wait()
        self._forget_slots()
        self._writers.exchange(ring, owner)

    def let_go(self, slot: Slot) -> None:
        """Stop writing to this slot, so that the caller can unmap it. Waits for the copies in flight."""
        self._in_flight.wait()
        if self._requested is not None and self._requested.target.slot is slot:
            self._persist_ended(fulfilled=False)
        self._in_flight.drop(self._writers.by_name[slot.name])
        self._writers.drop(slot)

    def register(self, slots: Sequence[Slot]) -> None:
        """Register slots with the devices, once for each slot. Takes up to half a second for each GiB, so
        another thread may do it before `set_slots`."""
        self._writers.register(slots)

    @property
    def numa_node(self) -> int:
        """The preferred NUMA node for slots: that of the first device with a known node."""
        nodes = (device.numa_node for device in self._devices)
        return next((node for node in nodes if node != NO_NODE), NO_NODE)

    def memory_wanted(self, *, ordered: bool = False) -> SlotSize | None:
        """Return the size of slots that the next capture needs; None if the current slots are large enough,
        or while the size of the state is not known yet, unless a capture is ordered."""
        if self._writers.ring is not None:
            return self._writers.memory_wanted
        return self.memory_needed(ordered=ordered)

    def memory_needed(self, *, ordered: bool = False) -> SlotSize | None:
        """Return the size that a slot needs. Unless a capture is ordered, None before the first step has
        created the state of optimizers, and while it is undecided whether their gradients are saved."""
        is_known = not self.hooks.is_undecided and all(
            optimizer.state or id(optimizer) in self.hooks.fired for optimizer in self._optimizers
        )
        if not (ordered or is_known or self.heartbeat.boundaries >= _MOST_STATELESS):
            return None
        walk = self._planner.walk()
        self._constants.decide(walk.leaves)
        plan = self._planner.plan(walk)
        needed = self._writers.size_for(plan)
        plan.release()
        return needed

    def keep_by_rank(self, names: Collection[str]) -> None:
        """Let each rank write its own copy of these leaves from the next capture on, because they differ
        among ranks. Any thread."""
        if self._sharing is not None and names:
            self._sharing.keep_by_rank(names)

    def hold_whole(self) -> None:
        """Keep all leaves in this rank's slots from the next capture on. Any thread."""
        if self._sharing is not None:
            self._sharing.hold_whole()

    # ---- constants

    def digest_candidates(self) -> None:
        """Digest the leaves that may be constants, before the first iteration. Reads their bytes."""
        self._constants.digest_candidates(lambda: self._planner.walk().leaves)

    def region_wanted(self) -> SlotSize | None:
        """Return the size of the region of constants to create, or None. Call `memory_wanted` first."""
        planned = self._constants.planned
        return region_size(planned) if planned is not None and self._region_copy is None else None

    def keep_region(self) -> bool:
        """Continue with the region of the resumed snapshot, because there is no memory for `region_wanted`.
        Return False without one."""
        return self._region_copy is None and self._constants.keep_region()

    def fill_region(self, region: Slot, owner: int) -> None:
        """Copy the constants into this region before the next capture. Unmaps it once it is sealed."""
        self._region_copy = RegionCopy(region, owner, self._constants, self._sealer, self._in_flight)

    @property
    def region(self) -> ConstantsRegion | None:
        """The sealed region that captures refer to."""
        return self._constants.region

    @property
    def region_named(self) -> int | None:
        """The nonce of the region that captures may refer to, or that is being filled. Any thread."""
        copy = self._region_copy  # read once: the training thread may reset it
        if copy is not None:
            return copy.nonce
        region = self._constants.region
        return None if region is None else region.nonce

    def _end_region_copy(self) -> None:
        copy, self._region_copy = self._region_copy, None
        if copy is not None:
            copy.end()

    # ---- boundaries

    def order(self) -> None:
        """Capture and persist the next boundary, independent of the schedule."""
        self._ordered = True

    @property
    def is_ordered(self) -> bool:
        """Whether an order is open for the next boundary."""
        return self._ordered

    def boundary(
        self,
        step: int,
        values: Callable[[], bytes],
        *,
        due: bool | None = None,
        ordered: bool = False,
    ) -> BoundaryResult:
        """Process one boundary; a second call with the same step continues the same boundary.

        values: returns the encoded values; called only for a capture.
        due: whether to capture; None leaves it to the schedule.
        ordered: capture independent of schedule and hooks, after waiting for copies in flight.

        Raises PersistError if a device has failed.
        """
        self._enter(step)
        self._check_devices(step)
        ordered = ordered or self._ordered
        is_due = self.schedule.due(step, self.boundary_index)
        if not ordered and not (is_due if due is None else due):
            return BoundaryResult(Verdict.NOT_DUE, step)
        if not ordered and not self._hooks.qualifies:
            why = "no optimizer has stepped since the last boundary"
            return BoundaryResult(Verdict.NOT_QUALIFIED, step, why)
        self.schedule.qualifies()
        if ordered:
            self._in_flight.wait()
        # A boundary that is tried again after a wait for slots counts once.
        before, self._skipped_step = self._skipped_step == step, step
        self._skipped += not before  # a state that cannot be captured raises
        reason = self._capture(step, values, ordered)
        if reason:
            return BoundaryResult(Verdict.SKIPPED, step, reason)
        self._skipped -= 1
        self._ordered, self._captured_step, self.lost_step, self._skipped_step = False, step, None, -1
        return BoundaryResult(Verdict.CAPTURED, step)

    def begin_provisional(self) -> None:
        """Let the snapshots of the present boundary wait for `confirm` or `withdraw`."""
        self._is_provisional = True

    def confirm(self) -> None:
        """Seal the snapshot of a provisional boundary, now or when its copies have ended."""
        if self._is_provisional:
            self._is_provisional = False
            self._in_flight.keep()

    def withdraw(self) -> bool:
        """Drop the snapshot of a provisional boundary; an order that it has fulfilled is open again. Return
        whether there was one."""
        self._is_provisional = False
        withdrawn = self._in_flight.withdraw()
        for snapshot in withdrawn:
            self._reopen(snapshot)
            self._captured_step = -1
        return bool(withdrawn)

    @property
    def has_provisional(self) -> bool:
        """Whether there is a whole snapshot of the present boundary, which waits for `confirm`."""
        return self._is_provisional and self._in_flight.has_provisional(self.boundary_index)

    def pass_by(self, step: int) -> None:
        """Count a boundary without a capture. A later call with its step may capture it. A capture that
        becomes due at it stays due."""
        self._enter(step)
        self.schedule.due(step, self.boundary_index)

    def _enter(self, step: int) -> None:
        self._check_graphs()
        self._in_flight.poll()
        if self._entered != (self.boundary_index, step):
            self._entered = self.boundary_index, step
            self._in_flight.confirm()
        self._check_persisted()
        if step == self._step:
            self._intervals.pause()
        else:
            self._step = step
            with contextlib.suppress(RuntimeError):  # a device fails meanwhile: no budget is needed
                self._intervals.boundary(trailing=self._in_flight.running(), marking=not self._is_graph_open)
            self._hooks = self.hooks.boundary()
            self.heartbeat.boundary(step)

    def _check_graphs(self) -> None:
        self._is_graph_open = any([device.capturing() for device in self._devices])

    def _check_devices(self, step: int) -> None:
        for device in self._devices:
            if device.failure:
                raise PersistError(
                    f"Step {step} was not captured: {device.name} has failed ({device.failure}), and its "
                    "memory cannot be read. Earlier snapshots are intact and stay with the keeper. End this "
                    "process and start the run again: it resumes from them.",
                    step=step,
                )

    @property
    def captured_step(self) -> int:
        """The step of the newest capture; 0 before the first one, and if its snapshot is lost."""
        return 0 if self.lost_step is not None else max(0, self._captured_step)

    @property
    def lost_reason(self) -> str:
        """The reason for the loss of the last lost snapshot."""
        return self._in_flight.lost_reason

    def wait(self) -> None:
        """Wait on the host for copies in flight, and confirm them; only at the ends of runs."""
        self._in_flight.wait()
        self._intervals.pause()

    def close(self) -> None:
        """Remove the hooks, wait for copies in flight, release slots and tensors. Confirms no snapshot: an
        orderly end calls `wait` before."""
        self.hooks.close()
        self.heartbeat.rest()
        self._in_flight.drain()
        self._forget_slots()
        self._writers.release()
        self._end_region_copy()
        self._planner.drop()
        for device in self._devices:
            device.close()

    def describe(self) -> list[tuple[str, int, int]]:
        """Return rows (way, leaves, bytes) of the current plan; [] before the first capture."""
        copies = self._planner.current
        return [] if copies is None else describe(copies.plan, copies.ways)

    def report(self) -> dict[str, float]:
        """Return counts and seconds so far (snapshots sealed, lost and skipped, boundaries, time in captures)
        and the bytes of gradients in a snapshot."""
        copies = self._planner.current
        return {
            "snapshots": self._in_flight.sealed,
            "snapshots_lost": self._in_flight.lost,
            "snapshots_skipped": self._skipped,
            "boundaries": self.heartbeat.boundaries,
            "capture_call_seconds": self._call_s,
            "capture_cost_seconds": self.schedule.budget.cost_s or 0.0,
            "gradient_bytes": 0 if copies is None else copies.plan.gradient_bytes,
        }

    # ---- one capture

    def _capture(self, step: int, values: Callable[[], bytes], ordered: bool) -> str:
        """Begin a snapshot. Return "" or the reason why none was begun."""
        if self._is_graph_open:
            return "a device graph is being captured"
        if self._writers.ring is None:
            return "the slots are not prepared yet"
        if self._in_flight.running():
            return "the copy of the previous snapshot is still running"
        began_s = time.perf_counter()
        try:
            if self._region_copy is not None:
                if not self._region_copy.is_over(self._planner, step, self._attempt, wait=ordered):
                    return "the constants are being copied"
                self._end_region_copy()
            copies, data = self._planner.prepare(values)
            # The first plan is made once in a run and does not count as a cost of later snapshots.
            once_s = 0.0 if self._call_s else time.perf_counter() - began_s
            self.schedule.begins(self.boundary_index)
            target = self._writers.begin(copies.plan, len(data))
            if isinstance(target, str):
                return target
            self._write(target, copies, data, step)
        except torch.OutOfMemoryError:
            self._planner.clone_no_more()
            return _NO_MEMORY
        except RuntimeError:
            self._check_graphs()  # a device may have failed since
            self._check_devices(step)
            raise
        except ConstantsChanged as found:
            for index in found.indexes:
                self._constants.changed(copies.names[index])
            self._planner.drop()
            return self._capture(step, values, ordered)
        call_s = time.perf_counter() - began_s
        self._call_s += call_s
        self.schedule.captured(ordered=ordered)
        copied_s = 0.0 if copies.on_devices else call_s - once_s
        self._intervals.captured(copied_s, ordered=ordered, once_s=once_s)
        return ""

    def _write(self, target: SlotWriter, copies: PreparedCopies, data: bytes, step: int) -> None:
        persist = self.schedule.persist_due(step, ordered=self._ordered)
        home = self._ordered or self.schedule.persists_home
        needs_group = self._in_flight.needs_group(copies)
        copies.write(
            target, data, self._sealer, step, self._attempt,
            boundary=self.boundary_index, gated=self._hooks.gated, persist=persist, home=home,
            confirms=self._is_provisional or needs_group,
        )  # fmt: skip
        pending = PendingSnapshot(
            step, self.boundary_index, target, copies,
            ordered=self._ordered, is_provisional=self._is_provisional, needs_group=needs_group,
        )  # fmt: skip
        self._in_flight.add(pending)
        if persist:
            self.schedule.persist_asked(home=home)
            self._requested = pending if home else self._requested

    # ---- ends of snapshots

    def _lost(self, pending: PendingSnapshot) -> None:
        if pending.step == self._captured_step:
            self.lost_step = pending.step
        self._reopen(pending)

    def _reopen(self, pending: PendingSnapshot) -> None:
        self.schedule.lost()
        self._ordered = self._ordered or pending.ordered  # the order is open again
        if pending is self._requested:
            self._persist_ended(fulfilled=False)

    def _check_persisted(self) -> None:
        """Check whether the last snapshot requested for the home is committed, or its save has failed. Its
        slot may hold another snapshot by now, if the cache has it."""
        if self._requested is None:
            return
        slot, generation = self._requested.target.slot, self._requested.generation
        failed = slot.failed == generation
        is_home = slot.home_ended >= (self._attempt[0], self._requested.boundary)
        if slot.persisted == generation or is_home or failed:
            self._persist_ended(fulfilled=not failed)

    def _persist_ended(self, *, fulfilled: bool) -> None:
        self._requested = None
        self.schedule.persist_ended(fulfilled=fulfilled)

    def _forget_slots(self) -> None:
        self._in_flight.forget()
        if self._requested is not None:
            # These slots are not read again, so the result of the request stays unknown.
            self._persist_ended(fulfilled=False)


_TORN = "its bytes are not those of its boundary"
_WAIT_SLICE_S = 60.0
_REGION_TRIES = 3


class PendingSnapshot:
    """One snapshot in flight.

    copies: hold its tensors; None after they have ended.
    names, ways: those of its leaves, for the leaves that the keeper finds torn later.
    ordered: the snapshot fulfils an order for the next boundary.
    is_provisional: it is unknown whether a batch follows its boundary. is_withdrawn: none does.
    needs_group: it is sealed only after a check of the process groups. is_confirmed: the sealer may seal it.
    """

    def __init__(
        self,
        step: int,
        boundary: int,
        target: SlotWriter,
        copies: PreparedCopies,
        *,
        ordered: bool,
        is_provisional: bool,
        needs_group: bool,
    ) -> None:
        self.boundary, self.is_provisional, self.needs_group = boundary, is_provisional, needs_group
        self.is_withdrawn = self.is_confirmed = False
        self.step, self.target, self.generation, self.ordered = step, target, target.generation, ordered
        self.copies: PreparedCopies | None = copies
        self.names, self.ways = copies.names, copies.ways


class InFlight:
    """The snapshots in flight.

    on_lost: called for each lost snapshot.
    group_failure: returns the reason why collectives may have been aborted, or "". None for a process that
        trains alone, whose snapshots need no confirmation.
    sealed, lost: counts of snapshots. lost_reason: the reason of the last loss.
    """

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
        # The newest sealed snapshot of each slot. The keeper may still report torn leaves in it.
        self._sealed: dict[str, PendingSnapshot] = {}
        self._failures: dict[int, tuple[str, bool]] = {}
        self.sealed = 0
        self.lost = 0
        self.lost_reason = ""

    def add(self, snapshot: PendingSnapshot) -> None:
        self._pending.append(snapshot)

    def needs_group(self, copies: PreparedCopies) -> bool:
        """Whether a snapshot by these copies needs a confirmation that no process group has failed."""
        return self._group_failure is not None and copies.uses_devices

    def running(self) -> bool:
        """Whether copies of a device are still running or not confirmed."""
        is_copying = any(each.copies.on_devices for each in self._pending if each.copies)
        return is_copying or bool(self._unconfirmed)

    def poll(self) -> None:
        """Process, without waiting, sealed and refused snapshots, and leaves that the keeper found torn."""
        for snapshot in list(self._pending):
            state = snapshot.target.state(snapshot.generation)
            if state is SlotState.WRITING or (state is SlotState.UNCONFIRMED and snapshot.is_confirmed):
                continue  # the sealer has not ended
            self._pending.remove(snapshot)
            copies, snapshot.copies = snapshot.copies, None
            assert copies is not None
            if snapshot.is_withdrawn:
                self._abandon(snapshot)
            elif state is SlotState.UNCONFIRMED:
                self._unconfirmed.append(snapshot)
            elif state is SlotState.SEALED:
                self._on_sealed(snapshot)
            else:
                self._on_refused(snapshot, copies)
        for snapshot in list(self._sealed.values()):
            self._check_for_tears(snapshot)

    def confirm(self) -> None:
        """Seal the snapshots that `poll` found complete, but for a provisional one, or discard them if a
        process group has failed.

        To be called when the training thread enters a boundary or waits in order; never at an end by an
        exception."""
        # Checked after the copies have ended: a later abort cannot change the copied bytes.
        failure = self._group_failure() if self._unconfirmed and self._group_failure is not None else ""
        unconfirmed = [each for each in self._unconfirmed if not each.is_provisional]
        self._unconfirmed = [each for each in self._unconfirmed if each.is_provisional]
        for snapshot in unconfirmed:
            target, generation = snapshot.target, snapshot.generation
            if not failure and target.slot.confirm(self._sealer, target.owner, generation):
                self._on_sealed(snapshot)
                continue
            target.slot.abandon(target.owner, generation)
            reason = failure or "its slot was freed before the confirmation"
            if reason != self.lost_reason:
                log.error("The snapshot of step %d was discarded: %s.", snapshot.step, reason)
            self._lose(snapshot, reason)

    def has_provisional(self, boundary: int) -> bool:
        """Whether `poll` found that the copies of a provisional snapshot of this boundary have ended."""
        return any(each.is_provisional and each.boundary == boundary for each in self._unconfirmed)

    def keep(self) -> None:
        """A batch follows: seal the provisional snapshots as soon as nothing else has to be confirmed."""
        for snapshot in [*self._pending, *self._unconfirmed]:
            if not snapshot.is_provisional:
                continue
            snapshot.is_provisional = False
            if not snapshot.needs_group:
                target = snapshot.target
                snapshot.is_confirmed = target.slot.confirm(self._sealer, target.owner, snapshot.generation)
                if snapshot.is_confirmed and snapshot in self._unconfirmed:
                    self._unconfirmed.remove(snapshot)
                    self._on_sealed(snapshot)

    def withdraw(self) -> list[PendingSnapshot]:
        """No batch follows: drop the provisional snapshots, and return them. Slots to which copies still run
        are freed when `poll` finds that those have ended."""
        withdrawn = [each for each in [*self._pending, *self._unconfirmed] if each.is_provisional]
        for snapshot in withdrawn:
            snapshot.is_provisional, snapshot.is_withdrawn = False, True
            if snapshot in self._unconfirmed:
                self._unconfirmed.remove(snapshot)
                self._abandon(snapshot)
        self.poll()
        return withdrawn

    def _abandon(self, snapshot: PendingSnapshot) -> None:
        self.failure_of(snapshot.target)  # of this snapshot, not of the next one in the slot
        snapshot.target.slot.abandon(snapshot.target.owner, snapshot.generation)
        snapshot.target.forget()

    def wait(self) -> None:
        """Wait on the host until no snapshot is in flight, and confirm them. Also processes leaves that the
        keeper found torn meanwhile."""
        self.drain()
        self.confirm()

    def drain(self) -> None:
        """Wait without confirming, for an end that may be abnormal."""
        self.poll()
        while self._pending:
            drained = self._sealer.drain(_WAIT_SLICE_S)
            if not drained:
                log.warning("The copies of step %d have been running for a minute.", self._pending[0].step)
            self.poll()
            for snapshot in list(self._pending) if drained else ():
                # The sealer has finished without a decision about this snapshot.
                snapshot.target.slot.abandon(snapshot.target.owner, snapshot.generation)
                self.poll()

    def forget(self) -> None:
        """Forget all snapshots, because the slots are replaced."""
        self._pending.clear()
        self._unconfirmed.clear()
        self._sealed.clear()

    def drop(self, target: SlotWriter) -> None:
        """Stop checking this slot. No snapshot to it may be in flight."""
        self._sealed.pop(target.slot.name, None)

    def _on_sealed(self, snapshot: PendingSnapshot) -> None:
        target = snapshot.target
        self.sealed += 1
        if target.generation == snapshot.generation:  # else the slot was already overwritten
            self._sealed[target.slot.name] = snapshot

    def _on_refused(self, snapshot: PendingSnapshot, copies: PreparedCopies) -> None:
        """Process a snapshot that was not sealed, or that the keeper's audit already discarded."""
        target = snapshot.target
        reason, copied = self.failure_of(target)
        generation, found = target.slot.torn
        torn = list(found) if generation == snapshot.generation else []
        if reason:
            # If the copies failed, the table is empty, and no leaf is torn.
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
        """Return the reason why a slot was not sealed, and whether its copies had ended."""
        self._failures.update({word: (why, copied) for word, why, copied in self._sealer.failures()})
        return self._failures.pop(target.slot.word_address, ("", True))

    def _constants_changed(self, snapshot: PendingSnapshot, copies: PreparedCopies) -> set[int]:
        """Return the constants that were written since the last capture; their copies are not torn."""
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

    def _check_for_tears(self, snapshot: PendingSnapshot) -> None:
        """Discard a snapshot in which the keeper's audit found leaves that differ from their digests."""
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
        # Ignore indexes out of range from the keeper. any() of a list, so that each leaf is processed.
        known = [leaf for leaf in leaves if leaf < len(snapshot.names)]
        if any([self._policy.tear(snapshot.names[leaf], snapshot.ways[leaf]) for leaf in known]):
            self._planner.drop()

    def _lose(self, snapshot: PendingSnapshot, reason: str) -> None:
        self.lost += 1
        self.lost_reason = reason
        self._on_lost(snapshot)


class RegionCopy:
    """The copy of the constants into the region to which all slots refer. Owns its mapping until `end`.

    This is an ordinary capture of the constants alone: host memory is copied during the boundary (another
    thread must not read tensors whose storage the program may free), and devices before any stream may write
    the leaves."""

    def __init__(
        self, region: Slot, owner: int, constants: Constants, sealer: _native.Sealer, in_flight: InFlight
    ) -> None:
        self.nonce = region.header.nonce
        self._region, self._target = region, SlotWriter(region, owner)
        self._constants, self._sealer, self._in_flight = constants, sealer, in_flight
        self._copies: PreparedCopies | None = None
        self._tries = 0

    def is_over(self, planner: Planner, step: int, attempt: tuple[int, int], *, wait: bool) -> bool:
        """Begin or continue the copy; return whether the region is sealed or given up. wait: wait for copies
        of devices."""
        if self._constants.planned is None:  # given up meanwhile
            return True
        try:
            copies = self._copies or self._begin(planner.copies_of_constants(), step, attempt)
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
            log.warning("each slot has a copy of the constants: %s", error)
            self._constants.give_up()
        return True

    def end(self) -> None:
        """Unmap the region: later captures only compare digests."""
        if self._copies is not None:
            self._copies.wait()
            if self._state(self._copies, wait=True) is SlotState.WRITING:
                return  # it stays mapped, because a copy may still write to it
            self._copies.plan.release()
        self._target.release()
        self._region.close()

    def _begin(self, copies: PreparedCopies, step: int, attempt: tuple[int, int]) -> PreparedCopies:
        """Begin the copy. Raises KeeperError if the region is too small or not available."""
        fits = self._region.size.holds(copies.plan.slot_size(len(NO_VALUES)))
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
        """Return WRITING while the copy is running, SEALED, or FREE if it could not be sealed."""
        if wait or not copies.on_devices:
            self._sealer.drain(_WAIT_SLICE_S)
        return self._target.state(self._target.generation)

    def _try_again(self, copies: PreparedCopies) -> None:
        """Prepare another try after a refused seal, without the leaves that were written meanwhile."""
        reason, copied = self._in_flight.failure_of(self._target)
        for index in self._target.empty_entries() if copied else ():
            self._constants.changed(copies.names[index])
        copies.plan.release()
        self._copies = None
        if self._tries >= _REGION_TRIES:
            raise KeeperError(
                f"their region could not be sealed ({reason or 'the leaves were written each time'})."
            )
