"""Digests of tensors, where they are. docs/format.md ("Digest") has the definition.

In host memory native code takes them, on a CUDA device one launch of our kernel (`CudaTable`). Where there is
none of it, torch's own operations give the same bits (`TorchDigests`): some forty read what they work on a
dozen times, in batches of at most `WORKSPACE_BYTES`, whatever the sizes of the leaves; int64 arithmetic
wraps, so it is exact modulo 2**64.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.plan import Addresses, local

log = logging.getLogger(__name__)

WORKSPACE_BYTES = 64 << 20
_BLOCK = _native.BLOCK_BYTES
# Words, their products and what products are made of; the rest is small beside them.
_BYTES_OF_A_BLOCK = 3 * _BLOCK
_LANES, _STRIPES = 8, 16
_FACTOR = 0x9E3779B97F4A7C15
_HALF = (1 << 32) - 1
_EMPTY = -1  # the empty mark, as int64


def digest_tensors(tensors: Sequence[Tensor], threads: int) -> list[int]:
    """The digest of each tensor's bytes in row-major order. Reads every byte once; on a device it is waited
    for. Tensors there that are not row-major are made so, all at once: that takes their size in memory."""
    digests = np.full(len(tensors), _native.EMPTY_DIGEST, dtype=np.uint64)
    leaves = [local(tensor.detach()).resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, leaf in enumerate(leaves):
        by_device.setdefault(leaf.device, []).append(index)
    for device, indexes in by_device.items():
        here = [leaves[index] for index in indexes]
        digests[indexes] = _digest_host(here, threads) if device.type == "cpu" else _digest_device(here)
    return [int(digest) for digest in digests]


def _digest_host(leaves: Sequence[Tensor], threads: int) -> Addresses:
    found: Addresses = np.empty(len(leaves), dtype=np.uint64)
    sources = array("Q", [leaf.data_ptr() for leaf in leaves])
    sizes = array("Q", [leaf.nbytes for leaf in leaves])
    _native.digest_many(sources, sizes, _native.address_of(found.data), threads)
    return found


def _digest_device(leaves: Sequence[Tensor]) -> Addresses:
    device = leaves[0].device
    out = torch.empty(len(leaves), dtype=torch.int64, device=device)
    with torch.cuda.device(device), torch.no_grad():
        CudaTable(device.index or 0, leaves, np.zeros(len(leaves), dtype=np.uint64)).run(out)
    found: Addresses = out.cpu().numpy().view(np.uint64)
    return found


# ---- a CUDA device


class CudaTable:
    """Row-major tensors of one device, with where each is copied to (0 for nowhere): copied and digested in
    one launch where the kernel can be used, else with torch's operations. Made, and run, on the current
    stream; one run ends before the next."""

    def __init__(self, index: int, leaves: Sequence[Tensor], destinations: Addresses) -> None:
        self._index, self._count = index, len(leaves)
        self._in_one_launch = why_not_in_one_launch(index) == ""
        if self._in_one_launch:
            self._entries = _uploaded(index, leaves, destinations)
            self._leaves: list[Tensor] = []
        else:
            self._leaves = [bytes_of(leaf) for leaf in leaves]
            self._digests = torch_digests(self._leaves)
            self._pairs = [
                (_memory_at(index, address, leaf.numel()), leaf)
                for address, leaf in zip(destinations.tolist(), self._leaves, strict=True)
                if address
            ]

    def __len__(self) -> int:
        return self._count

    def run(self, out: Tensor) -> None:
        """Digests go to `out`: int64, contiguous, one a leaf."""
        if self._in_one_launch:
            stream = torch.cuda.current_stream(self._index).cuda_stream
            _native.cuda_digest_launch(
                stream, self._entries.data_ptr(), self._count, out.data_ptr(), self._index
            )
            return
        if self._pairs:
            torch._foreach_copy_([target for target, _ in self._pairs], [leaf for _, leaf in self._pairs])
        self._digests.into(self._leaves, out)


@cache
def why_not_in_one_launch(index: int) -> str:
    """ "" where a table is one launch on this device, else the reason, which is said once."""
    reason = _native.cuda_digests_usable(index)
    if reason:
        log.warning(
            "The kernel that copies and digests cannot be used on cuda:%d: %s. Snapshots are as safe without "
            "it; they are digested with torch's operations, some for each tensor, and at each of them the "
            "loop waits for the copy to the host.", index, reason,
        )  # fmt: skip
    return reason


def _uploaded(index: int, leaves: Sequence[Tensor], destinations: Addresses) -> Tensor:
    """The entries of a table in device memory, there before what the current stream gets next. The host
    does not wait: torch keeps the page-locked source until it has been read."""
    sources = array("Q", [leaf.data_ptr() for leaf in leaves])
    sizes = array("Q", [leaf.numel() * leaf.element_size() for leaf in leaves])
    entries = bytearray(_native.cuda_digest_table(sources, destinations.data, sizes))
    source = torch.frombuffer(entries, dtype=torch.uint8).pin_memory()
    return source.to(torch.device("cuda", index), non_blocking=True)


def _memory_at(index: int, address: int, num_bytes: int) -> Tensor:
    """Device memory that somebody else keeps."""
    described = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    class ForeignMemory:
        __cuda_array_interface__ = described

    return torch.as_tensor(ForeignMemory(), device=torch.device("cuda", index))


# ---- torch's operations


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
    """Memory and keys on one device, for any number of `TorchDigests` that run on one stream. `allocate`
    gives so many bytes on the device, uint8, aligned to 16; num_bytes: see `workspace_bytes`."""

    def __init__(self, allocate: Callable[[int], Tensor], num_bytes: int = WORKSPACE_BYTES) -> None:
        self.num_blocks = num_bytes // _BYTES_OF_A_BLOCK
        memory = allocate(self.num_blocks * _BYTES_OF_A_BLOCK)
        self.bytes, self.products, self.halves = memory.view(3, self.num_blocks, _BLOCK).unbind()
        self.device = memory.device
        self.keys = [self._keys(first, 128).view(_STRIPES, _LANES) for first in (0, 128)]
        self.starts = [self._keys(first, _LANES) for first in (256, 264)]
        self.folds = [self._keys(first, _LANES) for first in (272, 280)]
        self.numbers = torch.arange(1, self.num_blocks + 1, dtype=torch.int64, device=self.device)

    def _keys(self, first: int, count: int) -> Tensor:
        numbers = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=self.device)
        return _finalize(numbers.mul_(signed(_FACTOR)))

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
        starts = [(piece, piece.first_block * _BLOCK) for piece in self._pieces]
        taken = [sources[piece.leaf][start : start + piece.num_bytes] for piece, start in starts]
        torch._foreach_copy_(self._places, taken)
        # With its size said, nothing waits for the device.
        piece = torch.repeat_interleave(self._counts, output_size=self._count)
        hashes = space.numbers[: self._count] + self._shifts[piece]
        hashes = _finalize(hashes.mul_(signed(_FACTOR)).add_(space.folds_of(self._count)))
        out.index_add_(0, self._leaves[piece], hashes)


class TorchDigests:
    """Digests of leaves whose sizes (in bytes) are known beforehand; small ones are taken together."""

    def __init__(self, workspace: Workspace, sizes: Sequence[int]) -> None:
        size_terms = [signed(size * _FACTOR) for size in sizes]
        self._size_terms = torch.tensor(size_terms, dtype=torch.int64, device=workspace.device)
        self._batches = [_Batch(workspace, pieces) for pieces in _batches(sizes, workspace.num_blocks)]

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
    allocate = partial(torch.empty, dtype=torch.uint8, device=device)
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


def _finalize(z: Tensor) -> Tensor:
    """SplitMix64's finalizer."""
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
