"""Reads slots as the keeper does, and provides a small walkable state for tests of the capture alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.hooks import Habit
from flashckpt.format.layout import PAGE, Box, Leaf
from flashckpt.memory.region import SlotHeader, SlotSize, round_up
from flashckpt.memory.slot import Slot, SlotRing
from tests.descriptors import closed_after

# nonce -> region of constants, as a keeper holds them.
REGIONS: dict[int, Slot] = {}


def make_region(size: SlotSize) -> Slot:
    """Create a region for constants, as a keeper does."""
    nonce = 1000 + len(REGIONS)
    capacities = round_up(size.metadata_bytes), round_up(size.image_bytes)
    descriptor = os.memfd_create(f"constants-{nonce}")
    os.ftruncate(descriptor, PAGE + sum(capacities))
    header = SlotHeader(
        index=0,
        rank=0,
        identity=bytes(16),
        nonce=nonce,
        metadata_capacity=capacities[0],
        image_capacity=capacities[1],
        holds_constants=True,
    )
    Slot.format(descriptor, header)
    REGIONS[nonce] = closed_after(Slot.open(descriptor, map_image=True))
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
        assert self.layout.left is None, "another rank's slot has a part of it"
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


@dataclass
class Live:
    name: str
    tensor: Tensor
    kind: str = "other"
    owner: Any = None
    container: Any = None
    key: Any = None
    aliases: list[str] = field(default_factory=list)
    tied: list[Tensor] = field(default_factory=list)
    box: Box | None = None
    replicas: tuple[int, ...] = ()
    wrapper: Tensor | None = None

    @property
    def held(self) -> Tensor:
        return self.tensor


@dataclass
class Walk:
    leaves: list[Live]
    guards: list[tuple[Sized, int]]
    anchors: list[tuple[Any, Any, Any]]


class State:
    """Modules, optimizers and plain dictionaries of tensors, walked again each time. Dictionaries whose name
    is in `fresh` return copies each time, as a `state_dict` may."""

    def __init__(self, **named: Any) -> None:
        self.named = named
        self.walks = 0
        self.current: Walk | None = None

    @property
    def optimizers(self) -> list[Any]:
        return [each for each in self.named.values() if isinstance(each, torch.optim.Optimizer)]

    def walk(self, used_up: Callable[[Tensor, Tensor], bool]) -> Walk:
        self.walks += 1
        walk = self.current = Walk([], [], [])
        for name, each in self.named.items():
            if isinstance(each, torch.nn.Module):
                _module(walk, name, each, used_up)
            elif isinstance(each, torch.optim.Optimizer):
                _optimizer(walk, name, each)
            else:
                walk.guards.append((each, len(each)))
                for key, tensor in each.items():
                    walk.leaves.append(Live(f"{name}.{key}", tensor, container=each, key=key))
        return walk

    def walk_now(self) -> list[Live]:
        """Walk every leaf without gradients; `current` stays the plan's walk."""
        current, walks = self.current, self.walks
        leaves = self.walk(lambda parameter, gradient: True).leaves
        self.current, self.walks = current, walks
        return leaves


def _module(
    walk: Walk, name: str, module: torch.nn.Module, used_up: Callable[[Tensor, Tensor], bool]
) -> None:
    for path, inner in module.named_modules():
        prefix = f"{name}.{path}." if path else f"{name}."
        for kind, owner in (("parameter", inner._parameters), ("buffer", inner._buffers)):
            walk.guards.append((owner, len(owner)))
            for key, tensor in owner.items():
                if tensor is None:
                    continue
                walk.leaves.append(Live(prefix + key, tensor, kind, inner, owner, key))
                if kind == "parameter" and tensor.grad is not None and not used_up(tensor, tensor.grad):
                    walk.leaves.append(
                        Live(prefix + key + ".grad", tensor.grad, "gradient", inner, tensor, "grad")
                    )


def _optimizer(walk: Walk, name: str, optimizer: torch.optim.Optimizer) -> None:
    walk.guards.append((optimizer.state, len(optimizer.state)))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter)
        if state is None:
            continue
        walk.guards.append((state, len(state)))
        for key, value in state.items():
            if isinstance(value, Tensor):
                walk.leaves.append(Live(f"{name}.{place}.{key}", value, "optimizer", optimizer, state, key))


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor as an image holds them."""
    row_major = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    return bytes(row_major.view(-1).view(torch.uint8).numpy())


def exact(state: State) -> dict[str, bytes]:
    """Return every current leaf of the state, without gradients."""
    return {live.name: bytes_of(live.tensor) for live in state.walk_now()}
