"""Digests of leaves on a device, with torch's own operations, equal to the native ones bit for bit.

A leaf's digest is num_bytes * MULTIPLIER + sum of (2j + 1) * s_j, modulo 2**64, over its bytes as signed
32-bit words s_j, the tail padded with zeros. int64 arithmetic wraps, so every sum here is exact modulo
2**64 whatever its order. Owns its scratch; casts at most one block of words to int64 at a time, since
torch's sum of int32 as int64 would make a copy of twice the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

MULTIPLIER = 0x9E3779B97F4A7C15
ROW_WORDS = 1024
ROW_BYTES = 4 * ROW_WORDS
PACKED_BLOCK_WORDS = 1 << 20
_LEAST_BLOCK_ROWS = 4096
_MOST_BLOCKS = 48

Allocate = Callable[[int], Tensor]
"""Bytes wanted -> a uint8 tensor of that many bytes, aligned to 16, on the device."""


def signed(number: int) -> int:
    """The int64 that has these 64 bits."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def size_term(num_bytes: int) -> int:
    return signed(num_bytes * MULTIPLIER)


def block_rows(total_rows: int) -> int:
    """Rows cast at once: few kernels for many bytes, scratch of a small part of what is digested."""
    return min(total_rows, max(_LEAST_BLOCK_ROWS, -(-total_rows // _MOST_BLOCKS)))


class LeafDigests:
    """Digests of leaves one at a time, where they lie: for ways that make no copy on the device."""

    def __init__(self, allocate: Allocate, largest_bytes: int) -> None:
        rows = max(1, min(_LEAST_BLOCK_ROWS, -(-largest_bytes // ROW_BYTES)))
        self._block = allocate(8 * rows * ROW_WORDS).view(torch.int64).view(rows, ROW_WORDS)
        device = self._block.device
        self._odd = torch.arange(1, 2 * ROW_WORDS, 2, dtype=torch.int64, device=device)
        self._rows = torch.arange(0, 2 * ROW_WORDS * rows, 2 * ROW_WORDS, dtype=torch.int64, device=device)

    def into(self, words: Tensor, out: Tensor) -> None:
        """The digest of a leaf given as int32 words, one-dimensional, into a 0-d int64 tensor."""
        out.fill_(size_term(4 * words.numel()))
        whole = words.numel() // ROW_WORDS
        step = self._block.shape[0]
        for first in range(0, whole, step):
            count = min(step, whole - first)
            block = self._block[:count]
            block.copy_(words[first * ROW_WORDS : (first + count) * ROW_WORDS].view(count, ROW_WORDS))
            rows = (self._rows[:count] + 2 * ROW_WORDS * first).mul_(block.sum(1))
            out.add_(rows.sum()).add_((self._odd * block.sum(0)).sum())
        tail = words[whole * ROW_WORDS :]
        if tail.numel():
            block = self._block[0, : tail.numel()]
            block.copy_(tail)
            out.add_((self._odd[: tail.numel()] + 2 * ROW_WORDS * whole).mul_(block).sum())


def digest_leaves(leaves: Sequence[Tensor], out: Tensor) -> None:
    """The digest of each leaf, given as its bytes (uint8, one-dimensional, at any address), into int64
    `out`."""

    def allocate(num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=out.device)

    kernels = LeafDigests(allocate, max((leaf.numel() for leaf in leaves), default=0))
    for place, leaf in enumerate(leaves):
        size = leaf.numel()
        words = -(-size // 4)
        if size % 4 or leaf.data_ptr() % 4:
            padded = torch.zeros(4 * words, dtype=torch.uint8, device=out.device)
            padded[:size].copy_(leaf)
            leaf = padded
        kernels.into(leaf.view(torch.int32), out[place])
        out[place].add_(signed(size_term(size) - size_term(4 * words)))


class RowDigests:
    """Digests of many leaves that each start on a row of one buffer: four kernels a block, whatever
    the number of leaves. Rows are summed on their own and the sums of each leaf's rows taken by a
    running sum, so that blocks need not end where leaves end."""

    def __init__(self, allocate: Allocate, first_rows: Sequence[int], sizes: Sequence[int]) -> None:
        counts = np.array([-(-size // ROW_BYTES) for size in sizes], dtype=np.int64)
        firsts = np.array(first_rows, dtype=np.int64)
        total = int(firsts[-1] + counts[-1])
        self._step = block_rows(total)
        self._block = allocate(8 * self._step * ROW_WORDS).view(torch.int64).view(self._step, ROW_WORDS)
        device = self._block.device
        factor = 2 * ROW_WORDS * (np.arange(total, dtype=np.int64) - np.repeat(firsts, counts))
        self._factor = torch.from_numpy(factor).to(device)
        self._starts = torch.from_numpy(firsts).to(device)
        self._ends = torch.from_numpy(firsts + counts).to(device)
        self._size_terms = torch.tensor([size_term(size) for size in sizes], dtype=torch.int64, device=device)
        self._odd = torch.arange(1, 2 * ROW_WORDS, 2, dtype=torch.int64, device=device)
        self._plain = torch.empty(total, dtype=torch.int64, device=device)
        self._weighted = torch.empty(total, dtype=torch.int64, device=device)
        self._running = torch.zeros(total + 1, dtype=torch.int64, device=device)

    def into(self, words: Tensor, out: Tensor) -> None:
        """words: the buffer as int32. out: int64, one digest a leaf."""
        total = self._plain.shape[0]
        rows = words[: total * ROW_WORDS].view(total, ROW_WORDS)
        for first in range(0, total, self._step):
            end = min(first + self._step, total)
            block = self._block[: end - first]
            block.copy_(rows[first:end])
            torch.sum(block, 1, out=self._plain[first:end])
            block.mul_(self._odd)
            torch.sum(block, 1, out=self._weighted[first:end])
        self._weighted.addcmul_(self._plain, self._factor)
        torch.cumsum(self._weighted, 0, out=self._running[1:])
        torch.sub(self._running[self._ends], self._running[self._starts], out=out)
        out.add_(self._size_terms)


class PackedDigests:
    """Digests of many small leaves packed word by word: a dozen kernels a block of many leaves.

    With running sums P of s_i and Q of (2i + 1) * s_i, i counted from the block's start, a leaf of words
    [a, b) has Q(b) - Q(a) - 2a * (P(b) - P(a)).
    """

    def __init__(self, allocate: Allocate, starts: Sequence[int], sizes: Sequence[int]) -> None:
        words = [-(-size // 4) for size in sizes]
        ends = [start + count for start, count in zip(starts, words, strict=True)]
        self._blocks = _blocks(starts, ends)
        longest = max(ends[last - 1] - starts[first] for first, last in self._blocks)
        self._buffer = allocate(8 * longest).view(torch.int64)
        self._plain = allocate(8 * (longest + 1)).view(torch.int64).zero_()
        self._weighted = allocate(8 * (longest + 1)).view(torch.int64).zero_()
        device = self._buffer.device
        self._odd = torch.arange(1, 2 * longest, 2, dtype=torch.int64, device=device)
        base = np.zeros(len(words), dtype=np.int64)
        for first, last in self._blocks:
            base[first:last] = starts[first]
        relative = np.array(starts, dtype=np.int64) - base
        self._ranges = [(starts[first], ends[last - 1]) for first, last in self._blocks]
        self._starts = torch.from_numpy(relative).to(device)
        self._ends = torch.from_numpy(np.array(ends, dtype=np.int64) - base).to(device)
        self._size_terms = torch.tensor([size_term(size) for size in sizes], dtype=torch.int64, device=device)

    def into(self, words: Tensor, out: Tensor) -> None:
        """words: the buffer as int32. out: int64, one digest a leaf."""
        for (first, last), (start, end) in zip(self._blocks, self._ranges, strict=True):
            count = end - start
            block = self._buffer[:count]
            block.copy_(words[start:end])
            torch.cumsum(block, 0, out=self._plain[1 : count + 1])
            block.mul_(self._odd[:count])
            torch.cumsum(block, 0, out=self._weighted[1 : count + 1])
            begins, ends = self._starts[first:last], self._ends[first:last]
            torch.sub(self._weighted[ends], self._weighted[begins], out=out[first:last])
            shift = (self._plain[ends] - self._plain[begins]).mul_(begins)
            out[first:last].sub_(shift, alpha=2)
        out.add_(self._size_terms)


def _blocks(starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of leaves that are digested together: whole leaves, not much above a block of words."""
    blocks, first = [], 0
    for index in range(1, len(starts) + 1):
        if index == len(starts) or ends[index] - starts[first] > PACKED_BLOCK_WORDS:
            blocks.append((first, index))
            first = index
    return blocks
