"""Where the tensors of a committed step rest: of each, by name, the pieces that ranks have of it.

Owns what makes pieces one tensor: one shape and dtype, boxes that neither overlap nor leave holes, and boxes
that several ranks have with the same bytes (replicas: any of them will do). A tensor that is whole on several
ranks with different bytes is each rank's own. Built of as many ranks' records as were read; opens no file,
and knows no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashckpt.errors import MismatchError
from flashckpt.format.layout import Box, Leaf
from flashckpt.format.records import Contents, RankRecord

Index = tuple[int, ...]
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class BoxRegion:
    """A box in a tensor: its first index in each dimension, and its sizes."""

    start: Index
    shape: Index

    @classmethod
    def of(cls, leaf: Leaf) -> BoxRegion:
        """The box of a leaf, the whole of one that has none."""
        return cls(leaf.box.start if leaf.box is not None else (0,) * len(leaf.shape), leaf.shape)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: BoxRegion) -> BoxRegion | None:
        """What both have, None where that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        ]
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return BoxRegion(start, tuple(high - low for low, high in zip(start, stop, strict=True)))

    def flat(self, whole: Index) -> BoxRegion | None:
        """The same elements of a tensor of this shape that is laid out row-major in one dimension; None where
        they do not follow one another there."""
        if not self.num_elements:
            return BoxRegion((0,), (0,))
        first = next((d for d, size in enumerate(self.shape) if size > 1), len(self.shape))
        if self.shape[first + 1 :] != whole[first + 1 :]:
            return None
        start = 0
        for at, size in zip(self.start, whole, strict=True):
            start = start * size + at
        return BoxRegion((start,), (self.num_elements,))

    def __str__(self) -> str:
        pairs = zip(self.start, self.shape, strict=True)
        return "[" + ", ".join(f"{start}:{start + size}" for start, size in pairs) + "]"


