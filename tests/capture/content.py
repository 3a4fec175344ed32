"""Reading slots the way the keeper reads them, and a small walk of a state for tests of the capture alone."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.shared import Shared
from flashckpt.format.layout import Layout, Leaf
from flashckpt.memory.slot import Slot, SlotRing

# Images of constants that slots share, by nonce: what a keeper finds in their regions.
REGIONS: dict[int, bytes] = {}


def region_of(content: Content) -> Shared:
    """A region that holds the constants of a snapshot, whose slot holds them itself."""
    constants = content.layout.constants
    assert constants is not None
    assert not content.layout.shared
    nonce = 1000 + len(REGIONS)
    REGIONS[nonce] = content.image[content.layout.constants_start :]
    digests = content.digests[len(content.layout.shard.leaves) :]
    return Shared(f"constants-00000-{nonce:016x}", nonce, constants, digests)


def region_with(layout: Layout, content: Content) -> Shared:
    """A region for these leaves, that a snapshot and the region it names hold."""
    nonce = 1000 + len(REGIONS)
    image = layout.header + b"".join(content.leaves[leaf.name] for leaf in layout.leaves)
    digests = {leaf.name: digest for leaf, digest in zip(content.layout.leaves, content.digests, strict=True)}
    REGIONS[nonce] = image
    found = tuple(digests[leaf.name] for leaf in layout.leaves)
    return Shared(f"constants-00000-{nonce:016x}", nonce, layout, found)


class Content:
    """What a sealed slot holds, read the way the keeper reads it: leaves by name, audited."""

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
        own = len(self.layout.shard.leaves) if self.layout.shared else len(self.layout.leaves)
        placed = zip(self.layout.leaves, self.layout.starts(), metadata.digests, strict=True)
        for index, (leaf, start, digest) in enumerate(placed):
            holder = image if index < own else REGIONS.get(self.constants_nonce, b"")
            data = holder[start : start + leaf.num_bytes]
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


@dataclass
class Walk:
    leaves: list[Live]
    guards: list[tuple[Sized, int]]
    anchors: list[tuple[Any, Any, Any]]


class State:
    """Modules, optimizers and plain dictionaries of tensors, walked anew each time: dictionaries whose name
    is in `fresh` give copies each time, as a `state_dict` may."""

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
        """Every leaf without gradients; the plan's walk stays the current one."""
        current, walks = self.current, self.walks
        leaves = self.walk(lambda parameter, gradient: True).leaves
        self.current, self.walks = current, walks
        return leaves


def _module(
    walk: Walk, name: str, module: torch.nn.Module, used_up: Callable[[Tensor, Tensor], bool]
) -> None:
    for path, inner in module.named_modules():
        prefix = f"{name}.{path}." if path else f"{name}."
        for kind, holder in (("parameter", inner._parameters), ("buffer", inner._buffers)):
            walk.guards.append((holder, len(holder)))
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                walk.leaves.append(Live(prefix + key, tensor, kind, inner, holder, key))
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
    """The bytes of a tensor as an image holds them."""
    row_major = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    return bytes(row_major.view(-1).view(torch.uint8).numpy())


def exact(state: State) -> dict[str, bytes]:
    """Every leaf of the state as it is now, gradients left out."""
    return {live.name: bytes_of(live.tensor) for live in state.walk_now()}
