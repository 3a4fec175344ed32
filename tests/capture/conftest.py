"""Slots and a small state for the tests of the capture."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from flashckpt import _native
from flashckpt.memory.region import SlotHeader
from flashckpt.memory.slot import Slot, SlotRing

from .accelerated import Accelerated, Maker

IDENTITY = bytes(16)


def make_slot(index: int, metadata_bytes: int, image_bytes: int, *, nonce: int = 7) -> Slot:
    descriptor = os.memfd_create(f"slot-{index}")
    os.ftruncate(descriptor, 4096 + metadata_bytes + image_bytes)
    header = SlotHeader(
        identity=IDENTITY,
        rank=0,
        index=index,
        nonce=nonce,
        metadata_capacity=metadata_bytes,
        image_capacity=image_bytes,
    )
    Slot.format(descriptor, header)
    return Slot.open(descriptor, map_image=True)


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    slots = [make_slot(i, 1 << 20, 16 << 20) for i in range(3)]
    yield SlotRing(slots)
    for slot in slots:
        slot.close()


@pytest.fixture
def sealer() -> Iterator[_native.Sealer]:
    sealer = _native.Sealer()
    yield sealer
    sealer.close()


@pytest.fixture
def make(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Maker]:
    made: list[Accelerated] = []

    def maker(**options: object) -> Accelerated:
        made.append(Accelerated(ring, sealer, **options))
        return made[-1]

    yield maker
    for each in made:
        each.close()
