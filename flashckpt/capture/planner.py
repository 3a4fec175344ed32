"""How the state is copied as it is now: patched where memory moved, made anew where leaves changed.

`Planner` owns when the prepared copies of a plan stand, when the state is walked again, and what is let go
when a device has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from flashckpt.capture.constants import Constants
from flashckpt.capture.copies import PreparedCopies
from flashckpt.capture.copy_policy import CopyPolicy
from flashckpt.capture.devices import Device
from flashckpt.capture.division import Sharing
from flashckpt.capture.hooks import StepHooks
from flashckpt.capture.plan import Plan
from flashckpt.capture.slot_writer import HeartbeatWriter
from flashckpt.errors import StateError

if TYPE_CHECKING:
    from flashckpt.state.tree import Walk

# What a device may take is known once the loop has gone round twice.
_WARM_BOUNDARIES = 2
# Walks of one boundary after which its state is given up: one is enough for any that keeps still.
_MOST_WALKS = 3


class Walkable(Protocol):
    """The state as a capture needs it (flashckpt.state.tree.Tree). `used_up(parameter, gradient)` says that
    a gradient is no leaf."""

    @property
    def current(self) -> Walk | None:
        """The last walk, as long as it stands; asking for values may replace it, and does where other
        gradients are leaves than it found."""

    def walk(self, used_up: Callable[[Any, Tensor], bool]) -> Walk: ...


class Planner:
    """`current` is None until the first capture, and where ways are to be chosen again. device_memory: bytes
    that arenas may take on a device, None to find out."""

    def __init__(
        self,
        tree: Walkable,
        policy: CopyPolicy,
        hooks: StepHooks,
        constants: Constants,
        heartbeat: HeartbeatWriter,
        devices: Sequence[Device],
        device_memory: int | None,
        threads: int,
        sharing: Sharing | None = None,
    ) -> None:
        self.current: PreparedCopies | None = None
        self._tree, self._policy, self._hooks, self._constants = tree, policy, hooks, constants
        self._heartbeat, self._devices = heartbeat, devices
        self._limit, self._threads, self._sharing = device_memory, threads, sharing
        self._walk: Walk | None = None
        self._chosen = self._ground()

    def prepare(self, values: Callable[[], bytes]) -> tuple[PreparedCopies, bytes]:
        """The copies of the state as it is now, with its values. Values are asked first: that is when
        their owners make tensors anew, or the tree walks again. What is made after a walk is followed too,
        since the walk asked for tensors of its own. Raises StateError if that never ends."""
        if self._tree.current is None:
            self.walk()
        self._give_way()
        for _ in range(_MOST_WALKS):
            data = values()
            copies, walk = self.current, self._tree.current
            if copies is not None and self._walk is walk and self._chosen == self._ground():
                moved = copies.plan.update()
                if moved:
                    copies.moved(moved)
                if moved is not None:
                    return copies, data
            self.drop()
            self._walk = self.walk()
            # First what it is made by: what is learned of replicas meanwhile is for the next plan.
            self._chosen = self._ground()
            plan = self.plan(self._walk)
            self.current = self._prepared(plan, self._room())
        raise StateError(
            "The state has other tensors each time it is asked. Nothing was captured: values and bytes would "
            "not belong together. Let every state_dict give the same tensors when it is called twice."
        )

    def walk(self) -> Walk:
        return self._tree.walk(self._hooks.used_up)

    def plan(self, walk: Walk) -> Plan:
        """A plan of one walk, with what is constant left to the region."""
        region, used = self._constants.parts(walk.leaves)
        return Plan(walk, region, used, sharing=self._sharing, constants=self._constants.names)

    def of_constants(self) -> PreparedCopies:
        """The copies of what a region is made for."""
        walk = self.walk()
        return self._prepared(Plan(walk, only=self._constants.to_copy(walk.leaves)), {})

    def drop(self) -> None:
        """Let them go: the next capture makes others. Snapshots in flight hold their own, and with it the
        tensors, until their copies have ended."""
        self.gate()
        if self.current is not None:
            self.current.plan.release()
            self.current = None

    def gate(self) -> None:
        """Before an optimizer writes: no stream passes a copy that still reads what it writes."""
        if self.current is not None:
            self.current.gate()

    def _prepared(self, plan: Plan, room: dict[str, int]) -> PreparedCopies:
        # A leaf without bytes needs no device.
        owners = [
            next((device for device in self._devices if size and device.owns(tensor)), None)
            for tensor, size in zip(plan.tensors, plan.sizes.tolist(), strict=True)
        ]
        ways = self._policy.choose(plan, owners, self._hooks.fired, room)
        return PreparedCopies(plan, owners, ways, self._policy.torn, self._devices, self._threads)

    def _ground(self) -> tuple[object, ...]:
        """What ways were chosen by, beside the plan: whose hooks fire, whether room is known, and what is not
        shared any more."""
        is_warm = not self._devices or self._heartbeat.boundaries >= _WARM_BOUNDARIES
        return self._hooks.fired, is_warm, self._sharing.ground if self._sharing is not None else None

    def _room(self) -> dict[str, int]:
        """Bytes that arenas may take, by device: at most half of what is free, or what the user set."""
        limit, room = self._limit, {}
        for device in self._devices if self._ground()[1] or limit is not None else ():
            free = device.room_bytes()
            room[device.name] = max(0, free // 2 if limit is None else min(free, limit))
        return room

    def _give_way(self) -> None:
        """Where headroom has fallen, arenas go, and smaller ones or none are made."""
        if self.current is not None and any(
            each.arena.is_large and each.device.room_bytes() < 0 for each in self.current.on_devices
        ):
            self.drop()
