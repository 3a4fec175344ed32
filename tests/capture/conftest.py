"""Slots of one's own and a small state: what every test of the capture starts from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from flashckpt import _native
from flashckpt.capture.target import Target
from flashckpt.format.layout import Leaf
from flashckpt.memory.slot import Slot
from flashckpt.memory.slots import SlotRing

IDENTITY = bytes(16)


def make_slot(index: int, metadata_bytes: int, image_bytes: int) -> Slot:
    descriptor = os.memfd_create(f"slot-{index}")
    os.ftruncate(descriptor, 4096 + metadata_bytes + image_bytes)
    return Slot.format(
        descriptor,
        identity=IDENTITY,
        rank=0,
        index=index,
        nonce=7,
        metadata_capacity=metadata_bytes,
        image_capacity=image_bytes,
        map_image=True,
    )


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
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Content:
    """What a sealed slot holds, read the way the keeper reads it: leaves by name, audited."""

    def __init__(self, slot: Slot) -> None:
        sealed = slot.sealed()
        assert sealed is not None, "nothing is sealed in the slot"
        metadata = slot.metadata(sealed)
        self.step, self.values = sealed.step, metadata.values
        image = bytes(slot.image_view[: sealed.record.image_bytes])
        self.image, self.layout = image, metadata.layout
        self.leaves: dict[str, bytes] = {}
        self.torn: list[str] = []
        for leaf, digest in zip(metadata.layout.leaves, metadata.digests, strict=True):
            start = sealed.record.data_start + leaf.offset
            data = image[start : start + leaf.num_bytes]
            self.leaves[leaf.name] = data
            buffer = np.frombuffer(data, dtype=np.uint8).copy()
            if _native.digest(_native.address_of(buffer), len(data)) != digest:
                self.torn.append(leaf.name)

    def leaf(self, name: str) -> Leaf:
        return next(leaf for leaf in self.layout.leaves if leaf.name == name)


def newest(ring: SlotRing) -> Content:
    found = ring.newest_sealed()
    assert found is not None, "no slot is sealed"
    return Content(found[0])


def audit(ring: SlotRing) -> list[str]:
    """Do as the keeper does when it is idle: audit the newest sealed snapshot, discard it if it is torn."""
    found = ring.newest_sealed()
    assert found is not None
    slot, sealed = found
    content = Content(slot)
    if content.torn:
        names = [leaf.name for leaf in content.layout.leaves]
        slot.set_torn(sealed.generation, [names.index(name) for name in content.torn])
        assert slot.free(slot.state())
    return content.torn


Maker = Callable[[], Target]
