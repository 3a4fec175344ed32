"""Whole tensors and slices of a step, read from the pieces that its ranks wrote.

Owns the copy of a slice from a file to memory, in strided runs, and `WholeTensors`: the tensors of a step of
any number of ranks, for a machine without ranks. Does not import torch, and needs no live state."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flashckpt.commit.steps import StepRecord
from flashckpt.format.layout import DTYPES, Box, Layout, Leaf
from flashckpt.printable import escaped
from flashckpt.restore.step_tensors import Index, Parts, StepRanks, StepTensor, TensorSlice, ties
from flashckpt.store.read_plan import Digests, ReadPlan, Source, Steps

log = logging.getLogger(__name__)

WINDOW_BYTES = 24 << 20
_MOST_WINDOW_BYTES = 64 << 20
_ALL = 1 << 62


def take(plan: ReadPlan, leaf: Leaf, into: memoryview, parts: Parts) -> None:
    """Add the copies of a leaf that consists of `parts` to a plan; `into` is its memory."""
    wanted = TensorSlice.of(leaf)
    for piece, common in parts:
        begin = piece.contents.data_start + piece.leaf.offset
        source, goal, run, steps = copy_of(piece.leaf, begin, piece.region, wanted, 0, common)
        plan.copy(piece.path, piece.contents, source, run, steps, into, goal)


def copy_of(
    stored: Leaf, begin: int, held: TensorSlice, wanted: TensorSlice, target: int, common: TensorSlice
) -> tuple[int, int, int, Steps]:
    """Return the copy of `common` from a leaf with the slice `held`, whose bytes begin at `begin` of a file,
    to a buffer in which the slice `wanted` begins at `target`. Both are row-major. The copy: where it begins
    in the file and in the buffer, the bytes of a run, and its steps."""
    item = DTYPES[stored.dtype][0]
    from_strides, to_strides = _strides(held.shape, item), _strides(wanted.shape, item)
    source = begin + _offset(common.start, held.start, from_strides)
    goal = target + _offset(common.start, wanted.start, to_strides)
    run, dimension = item, len(common.shape)
    # Inner dimensions that both slices have completely make one run, with the wanted part of the next one.
    while dimension:
        dimension -= 1
        run *= common.shape[dimension]
        if not common.shape[dimension] == held.shape[dimension] == wanted.shape[dimension]:
            break
    steps = tuple(
        (common.shape[d], from_strides[d], to_strides[d]) for d in range(dimension) if common.shape[d] > 1
    )
    return source, goal, run, steps


def _strides(shape: Index, item: int) -> list[int]:
    return [item * math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _offset(index: Index, origin: Index, strides: list[int]) -> int:
    return sum((i - o) * stride for i, o, stride in zip(index, origin, strides, strict=True))


def pieces(
    source: Source, wanted: Sequence[tuple[Leaf, Parts]], threads: int, window_bytes: int = WINDOW_BYTES
) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of leaves, each row-major: the index of the leaf and some of its rows, in order. Reads
    about `window_bytes` at once. A chunk is verified before its bytes are yielded, digests after the last
    piece. Raises what `ReadPlan.run` does."""
    digests = Digests()
    for _, parts in wanted:
        for piece, _ in parts:
            digests.place(piece.path, piece.leaf, piece.digest)

    def read() -> Iterator[tuple[int, memoryview]]:
        plan, found = ReadPlan(digests), list[tuple[int, memoryview]]()
        for index, rows, parts in window:
            into = memoryview(bytearray(rows.num_bytes))
            take(plan, rows, into, parts)
            for piece, common in parts:
                plan.digest(piece.path, piece.contents, piece.leaf, piece.digest, *piece.rows(common))
            found.append((index, into))
        plan.run(source, threads)
        yield from found

    window, held = list[tuple[int, Leaf, Parts]](), 0
    for index, (leaf, parts) in enumerate(wanted):
        # Ranks with columns give a part of each row: few rows at a time would read each chunk many times.
        columns = sum(not any(region.start[:1]) for _, region in parts)
        most_bytes = min(window_bytes * max(1, columns), max(window_bytes, _MOST_WINDOW_BYTES))
        for rows in _by_rows(leaf, most_bytes):
            if window and held + rows.num_bytes > window_bytes:
                yield from read()
                window, held = [], 0
            mine = [(piece, region.common(TensorSlice.of(rows))) for piece, region in parts]
            window.append((index, rows, [(piece, common) for piece, common in mine if common is not None]))
            held += rows.num_bytes
    yield from read()
    digests.check(source.url)


