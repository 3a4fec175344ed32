"""The arrangement of the state as it is now: patched where memory moved, made anew where leaves changed.

Owns when a plan stands and when the state is walked again, and what is let go when a device has no room.
Copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from flashckpt.capture.arrangement import Arrangement
from flashckpt.capture.device.base import Device
from flashckpt.capture.heartbeat import Pulse
from flashckpt.capture.hooks import StepHooks
from flashckpt.capture.plan import Change, Plan, layout_of
from flashckpt.capture.room import arena_room
from flashckpt.capture.targets import Targets
from flashckpt.capture.ways import Ways
from flashckpt.errors import StateError
from flashckpt.format.layout import Layout, Leaf

if TYPE_CHECKING:
    from flashckpt.state.tree import Walk

UsedUp = Callable[[Any, Tensor], bool]

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

    def walk(self, used_up: UsedUp) -> Walk: ...


class Following:
    """`current` is None until the first capture, and where ways are to be chosen again; `further` are all
    constants where the region that slots share does not hold them all. device_memory: bytes that arenas may
    take on a device, None to find out."""

    def __init__(
        self,
        tree: Walkable,
        ways: Ways,
        hooks: StepHooks,
        targets: Targets,
        pulse: Pulse,
        devices: Sequence[Device],
        device_memory: int | None,
        threads: int,
    ) -> None:
        self.current: Arrangement | None = None
        self.further: Layout | None = None
        self._tree, self._ways, self._hooks, self._targets = tree, ways, hooks, targets
        self._pulse, self._devices, self._limit, self._threads = pulse, devices, device_memory, threads
        self._walk: Walk | None = None
        self._chosen = self._ground()

    def follow(self, values: Callable[[], bytes]) -> tuple[Arrangement, bytes]:
        """The arrangement of the state as it is now, with its values. Values are asked first: that is when
        their owners make tensors anew, or the tree walks again. What is made after a walk is followed too,
        since the walk asked for tensors of its own. Raises StateError if that never ends."""
        if self._tree.current is None:
            self._tree.walk(self._hooks.used_up)
        self._give_way()
        for _ in range(_MOST_WALKS):
            data = values()
            arrangement, walk = self.current, self._tree.current
            if arrangement is not None and self._walk is walk and self._chosen == self._ground():
                change, indexes = arrangement.plan.follow()
                if change is Change.PATCHED:
                    arrangement.moved(indexes)
                if change is not Change.REBUILD:
                    return arrangement, data
            self._rebuild()
        raise StateError(
            "The state has other tensors each time it is asked. Nothing was captured: values and bytes would "
            "not belong together. Let every state_dict give the same tensors when it is called twice."
        )

    def plan(self, walk: Walk) -> Plan:
        """A plan of one walk, with the constants left to the region that slots share, where that holds just
        these."""
        constants, shared, self.further = self._ways.constants(walk.leaves), self._targets.shared, None
        if shared is None:
            return Plan(walk, constants)
        held = shared.by_name()
        if not self._ways.have_constants(held):
            self._targets.shared = None  # for good: what was no constant once is none any more
            return Plan(walk, constants)
        # Those that were found since are copied as before, until there is a region with them. In the slots
        # there may be no room for all: nothing would be captured, and for larger ones there may be no memory.
        plan = Plan(walk, frozenset(held), shared)
        unfit = self._unfit(plan, constants, shared.layout)
        for name in unfit:
            self._ways.no_constant(name)
        constants -= unfit
        if plan.shared is None or unfit & held.keys():
            plan.release()
            return Plan(walk, constants)
        if len(held) < len(constants):
            self.further = layout_of(walk, constants)
        return plan

    def _unfit(self, plan: Plan, constants: frozenset[str], held: Layout) -> frozenset[str]:
        """Constants that no region can hold: what each snapshot has to make row-major, or what is laid out
        otherwise than it is held. Slots would, for all constants: these become ordinary leaves instead, and
        a region goes on holding the others."""
        places = {leaf.name: index for index, leaf in enumerate(plan.leaves)}
        before = {leaf.name: leaf for leaf in held.leaves}
        return frozenset(
            name
            for name in constants
            if not self._is_read_in_place(plan, places[name])
            or (name in before and not _same_bytes(before[name], plan.leaves[places[name]]))
        )

    def _is_read_in_place(self, plan: Plan, index: int) -> bool:
        """Whether a capture digests a leaf where it lies."""
        tensor = plan.tensors[index]
        is_reached = any(device.owns(tensor) for device in self._devices) or tensor.device.type == "cpu"
        return index not in plan.odd and is_reached

    def gate(self) -> None:
        if self.current is not None:
            self.current.gate()

    def drop(self) -> None:
        """Let the arrangement go: the next capture makes another. Flights hold their own, and with it the
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
        self.current = Arrangement(plan, self._ways, self._hooks.fired, self._room(), self._threads)
        if plan.shared is not None and self.current.copies_constants:
            # No region holds what has to be made row-major for each snapshot: the slots do.
            self._targets.shared = None
            self._rebuild()

    def _ground(self) -> tuple[frozenset[int], bool]:
        """What ways were chosen by, beside the plan: whose hooks fire, and whether room is known."""
        return self._hooks.fired, not self._devices or self._pulse.boundaries >= _WARM_BOUNDARIES

    def _room(self) -> dict[str, int]:
        known = self._ground()[1] or self._limit is not None
        return arena_room(self._devices, self._limit) if known else {}

    def _give_way(self) -> None:
        """Where headroom has fallen, arenas go, and smaller ones or none are made."""
        if self.current is not None and any(
            transfer.arena is not None and transfer.arena.is_large and transfer.device.room_bytes() < 0
            for transfer in self.current.transfers
        ):
            self.drop()


def _same_bytes(one: Leaf, other: Leaf) -> bool:
    return (one.dtype, one.shape, one.stride) == (other.dtype, other.shape, other.stride)
