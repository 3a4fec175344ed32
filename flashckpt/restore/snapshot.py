"""A snapshot that is whole in memory and verified: what every tier gives and every filling takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flashckpt.errors import DamagedError
from flashckpt.format.layout import Leaf, SlotImage
from flashckpt.format.names import AttemptName
from flashckpt.format.typed import decode
from flashckpt.restore.step_image import StepImage, image_of
from flashckpt.state.tree import Saved


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's state at one step, which is a `boundary` of `attempt`. `image` is a writable buffer that
    holds what `layout` says, but for constants, which are in `constants_image`, and for what was left to
    other ranks of the node: of each such leaf `left` has the buffer that holds it, and at which byte.
    `digests` are those of `layout.leaves`; `values` is what is not a tensor, decoded; `at_rest` is where the
    images are of one that was read from disk; `untaken` names what a step of another layout has besides,
    `elsewhere` what of that is of modules: another rank must have a place for it."""

    step: int
    attempt: AttemptName
    boundary: int
    tier: str
    layout: SlotImage
    digests: Sequence[int]
    values: dict[str, Any]
    image: memoryview = field(repr=False)
    constants_image: memoryview | None = field(default=None, repr=False)
    left: Sequence[tuple[memoryview, int]] = field(default=(), repr=False)
    at_rest: StepImage | None = field(default=None, repr=False)
    untaken: tuple[str, ...] = field(default=(), repr=False)
    elsewhere: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, found: StepImage) -> Snapshot:
        """The snapshot that was read from disk. Raises DamagedError where its values are not whole."""
        record, [image, *constants] = found.record, found.images
        layout, digests = image_of(record, found.rank)
        return cls(
            step=record.step,
            attempt=record.attempt,
            boundary=record.boundary,
            tier="local",
            layout=layout,
            digests=digests,
            values=decode(dict(record.rank(found.rank).values)),
            image=image,
            constants_image=constants[0] if constants else None,
            at_rest=found,
        )

    def discard(self) -> None:
        """Nobody takes this one: what was read for it goes at once, whoever still has this object."""
        if self.at_rest is not None:
            self.at_rest.discard()

    @property
    def world(self) -> int:
        """How many ranks made it."""
        environment = self.values.get("environment")
        found = environment.get("world", 1) if isinstance(environment, dict) else 1
        return found if type(found) is int else 1

    @property
    def names(self) -> frozenset[str]:
        """Of all its leaves, every name."""
        return frozenset(name for leaf in self.layout.leaves for name in (leaf.name, *leaf.aliases))

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
        return leaf_view(*self._places[name])

    @cached_property
    def digests_by_name(self) -> dict[str, int]:
        """Of all leaves of the state."""
        gone = self.layout.outdated
        rows = enumerate(zip(self.layout.leaves, self.digests, strict=True))
        return {leaf.name: digest for index, (leaf, digest) in rows if index not in gone}

    @property
    def constants(self) -> frozenset[str]:
        """Names of the leaves that were constants when it was captured."""
        first, gone = self.layout.first_constant, self.layout.outdated
        rows = enumerate(self.layout.leaves)
        return frozenset(leaf.name for i, leaf in rows if i >= first and i not in gone)

    @cached_property
    def saved(self) -> Saved:
        """What the live state is compared with and filled from: the same object each time."""
        places = self._places
        leaves = {name: leaf for name, (_, leaf, _) in places.items()}

        def tensor(name: str) -> torch.Tensor:
            # Not `self.tensor`: in a cycle with this object, a whole image would wait for the collector.
            return leaf_view(*places[name])

        return Saved(leaves=leaves, value=self.section("state"), tensor=tensor)

    def places(self) -> list[tuple[memoryview, Leaf, int]]:
        """Where each of `layout.leaves` begins: in which buffer, and at which byte of it."""
        layout, found = self.layout, []
        for index, (leaf, start) in enumerate(zip(layout.leaves, layout.starts(), strict=True)):
            image: memoryview | None = self.image
            if index >= layout.first_constant:
                image = self.constants_image
            elif index >= layout.first_left:
                image, start = self.left[index - layout.first_left]
            assert image is not None
            found.append((image, leaf, start))
        return found

    @cached_property
    def _places(self) -> dict[str, tuple[memoryview, Leaf, int]]:
        gone = self.layout.outdated
        return {row[1].name: row for index, row in enumerate(self.places()) if index not in gone}


def leaf_view(image: memoryview, leaf: Leaf, start: int) -> torch.Tensor:
    """The leaf whose bytes begin at `start`, as a tensor of its true dtype and shape, row-major."""
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    if leaf.num_bytes == 0:
        return torch.empty(leaf.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(image, dtype=dtype, count=math.prod(leaf.shape), offset=start).view(leaf.shape)
