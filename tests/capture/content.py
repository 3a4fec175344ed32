"""Reads slots as the keeper does, and provides a small state for tests of the capture alone."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.hooks import Habit
from flashckpt.format.layout import Leaf
from flashckpt.memory.region import SlotSize, round_up
from flashckpt.memory.slot import Slot, SlotRing
from flashckpt.state.tree import LiveLeaf, Tree, Walk
from tests.descriptors import closed_after
from tests.memory.test_slot import make
from tests.state.image import all_used_up

# nonce -> region of constants, as a keeper holds them.
REGIONS: dict[int, Slot] = {}


def make_slot(index: int, metadata_bytes: int, image_bytes: int, *, nonce: int = 7, **more: Any) -> Slot:
    sizes = {"metadata_capacity": metadata_bytes, "image_capacity": image_bytes}
    return make(index, identity=bytes(16), nonce=nonce, **sizes, **more)


def make_region(size: SlotSize) -> Slot:
    """Create a region for constants, as a keeper does."""
    nonce = 1000 + len(REGIONS)
    capacities = round_up(size.metadata_bytes), round_up(size.image_bytes)
    REGIONS[nonce] = closed_after(make_slot(0, *capacities, nonce=nonce, holds_constants=True))
    return REGIONS[nonce]


def give_region(capture: Capture) -> Slot:
    """Provide the region that a capture wants, as a trainer does before its first capture."""
    assert capture.memory_needed(ordered=True) is not None
    size = capture.region_wanted()
    assert size is not None
    region = make_region(size)
    capture.fill_region(Slot.open(os.dup(region.descriptor), map_image=True), 1)
    assert capture.region_wanted() is None
    return region


def resumed_dropping(capture: Capture) -> None:
    """Put the hooks in the state after a resume of a loop that calls `zero_grad(set_to_none=True)`."""
    capture.hooks.resume(dict.fromkeys(capture.hooks.habits, Habit.DROPPED))


class Content:
    """The content of a sealed slot, read as the keeper reads it: leaves by name, audited."""

    def __init__(self, slot: Slot) -> None:
        sealed = slot.sealed()
        assert sealed is not None, "nothing is sealed in the slot"
        metadata = slot.metadata(sealed)
        self.step, self.values = sealed.step, metadata.values
        image = bytes(slot.image_view[: metadata.image.num_bytes])
        self.image, self.layout, self.digests = image, metadata.image, tuple(metadata.digests)
        self.leaves: dict[str, bytes] = {}
        self.torn: list[str] = []
        self.constants_nonce = sealed.record.constants_nonce
        assert not self.layout.left.leaves, "another rank's slot has a part of it"
        own, outdated = self.layout.first_constant, self.layout.outdated
        region = REGIONS[self.constants_nonce] if self.constants_nonce else slot
        assert not (self.constants_nonce and region.not_held(metadata)), "no region was sealed with these"
        placed = zip(self.layout.leaves, self.layout.starts(), metadata.digests, strict=True)
        for index, (leaf, start, digest) in enumerate(placed):
            data = bytes((slot if index < own else region).image_view[start : start + leaf.num_bytes])
            if index not in outdated:
                self.leaves[leaf.name] = data
            buffer = np.frombuffer(data, dtype=np.uint8).copy()
            if _native.digest(_native.address_of(buffer), len(data)) != digest:
                self.torn.append(leaf.name)

    @property
    def constants(self) -> list[str]:
        """The names of the leaves in the region."""
        own, outdated = self.layout.first_constant, self.layout.outdated
        rows = enumerate(self.layout.leaves)
        return [leaf.name for index, leaf in rows if index >= own and index not in outdated]

    def leaf(self, name: str) -> Leaf:
        return next(leaf for leaf in self.layout.leaves if leaf.name == name)


def newest(ring: SlotRing) -> Content:
    found = ring.newest_sealed()
    assert found is not None, "no slot is sealed"
    return Content(found[0])


class State(Tree):
    """The named objects, and a dictionary `more` of tensors that come later. Counts its walks."""

    def __init__(self, more: dict[str, Tensor] | None = None, **named: Any) -> None:
        self.more = {} if more is None else more
        self.walks = 0
        super().__init__({**named, "more": self.more})
        self.walks = 0

    def walk(self, used_up: Callable[[Any, Tensor], bool]) -> Walk:
        self.walks += 1
        return super().walk(used_up)

    def walk_now(self) -> list[LiveLeaf]:
        """Walk every leaf without gradients; `current` stays the plan's walk."""
        current, walks = self.current, self.walks
        leaves = self.walk(all_used_up).leaves
        self.current, self.walks = current, walks
        return leaves


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor as an image holds them."""
    row_major = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    return bytes(row_major.view(-1).view(torch.uint8).numpy())


def exact(state: State) -> dict[str, bytes]:
    """Return every current leaf of the state, without gradients."""
    return {live.name: bytes_of(live.tensor) for live in state.walk_now()}
