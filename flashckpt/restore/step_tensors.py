"""The tensors of a committed step: for each name, the slices that ranks hold, and in which files.

Owns the rules for one tensor: one shape and dtype; slices that neither overlap nor leave holes; equal bytes
in a slice that several ranks hold (replicas: any is used). A tensor that is whole on several ranks with
different bytes belongs to each rank by itself. Owns which parts of a large step are read, too. Opens no
shard; does not import torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashckpt.commit.steps import StepRecord
from flashckpt.errors import MismatchError
from flashckpt.format.layout import Leaf
from flashckpt.format.records import Contents, RankRecord
from flashckpt.format.typed import decode

Index = tuple[int, ...]
_SHOWN = 8
# All parts of a step are read if they have no more bytes: that takes a second or two.
_SMALL_BYTES = 16 << 20
_AT_ONCE = 4
_STATE = "state"


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A slice of a tensor: its first index and its size in each dimension."""

    start: Index
    shape: Index

    @classmethod
    def of(cls, leaf: Leaf) -> TensorSlice:
        """Return the slice that a leaf is of its tensor."""
        return cls(leaf.box.start if leaf.box is not None else (0,) * len(leaf.shape), leaf.shape)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: TensorSlice) -> TensorSlice | None:
        """Return the intersection with another slice; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        ]
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return TensorSlice(start, tuple(high - low for low, high in zip(start, stop, strict=True)))

    def __str__(self) -> str:
        pairs = zip(self.start, self.shape, strict=True)
        return "[" + ", ".join(f"{start}:{start + size}" for start, size in pairs) + "]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a tensor in a file of the store. rank: whose state it was. leaf: with its offset in the
    file."""

    region: TensorSlice
    rank: int
    path: str
    contents: Contents = field(repr=False, compare=False)
    leaf: Leaf
    digest: int

    def rows(self, common: TensorSlice) -> tuple[int, int]:
        """Return the range of the piece's bytes with the rows that hold `common`."""
        if common == self.region:
            return 0, self.leaf.num_bytes
        row_bytes = self.leaf.num_bytes // self.region.shape[0]
        low = (common.start[0] - self.region.start[0]) * row_bytes
        return low, low + common.shape[0] * row_bytes


Parts = Sequence[tuple[Piece, TensorSlice]]
"""The pieces that make up a slice, each with its share."""


def complete_piece(leaf: Leaf, parts: Parts) -> Piece | None:
    """Return the piece that is all of a leaf; None if the leaf consists of parts."""
    if len(parts) != 1:
        return None
    [(piece, common)] = parts
    return piece if common == piece.region == TensorSlice.of(leaf) else None


