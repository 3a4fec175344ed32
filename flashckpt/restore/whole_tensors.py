"""The tensors of a step whole, whatever number of ranks made it: for a machine that has no ranks. Needs no
torch and no live state.

Of a tensor that differs from rank to rank (a buffer, a counter) it is one rank's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flashckpt.commit.steps import StepRecord
from flashckpt.format.layout import Box, Layout, Leaf
from flashckpt.printable import escaped
from flashckpt.restore.box_gathering import Gathering, SlicedDigests, gather
from flashckpt.restore.step_leaves import BoxRegion, Parts, StepTensor, shape_of
from flashckpt.restore.step_ranks import StepRanks

log = logging.getLogger(__name__)

_ALL = 1 << 62
_PIECE_BYTES, _MOST_PIECE_BYTES = 8 << 20, 64 << 20


class WholeTensors:
    """`leaves` are those of the step, without boxes and not placed, in the order of an image. Names in an
    optimizer's state that mean other parameters on other ranks are written in full."""

    def __init__(self, record: StepRecord, rank: int = 0) -> None:
        """`record` with all parts. `rank`: whose things are taken where ranks differ. MismatchError where the
        pieces of a tensor have holes, or overlap."""
        self._record = record
        self._ranks = StepRanks(record, rank, 1, small_bytes=_ALL)
        self._rank, self._parts = rank, dict[str, Parts]()
        leaves, by_rank = [], []
        for names, tensor in self._stored():
            leaf, parts = self._whole(names, tensor)
            leaves.append(leaf)
            self._parts[leaf.name] = parts
            by_rank += [leaf.name] if tensor.is_by_rank else []
        self.leaves: Sequence[Leaf] = [_unplaced(leaf) for leaf in Layout.of(leaves).leaves]
        if by_rank:
            log.info("%d tensors differ from rank to rank: those of rank %d are taken (%s)",
                     len(by_rank), rank, escaped(", ".join(by_rank[:5])))  # fmt: skip

    def layout(self, leaves: Sequence[Leaf] | None = None) -> Layout:
        """The image of some of the leaves, or of all."""
        return Layout.of(self.leaves if leaves is None else leaves)

    def read(self, layout: Layout, into: memoryview, threads: int) -> int:
        """Fill an image of a layout that `layout` gave, verified. Raises what `gather` does."""
        parts = [self._parts[leaf.name] for leaf in layout.leaves]
        return gather(self._record.store, layout, parts, into, threads)

    def pieces(self, leaf: Leaf, threads: int, piece_bytes: int = _PIECE_BYTES) -> Iterator[memoryview]:
        """The bytes of one of `leaves`, row-major, in pieces of about `piece_bytes`. A chunk is verified
        before a byte of it is given, the digests after the last piece. Raises what `gather` does."""
        parts, digests = self._parts[leaf.name], SlicedDigests()
        # Ranks that have columns give a part of each row: few rows at a time would read each chunk many
        # times.
        beside = sum(not any(region.start[:1]) for _, region in parts)
        for rows in _slices(leaf, min(piece_bytes * beside, _MOST_PIECE_BYTES)):
            gathering, image = Gathering(), memoryview(bytearray(rows.num_bytes))
            gathering.take(rows, 0, _common(leaf, rows, parts), digests)
            gathering.run(self._record.store, image, threads)
            yield image
        digests.check(self._record.store.url)

    def _stored(self) -> list[tuple[list[str], StepTensor]]:
        """Each tensor once, with its names."""
        found: dict[tuple[int, str], tuple[list[str], StepTensor]] = {}
        published = self._published()
        for name in self._ranks.leaves:
            tensor = self._ranks.leaves.get(name)
            assert tensor is not None
            rank = self._nearest(tensor)
            key = rank, tensor.leaf_of(rank).name
            found.setdefault(key, ([], tensor))[0].append(published.get(name, name))
        return list(found.values())

    def _published(self) -> dict[str, str]:
        """Full names of an optimizer's state -> the short ones, where each rank means the same by them."""
        short = {full: name for renamed in self._ranks.renamed.values() for name, full in renamed.items()}
        meant = Counter(short.values())
        other = {name for name in self._ranks.leaves if name not in short}
        return {full: name for full, name in short.items() if meant[name] == 1 and name not in other}

    def _whole(self, names: list[str], tensor: StepTensor) -> tuple[Leaf, Parts]:
        rank = self._nearest(tensor)
        stored, own = tensor.leaf_of(rank), tensor.of_rank(rank)
        if tensor.is_by_rank and own is not None:
            parts: Parts = [(own, own.region)]
        else:
            tensor.check_covered()
            whole = BoxRegion((0,) * len(tensor.shape), tensor.shape)
            [parts] = self._ranks.find([(tensor.name, whole)])
        first = min(names, key=lambda name: (name != stored.name, name))
        aliases = tuple(name for name in names if name != first)
        stride = stored.stride if stored.box is None else None
        shape = shape_of(stored)
        return Leaf(name=first, dtype=stored.dtype, shape=shape, stride=stride, aliases=aliases), parts

    def _nearest(self, tensor: StepTensor) -> int:
        return self._rank if self._rank in tensor.ranks else tensor.ranks[0]


def _unplaced(leaf: Leaf) -> Leaf:
    return Leaf(name=leaf.name, dtype=leaf.dtype, shape=leaf.shape, stride=leaf.stride, aliases=leaf.aliases)


def _slices(leaf: Leaf, most_bytes: int) -> Iterator[Leaf]:
    """Rows of a leaf, in order: as many at a time as fit, at least one."""
    if not leaf.shape or leaf.num_bytes <= most_bytes:
        yield leaf
        return
    count = max(1, most_bytes * leaf.shape[0] // leaf.num_bytes)
    for first in range(0, leaf.shape[0], count):
        shape = (min(count, leaf.shape[0] - first), *leaf.shape[1:])
        box = Box(shape=leaf.shape, start=(first, *(0 for _ in leaf.shape[1:])))
        yield replace(leaf, shape=shape, box=box)


def _common(leaf: Leaf, rows: Leaf, parts: Parts) -> Parts:
    """The pieces that make up these rows, and the slice of each that belongs to them."""
    found = []
    for piece, region in parts:
        wanted: BoxRegion | None = BoxRegion.of(rows)
        if len(region.shape) != len(leaf.shape):
            # FSDP1 stores it in one dimension.
            wanted = BoxRegion.of(rows).flat(leaf.shape)
        assert wanted is not None, leaf.name
        common = region.common(wanted)
        if common is not None:
            found.append((piece, common))
    return found
