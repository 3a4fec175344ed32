"""The arena: where leaves are cloned on their device, and how it is digested and emptied.

Owns one buffer's geometry. Large leaves each start on a row of 4,096 bytes, so that one pass of row sums
digests all of them; small ones are packed word by word in the order of the image, so that many leave in
one copy. Leaves that are not row-major, or whose bytes are no whole words, are made so here; padding is
zero and stays zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashckpt.capture.digests import ROW_BYTES, LeafDigests, PackedDigests, RowDigests, block_rows
from flashckpt.capture.plan import Plan
from flashckpt.capture.ways import SMALL_BYTES

Allocate = Callable[[int], Tensor]


def words_of(tensor: Tensor) -> Tensor | None:
    """The tensor's bytes as int32 words, one-dimensional and without a copy; None where they are none."""
    num_bytes = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    if num_bytes % 4 or start % 4 or tensor.data_ptr() % 4 or not tensor.is_contiguous():
        return None
    return tensor.detach().view(-1).view(torch.int32)


def arena_bytes(sizes: Sequence[int]) -> int:
    """What an arena for leaves of these sizes takes on the device, with what its digests need."""
    large = sum(-(-size // ROW_BYTES) for size in sizes if size >= SMALL_BYTES)
    small = sum(_packed(size) for size in sizes if size < SMALL_BYTES)
    scratch = 8 * (ROW_BYTES // 4) * block_rows(large) + 4 * 8 * large if large else 0
    return large * ROW_BYTES + small + scratch + min(small, SMALL_BYTES * 5) * 8


class Arena:
    """A place for each of the leaves `indexes` of a plan."""

    def __init__(self, plan: Plan, indexes: Sequence[int], allocate: Allocate) -> None:
        sizes = {i: int(plan.sizes[i]) for i in indexes}
        self.large = [i for i in indexes if sizes[i] >= SMALL_BYTES]
        self.small = [i for i in indexes if sizes[i] < SMALL_BYTES]
        self.indexes = self.large + self.small
        self._plan = plan
        self._offsets: dict[int, int] = {}
        end = self._place(sizes)
        self.buffer = allocate(end)
        self.buffer.zero_()
        self._words = self.buffer.view(torch.int32)
        self._digests(sizes, allocate)
        self._targets = {i: self._target(i, sizes[i]) for i in self.indexes}
        self._pair()

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel()

    def moved(self) -> None:
        """The plan's tensors are others: read them from here on."""
        self._pair()

    def clone(self) -> None:
        """Copy every leaf here: one fused operation for all that are whole words."""
        if self._word_sources:
            torch._foreach_copy_(self._word_targets, self._word_sources)
        for target, source in self._odd_pairs:
            target.copy_(source)

    def digest(self, out: Tensor) -> None:
        """One digest a leaf, in the order of `indexes`."""
        if self._rows is not None:
            self._rows.into(self._words, out[: len(self.large)])
        if self._packed is not None:
            self._packed.into(self._words[self._packed_start // 4 :], out[len(self.large) :])

    def digest_sources(self, out: Tensor, digests: LeafDigests) -> None:
        """The same of the live leaves, where they lie; those made row-major here are not looked at."""
        for place, words in self._checked:
            digests.into(words, out[place])

    def checkable(self) -> list[bool]:
        """Which of `indexes` `digest_sources` takes."""
        taken = {place for place, _ in self._checked}
        return [place in taken for place in range(len(self.indexes))]

    def runs(self) -> list[tuple[int, int, int]]:
        """(address here, offset in the image, bytes) of copies to the host, joined where both go on."""
        joined: list[tuple[int, int, int]] = []
        base = self.buffer.data_ptr()
        for index in sorted(self.indexes):
            here, there = base + self._offsets[index], int(self._plan.offsets[index])
            size = int(self._plan.sizes[index])
            if joined:
                address, offset, length = joined[-1]
                if address + length == here and offset + length == there:
                    joined[-1] = (address, offset, length + size)
                    continue
            joined.append((here, there, size))
        return joined

    def _place(self, sizes: dict[int, int]) -> int:
        end = 0
        for index in self.large:
            self._offsets[index] = end
            end += -(-sizes[index] // ROW_BYTES) * ROW_BYTES
        self._packed_start = end
        for index in self.small:
            # A leaf of wide elements after odd bytes: its view needs its own alignment.
            item = self._plan.tensors[index].element_size()
            end = -(-end // item) * item if item > 4 else end
            self._offsets[index] = end
            end += -(-sizes[index] // 4) * 4
        return -(-end // ROW_BYTES) * ROW_BYTES

    def _digests(self, sizes: dict[int, int], allocate: Allocate) -> None:
        rows = [self._offsets[i] // ROW_BYTES for i in self.large]
        self._rows = RowDigests(allocate, rows, [sizes[i] for i in self.large]) if self.large else None
        starts = [(self._offsets[i] - self._packed_start) // 4 for i in self.small]
        self._packed = PackedDigests(allocate, starts, [sizes[i] for i in self.small]) if self.small else None

    def _target(self, index: int, size: int) -> Tensor:
        start = self._offsets[index]
        return self.buffer[start : start + size]

    def _pair(self) -> None:
        self._word_targets: list[Tensor] = []
        self._word_sources: list[Tensor] = []
        self._odd_pairs: list[tuple[Tensor, Tensor]] = []
        self._checked: list[tuple[int, Tensor]] = []
        for place, index in enumerate(self.indexes):
            tensor, target = self._plan.tensors[index], self._targets[index]
            words = None if index in self._plan.odd else words_of(tensor)
            if words is not None:
                self._word_sources.append(words)
                self._word_targets.append(target.view(torch.int32))
                self._checked.append((place, words))
            else:
                shaped = target.view(tensor.dtype).view(tensor.shape)
                self._odd_pairs.append((shaped, tensor.detach()))


def _packed(size: int) -> int:
    return -(-size // 16) * 16