class StepTensor:
    """One tensor of a step; `name` is one of its names. Empty pieces are left out, except those of an empty
    tensor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._owners: dict[TensorSlice, list[Piece]] = {}
        self._by_rank: dict[int, Piece] = {}
        self._leaves: dict[int, Leaf] = {}
        self._writers: dict[TensorSlice, int] = {}
        self._is_declared = False
        self._order: _Order | None = None

    def add_replica(self, rank: int, leaf: Leaf, writer: int) -> None:
        """Add a replica of a rank that is in the files of `writer`."""
        self._leaves[rank] = leaf
        self._writers[TensorSlice.of(leaf)] = writer

    def declare(self) -> None:
        """Record that ranks with the same slice of the tensor have equal bytes by declaration."""
        self._is_declared = True

    def add(self, piece: Piece) -> None:
        self._by_rank[piece.rank] = piece
        self._leaves[piece.rank] = piece.leaf
        if piece.region.num_elements or not math.prod(piece.leaf.whole_shape):
            self._owners.setdefault(piece.region, []).append(piece)
        self._order = None

    @property
    def ranks(self) -> list[int]:
        """The ranks with a slice of it, also an empty one."""
        return sorted(self._leaves)

    @property
    def leaf(self) -> Leaf:
        """The leaf of one of its ranks."""
        return next(iter(self._leaves.values()))

    @property
    def shape(self) -> Index:
        return self.leaf.whole_shape

    @property
    def whole(self) -> TensorSlice:
        """The slice of all its elements."""
        return TensorSlice((0,) * len(self.shape), self.shape)

    @property
    def dtype(self) -> str:
        return self.leaf.dtype

    @property
    def is_by_rank(self) -> bool:
        """Whether each rank has a tensor of its own: whole, and with other bytes or another shape."""
        if self.is_one:
            return False
        pieces = self._by_rank.values()
        return len({(piece.leaf.dtype, piece.leaf.shape, piece.digest) for piece in pieces}) > 1

    @property
    def is_one(self) -> bool:
        """Whether it is one tensor also in view of ranks that were not read: in slices, or equal by
        declaration."""
        return self._is_declared or any(leaf.box is not None for leaf in self._leaves.values())

    def of_rank(self, rank: int) -> Piece | None:
        """Return the piece in a rank's own files."""
        return self._by_rank.get(rank)

    def leaf_of(self, rank: int) -> Leaf:
        """Return the leaf of one of `ranks`."""
        return self._leaves[rank]

    def slices(self) -> Iterator[tuple[int, TensorSlice]]:
        """Yield each known rank with its slice."""
        for rank, leaf in self._leaves.items():
            yield rank, TensorSlice.of(leaf)

    def writers(self, wanted: TensorSlice) -> Iterator[int]:
        """Yield the ranks that were not read and whose files have a replica of some of a slice."""
        for region, writer in self._writers.items():
            if region not in self._owners and region.common(wanted) is not None:
                yield writer

    def missing(self, wanted: TensorSlice) -> Index | None:
        """Return the first index of a slice that no known piece has, or None."""
        left = [wanted]
        for region in self._near(wanted):
            left = [rest for each in left for rest in without(each, region)]
        return min((each.start for each in left), default=None)

    def parts_of(self, wanted: TensorSlice, rank: int) -> Parts | None:
        """Return the pieces that make up a slice, of replicas those of `rank`; None if the known pieces do
        not make up all of it.

        Raises MismatchError if pieces overlap, or if ranks have different bytes of the same slice.
        """
        self.check_alike()
        if not wanted.num_elements:
            return []
        found = [(region, common) for region in self._near(wanted) if (common := region.common(wanted))]
        self._check_disjoint([region for region, _ in found])
        if sum(common.num_elements for _, common in found) != wanted.num_elements:
            return None
        return [(self._piece(region, rank), common) for region, common in found]

    def check_alike(self) -> None:
        """Raise MismatchError if ranks have different shapes or dtypes of it."""
        found: dict[tuple[str, Index], int] = {}
        for rank, leaf in self._leaves.items():
            found.setdefault((leaf.dtype, leaf.whole_shape), rank)
        if len(found) > 1:
            rows = ", ".join(f"{dtype} {shape} on rank {rank}" for (dtype, shape), rank in found.items())
            raise self._refused(f"it is not the same on all ranks: {rows}")

    def holes(self, wanted: TensorSlice) -> MismatchError:
        """Return the error for a slice that the pieces do not make up."""
        found = [common for region in self._near(wanted) if (common := region.common(wanted))]
        held = sum(common.num_elements for common in found)
        there = ", ".join(
            f"{region} on rank {pieces[0].rank}" for region, pieces in list(self._owners.items())[:_SHOWN]
        )
        more = ", …" if len(self._owners) > _SHOWN else ""
        return self._refused(
            f"of its slice {wanted}, {wanted.num_elements - held} of {wanted.num_elements} elements are on "
            f"no rank (there are {there or 'none'}{more})"
        )

    def _near(self, wanted: TensorSlice) -> Sequence[TensorSlice]:
        if self._order is None:
            self._order = _Order(list(self._owners))
        return self._order.near(wanted)

    def _piece(self, region: TensorSlice, rank: int) -> Piece:
        pieces = self._owners[region]
        differ = next((each for each in pieces if each.digest != pieces[0].digest), None)
        if differ is not None:
            raise self._refused(
                f"ranks {pieces[0].rank} and {differ.rank} have different bytes of the same slice {region}: "
                "a replica has diverged, and nothing says which one is right"
            )
        return next((each for each in pieces if each.rank == rank), pieces[0])

    def _check_disjoint(self, regions: Sequence[TensorSlice]) -> None:
        pair = overlapping(regions)
        if pair is not None:
            one, other = (self._owners[region][0] for region in pair)
            raise self._refused(
                f"{one.region} on rank {one.rank} and {other.region} on rank {other.rank} overlap"
            )

    def _refused(self, why: str) -> MismatchError:
        return MismatchError(
            f"{self.name} cannot be put together for another layout: {why}. Nothing was loaded. Start with "
            "as many ranks and the same mesh as made the step, or take another step.",
            differences=((self.name, why, "one tensor"),),
        )


def ties(there: Iterable[tuple[str, StepTensor]]) -> dict[StepTensor, list[str]]:
    """Return each stored tensor once, with its names."""
    stored: dict[tuple[int, str], StepTensor] = {}
    found: dict[StepTensor, list[str]] = {}
    for name, tensor in there:
        # Empty slices are not tied.
        rank = next((rank for rank, each in tensor.slices() if each.num_elements), tensor.ranks[0])
        first = stored.setdefault((rank, tensor.leaf_of(rank).name), tensor)
        found.setdefault(first, []).append(name)
    return found


