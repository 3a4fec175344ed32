"""The capture of one rank: what happens at a boundary.

Owns the order: poll what was begun, ask schedule and hooks, prepare the copies, fill a slot, hand it to the
sealer. The training thread waits here for nothing but its own copies of host memory; `wait` and an ordered
capture wait for copies in flight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch

from flashckpt import _native
from flashckpt.capture.constants import Constants, ConstantsChanged, region_size
from flashckpt.capture.copies import PreparedCopies
from flashckpt.capture.copy_policy import CopyPolicy, describe
from flashckpt.capture.devices import Device
from flashckpt.capture.division import ALL_GROUPS, Sharing
from flashckpt.capture.hooks import StepHooks, unwrapped
from flashckpt.capture.in_flight import InFlight, PendingSnapshot, RegionCopy
from flashckpt.capture.plan import ConstantsRegion
from flashckpt.capture.planner import Planner, Walkable
from flashckpt.capture.schedule import Intervals, Schedule
from flashckpt.capture.slot_writer import HeartbeatWriter, SlotWriter, SlotWriters
from flashckpt.errors import PersistError
from flashckpt.memory.control_page import SlotSize
from flashckpt.memory.numa import NO_NODE
from flashckpt.memory.slot import Slot, SlotRing
from flashckpt.options import Options

# Optimizers without state are waited for so long before the size of the state is taken for what it is.
_MOST_STATELESS = 8
_NO_MEMORY = "the device has no memory left for a snapshot's buffers"


class Verdict(str, Enum):
    CAPTURED = "captured"
    NOT_DUE = "not due"
    NOT_QUALIFIED = "not qualified"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class BoundaryResult:
    """reason says why nothing was captured, in words for a log. What was captured is a snapshot once its slot
    is sealed."""

    verdict: Verdict
    step: int
    reason: str = ""

    @property
    def captured(self) -> bool:
        return self.verdict is Verdict.CAPTURED


class Capture:
    """Snapshots of one state into slots.

    schedule says which boundaries are taken; attempt is (number, nonce) of this attempt; optimizers are those
    of the state, wrapped or not; known are the digests, by name, of the snapshot that the state was restored
    from, constants names those of it that were, region is the one that it names. ordinal is that of the
    boundary, counted by who passes them, alike on all ranks: it stands in each snapshot. sharing says
    what is done about leaves that other ranks hold too, group_failure is for `InFlight`.
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
        sharing: Sharing | None = None,
        group_failure: Callable[[], str] | None = None,
    ) -> None:
        self._sealer, self._devices, self._attempt = sealer, devices, attempt
        inner = [unwrapped(optimizer) for optimizer in optimizers]
        self._optimizers: list[Any] = [o for o in inner if isinstance(o, torch.optim.Optimizer)]
        self.hooks = StepHooks(self._optimizers, lambda: self._planner.gate(), devices)
        self.schedule = schedule
        threads = options.threads or torch.get_num_threads()
        self._constants = Constants(self._optimizers, devices, threads, known, constants, region)
        self._copy: RegionCopy | None = None
        self._sharing = sharing
        self._policy = CopyPolicy(self._optimizers, self._constants)
        self._intervals = Intervals(self.schedule.budget, devices)
        self._skipped, self._skipped_step = 0, -1
        self.ordinal = 0
        self._writers = SlotWriters(devices)
        self.heartbeat = HeartbeatWriter(self._writers.by_name)
        self._planner = Planner(
            tree, self._policy, self.hooks, self._constants, self.heartbeat, devices,
            options.device_memory, threads, sharing,
        )  # fmt: skip
        self._in_flight = InFlight(
            self._planner, self._policy, self._constants, sealer, self._lost, group_failure
        )
        self._ordered = False
        self._asked: PendingSnapshot | None = None
        self._captured_step = -1
        self.lost_step: int | None = None  # that one, once its snapshot is lost
        self._call_s = 0.0
        self._step, self._entered = -1, (-1, -1)
        if ring is not None:
            self.set_slots(ring, owner)

    # ---- slots

    def set_slots(self, ring: SlotRing, owner: int | Mapping[str, int] = 1) -> None:
        """Write to these slots from now on. owner: this process's index in the owner tables, by slot name
        where they differ. Waits for the copies into the old ones and for their seals:
        whoever unmaps those next must not take the memory away under them."""
        self._in_flight.wait()
        self._forget_slots()
        self._writers.exchange(ring, owner)

    def let_go(self, slot: Slot) -> None:
        """Write to this slot no more, so that its memory may go. Waits for the copies in flight."""
        self._in_flight.wait()
        if self._asked is not None and self._asked.target.slot is slot:
            self._persist_ended(fulfilled=False)
        self._in_flight.drop(self._writers.by_name[slot.name])
        self._writers.drop(slot)

    def register(self, slots: Sequence[Slot]) -> None:
        """Make slots known to the devices. Takes up to half a second a GiB, so that it may be done before
        `set_slots`, by another thread; it is done once a slot."""
        self._writers.register(slots)

    @property
    def numa_node(self) -> int:
        """The NUMA node that slots come from where it has memory: that of the first device that has one."""
        nodes = (device.numa_node for device in self._devices)
        return next((node for node in nodes if node != NO_NODE), NO_NODE)

    def room_wanted(self, *, ordered: bool = False) -> SlotSize | None:
        """What the slots of the next capture have to have room for; None while those it has are large
        enough, or, unless one is ordered, while the size of the state is not known yet."""
        if self._writers.ring is not None:
            return self._writers.room_wanted
        return self.room_needed(ordered=ordered)

    def room_needed(self, *, ordered: bool = False) -> SlotSize | None:
        """What a slot has to have room for. Unless a capture is ordered, None before optimizers have state,
        which comes with the first step, and while it is open whether their gradients are saved."""
        is_known = not self.hooks.is_undecided and all(
            optimizer.state or id(optimizer) in self.hooks.fired for optimizer in self._optimizers
        )
        if not (ordered or is_known or self.heartbeat.boundaries >= _MOST_STATELESS):
            return None
        walk = self._planner.walk()
        self._constants.decide(walk.leaves)
        plan = self._planner.plan(walk)
        needed = self._writers.room_for(plan)
        plan.release()
        return needed

    def keep_by_rank(self, names: Collection[str]) -> None:
        """These leaves are not alike on the ranks that hold them: each writes its own from the next capture
        on. Any thread."""
        if self._sharing is not None and names:
            self._sharing.keep_by_rank(names)

    def hold_whole(self, groups: int = ALL_GROUPS) -> None:
        """From the next capture on nothing of these groups of leaves is left to other ranks of the node. Any
        thread."""
        if self._sharing is not None:
            self._sharing.hold_whole(groups)

    # ---- constants

    def look(self) -> None:
        """Before the first iteration: digest what may be constant. Reads its bytes."""
        self._constants.look(lambda: self._planner.walk().leaves)

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
        self._copy = RegionCopy(region, owner, self._constants, self._sealer, self._in_flight)

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
    ) -> BoundaryResult:
        """One boundary. values gives what is not a tensor, encoded; it is called only for a capture.

        due: None leaves it to the schedule. ordered: whatever that and the hooks say, and after waiting
        for a copy in flight. A second call with the same step is about the same boundary.

        Raises PersistError where a device has failed.
        """
        self._enter(step)
        self._check_devices(step)
        ordered = ordered or self._ordered
        is_due = self.schedule.due(step, self.ordinal)
        if not ordered and not (is_due if due is None else due):
            return BoundaryResult(Verdict.NOT_DUE, step)
        if not ordered and not self._hooks.qualifies:
            why = "no optimizer has stepped since the last boundary"
            return BoundaryResult(Verdict.NOT_QUALIFIED, step, why)
        self.schedule.qualifies()
        if ordered:
            self._in_flight.wait()
        # A boundary that is tried again, after it has waited for slots, is one and not two.
        before, self._skipped_step = self._skipped_step == step, step
        self._skipped += not before  # a state that cannot be captured raises
        reason = self._capture(step, values, ordered)
        if reason:
            return BoundaryResult(Verdict.SKIPPED, step, reason)
        self._skipped -= 1
        self._ordered, self._captured_step, self.lost_step, self._skipped_step = False, step, None, -1
        return BoundaryResult(Verdict.CAPTURED, step)

    def pass_by(self, step: int) -> None:
        """A boundary that is counted, and captured later if at all, by another call with its step. What falls
        due on it stays due."""
        self._enter(step)
        self.schedule.due(step, self.ordinal)

    def _enter(self, step: int) -> None:
        self._ask_devices()
        self._in_flight.poll()
        if self._entered != (self.ordinal, step):
            self._entered = self.ordinal, step
            self._in_flight.confirm()
        self._settle()
        if step == self._step:
            self._intervals.pause()
        else:
            self._step = step
            with contextlib.suppress(RuntimeError):  # of a device that fails meanwhile: no budget is needed
                self._intervals.boundary(trailing=self._in_flight.running(), marking=not self._graph)
            self._hooks = self.hooks.boundary()
            self.heartbeat.boundary(step)

    def _ask_devices(self) -> None:
        self._graph = any([device.capturing() for device in self._devices])

    def _check_devices(self, step: int) -> None:
        for device in self._devices:
            if device.failure:
                raise PersistError(
                    f"Step {step} was not captured: {device.name} has failed ({device.failure}), and nothing "
                    "can be read from it. What was captured before is whole and stays with the keeper. End "
                    "this process and start the run again: it resumes from there.",
                    step=step,
                )

    @property
    def lost_reason(self) -> str:
        """Why the last snapshot that was lost is."""
        return self._in_flight.lost_reason

    def wait(self) -> None:
        """The host waits for copies in flight, and confirms them: at the ends of runs only."""
        self._in_flight.wait()
        self._intervals.pause()

    def close(self) -> None:
        """Take the hooks off, wait for copies in flight, let go of slots and tensors. Confirms nothing: an
        end in order has waited before."""
        self.hooks.close()
        self.heartbeat.rest()
        self._in_flight.drain()
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
        """Counts and seconds so far: snapshots sealed, lost and skipped, boundaries, time in captures; and
        the bytes of gradients in a snapshot."""
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
        """Begin a snapshot. Returns why there is none, or nothing."""
        if self._graph:
            return "a device graph is being captured"
        if self._writers.ring is None:
            return "the slots are not prepared yet"
        if self._in_flight.running():
            return "the copy of the snapshot before is still running"
        began_s = time.perf_counter()
        try:
            if self._copy is not None:
                if not self._copy.is_over(self._planner, step, self._attempt, wait=ordered):
                    return "what never changes is being copied"
                self._end_copy()
            copies, data = self._planner.prepare(values)
            # The first plan is made once in a run: it says nothing of what the next snapshot costs.
            once_s = 0.0 if self._call_s else time.perf_counter() - began_s
            self.schedule.begins(self.ordinal)
            target = self._writers.begin(copies.plan, len(data))
            if isinstance(target, str):
                return target
            self._write(target, copies, data, step)
        except torch.OutOfMemoryError:
            self._planner.drop()
            return _NO_MEMORY
        except RuntimeError:
            self._ask_devices()  # one may have failed since
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
        persist = self._ordered or self.schedule.persist_due(step)
        copies.write(
            target, data, self._sealer, step, self._attempt,
            boundary=self.ordinal, gated=self._hooks.gated, persist=persist,
            confirms=self._in_flight.confirms(copies),
        )  # fmt: skip
        pending = PendingSnapshot(step, target, copies, ordered=self._ordered)
        self._in_flight.add(pending)
        if persist:
            self.schedule.persist_asked()
            self._asked = pending

    # ---- what the parts call

    def _lost(self, pending: PendingSnapshot) -> None:
        self.schedule.lost()
        if pending.step == self._captured_step:
            self.lost_step = pending.step
        self._ordered = self._ordered or pending.ordered  # the order stands again
        if pending is self._asked:
            self._persist_ended(fulfilled=False)

    def _settle(self) -> None:
        """Whether what was last asked to be persisted has been, or could not be."""
        if self._asked is None:
            return
        slot, generation = self._asked.target.slot, self._asked.generation
        failed = slot.failed[0] == generation
        if slot.persisted == generation or failed:
            self._persist_ended(fulfilled=not failed)

    def _persist_ended(self, *, fulfilled: bool) -> None:
        self._asked = None
        self.schedule.persist_ended(fulfilled=fulfilled)

    def _forget_slots(self) -> None:
        self._in_flight.forget()
        if self._asked is not None:
            # Nobody here looks at those slots again: whether it was persisted is not known.
            self._persist_ended(fulfilled=False)
