"""A snapshot that is whole in memory and verified: what every tier gives and every filling takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flashckpt.errors import DamagedError
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.records import AttemptName
from flashckpt.state.tree import Saved


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's state at one step. `image` is a writable buffer of `layout.num_bytes` bytes at least;
    `digests` are in image order; `values` is what is not a tensor, decoded."""

    step: int
    attempt: AttemptName
    tier: str
    layout: Layout
    digests: Sequence[int]
    values: dict[str, Any]
    image: memoryview = field(repr=False)

    def section(self, name: str) -> dict[str, Any]:
        """One part of the values. Raises DamagedError where there is none."""
        section = self.values.get(name)
        if not isinstance(section, dict):
            raise DamagedError(
                f"The snapshot of step {self.step} has no {name!r} among its values. Nothing was loaded.",
                step=self.step,
            )
        return section

    def tensor(self, name: str) -> torch.Tensor:
        """A view of one leaf's bytes in the image, row-major, in its true dtype. Not to be kept: the
        image is overwritten by a later snapshot."""
        return leaf_view(self.image, self.layout, self._by_name[name])

    @cached_property
    def saved(self) -> Saved:
        """What the live state is compared with and filled from: the same object each time."""
        return Saved(leaves=self._by_name, value=self.section("state"), tensor=self.tensor)

    @cached_property
    def _by_name(self) -> dict[str, Leaf]:
        return {leaf.name: leaf for leaf in self.layout.leaves}


def leaf_view(image: memoryview, layout: Layout, leaf: Leaf) -> torch.Tensor:
    """One leaf's bytes in an image as a tensor of its true dtype and shape, row-major."""
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    if leaf.num_bytes == 0:
        return torch.empty(leaf.shape, dtype=dtype)
    start = layout.data_start + leaf.offset
    return torch.frombuffer(image, dtype=dtype, count=math.prod(leaf.shape), offset=start).view(leaf.shape)