class _Order:
    """Slices of one tensor, sorted along the dimension with the most different starts."""

    def __init__(self, regions: list[TensorSlice]) -> None:
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

    def near(self, wanted: TensorSlice) -> Sequence[TensorSlice]:
        """Return all slices that intersect `wanted`, perhaps among others."""
        if self._dimension < 0:
            return self._regions
        start = wanted.start[self._dimension]
        first = bisect_left(self._starts, start - self._longest + 1)
        return self._regions[first : bisect_left(self._starts, start + wanted.shape[self._dimension])]


def overlapping(regions: Sequence[TensorSlice]) -> tuple[TensorSlice, TensorSlice] | None:
    """Return two different slices of one tensor that intersect."""
    order = _Order(list(regions))
    for region in regions:
        for other in order.near(region):
            if other != region and region.common(other) is not None:
                return region, other
    return None


def without(region: TensorSlice, other: TensorSlice) -> Iterator[TensorSlice]:
    """Yield slices that make up a slice without another one."""
    common = region.common(other)
    if common is None:
        yield region
        return
    start, shape = list(region.start), list(region.shape)
    for d, (low, size) in enumerate(zip(common.start, common.shape, strict=True)):
        for first, behind in ((start[d], low), (low + size, start[d] + shape[d])):
            if first < behind:
                yield TensorSlice(
                    (*start[:d], first, *start[d + 1 :]), (*shape[:d], behind - first, *shape[d + 1 :])
                )
        start[d], shape[d] = low, size