def _by_rows(leaf: Leaf, most_bytes: int) -> Iterator[Leaf]:
    """Yield slices of a leaf, in order: as many rows as fit, at least one."""
    if not leaf.shape or leaf.num_bytes <= most_bytes:
        yield leaf
        return
    count = max(1, most_bytes * leaf.shape[0] // leaf.num_bytes)
    for first in range(0, leaf.shape[0], count):
        shape = (min(count, leaf.shape[0] - first), *leaf.shape[1:])
        box = Box(shape=leaf.shape, start=(first, *(0 for _ in leaf.shape[1:])))
        yield replace(leaf, shape=shape, box=box)


class WholeTensors:
    """The tensors of a step, whole. leaves: without slices and offsets, in the order of an image. A tensor
    that differs from rank to rank (a buffer, a counter) is that of the first rank that has it."""

    def __init__(self, record: StepRecord) -> None:
        """record: with all parts. Raises MismatchError if the pieces of a tensor have holes or overlap."""
        self._ranks = StepRanks(record, 0, 1, small_bytes=_ALL)
        self._parts = dict[str, Parts]()
        leaves, by_rank = [], []
        for tensor, names in ties(self._ranks.leaves.items()).items():
            leaf, parts = self._whole(names, tensor)
            leaves.append(leaf)
            self._parts[leaf.name] = parts
            by_rank += [leaf.name] if tensor.is_by_rank else []
        self.leaves: Sequence[Leaf] = [
            Leaf(name=each.name, dtype=each.dtype, shape=each.shape, stride=each.stride, aliases=each.aliases)
            for each in Layout.of(leaves).leaves
        ]
        if by_rank:
            log.info("%d tensors differ from rank to rank: those of the first rank are taken (%s)",
                     len(by_rank), escaped(", ".join(by_rank[:5])))  # fmt: skip

    def parts(self, leaf: Leaf) -> Parts:
        """Return the pieces that make up one of `leaves`."""
        return self._parts[leaf.name]

    def slice(self, leaf: Leaf, region: TensorSlice, name: str) -> tuple[Leaf, Parts]:
        """Return a slice of one of `leaves` as a leaf called `name`, and the pieces that make it up."""
        box = Box(shape=leaf.shape, start=region.start) if region.shape != leaf.shape else None
        cut = [(piece, part.common(region)) for piece, part in self._parts[leaf.name]]
        parts = [(piece, common) for piece, common in cut if common is not None]
        return Leaf(name=name, dtype=leaf.dtype, shape=region.shape, box=box), parts

    def _whole(self, names: list[str], tensor: StepTensor) -> tuple[Leaf, Parts]:
        rank = tensor.ranks[0]
        stored, own = tensor.leaf_of(rank), tensor.of_rank(rank)
        if tensor.is_by_rank and own is not None:
            parts: Parts = [(own, own.region)]
        else:
            [parts] = self._ranks.find([(tensor.name, tensor.whole)])
        first = min(names, key=lambda name: (name != stored.name, name))
        aliases = tuple(name for name in names if name != first)
        stride = stored.stride if stored.box is None else None
        shape = stored.whole_shape
        return Leaf(name=first, dtype=stored.dtype, shape=shape, stride=stride, aliases=aliases), parts
