"""The arrangement of the state as it is now: patched where memory moved, made anew where leaves changed.

Owns when a plan stands and when the state is walked again, and what is let go when a device has no room.
Copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from flashckpt.capture.arrangement import Arrangement
from flashckpt.capture.constants import Constants
from flashckpt.capture.devices import Device
from flashckpt.capture.heartbeat import Pulse
from flashckpt.capture.hooks import StepHooks
from flashckpt.capture.plan import Change, Plan
from flashckpt.capture.room import arena_room
from flashckpt.capture.ways import Ways
from flashckpt.errors import StateError

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
    """`current` is None until the first capture, and where ways are to be chosen again. device_memory: bytes
    that arenas may take on a device, None to find out."""

    def __init__(
        self,
        tree: Walkable,
        ways: Ways,
        hooks: StepHooks,
        constants: Constants,
        pulse: Pulse,
        devices: Sequence[Device],
        device_memory: int | None,
        threads: int,
    ) -> None:
        self.current: Arrangement | None = None
        self._tree, self._ways, self._hooks, self._constants = tree, ways, hooks, constants
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
        """A plan of one walk, with what is constant left to the region."""
        return Plan(walk, *self._constants.parts(walk.leaves))

    def arranged(self, plan: Plan, room: dict[str, int]) -> Arrangement:
        """A plan with the way of each leaf. room: bytes that an arena may take, by device name."""
        return Arrangement(plan, self._ways, self._hooks.fired, room, self._threads)

    def gate(self) -> None:
        if self.current is not None:
            self.current.gate()

    def drop(self) -> None:
        """Let the arrangement go: the next capture makes another. InFlight hold their own, and with it the
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
