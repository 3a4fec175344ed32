"""Where a loader stands, in plain values: the position that is saved at a boundary; which samples of an epoch
it gives, where ranks divide them among themselves; and that it was taken on another layout of ranks.

Data-parallel rank and size are those of the sampler: ranks that share the data (tensor or pipeline parallel)
have one of the same numbers. torch's samplers give rank r of W the entries r, r + W, … of one order, and
Accelerate's give it the batches r, r + W, …: in both, after k batches of B samples on each rank, the first
k·B·W entries were given. What is left of it can be divided among
any number of ranks: no sample is given twice or missed, but for the end's padding or dropping, as torch's.

Owns that arithmetic. Draws nothing but from copies of generators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flashckpt.errors import DamagedError, MismatchError
from flashckpt.state import rng

_EXPLAINED = {
    "dataloader": "a torch DataLoader",
    "stateful": "a loader that keeps its own state",
    "replayed": "an iterable that is replayed",
    "received": "a loader from which the first rank draws for all",
}


BY_SAMPLES, BY_BATCHES, BY_BATCHES_UNPADDED = "samples", "batches", "batches, unpadded"


@dataclass(frozen=True)
class Order:
    """The order of an epoch's samples, the same on all ranks.

    how: "sequential"; "seeded" (a permutation by `seed`: an int, or a generator's state); or "drawn" (a
    RandomSampler's, from the random numbers at the epoch's start: `sampler` and `loader` are the paths of the
    generators that those two own, None for the global one). length: its samples.
    """

    how: str
    length: int
    seed: int | bytes | None = None
    sampler: str | None = None
    loader: str | None = None

    def indices(self) -> Sequence[int]:
        """All of it. Not of one that is "drawn" (see `settled`)."""
        if self.how == "sequential":
            return range(self.length)
        assert self.seed is not None, self.how
        generator = torch.Generator()
        if isinstance(self.seed, bytes):
            rng.restore_one(generator, self.seed)
        else:
            generator.manual_seed(self.seed)
        drawn: list[int] = torch.randperm(self.length, generator=generator, device="cpu").tolist()
        return drawn

    def settled(self, start: Mapping[str, Any], *, base_seed: bool) -> Order:
        """The same order by its seed, whatever becomes of the generators. start: the random numbers at the
        epoch's start. base_seed: the loader drew that of its workers first, as it does but for workers that
        live on. Raises DamagedError where a generator's state is none."""
        if self.how != "drawn":
            return self
        generators: dict[str | None, torch.Generator] = {}
        for path in (None, self.loader, self.sampler):
            generators[path] = torch.Generator()
            state = start["global"].get("torch") if path is None else start["own"].get(path)
            rng.restore_one(generators[path], state)

        def drawn(path: str | None) -> int:
            return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generators[path]))

        if base_seed:
            drawn(self.loader)
        seed = drawn(None) if self.sampler is None else rng.capture_one(generators[self.sampler])
        return Order("seeded", self.length, seed)


