"""The ranks of a committed step, read as they are needed, and the tensors that are known of them so far.

Owns which parts are read: of a small step all of them, of a large one those that have what is asked for,
which are guessed from the boxes that are known. A guess decides only what is read next: what is given was
found in the records. Reads no shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flashckpt.commit.steps import StepRecord, check_has_all, read_step
from flashckpt.format.records import RankRecord
from flashckpt.restore.state_names import full_names
from flashckpt.restore.step_leaves import BoxRegion, Index, Parts, StepFile, StepLeaves, StepTensor

# A step whose parts have no more bytes is read whole: that takes a second or two.
_SMALL_BYTES = 16 << 20
_AT_ONCE = 4

Wanted = tuple[str, BoxRegion]
"""A tensor's name, and the box of it that is wanted."""


class StepRanks:
    """What is known of a step by a rank that goes on from it. `source` is the rank of the step whose own
    things (values, buffers) it takes: that of its number, or where there was none, of its number modulo the
    old world. NoSuchStepError for a step of which this folder has some ranks alone."""

    def __init__(self, record: StepRecord, rank: int, world: int, small_bytes: int = _SMALL_BYTES) -> None:
        check_has_all(record)
        self.record, self._rank, self._world = record, rank, world
        self.source = rank % record.world
        self.leaves = StepLeaves()
        self.renamed: dict[int, dict[str, str]] = {}
        self._records: dict[int, StepRecord] = {}
        self._keep(record)
        small = sum(part.num_bytes for part in record.manifest.parts) <= small_bytes
        self.read(range(record.world) if small else [self.source])

    def __getitem__(self, rank: int) -> RankRecord:
        """What a rank has; read where it was not yet."""
        self.read([rank])
        return self._records[rank].rank(rank)

    @property
    def known(self) -> list[int]:
        """The ranks that have been read."""
        return sorted(self.renamed)

    @property
    def is_complete(self) -> bool:
        return len(self.renamed) == self.record.world

    def read_apart(self) -> None:
        """Know ranks too that are apart in each dimension of any mesh: a value that is not the same on all
        ranks, but goes by their place in it, is not the same on all of these."""
        self.read([0, *(1 << exponent for exponent in range((self.record.world - 1).bit_length()))])

    def read(self, ranks: Iterable[int]) -> None:
        """Know these ranks too."""
        new = set(ranks) - self.renamed.keys()
        if missing := new - self._records.keys():
            record = self.record
            self._keep(read_step(record.store, record.step, record.attempt, missing))
        for rank in sorted(new):
            record = self._records[rank]
            each = record.rank(rank)
            files = [StepFile(path, contents) for path, contents in record.files(rank)]
            self.renamed[rank] = full_names(each)
            self.leaves.add(each, files, self.renamed[rank])

    def _keep(self, record: StepRecord) -> None:
        """In whose parts these ranks are; for most of them nobody will ask."""
        self._records.update((rank.rank, record) for head in record.parts.heads for rank in head.ranks)

    # ---- tensors

    def tensor(self, name: str) -> StepTensor | None:
        """One tensor of the step, None where no rank has it."""
        return self._tensors([name])[0]

    def find(self, wanted: Sequence[Wanted]) -> list[Parts]:
        """The pieces that make up each of these boxes, of tensors that are there. MismatchError where they
        do not."""
        open_ = list(range(len(wanted)))
        found: list[Parts] = [()] * len(wanted)
        while open_:
            left = []
            for index in open_:
                name, region = wanted[index]
                parts = self._known(name, region).parts_of(region, self._rank)
                if parts is None:
                    left.append(index)
                else:
                    found[index] = parts
            if left and self.is_complete:
                name, region = wanted[left[0]]
                raise self._known(name, region).holes(region)
            if left:
                self._read_more(self._guesses(wanted[index]) for index in left)
            open_ = left
        return found

    def tensors(self, names: Sequence[str]) -> list[StepTensor | None]:
        """The same of several, which reads less often."""
        return self._tensors(names)

    def _known(self, name: str, region: BoxRegion) -> StepTensor:
        """A tensor as the box of it that is wanted lies in it."""
        tensor = self.leaves.get(name)
        assert tensor is not None, name
        return tensor.in_dimensions(len(region.shape))

    def _tensors(self, names: Sequence[str]) -> list[StepTensor | None]:
        while not self.is_complete and any(self.leaves.get(name) is None for name in names):
            self._read_more([self._stages()])
        return [self.leaves.get(name) for name in names]

    def _read_more(self, guesses: Iterable[Iterable[int]]) -> None:
        """Read the first of each of the guesses that is not known; where there is none, a few of all."""
        new: set[int] = set()
        for each in guesses:
            rank = next((rank for rank in each if rank not in self.renamed), None)
            if rank is not None:
                new.add(rank)
        if not new:
            order = (rank for rank in _spread(self.record.world) if rank not in self.renamed)
            new.update(rank for rank, _ in zip(order, range(_AT_ONCE), strict=False))
        self.read(new)

    def _stages(self) -> Iterator[int]:
        """Ranks that may have a tensor of which no known rank has anything."""
        world = self.record.world
        yield self._rank * world // self._world
        yield from _spread(world)

    def _guesses(self, wanted: Wanted) -> Iterator[int]:
        """Ranks that may have what is missing of a box, going by how boxes go with ranks among those known:
        as on a mesh, by equal steps from one box to the next."""
        name, region = wanted
        tensor, world = self._known(name, region), self.record.world
        yield from tensor.writers(region)
        held = [(rank, box) for rank, box in tensor.boxes() if box.num_elements]
        missing = tensor.missing(region)
        if missing is None or not held:
            return
        sizes = tuple(max(column) for column in zip(*(box.shape for _, box in held), strict=True))
        places = {_place(box.start, sizes): rank for rank, box in reversed(held)}
        goal = _place(missing, sizes)
        for place in sorted(places, key=lambda each: _distance(each, goal)):
            yield from _beside(places, place, goal, world)


def _place(start: Index, sizes: Index) -> Index:
    """Which box it is, in each dimension, where all have these sizes."""
    return tuple(at // size for at, size in zip(start, sizes, strict=True))


def _distance(one: Index, other: Index) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _beside(places: dict[Index, int], place: Index, goal: Index, world: int) -> Iterator[int]:
    """Which ranks may have the box at `goal`, going from the one at `place` in steps as others are apart; in
    steps of powers of two along a dimension in which none are known to be."""
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
    """By how much the rank grows from one box to the next in a dimension, on average to the farthest known
    one that differs in it alone. None where there is none."""
    others = [
        (each[dimension] - place[dimension], rank - places[place])
        for each, rank in places.items()
        if each != place
        and (*each[:dimension], *each[dimension + 1 :]) == (*place[:dimension], *place[dimension + 1 :])
    ]
    if not others:
        return None
    boxes, ranks = max(others, key=lambda other: abs(other[0]))
    return ranks / boxes


def _spread(count: int) -> Iterator[int]:
    """All numbers below `count`, each step halving the distance between those that were given."""
    stride = 1 << max(count - 1, 1).bit_length()
    yield 0
    while stride > 1:
        stride //= 2
        yield from range(stride, count, 2 * stride)
