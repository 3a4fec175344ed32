"""How much room a snapshot needs in a slot, and how much an arena may take of a device. Sums only."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.capture.device.base import Device
from flashckpt.capture.plan import Plan
from flashckpt.format.metadata import geometry
from flashckpt.memory.page import round_up

# Headroom in a slot for what a patch may add, beside a mebibyte: a sixteenth of the image, half of the
# metadata.
_IMAGE_SLACK = 16
_METADATA_SLACK = 2
_LEAST_SLACK_BYTES = 1 << 20


def with_slack(metadata_bytes: int, image_bytes: int) -> tuple[int, int]:
    """Room for a state of these sizes, in whole pages, with headroom for what a patch may add."""
    return (
        round_up(metadata_bytes + metadata_bytes // _METADATA_SLACK + _LEAST_SLACK_BYTES),
        round_up(image_bytes + image_bytes // _IMAGE_SLACK + _LEAST_SLACK_BYTES),
    )


def grown_room(metadata_bytes: int, image_bytes: int) -> tuple[int, int]:
    """Room for a state that has outgrown its slots, and may go on growing, where `with_slack` gave these
    sizes: half as much again, so that it outgrows slots seldom, however small its steps are."""
    return round_up(metadata_bytes + metadata_bytes // 2), round_up(image_bytes + image_bytes // 2)


def least_room(metadata_bytes: int, image_bytes: int) -> tuple[int, int]:
    """Room that does where `with_slack` gave these sizes: with half of the slack. Slots that survived were
    made for a state that was laid out a little differently, and are taken back."""
    metadata_slack = metadata_bytes // (2 * (_METADATA_SLACK + 1)) + _LEAST_SLACK_BYTES // 2
    image_slack = image_bytes // (2 * (_IMAGE_SLACK + 1)) + _LEAST_SLACK_BYTES // 2
    return max(1, metadata_bytes - metadata_slack), max(1, image_bytes - image_slack)


def slot_room(plan: Plan, values_bytes: int) -> tuple[int, int]:
    """(metadata, image) bytes of a slot for this plan, with slack."""
    metadata = geometry(len(plan.json), len(plan), values_bytes, len(plan.constants_json)).num_bytes
    return with_slack(metadata, plan.image.num_bytes)


def arena_room(devices: Sequence[Device], limit: int | None) -> dict[str, int]:
    """Bytes that arenas may take, by device: at most half of what is free, or what the user set."""
    room = {}
    for device in devices:
        free = device.room_bytes()
        room[device.name] = max(0, free // 2 if limit is None else min(free, limit))
    return room
