"""Constants that several slots share: which leaves a region holds, and with which digests.

Owns the words between a capture, which only compares digests, and whoever keeps the region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flashckpt.format.layout import Layout


@dataclass(frozen=True, slots=True)
class Shared:
    """A sealed region: its name and nonce, the leaves in it, and their digests in the same order."""

    name: str
    nonce: int
    layout: Layout = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)

    def by_name(self) -> dict[str, int]:
        return {leaf.name: digest for leaf, digest in zip(self.layout.leaves, self.digests, strict=True)}


class ConstantsChanged(Exception):
    """Leaves (by index in the plan) that a region holds are not what they were: nothing may name it for
    them, and what stands in it is not overwritten, since older snapshots do."""

    def __init__(self, indexes: Sequence[int]) -> None:
        super().__init__(f"{len(indexes)} constants have changed")
        self.indexes = tuple(indexes)
