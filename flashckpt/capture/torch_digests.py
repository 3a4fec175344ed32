"""Digests of leaves on a device with torch's own operations, equal to the native ones bit for bit.

For devices that have no kernel of ours. Slow beside one: some forty operations read what they work on a dozen
times, in batches of at most `WORKSPACE_BYTES`, whatever the sizes of the leaves. docs/format.md ("Digest")
has the definition; int64 arithmetic wraps, so it is exact modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashckpt import _native

WORKSPACE_BYTES = 64 << 20
_BLOCK = _native.BLOCK_BYTES
# Words, their products and what products are made of; the rest is small beside them.
_BYTES_OF_A_BLOCK = 3 * _BLOCK
_LANES, _STRIPES = 8, 16
_FACTOR = 0x9E3779B97F4A7C15
_HALF = (1 << 32) - 1
_EMPTY = -1  # the empty mark, as int64

Allocate = Callable[[int], Tensor]
"""Bytes wanted -> a uint8 tensor of that many bytes, aligned to 16, on the device."""


def signed(number: int) -> int:
    """The int64 that has these 64 bits."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 and one-dimensional, without a copy."""
    # Strides of dimensions of one element may be anything; `view` would object to the last one.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def workspace_bytes(sizes: Sequence[int], most: int = WORKSPACE_BYTES) -> int:
    """What a `Workspace` for leaves of these sizes takes, in bytes."""
    return min(max(most // _BYTES_OF_A_BLOCK, 1), max(sum(map(_blocks, sizes)), 1)) * _BYTES_OF_A_BLOCK


class Workspace:
    """Memory and keys on one device, for any number of `TorchDigests` that run on one stream."""

    def __init__(self, allocate: Allocate, num_bytes: int = WORKSPACE_BYTES) -> None:
        """num_bytes: see `workspace_bytes`."""
        self.num_blocks = num_bytes // _BYTES_OF_A_BLOCK
        memory = allocate(self.num_blocks * _BYTES_OF_A_BLOCK)
        self.bytes, self.products, self.halves = memory.view(3, self.num_blocks, _BLOCK).unbind()
        self.device = memory.device
        self.keys = [self._keys(first, 128).view(_STRIPES, _LANES) for first in (0, 128)]
        self.starts = [self._keys(first, _LANES) for first in (256, 264)]
        self.folds = [self._keys(first, _LANES) for first in (272, 280)]
        self.numbers = torch.arange(1, self.num_blocks + 1, dtype=torch.int64, device=self.device)

    def _keys(self, first: int, count: int) -> Tensor:
        keys = [signed(_finalized((n + 1) * _FACTOR)) for n in range(first, first + count)]
        return torch.tensor(keys, dtype=torch.int64, device=self.device)

    def folds_of(self, count: int) -> Tensor:
        """int64[count]: for each of the first `count` blocks of `bytes` the sum of its folds."""
        words = self.bytes[:count].view(torch.int64).view(count, _STRIPES, _LANES)
        plain = words.sum(1).view(count, _LANES // 2, 2).flip(2).view(count, _LANES)
        first = self._products(words, self.keys[0]).add_(self.starts[0]).add_(plain)
        second = self._products(words, self.keys[1]).add_(self.starts[1])
        return _folded(first, self.folds[0]).add_(_folded(second, self.folds[1]))

    def _products(self, words: Tensor, keys: Tensor) -> Tensor:
        """int64[blocks, lanes]: over the stripes of each block the sum of low by high half of word ^ key."""
        low, high = (
            each[: len(words)].view(torch.int64).view(words.shape) for each in (self.products, self.halves)
        )
        torch.bitwise_xor(words, keys, out=low)
        torch.bitwise_right_shift(low, 32, out=high)
        low.bitwise_and_(_HALF)
        return low.mul_(high.bitwise_and_(_HALF)).sum(1)


@dataclass(frozen=True)
class _Piece:
    leaf: int
    first_block: int
    num_blocks: int
    num_bytes: int
    row: int  # in the workspace


class _Batch:
    """Pieces of leaves that fill a workspace together."""

    def __init__(self, workspace: Workspace, pieces: Sequence[_Piece]) -> None:
        self._workspace, self._pieces = workspace, pieces
        self._count = sum(piece.num_blocks for piece in pieces)
        flat = workspace.bytes.view(-1)
        self._places = [flat[p.row * _BLOCK : p.row * _BLOCK + p.num_bytes] for p in pieces]
        self._is_padded = any(piece.num_bytes % _BLOCK for piece in pieces)

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=workspace.device)

        self._leaves = column([piece.leaf for piece in pieces])
        self._counts = column([piece.num_blocks for piece in pieces])
        self._shifts = column([piece.first_block - piece.row for piece in pieces])

    def add_to(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Add the hashes of each leaf's blocks to its place in `out`."""
        space = self._workspace
        if self._is_padded:
            space.bytes[: self._count].zero_()
        torch._foreach_copy_(self._places, [self._source(piece, sources) for piece in self._pieces])
        # With its size said, nothing waits for the device.
        piece = torch.repeat_interleave(self._counts, output_size=self._count)
        hashes = space.numbers[: self._count] + self._shifts[piece]
        hashes = _finalize(hashes.mul_(signed(_FACTOR)).add_(space.folds_of(self._count)))
        out.index_add_(0, self._leaves[piece], hashes)

    @staticmethod
    def _source(piece: _Piece, sources: Sequence[Tensor]) -> Tensor:
        start = piece.first_block * _BLOCK
        return sources[piece.leaf][start : start + piece.num_bytes]


class TorchDigests:
    """Digests of leaves whose sizes are known beforehand; small ones are taken together."""

    def __init__(self, workspace: Workspace, sizes: Sequence[int]) -> None:
        """sizes: bytes of each leaf."""
        size_terms = [signed(size * _FACTOR) for size in sizes]
        self._size_terms = torch.tensor(size_terms, dtype=torch.int64, device=workspace.device)
        batches = _batches(sizes, workspace.num_blocks)
        self._batches = [_Batch(workspace, pieces) for pieces in batches]

    def into(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Enqueue one digest a leaf, on the current stream.

        sources: of each leaf its bytes (`bytes_of`), at any alignment. out: int64[leaves], which gets the
        bits of the unsigned digests.
        """
        out.copy_(self._size_terms)
        for batch in self._batches:
            batch.add_to(sources, out)
        out.masked_fill_(out == _EMPTY, _EMPTY - 1)


def torch_digests(leaves: Sequence[Tensor]) -> TorchDigests:
    """Digests of leaves on one device, given as their bytes, with a workspace of their own there."""
    sizes = [leaf.numel() for leaf in leaves]
    device = leaves[0].device if leaves else torch.device("cpu")

    def allocate(num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return TorchDigests(Workspace(allocate, workspace_bytes(sizes)), sizes)


def _batches(sizes: Sequence[int], most: int) -> list[list[_Piece]]:
    batches: list[list[_Piece]] = [[]]
    row = 0
    for leaf, size in enumerate(sizes):
        done = 0
        while done < _blocks(size):
            if row == most:
                batches.append([])
                row = 0
            count = min(_blocks(size) - done, most - row)
            num_bytes = min(count * _BLOCK, size - done * _BLOCK)
            batches[-1].append(_Piece(leaf, done, count, num_bytes, row))
            row, done = row + count, done + count
    return [batch for batch in batches if batch]


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK)


def _finalized(z: int) -> int:
    """SplitMix64's finalizer, of a plain integer."""
    mask = (1 << 64) - 1
    z &= mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def _finalize(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)).mul_(signed(0xBF58476D1CE4E5B9))
    z = (z ^ _shifted(z, 27)).mul_(signed(0x94D049BB133111EB))
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits of the unsigned number."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _folded(accumulators: Tensor, keys: Tensor) -> Tensor:
    """int64[blocks]: over the pairs of lanes the sum of low ^ high half of the 128-bit product."""
    a, b = (accumulators ^ keys).view(-1, _LANES // 2, 2).unbind(2)
    low_a, high_a, low_b, high_b = a & _HALF, _shifted(a, 32), b & _HALF, _shifted(b, 32)
    crossed = high_a * low_b
    middle = _shifted(low_a * low_b, 32) + (crossed & _HALF) + low_a * high_b
    high = high_a * high_b + _shifted(crossed, 32) + _shifted(middle, 32)
    return ((a * b) ^ high).sum(1)