@dataclass(frozen=True, slots=True)
class StepFile:
    """A file of a step: its path in the store, and what stands in it."""

    path: str
    contents: Contents = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one file has of a tensor. `leaf` has its offset in the file; `rank` is whose state it was."""

    region: BoxRegion
    rank: int
    file: StepFile
    leaf: Leaf
    digest: int

    def rows(self, common: BoxRegion) -> tuple[int, int]:
        """The range of its bytes that holds `common`: some of its rows, each whole."""
        if common == self.region:
            return 0, self.leaf.num_bytes
        row_bytes = self.leaf.num_bytes // self.region.shape[0]
        low = (common.start[0] - self.region.start[0]) * row_bytes
        return low, low + common.shape[0] * row_bytes


Parts = Sequence[tuple[Piece, BoxRegion]]
"""Pieces that make up a box, and what of each belongs to it."""


def shape_of(leaf: Leaf) -> Index:
    """The shape of the tensor that a leaf is, or has a box of."""
    return leaf.shape if leaf.box is None else leaf.box.shape


class StepTensor:
    """One tensor of a step, of which `name` is one of its names. Pieces of no elements are left out, but for
    those of a tensor that has none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._holders: dict[BoxRegion, list[Piece]] = {}
        self._by_rank: dict[int, Piece] = {}
        self._leaves: dict[int, Leaf] = {}
        self._writers: dict[BoxRegion, int] = {}
        self._is_declared = False
        self._order: _Order | None = None
        self._flat: StepTensor | None = None

    def add_replica(self, rank: int, leaf: Leaf, writer: int) -> None:
        """Something that a rank has like others, and that is in the files of `writer`."""
        self._leaves[rank] = leaf
        self._writers[BoxRegion.of(leaf)] = writer
        self._is_declared, self._flat = True, None

    def declare(self) -> None:
        """Ranks that have it, or the same box of it, have the same by declaration."""
        self._is_declared = True

    def add(self, piece: Piece) -> None:
        self._by_rank[piece.rank] = piece
        self._leaves[piece.rank] = piece.leaf
        if piece.region.num_elements or not math.prod(shape_of(piece.leaf)):
            self._holders.setdefault(piece.region, []).append(piece)
        self._order = self._flat = None

    def in_dimensions(self, count: int) -> StepTensor:
        """It itself, or laid out row-major in one dimension where that is asked for. MismatchError where a
        box would lie in several pieces there."""
        if count == len(self.shape):
            return self
        if self._flat is None:
            self._flat = StepTensor(self.name)
            self._flat._leaves = {rank: self._flat_leaf(leaf) for rank, leaf in self._leaves.items()}
            self._flat._writers = {self.in_one(region): writer for region, writer in self._writers.items()}
            self._flat._is_declared = self._is_declared
            for region, pieces in self._holders.items():
                flat = self.in_one(region)
                self._flat._holders[flat] = [replace(piece, region=flat) for piece in pieces]
        return self._flat

    def _flat_leaf(self, leaf: Leaf) -> Leaf:
        region, total = self.in_one(BoxRegion.of(leaf)), math.prod(shape_of(leaf))
        box = Box(shape=(total,), start=region.start) if region.num_elements < total else None
        return replace(leaf, shape=region.shape, stride=None, box=box)

    def in_one(self, region: BoxRegion, shape: Index | None = None) -> BoxRegion:
        """A box of it, or of it in that shape, laid out in one dimension. MismatchError where it would lie in
        several pieces."""
        found = region.flat(shape or self.shape)
        if found is None:
            why = f"FSDP1 lays it out in one dimension, where its box {region} would lie in several pieces"
            raise self._refused(why)
        return found

    @property
    def ranks(self) -> list[int]:
        """Those that have it, or a part of it, also an empty one."""
        return sorted(self._leaves)

    @property
    def leaf(self) -> Leaf:
        """That of one of its ranks."""
        return next(iter(self._leaves.values()))

    @property
    def shape(self) -> Index:
        return shape_of(self.leaf)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> str:
        return self.leaf.dtype

    @property
    def is_by_rank(self) -> bool:
        """Whether each rank has one of its own: whole, and with other bytes, or another shape."""
        if self.is_one:
            return False
        pieces = self._by_rank.values()
        return len({(piece.leaf.dtype, piece.leaf.shape, piece.digest) for piece in pieces}) > 1

    @property
    def is_one(self) -> bool:
        """Whether it is one tensor for certain, whatever ranks have of it that were not read: in boxes, or
        alike by declaration."""
        return self._is_declared or any(leaf.box is not None for leaf in self._leaves.values())

    def of_rank(self, rank: int) -> Piece | None:
        """What this rank's own files have of it."""
        return self._by_rank.get(rank)

    def leaf_of(self, rank: int) -> Leaf:
        """How this rank, one of `ranks`, had it."""
        return self._leaves[rank]

    def boxes(self) -> Iterator[tuple[int, BoxRegion]]:
        """The box of each rank that is known to have one."""
        for rank, leaf in self._leaves.items():
            yield rank, BoxRegion.of(leaf)

    def writers(self, wanted: BoxRegion) -> Iterator[int]:
        """The ranks in whose files a replica is, of those of which it is known and that are not read."""
        for region, writer in self._writers.items():
            if region not in self._holders and region.common(wanted) is not None:
                yield writer

    def regions(self) -> list[BoxRegion]:
        """The boxes that there are, each once."""
        return list(self._holders)

    def missing(self, wanted: BoxRegion) -> Index | None:
        """The first index of a box of which no piece is known; None where there is none."""
        left = [wanted]
        for region in self._near(wanted):
            left = [rest for each in left for rest in without(each, region)]
        return min((each.start for each in left), default=None)

    def parts_of(self, wanted: BoxRegion, rank: int) -> Parts | None:
        """The pieces that make up a box, and what of each; `rank`'s own where replicas are to be chosen from.
        None where they do not (yet) make up all of it.

        Raises MismatchError where pieces overlap, or ranks that have the same box have other bytes in it.
        """
        self.check_alike()
        if not wanted.num_elements:
            return []
        found = [(region, common) for region in self._near(wanted) if (common := region.common(wanted))]
        self._check_disjoint([region for region, _ in found])
        if sum(common.num_elements for _, common in found) != wanted.num_elements:
            return None
        return [(self._held(region, rank), common) for region, common in found]

    def check_alike(self) -> None:
        """MismatchError where ranks have it in another shape or dtype than others."""
        found: dict[tuple[str, Index], int] = {}
        for rank, leaf in self._leaves.items():
            found.setdefault((leaf.dtype, shape_of(leaf)), rank)
        if len(found) > 1:
            said = ", ".join(f"{dtype} {shape} on rank {rank}" for (dtype, shape), rank in found.items())
            raise self._refused(f"it is not the same on all ranks: {said}")

    def check_covered(self) -> None:
        """MismatchError unless the pieces are, together, exactly the tensor. All ranks must be known."""
        self.check_alike()
        self._check_disjoint(self.regions())
        held, needed = sum(region.num_elements for region in self._holders), math.prod(self.shape)
        if held != needed:
            raise self.holes(BoxRegion((0,) * len(self.shape), self.shape))

    def holes(self, wanted: BoxRegion) -> MismatchError:
        """What is said of a box that pieces do not make up."""
        found = [common for region in self._near(wanted) if (common := region.common(wanted))]
        held = sum(common.num_elements for common in found)
        there = ", ".join(
            f"{region} on rank {self._holders[region][0].rank}" for region in self.regions()[:_SHOWN]
        )
        more = ", …" if len(self._holders) > _SHOWN else ""
        return self._refused(
            f"of its box {wanted}, {wanted.num_elements - held} of {wanted.num_elements} elements are on no "
            f"rank (there are {there or 'none'}{more})"
        )

    def _near(self, wanted: BoxRegion) -> Sequence[BoxRegion]:
        if self._order is None:
            self._order = _Order(list(self._holders))
        return self._order.near(wanted)

    def _held(self, region: BoxRegion, rank: int) -> Piece:
        pieces = self._holders[region]
        differ = next((each for each in pieces if each.digest != pieces[0].digest), None)
        if differ is not None:
            raise self._refused(
                f"ranks {pieces[0].rank} and {differ.rank} have other bytes in the same box {region}: a "
                "replica has diverged, and nothing says which one counts"
            )
        return next((each for each in pieces if each.rank == rank), pieces[0])

    def _check_disjoint(self, regions: Sequence[BoxRegion]) -> None:
        pair = overlapping(regions)
        if pair is not None:
            one, other = (self._holders[region][0] for region in pair)
            raise self._refused(
                f"{one.region} on rank {one.rank} and {other.region} on rank {other.rank} overlap"
            )

    def _refused(self, why: str) -> MismatchError:
        return MismatchError(
            f"{self.name} cannot be put together for another layout: {why}. Nothing was loaded. Start with "
            "as many ranks and the same mesh as made the step, or take another step.",
            differences=((self.name, why, "one tensor"),),
        )


