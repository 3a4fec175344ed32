"""The slots that captures go to, together: exchanged, known to the devices, large enough or too small.

Owns which they are. Fills none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashckpt.capture.devices import Device
from flashckpt.capture.plan import Plan
from flashckpt.capture.room import slot_room
from flashckpt.capture.target import Target
from flashckpt.memory.control_page import SlotSize
from flashckpt.memory.slot import Slot, SlotRing

# What is no tensor takes so much at least in a slot's metadata: before the first capture nobody has seen it,
# and slots that are asked for later fit what was asked for then.
_LEAST_VALUES_BYTES = 1 << 16


class Targets:
    """`by_name` are the slots of `ring`, ready to be filled."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.by_name: dict[str, Target] = {}
        self.ring: SlotRing | None = None
        self._devices = devices
        self._needed: SlotSize | None = None
        self._values_bytes = 0

    def exchange(self, ring: SlotRing | None, owner: int | Mapping[str, int]) -> None:
        """Write to other slots from now on. `owner`: this process's index in them, by name if they differ."""
        self.release()
        self.ring, self._needed = ring, None
        for slot in ring.slots if ring is not None else ():
            self.by_name[slot.name] = Target(slot, owner if isinstance(owner, int) else owner[slot.name])
        self.register(ring.slots if ring is not None else ())

    def register(self, slots: Sequence[Slot]) -> None:
        """Make slots known to the devices, until they are unmapped; once a slot."""
        for slot in slots:
            for device in self._devices:
                device.register(slot.mapping)

    def release(self) -> None:
        for target in self.by_name.values():
            target.release()
        self.by_name.clear()

    def drop(self, slot: Slot) -> None:
        """Write to this one no more. Nothing may be under way to it."""
        target = self.by_name.pop(slot.name)
        target.release()
        self.ring = self.ring.without(slot) if self.ring is not None else None

    def measure(self, plan: Plan, values_bytes: int) -> None:
        """Compare the slots with a plan: `room_wanted` says what is needed where one of them is too small."""
        self._values_bytes = values_bytes
        has_room = all(each.fits(plan, values_bytes) for each in self.by_name.values())
        self._needed = None if has_room else slot_room(plan, values_bytes)

    def fitting(self, slot: Slot, plan: Plan, values_bytes: int) -> Target | None:
        """The target of a slot for this plan; None where it is too small: `room_wanted` says so until
        all of them have room."""
        target = self.by_name[slot.name]
        if not target.fits(plan, values_bytes):
            self.measure(plan, values_bytes)
            return None
        self._values_bytes = values_bytes
        if self._needed is not None:
            # It may have become smaller: there may be no memory for what it was.
            self.measure(plan, values_bytes)
        return target

    # ---- how large

    @property
    def room_wanted(self) -> SlotSize | None:
        """What the slots of the next capture have to have room for, where these are too small."""
        return self._needed

    def room_for(self, plan: Plan) -> SlotSize:
        """What slots for this plan have to have room for."""
        needed, known = slot_room(plan, max(self._values_bytes, _LEAST_VALUES_BYTES)), self._needed
        return needed if known is None else SlotSize(max(needed[0], known[0]), max(needed[1], known[1]))