@dataclass(frozen=True)
class Share:
    """The part of an epoch that this rank gives.

    ranks, rank: the data-parallel size and rank, 1 and 0 where nothing divides the samples. batch_size: None
    where batches are made by code that is not known. even: what cannot be divided evenly is left out
    (`drop_last` of the sampler), not padded. whole: a batch that is not full is left out (`drop_last` of the
    loader). order: None where it is not known. samples, batches: of the epoch, given by all ranks together,
    and by each of them, before they divided the rest as they do now. by: the entries of the order that ranks
    take in turn: single samples, or batches of consecutive samples, where the last round is padded or not.
    """

    ranks: int
    rank: int
    batch_size: int | None = None
    even: bool = False
    whole: bool = False
    order: Order | None = None
    samples: int = 0
    batches: int = 0
    by: str = BY_SAMPLES

    def value(self) -> dict[str, Any]:
        """Plain values, for `read`."""
        return asdict(self)

    @classmethod
    def read(cls, saved: Any) -> Share | None:
        """What `value` gave, or None for None. Raises ValueError for anything else."""
        if saved is None:
            return None
        try:
            order = None if saved["order"] is None else Order(**saved["order"])
            share = cls(**{**saved, "order": order})
        except (TypeError, KeyError) as error:
            raise ValueError(f"its share cannot be read: {error}") from error
        if not share._is_sound():
            raise ValueError(f"its share cannot be: {share}")
        return share

    def _is_sound(self) -> bool:
        order, counts = self.order, (self.ranks, self.rank, self.samples, self.batches)
        if not all(type(count) is int and count >= 0 for count in counts) or self.rank >= self.ranks:
            return False
        if self.batch_size is not None and (type(self.batch_size) is not int or self.batch_size < 1):
            return False
        if self.by != BY_SAMPLES and (
            self.by not in (BY_BATCHES, BY_BATCHES_UNPADDED) or not self.batch_size
        ):
            return False
        if order is None:
            return self.samples == 0 == self.batches
        by_seed = type(order.seed) in (int, bytes)
        good = order.how == "sequential" or (order.how == "seeded" and by_seed) or order.how == "drawn"
        paths_good = all(path is None or type(path) is str for path in (order.sampler, order.loader))
        return good and paths_good and type(order.length) is int and order.length >= 0

    @property
    def can_be_divided(self) -> bool:
        """Whether it is known which samples were given after so many batches."""
        return self.order is not None and self.batch_size is not None

    def divides_as(self, other: Share) -> bool:
        """Whether both give the same entries of an order, in the same batches."""
        mine, its = ((s.ranks, s.rank, s.batch_size, s.even, s.by) for s in (self, other))
        return mine == its

    def given(self, batches_taken: int) -> int:
        """Samples of the epoch that all ranks have given once each has given so many batches."""
        assert self.order is not None
        assert self.batch_size is not None
        given = self.samples + (batches_taken - self.batches) * self.batch_size * self.ranks
        return min(given, self.order.length)

    def go_on(self, then: Share, batches_taken: int) -> Share:
        """This rank's share of what `then` had left after so many batches."""
        return replace(self, order=then.order, samples=then.given(batches_taken), batches=batches_taken)

    @property
    def own_samples(self) -> int:
        """Samples that this rank gives of what was left when the ranks divided it: as many as each other,
        unless batches are not padded."""
        assert self.order is not None
        left = max(0, self.order.length - self.samples)
        if self.by == BY_SAMPLES:
            return left // self.ranks if self.even else math.ceil(left / self.ranks)
        assert self.batch_size is not None
        rounds, beyond = divmod(left, self.batch_size * self.ranks)
        if not self.whole and self.by == BY_BATCHES_UNPADDED:
            beyond -= self.rank * self.batch_size
            return rounds * self.batch_size + min(max(beyond, 0), self.batch_size)
        return (rounds + (beyond > 0 and not self.whole)) * self.batch_size

    def own_indices(self) -> list[int]:
        """Those samples. Where that takes more than there are, those that the order begins with are given
        once more, as by torch's and Accelerate's samplers."""
        assert self.order is not None
        numbers, size = range(self.own_samples), self.batch_size or 1
        if self.by == BY_SAMPLES:
            entries = [self.samples + self.rank + number * self.ranks for number in numbers]
        else:
            entries = [
                self.samples + (number // size * self.ranks + self.rank) * size + number % size
                for number in numbers
            ]
        indices, length = self.order.indices(), self.order.length
        return [indices[entry % length] for entry in entries]

    @property
    def all_batches(self) -> int:
        """Batches of the epoch on this rank, those before the division included."""
        assert self.batch_size is not None
        own, size = self.own_samples, self.batch_size
        return self.batches + (own // size if self.whole else math.ceil(own / size))


@dataclass(frozen=True)
class Moved:
    """A position that was taken on another layout. ranks, world: how many ranks there were, and are. alike:
    whether the old ranks' loaders gave the same, as far as it can be seen."""

    ranks: int
    world: int
    alike: bool

    @classmethod
    def read(cls, saved: Any) -> Moved | None:
        """None for None. Raises ValueError for anything but the attributes of one."""
        if saved is None:
            return None
        try:
            moved = cls(**saved)
        except TypeError as error:
            raise ValueError(f"it cannot be read from which ranks it is: {error}") from error
        if type(moved.ranks) is not int or type(moved.world) is not int or type(moved.alike) is not bool:
            raise ValueError(f"it cannot be from such ranks: {moved}")
        return moved

    @property
    def is_resized(self) -> bool:
        return self.ranks != self.world


@dataclass(frozen=True)
class Position:
    """Where a loader stands at a boundary.

    kind: which kind of source saved it. epoch: None before the first. batches_taken: of this epoch.
    over: the epoch has no more batches. length: batches of an epoch, None where unknown.
    made_of: batch size and the like, which must not change; and, where they are known, how ranks divide the
    samples ("share"), and that it was taken on another layout of ranks ("moved").
    start: random numbers at the epoch's start, None where nothing was drawn yet or nothing will be redrawn.
    first: those before the first batch, where others may have drawn since the iterator was made; else None.
    now: random numbers at the boundary. parts: what this kind of source needs beside that.
    ahead: empty, unless batches were drawn and not yet trained on at the boundary. Then the position is that
    before the first of them, `now` are the random numbers under which it was drawn, and `ahead` has those
    of each further one, and last those of the boundary. has_ended: the loader had given its last batch at the
    boundary; it may draw random numbers as it ends.
    """

    kind: str
    epoch: int | None
    batches_taken: int
    over: bool
    length: int | None
    made_of: dict[str, Any]
    start: dict[str, Any] | None
    first: dict[str, Any] | None
    now: dict[str, Any]
    parts: dict[str, Any]
    ahead: list[dict[str, Any]]
    has_ended: bool

    @property
    def boundary(self) -> dict[str, Any]:
        """Random numbers at the boundary."""
        return self.ahead[-1] if self.ahead else self.now

    @classmethod
    def read(cls, saved: Mapping[str, Any], kind: str, parts: frozenset[str]) -> Position:
        """Raises MismatchError for a position of another kind of source, DamagedError for a malformed one."""
        saved_kind = saved.get("kind")
        if saved_kind in _EXPLAINED and saved_kind != kind:
            raise MismatchError(
                f"The checkpoint was taken with {_EXPLAINED[saved_kind]}, and the loop now has "
                f"{_EXPLAINED[kind]}. The model and the rest of the state were put back already; no "
                "batch was drawn. Start again with the kind of loader that was saved.",
                differences=(("loader", saved_kind, kind),),
            )
        problem = _problem(saved, parts)
        if saved_kind != kind or problem:
            raise DamagedError(
                f"The loader's position in the checkpoint cannot be read ({problem or 'unknown kind'}). "
                "No batch was drawn. Resume from an older step."
            )
        return cls(**saved)


_TYPES: dict[str, Any] = {
    "kind": str, "epoch": int | None, "batches_taken": int, "over": bool, "length": int | None,
    "made_of": dict, "start": dict | None, "first": dict | None, "now": dict, "parts": dict,
    "ahead": list, "has_ended": bool,
}  # fmt: skip


def _problem(saved: Mapping[str, Any], parts: frozenset[str]) -> str:
    if saved.keys() != _TYPES.keys():
        return f"its keys are {sorted(map(str, saved))}"
    for name, kinds in _TYPES.items():
        if not isinstance(saved[name], kinds):
            return f"{name} is a {type(saved[name]).__name__}"
    if saved["batches_taken"] < 0:
        return f"batches_taken is {saved['batches_taken']}"
    if saved["parts"].keys() != parts:
        return f"its parts are {sorted(map(str, saved['parts']))}"
    try:
        Share.read(saved["made_of"].get("share"))
        Moved.read(saved["made_of"].get("moved"))
    except ValueError as error:
        return str(error)
    all_marks = (saved["now"], saved["start"], saved["first"], *saved["ahead"])
    marks = [mark for mark in all_marks if mark is not None]
    is_whole = all(isinstance(mark, dict) and mark.keys() == {"global", "own"} for mark in marks)
    return "" if is_whole else "random numbers are missing"


def is_at_end(position: Position) -> bool:
    """Whether no batch followed, as far as the loader knew its length."""
    return position.over or (position.length is not None and position.batches_taken >= position.length)