class _Order:
    """Boxes of one tensor, in order along the dimension in which there are most."""

    def __init__(self, regions: list[BoxRegion]) -> None:
        dimensions = len(regions[0].shape) if regions else 0
        counts = [len({region.start[d] for region in regions}) for d in range(dimensions)]
        self._dimension = counts.index(max(counts)) if counts else -1
        if self._dimension >= 0:
            regions.sort(key=lambda region: region.start[self._dimension])
        self._regions = regions
        self._starts = [region.start[self._dimension] for region in regions] if dimensions else []
        self._longest = (
            max((region.shape[self._dimension] for region in regions), default=0) if dimensions else 0
        )

    def near(self, wanted: BoxRegion) -> Sequence[BoxRegion]:
        """All that have something of a box; there may be others among them."""
        if self._dimension < 0:
            return self._regions
        start = wanted.start[self._dimension]
        first = bisect_left(self._starts, start - self._longest + 1)
        return self._regions[first : bisect_left(self._starts, start + wanted.shape[self._dimension])]


def overlapping(regions: Sequence[BoxRegion]) -> tuple[BoxRegion, BoxRegion] | None:
    """Two different boxes of one tensor that have elements in common."""
    order = _Order(list(regions))
    for region in regions:
        for other in order.near(region):
            if other != region and region.common(other) is not None:
                return region, other
    return None


def without(region: BoxRegion, other: BoxRegion) -> Iterator[BoxRegion]:
    """What is left of a box without another, in boxes."""
    common = region.common(other)
    if common is None:
        yield region
        return
    start, shape = list(region.start), list(region.shape)
    for d, (low, size) in enumerate(zip(common.start, common.shape, strict=True)):
        for first, behind in ((start[d], low), (low + size, start[d] + shape[d])):
            if first < behind:
                yield BoxRegion(
                    (*start[:d], first, *start[d + 1 :]), (*shape[:d], behind - first, *shape[d + 1 :])
                )
        start[d], shape[d] = low, size


class StepLeaves:
    """The tensors of a step by name, of the ranks that were added. Further names of a tensor lead to it
    too."""

    def __init__(self) -> None:
        self._tensors: dict[str, StepTensor] = {}

    def add(self, record: RankRecord, files: Sequence[StepFile], renamed: Mapping[str, str]) -> None:
        """What one rank has, in these files. `renamed`: leaves that are known here by another name than in
        the record."""
        by_name = {file.contents.shard.file: file for file in files}
        regions: dict[BoxRegion, BoxRegion] = {}  # many leaves of a rank have the same: one object for each
        for file, leaf, digest in record.counted():
            region = BoxRegion.of(leaf)
            region = regions.setdefault(region, region)
            piece = Piece(region, record.rank, by_name[file], leaf, digest)
            for tensor in self._of(leaf, renamed):
                tensor.add(piece)
        for writer, leaf, _ in record.elsewhere():
            for tensor in self._of(leaf, renamed):
                tensor.add_replica(record.rank, leaf, writer)
        for table in record.replicas:
            for leaf in table.leaves:
                for tensor in self._of(leaf, renamed):
                    tensor.declare()

    def _of(self, leaf: Leaf, renamed: Mapping[str, str]) -> Iterator[StepTensor]:
        for name in (leaf.name, *leaf.aliases):
            known = renamed.get(name, name)
            if known not in self._tensors:
                self._tensors[known] = StepTensor(known)
            yield self._tensors[known]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def get(self, name: str) -> StepTensor | None:
        return self._tensors.get(name)
