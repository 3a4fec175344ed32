"""How the state is copied as it is now: patched where memory moved, made anew where leaves changed.

`PreparedCopies` is a plan with the way of each leaf and what carries it out: the parts of one capture.
`Planner` owns when it stands, when the state is walked again, and what is let go when a device has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from flashckpt.capture.constants import Constants
from flashckpt.capture.copy_policy import CopyPolicy, Way
from flashckpt.capture.device_copies import DeviceCopies
from flashckpt.capture.devices import Device, StreamMark
from flashckpt.capture.heartbeat import HeartbeatWriter
from flashckpt.capture.hooks import StepHooks
from flashckpt.capture.host_copies import HostCopies
from flashckpt.capture.plan import Addresses, Change, Plan
from flashckpt.capture.slot_writer import SlotWriter
from flashckpt.errors import StateError

if TYPE_CHECKING:
    from flashckpt.state.tree import Walk

UsedUp = Callable[[Any, Tensor], bool]

# What a device may take is known once the loop has gone round twice.
_WARM_BOUNDARIES = 2
# Walks of one boundary after which its state is given up: one is enough for any that keeps still.
_MOST_WALKS = 3
# In so many captures of a plan the sources are digested again after they were cloned.
_CHECKED = 3


class Walkable(Protocol):
    """The state as a capture needs it (flashckpt.state.tree.Tree). `used_up(parameter, gradient)` says that
    a gradient is no leaf."""

    @property
    def current(self) -> Walk | None:
        """The last walk, as long as it stands; asking for values may replace it, and does where other
        gradients are leaves than it found."""

    def walk(self, used_up: UsedUp) -> Walk: ...


class PreparedCopies:
    """Everything a boundary needs to copy the leaves of one plan."""

    def __init__(
        self, plan: Plan, policy: CopyPolicy, fired: frozenset[int], room: Mapping[str, int], threads: int
    ) -> None:
        self.plan = plan
        self._devices: Sequence[Device | None] = policy.device_of(plan)
        self.ways: list[Way] = policy.choose(plan, self._devices, fired, room)
        host = [i for i, each in enumerate(self._devices) if each is None and i not in plan.outdated]
        constants = [i for i in host if self.ways[i] is Way.CONSTANT]
        suspects = [i for i in host if policy.suspect(plan.leaves[i].name)]
        self.host = HostCopies(plan, host, constants, suspects, threads)
        self._policy = policy
        self._feeders: dict[int, tuple[Device, StreamMark]] = {}
        self._find_feeders(host)
        holes = self.host.may_be_staged()
        self.transfers = [self._transfer(device, policy, holes) for device in _distinct(self._devices)]
        self.host.stage(i for t in self.transfers if t.arena is not None for i in t.arena.bridged)
        self.captures = 0
        self.names = [leaf.name for leaf in plan.leaves]
        held = plan.region.digests if plan.region is not None else ()
        self._held: Addresses = np.array(held, dtype=np.uint64)

    def moved(self, indexes: Iterable[int]) -> None:
        """The plan was patched: these leaves lie elsewhere now."""
        self.host.moved()
        self._find_feeders(i for i in indexes if self._devices[i] is None)
        for transfer in self.transfers:
            transfer.moved()

    def capture(self, target: SlotWriter, *, gated: bool) -> tuple[list[int], Addresses]:
        """Start every copy. Returns the handles that a seal waits for, and the moves that it makes then
        (`SlotWriter.seal`). Whatever is raised, copies may have begun: `wait` for them.

        Devices first: their copies run while the host copies its own.
        """
        check = self.captures < _CHECKED
        self.captures += 1
        for device, mark in self._feeders.values():
            device.gather()
            device.mark(mark)
        handles = [t.capture(target, gated=gated, check=check) for t in self.transfers]
        for _, mark in self._feeders.values():
            mark.wait()
        self.host.capture(target, check=check)
        return handles, np.concatenate([self.host.moves(target), *(t.moves(target) for t in self.transfers)])

    def wait(self) -> None:
        """The host waits until nothing that was begun writes to a slot any more. Raises nothing for copies
        that failed: these have ended too."""
        for transfer in self.transfers:
            transfer.wait()

    def landed(self) -> None:
        """The copies of a snapshot have ended."""
        for transfer in self.transfers:
            transfer.landed()

    def gate(self) -> None:
        for transfer in self.transfers:
            transfer.gate()

    def changed_constants(self, table: Addresses) -> list[int]:
        """Those whose digests in a slot's table are not those that the region was sealed with."""
        first = self.plan.first_constant
        return [first + int(i) for i in np.flatnonzero(table[first:] != self._held)]

    def _find_feeders(self, host: Iterable[int]) -> None:
        """Devices that write leaves in host memory: these are read after the kernels of the boundary."""
        for device in self._policy.feeders(self.plan.tensors[i] for i in host):
            self._feeders.setdefault(id(device), (device, device.new_mark()))

    def _transfer(self, device: Device, policy: CopyPolicy, holes: frozenset[int]) -> DeviceCopies:
        indexes = [i for i, owner in enumerate(self._devices) if owner is device]
        synchronised = [i for i in indexes if policy.synchronised(self.plan.leaves[i].name)]
        return DeviceCopies(device, self.plan, indexes, self.ways, synchronised, holes)


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
    ) -> None:
        self.current: PreparedCopies | None = None
        self._tree, self._policy, self._hooks, self._constants = tree, policy, hooks, constants
        self._heartbeat, self._devices, self._limit, self._threads = (
            heartbeat,
            devices,
            device_memory,
            threads,
        )
        self._walk: Walk | None = None
        self._chosen = self._ground()

    def prepare(self, values: Callable[[], bytes]) -> tuple[PreparedCopies, bytes]:
        """The copies of the state as it is now, with its values. Values are asked first: that is when
        their owners make tensors anew, or the tree walks again. What is made after a walk is followed too,
        since the walk asked for tensors of its own. Raises StateError if that never ends."""
        if self._tree.current is None:
            self._tree.walk(self._hooks.used_up)
        self._give_way()
        for _ in range(_MOST_WALKS):
            data = values()
            copies, walk = self.current, self._tree.current
            if copies is not None and self._walk is walk and self._chosen == self._ground():
                change, indexes = copies.plan.update()
                if change is Change.PATCHED:
                    copies.moved(indexes)
                if change is not Change.REBUILD:
                    return copies, data
            self._rebuild()
        raise StateError(
            "The state has other tensors each time it is asked. Nothing was captured: values and bytes would "
            "not belong together. Let every state_dict give the same tensors when it is called twice."
        )

    def plan(self, walk: Walk) -> Plan:
        """A plan of one walk, with what is constant left to the region."""
        return Plan(walk, *self._constants.parts(walk.leaves))

    def arranged(self, plan: Plan, room: dict[str, int]) -> PreparedCopies:
        """A plan with the way of each leaf. room: bytes that an arena may take, by device name."""
        return PreparedCopies(plan, self._policy, self._hooks.fired, room, self._threads)

    def drop(self) -> None:
        """Let them go: the next capture makes others. Snapshots in flight hold their own, and with it the
        tensors, until their copies have ended."""
        if self.current is not None:
            self.current.gate()
            self.current.plan.release()
            self.current = None

    def _rebuild(self) -> None:
        self.drop()
        self._walk = self._tree.walk(self._hooks.used_up)
        plan = self.plan(self._walk)
        self._chosen = self._ground()
        self.current = self.arranged(plan, self._room())

    def _ground(self) -> tuple[frozenset[int], bool]:
        """What ways were chosen by, beside the plan: whose hooks fire, and whether room is known."""
        return self._hooks.fired, not self._devices or self._heartbeat.boundaries >= _WARM_BOUNDARIES

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
            transfer.arena is not None and transfer.arena.is_large and transfer.device.room_bytes() < 0
            for transfer in self.current.transfers
        ):
            self.drop()


def _distinct(devices: Sequence[Device | None]) -> list[Device]:
    return list({id(device): device for device in devices if device is not None}.values())
