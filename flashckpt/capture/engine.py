"""The capture of one rank: what happens at a boundary.

Owns the order: poll what was begun, ask schedule and hooks, prepare the copies, fill a slot, hand it to the
sealer. The training thread waits here for nothing but its own copies of host memory; `wait` and an ordered
capture wait for copies in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from flashckpt import _native, crashpoints
from flashckpt.capture.constants import Constants, ConstantsChanged
from flashckpt.capture.copy_policy import CopyPolicy, describe
from flashckpt.capture.devices import Device
from flashckpt.capture.heartbeat import HeartbeatWriter
from flashckpt.capture.hooks import Boundary, StepHooks, unwrapped
from flashckpt.capture.in_flight import InFlight, PendingSnapshot
from flashckpt.capture.live_digests import digest_tensors
from flashckpt.capture.plan import ConstantsRegion, Plan
from flashckpt.capture.planner import Planner, PreparedCopies, Walkable
from flashckpt.capture.region_copy import RegionCopy
from flashckpt.capture.schedule import Intervals, Schedule
from flashckpt.capture.slot_writer import SlotWriter, SlotWriters
from flashckpt.errors import KeeperError
from flashckpt.events import log
from flashckpt.memory.constants import region_size
from flashckpt.memory.control_page import SlotSize
from flashckpt.memory.slot import Slot, SlotRing, SlotState
from flashckpt.options import Options

_COPIES = 3
_NO_MEMORY = "the device has no memory left for a snapshot's buffers"


class Verdict(str, Enum):
    CAPTURED = "captured"
    NOT_DUE = "not due"
    NOT_QUALIFIED = "not qualified"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class BoundaryResult:
    """reason says why nothing was captured, in words for a log; slot and generation name the snapshot
    that was begun: it exists once its slot is sealed."""

    verdict: Verdict
    step: int
    reason: str = ""
    slot: int = -1
    generation: int = -1
    persist: bool = False

    @property
    def captured(self) -> bool:
        return self.verdict is Verdict.CAPTURED


class Capture:
    """Snapshots of one state into slots.

    schedule says which boundaries are taken; attempt is (number, nonce) of this attempt; optimizers are those
    of the state, wrapped or not; known are the digests, by name, of the snapshot that the state was restored
    from, constants names those of it that were, region is the one that it names.
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
        optimizers: Sequence[object] = (),
        attempt: tuple[int, int] = (0, 0),
        owner: int | Mapping[str, int] = 1,
        known: Mapping[str, int] = MappingProxyType({}),
        constants: Collection[str] = (),
        region: ConstantsRegion | None = None,
    ) -> None:
        self._tree, self._sealer, self._options, self._devices = tree, sealer, options, devices
        self._attempt = attempt
        inner = [unwrapped(optimizer) for optimizer in optimizers]
        self._optimizers: list[Any] = [o for o in inner if isinstance(o, torch.optim.Optimizer)]
        self.hooks = StepHooks(self._optimizers, self._close_gates, devices)
        self.schedule = schedule
        threads = options.threads or torch.get_num_threads()
        digests = partial(digest_tensors, threads=threads)
        self._constants = Constants(self._optimizers, digests, self._reaches, known, constants, region)
        self._copy: RegionCopy | None = None
        self._policy = CopyPolicy(self._optimizers, devices, self._constants)
        self._intervals = Intervals(self.schedule.budget, devices)
        self._skipped, self._skipped_step = 0, -1
        self._writers = SlotWriters(devices)
        self.heartbeat = HeartbeatWriter(self._writers.by_name)
        self._planner = Planner(
            tree,
            self._policy,
            self.hooks,
            self._constants,
            self.heartbeat,
            devices,
            options.device_memory,
            threads,
        )
        self._in_flight = InFlight(self._policy, self._constants, sealer, self._lost, self._planner.drop)
        self._ordered = False
        self._asked: PendingSnapshot | None = None
        self._captured_step = -1
        self.lost_step: int | None = None  # that one, once its snapshot is lost
        self._call_s = 0.0
        self._step = -1
        self._hooks = Boundary(qualifies=False, gated=False)
        if ring is not None:
            self.set_slots(ring, owner)

    # ---- slots

    def set_slots(self, ring: SlotRing | None, owner: int | Mapping[str, int] = 1) -> None:
        """Write to these slots from now on (None: to none). owner: this process's index in the owner
        tables, by slot name where they differ. Waits for the copies into the old ones and for their seals:
        whoever unmaps those next must not take the memory away under them."""
        self._in_flight.wait()
        self._forget_slots()
        self._writers.exchange(ring, owner)

    def let_go(self, slot: Slot) -> None:
        """Write to this slot no more, so that its memory may go. Waits for the copies in flight."""
        self._in_flight.wait()
        if self._asked is not None and self._asked.target.slot is slot:
            self._asked = None
            self.schedule.persist_ended(fulfilled=False)
        self._in_flight.drop(self._writers.by_name[slot.name])
        self._writers.drop(slot)

    def register(self, slots: Sequence[Slot]) -> None:
        """Make slots known to the devices. Takes up to half a second a GiB, so that it may be done before
        `set_slots`, by another thread; it is done once a slot."""
        self._writers.register(slots)

    def room_wanted(self, *, ordered: bool = False) -> SlotSize | None:
        """What the slots of the next capture have to have room for; None while those it has are large
        enough, or, unless one is ordered, while the size of the state is not known yet."""
        if self._writers.ring is not None:
            return self._writers.room_wanted
        return self.room_needed(ordered=ordered)

    def room_needed(self, *, ordered: bool = False) -> SlotSize | None:
        """What a slot has to have room for. None before optimizers have state, which comes with the first
        step, unless a capture is ordered before it."""
        if not ordered and not self._has_state():
            return None
        walk = self._tree.walk(self.hooks.used_up)
        self._constants.decide(walk.leaves)
        plan = self._planner.plan(walk)
        needed = self._writers.room_for(plan)
        plan.release()
        return needed

    # ---- constants

    def look(self) -> None:
        """Before the first iteration: digest what may be constant. Reads its bytes."""
        if self._constants.is_to_look:
            self._constants.look(self._tree.walk(self.hooks.used_up).leaves)

    def region_wanted(self) -> SlotSize | None:
        """What a region of constants has to have room for, where one is to be made. To be asked after
        `room_wanted`."""
        planned = self._constants.planned
        return region_size(planned) if planned is not None and self._copy is None else None

    def keep_region(self) -> bool:
        """There is no memory for `region_wanted`: go on with the region that was resumed from. False where
        there is none."""
        return self._copy is None and self._constants.keep_region()

    def fill_region(self, region: Slot, owner: int) -> None:
        """Copy what is constant into this one, before the next capture. It is unmapped once it is sealed."""
        self._copy = RegionCopy(region, owner, self._sealer)

    @property
    def region(self) -> ConstantsRegion | None:
        """The sealed region that captures name."""
        return self._constants.region

    @property
    def region_named(self) -> int | None:
        """The nonce of the region that captures may name, or that is to be filled."""
        copy = self._copy  # asked by another thread: it may be over at any time
        if copy is not None:
            return copy.nonce
        region = self._constants.region
        return None if region is None else region.nonce

    def _is_filled(self, step: int, *, ordered: bool) -> bool:
        """Whether what is constant stands in its region, sealed: no snapshot is begun that names another.
        Copies of a device are waited for only where a capture is ordered."""
        copy = self._copy
        if copy is None:
            return True
        if self._constants.planned is None:  # given up since it was asked for
            self._end_copy()
            return True
        try:
            if copy.copies is None:
                walk = self._tree.walk(self.hooks.used_up)
                plan = Plan(walk, only=self._constants.to_copy(walk.leaves))
                copy.begin(self._planner.arranged(plan, {}), step, self._attempt)
            state = copy.state(wait=ordered)
            if state is SlotState.WRITING:
                return False
            if state is SlotState.SEALED:
                self._constants.filled(copy.sealed())
                crashpoints.point("share.sealed")
            elif not self._is_given_up(copy):
                return False
        except KeeperError as error:
            log.warning("each slot has a copy of what never changes: %s", error)
            self._constants.give_up()
        self._end_copy()
        return True

    def _is_given_up(self, copy: RegionCopy) -> bool:
        """A region could not be sealed: tried again without what was written meanwhile."""
        reason, copied = self._in_flight.failure_of(copy.target)
        assert copy.copies is not None
        names, torn = copy.copies.names, copy.target.empty_entries() if copied else []
        for index in torn:
            self._constants.changed(names[index])
        copy.drop()
        if copy.tries < _COPIES:
            return False
        raise KeeperError(f"their region could not be sealed ({reason or 'they are written all the time'}).")

    def _end_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.end()

    # ---- boundaries

    def order(self) -> None:
        """The next boundary is captured and persisted, whatever the schedule."""
        self._ordered = True

    @property
    def is_ordered(self) -> bool:
        """Whether an order stands that the next boundary is to answer."""
        return self._ordered

    def boundary(
        self,
        step: int,
        values: Callable[[], bytes],
        *,
        due: bool | None = None,
        ordered: bool = False,
        persist: bool = False,
    ) -> BoundaryResult:
        """One boundary. values gives what is not a tensor, encoded; it is called only for a capture.

        due: None leaves it to the schedule. ordered: whatever that and the hooks say, and after waiting
        for a copy in flight. persist: the snapshot is to be persisted. A second call with the same step is
        about the same boundary.
        """
        capturing, hooks = self._enter(step)
        if self._ordered:
            ordered = persist = True
        is_due = self.schedule.due(step)
        if not ordered and not (is_due if due is None else due):
            return BoundaryResult(Verdict.NOT_DUE, step)
        if not ordered and not hooks.qualifies:
            why = "no optimizer has stepped since the last boundary"
            return BoundaryResult(Verdict.NOT_QUALIFIED, step, why)
        if ordered:
            self._in_flight.wait()
        outcome = self._capture(step, values, hooks, capturing, ordered, persist)
        if outcome.captured:
            self._ordered, self._captured_step, self.lost_step = False, step, None
        # A boundary that is tried again, after it has waited for slots, is one and not two.
        self._skipped += (not outcome.captured) - (self._skipped_step == step)
        self._skipped_step = -1 if outcome.captured else step
        return outcome

    def pass_by(self, step: int) -> None:
        """A boundary that is counted, and captured later if at all, by another call with its step. What falls
        due on it stays due."""
        self._enter(step)
        self.schedule.due(step)

    def _enter(self, step: int) -> tuple[bool, Boundary]:
        """Whether a device graph is being captured, and what the hooks say."""
        capturing = any(device.capturing() for device in self._devices)
        self._in_flight.poll()
        self._settle()
        if step == self._step:
            self._intervals.pause()
        else:
            self._step = step
            self._intervals.boundary(trailing=self._in_flight.running(), marking=not capturing)
            self._hooks = self.hooks.boundary()
            self.heartbeat.boundary(step)
        return capturing, self._hooks

    def wait(self) -> None:
        """The host waits for copies in flight: at the ends of runs only."""
        self._in_flight.wait()
        self._intervals.pause()

    def close(self) -> None:
        """Take the hooks off, wait for copies in flight, let go of slots and tensors."""
        self.hooks.close()
        self.heartbeat.rest()
        self._in_flight.wait()
        self._forget_slots()
        self._writers.release()
        self._end_copy()
        self._planner.drop()
        for device in self._devices:
            device.close()

    def describe(self) -> list[tuple[str, int, int]]:
        """Rows (way, leaves, bytes) of the plan as it stands; empty before the first capture."""
        copies = self._planner.current
        return [] if copies is None else describe(copies.plan, copies.ways)

    def report(self) -> dict[str, float]:
        """Counts and seconds so far: snapshots sealed, lost and skipped, boundaries, time in captures."""
        return {
            "snapshots": self._in_flight.sealed,
            "snapshots_lost": self._in_flight.lost,
            "snapshots_skipped": self._skipped,
            "boundaries": self.heartbeat.boundaries,
            "capture_call_seconds": self._call_s,
            "capture_cost_seconds": self.schedule.budget.cost_s or 0.0,
        }

    # ---- one capture

    def _capture(
        self,
        step: int,
        values: Callable[[], bytes],
        hooks: Boundary,
        capturing: bool,
        ordered: bool,
        persist: bool,
    ) -> BoundaryResult:
        if capturing:
            return _skipped(step, "a device graph is being captured")
        if self._writers.ring is None:
            return _skipped(step, "the slots are not prepared yet")
        if self._in_flight.running():
            return _skipped(step, "the copy of the snapshot before is still running")
        began_s = time.perf_counter()
        try:
            if not self._is_filled(step, ordered=ordered):
                return _skipped(step, "what never changes is being copied")
            copies, data = self._planner.prepare(values)
        except torch.OutOfMemoryError:
            self._planner.drop()
            return _skipped(step, _NO_MEMORY)
        # The first plan is made once in a run: it says nothing of what the next snapshot costs.
        once_s = 0.0 if self._call_s else time.perf_counter() - began_s
        target = self._writers.begin(copies.plan, len(data))
        if isinstance(target, str):
            return _skipped(step, target)
        persist = persist or self.schedule.persist_due(step)
        try:
            self._fill(target, copies, data, step, hooks.gated, persist)
        except ConstantsChanged as found:
            for index in found.indexes:
                self._constants.changed(copies.names[index])
            self._planner.drop()
            return self._capture(step, values, hooks, capturing, ordered, persist)
        except torch.OutOfMemoryError:
            self._planner.drop()
            return _skipped(step, _NO_MEMORY)
        call_s = time.perf_counter() - began_s
        self._call_s += call_s
        self.schedule.captured(ordered=ordered)
        copied_s = 0.0 if copies.transfers else call_s - once_s
        self._intervals.captured(copied_s, ordered=ordered, once_s=once_s)
        return BoundaryResult(Verdict.CAPTURED, step, "", target.slot.index, target.generation, persist)

    def _fill(
        self, target: SlotWriter, copies: PreparedCopies, data: bytes, step: int, gated: bool, persist: bool
    ) -> None:
        try:
            target.prepare(copies.plan, data)
            handles, moves = copies.capture(target, gated=gated)
            if persist:
                target.slot.request_persist(target.generation)
            target.seal(self._sealer, handles, moves, step, self._attempt)
        except BaseException:
            target.forget()
            try:
                # What was begun still writes to the slot: nobody may have it before that has ended.
                copies.wait()
            finally:
                target.abandon()
            raise
        names, ways = copies.names, copies.ways
        pending = PendingSnapshot(step, target, target.generation, copies, names, ways, self._ordered)
        self._in_flight.add(pending)
        if persist:
            self.schedule.persist_asked()
            self._asked = pending

    # ---- what the parts call

    def _close_gates(self) -> None:
        if self._planner.current is not None:
            self._planner.current.gate()

    def _reaches(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" or any(device.owns(tensor) for device in self._devices)

    def _lost(self, pending: PendingSnapshot) -> None:
        self.schedule.lost()
        self.lost_step = pending.step if pending.step == self._captured_step else self.lost_step
        self._ordered = self._ordered or pending.ordered  # the order stands again
        if pending is self._asked:
            self.schedule.persist_ended(fulfilled=False)
            self._asked = None

    def _settle(self) -> None:
        """Whether what was last asked to be persisted has been, or could not be."""
        asked = self._asked
        if asked is None:
            return
        slot, generation = asked.target.slot, asked.generation
        failed = slot.failed[0] == generation
        if slot.persisted == generation or failed:
            self.schedule.persist_ended(fulfilled=not failed)
            self._asked = None

    def _has_state(self) -> bool:
        if not self._optimizers or self.heartbeat.boundaries >= 8:
            return True
        return all(optimizer.state or id(optimizer) in self.hooks.fired for optimizer in self._optimizers)

    def _forget_slots(self) -> None:
        self._in_flight.forget()
        if self._asked is not None:
            # Nobody here looks at those slots again: whether it was persisted is not known.
            self._asked = None
            self.schedule.persist_ended(fulfilled=False)


def _skipped(step: int, reason: str) -> BoundaryResult:
    return BoundaryResult(Verdict.SKIPPED, step, reason)
