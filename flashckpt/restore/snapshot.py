"""The state of one rank at a boundary, as a start restores it: what each tier returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flashckpt.errors import DamagedError
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.names import AttemptName
from flashckpt.state.leaves import Saved


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of one rank: of `boundary` of `attempt`, at `step`.

    leaves: by name. digests: of each leaf. values: everything that is not a tensor, decoded.
    tensors: a row-major CPU tensor for each leaf, with verified bytes. A snapshot in storage has them and the
        digests once `StepReading.read` has returned. own: the names of those that a restore may keep; it
        copies the others.
    constants: the names of the leaves that were constants at the capture. region: the leaves of the region
        that holds them in memory, and their digests.
    untaken: leaves of a step of another layout that have no place on this rank; elsewhere: those of them that
        belong to modules, so that another rank must have a place for them.
    """

    step: int
    attempt: AttemptName
    boundary: int
    tier: str
    leaves: Mapping[str, Leaf]
    values: dict[str, Any] = field(repr=False)
    digests: dict[str, int] = field(default_factory=dict, repr=False)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    own: set[str] = field(default_factory=set, repr=False)
    constants: frozenset[str] = field(default=frozenset(), repr=False)
    region: tuple[Layout, tuple[int, ...]] | None = field(default=None, repr=False)
    untaken: tuple[str, ...] = field(default=(), repr=False)
    elsewhere: tuple[str, ...] = field(default=(), repr=False)

    def discard(self) -> None:
        """Release its tensors, even if references to this object remain."""
        self.tensors.clear()

    @property
    def world(self) -> int:
        """The number of ranks that made it."""
        environment = self.values.get("environment")
        found = environment.get("world", 1) if isinstance(environment, dict) else 1
        return found if type(found) is int else 1

    @property
    def names(self) -> frozenset[str]:
        """Every name of every leaf."""
        return frozenset(name for leaf in self.leaves.values() for name in (leaf.name, *leaf.aliases))

    def section(self, name: str) -> dict[str, Any]:
        """Return one section of the values. Raises DamagedError if it is missing."""
        section = self.values.get(name)
        if not isinstance(section, dict):
            raise DamagedError(
                f"The snapshot of step {self.step} has no {name!r} among its values. Nothing was loaded.",
                step=self.step,
            )
        return section

    @cached_property
    def saved(self) -> Saved:
        """The state to compare the live state with and to restore it from; the same object each time."""
        # Not `self`: a cycle with this object would keep its memory until garbage collection.
        tensors = self.tensors
        return Saved(
            leaves=self.leaves, value=self.section("state"), tensor=tensors.__getitem__, own=self.own
        )


def leaf_view(image: memoryview, leaf: Leaf, start: int) -> torch.Tensor:
    """Return the leaf whose bytes begin at `start` as a tensor of its true dtype and shape, row-major."""
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    if leaf.num_bytes == 0:
        return torch.empty(leaf.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(image, dtype=dtype, count=math.prod(leaf.shape), offset=start).view(leaf.shape)
