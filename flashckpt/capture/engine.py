"""The capture of one rank: what happens at a boundary.

Owns the order: poll what was begun, ask pace and hooks, follow the plan, fill a slot, hand it to the
sealer. The training thread waits here for nothing but its own copies of host memory; `wait` and an ordered
capture wait for copies in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from flashckpt import _native
from flashckpt.capture.arrangement import Arrangement
from flashckpt.capture.device.base import Device
from flashckpt.capture.flights import Flight, Flights
from flashckpt.capture.hooks import Boundary, StepHooks, unwrapped
from flashckpt.capture.intervals import Intervals
from flashckpt.capture.outcome import Outcome, Verdict
from flashckpt.capture.pace import Every, Pace
from flashckpt.capture.plan import Change, Plan, UsedUp, Walked
from flashckpt.capture.target import Target
from flashckpt.capture.ways import Ways, describe
from flashckpt.format.metadata import geometry
from flashckpt.memory.page import round_up
from flashckpt.memory.slots import SlotRing
from flashckpt.options import Options

# Headroom in a slot for what a patch may add, beside a page: a sixteenth of the image, half of the metadata.
_IMAGE_SLACK = 16
_METADATA_SLACK = 2
_LEAST_SLACK_BYTES = 1 << 20
# What a device may take is known once the loop has gone round twice.
_WARM_BOUNDARIES = 2


class Walkable(Protocol):
    """The state as a capture needs it (flashckpt.state.tree.Tree)."""

    def walk(self, used_up: UsedUp) -> Walked: ...


class Capture:
    """Snapshots of one state into slots.

    attempt is (number, nonce) of this attempt; optimizers are those of the state, wrapped or not.
    """

    def __init__(
        self,
        tree: Walkable,
        ring: SlotRing | None,
        sealer: _native.Sealer,
        options: Options,
        devices: Sequence[Device] = (),
        *,
        optimizers: Sequence[object] = (),
        attempt: tuple[int, int] = (0, 0),
        owner: int | Mapping[int, int] = 1,
        every: Every = "auto",
        persist_every: str | int | None = None,
    ) -> None:
        self._tree, self._sealer, self._options, self._devices = tree, sealer, options, devices
        self._attempt = attempt
        inner = [unwrapped(optimizer) for optimizer in optimizers]
        self._optimizers: list[Any] = [o for o in inner if isinstance(o, torch.optim.Optimizer)]
        self.hooks = StepHooks(self._optimizers, self._close_gates, self._capturing)
        self.pace = Pace(every, persist_every, overhead=options.overhead)
        self._ways = Ways(self._optimizers, devices)
        self._flights = Flights(self._ways, sealer, self._lost, self._rearrange)
        self._intervals = Intervals(self.pace.budget, devices)
        self._arrangement: Arrangement | None = None
        self._targets: dict[int, Target] = {}
        self._ring: SlotRing | None = None
        self._ordered = False
        self._asked: Flight | None = None
        self._boundaries = self._skipped = 0
        self._call_s = 0.0
        self._needed = (0, 0)
        self._threads = options.threads or torch.get_num_threads()
        if ring is not None:
            self.set_slots(ring, owner)

    # ---- slots

    def set_slots(self, ring: SlotRing | None, owner: int | Mapping[int, int] = 1) -> None:
        """Write to these slots from now on (None: to none). owner: this process's index in the owner
        tables, by slot where they differ. The old ones must not be in use: call `wait` before."""
        self._release_targets()
        self._ring = ring
        for slot in ring.slots if ring is not None else ():
            index = owner if isinstance(owner, int) else owner[slot.index]
            self._targets[slot.index] = Target(slot, index)
            for device in self._devices:
                device.register(slot.image_address, slot.image_capacity)
                device.register(slot.metadata_address, slot.metadata_capacity)

    def room_needed(self, values_bytes: int = 1 << 16) -> tuple[int, int] | None:
        """(metadata, image) bytes that a slot needs, in whole pages, with slack. None before optimizers
        have state: it comes with the first step."""
        if not self._has_state():
            return None
        plan = Plan(self._tree.walk(self.hooks.used_up))
        metadata = geometry(len(plan.json), len(plan), values_bytes).num_bytes
        image = plan.layout.num_bytes
        plan.release()
        needed = (
            round_up(metadata + metadata // _METADATA_SLACK + _LEAST_SLACK_BYTES),
            round_up(image + image // _IMAGE_SLACK + _LEAST_SLACK_BYTES),
        )
        return max(needed[0], self._needed[0]), max(needed[1], self._needed[1])

    # ---- boundaries

    def order(self) -> None:
        """The next boundary is captured and persisted, whatever the pace."""
        self._ordered = True

    def boundary(
        self,
        step: int,
        values: Callable[[], bytes],
        *,
        due: bool | None = None,
        ordered: bool = False,
        persist: bool = False,
    ) -> Outcome:
        """One boundary. values gives what is not a tensor, encoded; it is called only for a capture.

        due: None leaves it to the pace. ordered: whatever the pace and the hooks say, and after waiting
        for a copy in flight. persist: the snapshot is to be persisted.
        """
        self._boundaries += 1
        capturing = self._capturing()
        self._flights.poll()
        self._settle()
        self._intervals.boundary(trailing=self._flights.running(), marking=not capturing)
        hooks = self.hooks.boundary()
        self._beat()
        if self._ordered:
            ordered = persist = True
        is_due = self.pace.due(step)
        if not ordered and not (is_due if due is None else due):
            return Outcome(Verdict.NOT_DUE, step)
        if not ordered and not hooks.qualifies:
            return Outcome(Verdict.NOT_QUALIFIED, step, "no optimizer has stepped since the last boundary")
        if ordered:
            self._flights.wait()
        outcome = self._capture(step, values, hooks, capturing, ordered, persist)
        if outcome.captured:
            self._ordered = False
        else:
            self._skipped += 1
        return outcome

    def wait(self) -> None:
        """The host waits for copies in flight: at the ends of runs only."""
        self._flights.wait()
        self._intervals.pause()

    def close(self) -> None:
        """Take the hooks off, wait for copies in flight, let go of slots and tensors."""
        self.hooks.close()
        self._flights.wait()
        self._release_targets()
        self._drop_arrangement()
        for device in self._devices:
            device.close()

    def describe(self) -> list[tuple[str, int, int]]:
        """Rows (way, leaves, bytes) of the plan as it stands; empty before the first capture."""
        arrangement = self._arrangement
        return [] if arrangement is None else describe(arrangement.plan, arrangement.ways)

    def report(self) -> dict[str, float]:
        """Counts and seconds so far: snapshots sealed, lost and skipped, boundaries, time in captures."""
        return {
            "snapshots": self._flights.sealed,
            "snapshots_lost": self._flights.lost,
            "snapshots_skipped": self._skipped,
            "boundaries": self._boundaries,
            "capture_call_seconds": self._call_s,
            "capture_cost_seconds": self.pace.budget.cost_s or 0.0,
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
    ) -> Outcome:
        if capturing:
            return _skipped(step, "a device graph is being captured")
        if self._ring is None:
            return _skipped(step, "the slots are not prepared yet")
        if self._flights.running():
            return _skipped(step, "the copy of the snapshot before is still running")
        began_s = time.perf_counter()
        arrangement, data = self._follow(values)
        slot = self._ring.take()
        if slot is None:
            return _skipped(step, "every slot is in use")
        target = self._targets[slot.index]
        if not target.fits(arrangement.plan, len(data)):
            self._grow(arrangement.plan, len(data))
            return _skipped(step, "the state has outgrown the slots")
        if not target.begin():
            return _skipped(step, "the slot was taken by the keeper")
        persist = persist or self.pace.persist_due(step)
        self._fill(target, arrangement, data, step, hooks, persist)
        call_s = time.perf_counter() - began_s
        self._call_s += call_s
        self.pace.captured(ordered=ordered)
        self._intervals.captured(0.0 if arrangement.transfers else call_s, ordered=ordered)
        return Outcome(Verdict.CAPTURED, step, "", slot.index, target.generation, persist)

    def _fill(
        self, target: Target, arrangement: Arrangement, data: bytes, step: int, hooks: Boundary, persist: bool
    ) -> None:
        target.prepare(arrangement.plan, data)
        try:
            handles, changed = arrangement.capture(target, gated=hooks.gated)
        except BaseException:
            target.forget()
            target.abandon()
            raise
        if persist:
            target.slot.request_persist(target.generation)
        target.seal(self._sealer, handles, step, self._attempt)
        flight = Flight(step, target, target.generation, persist, arrangement)
        self._flights.add(flight)
        if persist:
            self.pace.persist_asked()
            self._asked = flight
        for index in changed:
            self._ways.no_constant(arrangement.plan.layout.leaves[index].name)
        if changed:
            self._rearrange()

    def _follow(self, values: Callable[[], bytes]) -> tuple[Arrangement, bytes]:
        """The arrangement of the state as it is now, with its values. Values are asked first: that is
        when their owners make tensors anew."""
        arrangement = self._arrangement
        if arrangement is None:
            arrangement = self._rebuild()
            return arrangement, values()
        data = values()
        change, _ = arrangement.plan.follow(self.hooks.used_up)
        if change is Change.PATCHED:
            arrangement.moved()
        elif change is Change.REBUILD or arrangement.fired != self.hooks.fired:
            arrangement = self._rebuild()
            data = values()
        return arrangement, data

    def _rebuild(self) -> Arrangement:
        self._drop_arrangement()
        plan = Plan(self._tree.walk(self.hooks.used_up))
        plan.note_gradients(self.hooks.used_up)
        self._arrangement = Arrangement(plan, self._ways, self.hooks.fired, self._room(), self._threads)
        return self._arrangement

    def _room(self) -> dict[str, int]:
        limit = self._options.device_memory
        if limit is not None:
            return {device.name: limit for device in self._devices}
        if self._boundaries < _WARM_BOUNDARIES:
            return {}
        return {device.name: device.room_bytes() // 2 for device in self._devices}

    # ---- what the parts call

    def _close_gates(self) -> None:
        if self._arrangement is not None:
            self._arrangement.gate()

    def _capturing(self) -> bool:
        return any(device.capturing() for device in self._devices)

    def _rearrange(self) -> None:
        """Ways must be chosen again: with the next capture."""
        self._drop_arrangement()

    def _lost(self, flight: Flight) -> None:
        self.pace.lost()
        if flight is self._asked:
            self.pace.persist_ended(fulfilled=False)
            self._asked = None

    def _settle(self) -> None:
        """Whether what was last asked to be persisted has been, or could not be."""
        asked = self._asked
        if asked is None:
            return
        slot, generation = asked.target.slot, asked.generation
        failed = slot.failed[0] == generation
        if slot.persisted == generation or failed:
            self.pace.persist_ended(fulfilled=not failed)
            self._asked = None

    def _beat(self) -> None:
        now = time.monotonic_ns()
        for target in self._targets.values():
            target.slot.beat(self._boundaries, now)

    def _has_state(self) -> bool:
        if not self._optimizers or self._boundaries >= 8:
            return True
        return all(optimizer.state or id(optimizer) in self.hooks.fired for optimizer in self._optimizers)

    def _grow(self, plan: Plan, values_bytes: int) -> None:
        metadata = geometry(len(plan.json), len(plan), values_bytes).num_bytes
        image = plan.layout.num_bytes
        self._needed = (
            round_up(metadata + metadata // _METADATA_SLACK),
            round_up(image + image // _IMAGE_SLACK),
        )

    def _drop_arrangement(self) -> None:
        # Flights hold their own arrangement, and with it the tensors, until their copies have ended.
        if self._arrangement is not None:
            self._arrangement.gate()
            self._arrangement.plan.release()
            self._arrangement = None

    def _release_targets(self) -> None:
        for target in self._targets.values():
            for device in self._devices:
                device.unregister(target.slot.image_address)
                device.unregister(target.slot.metadata_address)
            target.release()
        self._targets.clear()
        self._flights.forget()


def _skipped(step: int, reason: str) -> Outcome:
    return Outcome(Verdict.SKIPPED, step, reason)