def entry_of(record: StepRecord, part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entry that has a part of the state ("model.encoder" is in "model"), and the values of the
    state of the first rank with it; {} and those of rank 0 if no rank has."""
    for rank in range(record.world):
        value = _state_of(decode(dict(record.rank(rank).values)))
        for name, entry in value["entries"].items():
            if f"{part}.".startswith(f"{name}."):
                return value, entry
    return _state_of(decode(dict(record.rank(0).values))), {}


def _state_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the state; without entries for a step that was written by hand."""
    state = values.get(_STATE)
    return state if isinstance(state, dict) and "entries" in state else {"entries": {}}


def transient_names(record: StepRecord) -> frozenset[str]:
    """Return the buffers of all ranks that no module's state_dict has."""
    ranks = (rank for part in record.parts for rank in part.ranks)
    entries = (entry for rank in ranks for entry in _state_of(rank.values)["entries"].values())
    return frozenset(name for entry in entries for name in entry.get("transient", ()))


# ---- ranks, read when they are needed

Wanted = tuple[str, TensorSlice]
"""A tensor's name, and a slice of it."""


class StepRanks:
    """The ranks of a step that rank `rank` of `world` resumes from, read when they are needed: all ranks of a
    small step; of a large one those that have what is asked for, which are guessed from the known slices. A
    guess only decides what is read next; results come from the records.

    source: the rank of the step whose own values and buffers this rank takes: that of its number modulo the
    old world size. leaves: the tensors of the ranks that were read, by each of their names.
    """

    def __init__(self, record: StepRecord, rank: int, world: int, small_bytes: int = _SMALL_BYTES) -> None:
        self.record, self._rank, self._world = record, rank, world
        self.source = rank % record.world
        self.leaves: dict[str, StepTensor] = {}
        self._known_ranks: set[int] = set()
        small = sum(part.num_bytes for part in record.manifest.parts) <= small_bytes
        self.read(range(record.world) if small else [self.source])

    def __getitem__(self, rank: int) -> RankRecord:
        """Return a rank's record; reads it if needed."""
        self.read([rank])
        return self.record.rank(rank)

    @property
    def known(self) -> list[int]:
        """The ranks that were read."""
        return sorted(self._known_ranks)

    @property
    def is_complete(self) -> bool:
        return len(self._known_ranks) == self.record.world

    def read_apart(self) -> None:
        """Read ranks that differ in each dimension of any mesh: a value that depends on the place in the mesh
        differs on some of them."""
        self.read([0, *(1 << exponent for exponent in range((self.record.world - 1).bit_length()))])

    def read(self, ranks: Iterable[int]) -> None:
        """Read these ranks, unless they are known."""
        new = set(ranks) - self._known_ranks
        for rank in sorted(new):
            self._add(rank)
        self._known_ranks |= new

    def _add(self, rank: int) -> None:
        regions: dict[TensorSlice, TensorSlice] = {}  # many leaves of a rank share one object
        mine = self.record.rank(rank)
        for each in self.record.written(rank):
            region = TensorSlice.of(each.leaf)
            region = regions.setdefault(region, region)
            for tensor in self._of(each.leaf):
                tensor.add(Piece(region, rank, *each))
        for writer, leaf, _ in mine.elsewhere():
            for tensor in self._of(leaf):
                tensor.add_replica(rank, leaf, writer)
        for leaf in (leaf for table in mine.replicas for leaf in table.leaves):
            for tensor in self._of(leaf):
                tensor.declare()

    def _of(self, leaf: Leaf) -> Iterator[StepTensor]:
        for name in (leaf.name, *leaf.aliases):
            if name not in self.leaves:
                self.leaves[name] = StepTensor(name)
            yield self.leaves[name]

    def find(self, wanted: Sequence[Wanted]) -> list[Parts]:
        """Return the pieces that make up each of these slices of existing tensors. Raises MismatchError if
        they do not."""
        open_ = list(range(len(wanted)))
        found: list[Parts] = [()] * len(wanted)
        while open_:
            left = []
            for index in open_:
                name, region = wanted[index]
                parts = self.leaves[name].parts_of(region, self._rank)
                if parts is None:
                    left.append(index)
                else:
                    found[index] = parts
            if left and self.is_complete:
                name, region = wanted[left[0]]
                raise self.leaves[name].holes(region)
            if left:
                self._read_more(self._guesses(wanted[index]) for index in left)
            open_ = left
        return found

    def look_for(self, names: Collection[str]) -> None:
        """Read ranks until `leaves` has all these tensors, or all ranks are known."""
        while not self.is_complete and not self.leaves.keys() >= set(names):
            # Ranks that may have a tensor without a slice on a known rank: other stages of a pipeline.
            world = self.record.world
            self._read_more([[self._rank * world // self._world, *_spread(world)]])

    def _read_more(self, guesses: Iterable[Iterable[int]]) -> None:
        """Read the first unknown rank of each of the guesses; if all are known, a few of all ranks."""
        new: set[int] = set()
        for each in guesses:
            rank = next((rank for rank in each if rank not in self._known_ranks), None)
            if rank is not None:
                new.add(rank)
        if not new:
            order = (rank for rank in _spread(self.record.world) if rank not in self._known_ranks)
            new.update(rank for rank, _ in zip(order, range(_AT_ONCE), strict=False))
        self.read(new)

    def _guesses(self, wanted: Wanted) -> Iterator[int]:
        """Yield ranks that may have the missing elements of a slice, if ranks and slices go together as on a
        mesh: in equal steps from one slice to the next."""
        name, region = wanted
        tensor, world = self.leaves[name], self.record.world
        yield from tensor.writers(region)
        held = [(rank, each) for rank, each in tensor.slices() if each.num_elements]
        missing = tensor.missing(region)
        if missing is None or not held:
            return
        sizes = tuple(max(column) for column in zip(*(each.shape for _, each in held), strict=True))
        places = {_place(each.start, sizes): rank for rank, each in reversed(held)}
        goal = _place(missing, sizes)
        for place in sorted(
            places, key=lambda each: sum(abs(a - b) for a, b in zip(each, goal, strict=True))
        ):
            yield from _guesses_from(places, place, goal, world)


def _place(start: Index, sizes: Index) -> Index:
    """Return the number of a slice in each dimension if all slices have these sizes."""
    return tuple(at // size for at, size in zip(start, sizes, strict=True))


def _guesses_from(places: dict[Index, int], place: Index, goal: Index, world: int) -> Iterator[int]:
    """Yield ranks that may have the slice at `goal`, extrapolated from the rank of the one at `place` by the
    known steps; along dimensions without a known step, in powers of two."""
    guess, unknown = float(places[place]), 0
    for dimension, (here, there) in enumerate(zip(place, goal, strict=True)):
        if here != there:
            step = _step(places, place, dimension)
            guess += 0 if step is None else step * (there - here)
            unknown += there - here if step is None else 0
    stride = 1
    while stride < world:
        rank = round(guess) + unknown * stride
        if 0 <= rank < world:
            yield rank
        stride = 2 * stride if unknown else world


def _step(places: dict[Index, int], place: Index, dimension: int) -> float | None:
    """Return the mean difference of ranks from one slice to the next in a dimension, up to the farthest known
    slice that differs in this dimension only; or None."""
    others = [
        (each[dimension] - place[dimension], rank - places[place])
        for each, rank in places.items()
        if each != place
        and (*each[:dimension], *each[dimension + 1 :]) == (*place[:dimension], *place[dimension + 1 :])
    ]
    if not others:
        return None
    slices, ranks = max(others, key=lambda other: abs(other[0]))
    return ranks / slices


def _spread(count: int) -> Iterator[int]:
    """Yield all numbers below `count`; each pass halves the distance between those already given."""
    stride = 1 << max(count - 1, 1).bit_length()
    yield 0
    while stride > 1:
        stride //= 2
        yield from range(stride, count, 2 * stride)
