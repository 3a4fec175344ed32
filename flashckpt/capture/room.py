"""How much room a snapshot needs in a slot, and how much an arena may take of a device. Sums only."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.capture.devices import Device
from flashckpt.capture.plan import Plan
from flashckpt.format.metadata import geometry
from flashckpt.memory.control_page import SlotSize


def slot_room(plan: Plan, values_bytes: int) -> SlotSize:
    """What a slot for this plan has to have room for."""
    metadata = geometry(len(plan.json), len(plan), values_bytes, len(plan.constants_json)).num_bytes
    return SlotSize(metadata, plan.image.shard.num_bytes)


def arena_room(devices: Sequence[Device], limit: int | None) -> dict[str, int]:
    """Bytes that arenas may take, by device: at most half of what is free, or what the user set."""
    room = {}
    for device in devices:
        free = device.room_bytes()
        room[device.name] = max(0, free // 2 if limit is None else min(free, limit))
    return room
