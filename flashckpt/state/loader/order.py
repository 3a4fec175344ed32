"""How the ranks divide the samples of an epoch.

Data-parallel rank and size are those of the sampler: ranks that get the same data (tensor or pipeline
parallel) have the same numbers. torch's samplers give rank r of W the entries r, r + W, … of one order, and
Accelerate's give it the batches r, r + W, …: in both, after k batches of B samples on each rank, the first
k·B·W entries were used. The rest can be divided among any number of ranks without a repeated or missing
sample, except for the padding or dropping at the end, which is torch's.

Owns this arithmetic and the reading of samplers (torch's, Accelerate's, torchdata's). Draws only from copies
of generators, and never changes a loader.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from flashckpt.state import rng

_T = TypeVar("_T")


def checked_fields(kind: type[_T], saved: Any) -> _T:
    """Return an instance of a class from its fields. Raises ValueError unless names and types match."""
    hints = _hints(kind)  # type: ignore[arg-type]
    if not isinstance(saved, dict) or saved.keys() != hints.keys():
        raise ValueError(f"its {kind.__name__.lower()} has other fields")
    for name, types in hints.items():
        if types is not None and type(saved[name]) not in types:
            raise ValueError(f"{name} of its {kind.__name__.lower()} is a {type(saved[name]).__name__}")
    return kind(**saved)


@functools.cache
def _hints(kind: type) -> dict[str, set[Any] | None]:
    """Return the types of each field of a class; None for any type."""
    hints = get_type_hints(kind)
    unions = {name: get_args(h) if isinstance(h, UnionType) else (h,) for name, h in hints.items()}
    return {
        name: None if Any in types else {get_origin(each) or each for each in types}
        for name, types in unions.items()
    }


BY_SAMPLES, BY_BATCHES = "samples", "batches"


@dataclass(frozen=True)
class Order:
    """The order of an epoch's samples, the same on all ranks.

    how: "sequential"; "seeded" (a permutation by `seed`); or "drawn" (a RandomSampler's permutation, from the
        generator states before its first index).
    length: the number of samples.
    seed: an int, or a generator's state.
    sampler: for "drawn", the path of the sampler's own generator; None for the global one.
    """

    how: str
    length: int
    seed: int | bytes | None = None
    sampler: str | None = None

    def indices(self) -> Sequence[int]:
        """Return the whole order. Not for "drawn" (see `settled`)."""
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

    def settled(self, at_draw: Mapping[str, Any]) -> Order:
        """Return the same order as "seeded", independent of the generators. at_draw: the generator states
        before the first index was drawn. Raises DamagedError for an invalid generator state."""
        if self.how != "drawn":
            return self
        is_own, generator = self.sampler is not None, torch.Generator()
        state = at_draw["own"].get(self.sampler) if is_own else at_draw["global"].get("torch")
        rng.restore_one(generator, state)
        if is_own:
            return Order("seeded", self.length, state)
        # As torch's RandomSampler draws its seed.
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        return Order("seeded", self.length, int(drawn))


@dataclass(frozen=True)
class Share:
    """This rank's part of an epoch.

    ranks, rank: the data-parallel size and rank; 1 and 0 if nothing divides the samples.
    batch_size: None if unknown code makes the batches.
    even: drop samples that cannot be divided evenly (`drop_last` of the sampler) instead of padding.
    whole: drop a batch that is not full (`drop_last` of the loader).
    order: None if unknown.
    samples: the samples of the epoch that all ranks together used before the current division.
    batches: the batches of the epoch that each rank used before the current division.
    by: the entries of the order that ranks take in turn: single samples, or batches of consecutive samples.
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
        """Return plain values, for `read`."""
        # Not by `asdict`, which takes longer than all random numbers of a position.
        return {**vars(self), "order": None if self.order is None else dict(vars(self.order))}

    @classmethod
    def read(cls, saved: Any) -> Share | None:
        """Return the share from the result of `value`, or None for None. Raises ValueError for other
        values."""
        if saved is None:
            return None
        order = saved.get("order") if isinstance(saved, dict) else None
        if order is not None:
            saved = {**saved, "order": checked_fields(Order, order)}
        share = checked_fields(cls, saved)
        if not share._is_sound():
            raise ValueError(f"its share is invalid: {share}")
        return share

    def _is_sound(self) -> bool:
        order = self.order
        if min(self.ranks, self.rank, self.samples, self.batches) < 0 or self.rank >= self.ranks:
            return False
        if self.batch_size is not None and self.batch_size < 1:
            return False
        if self.by != BY_SAMPLES and (self.by != BY_BATCHES or self.batch_size is None):
            return False
        if order is None:
            return self.samples == 0 == self.batches
        known = order.how in ("sequential", "drawn") or (order.how == "seeded" and order.seed is not None)
        return known and order.length >= 0

    @property
    def can_be_divided(self) -> bool:
        """Whether the samples used after a number of batches are known."""
        return self.order is not None and self.batch_size is not None

    def divides_as(self, other: Share) -> bool:
        """Whether both have the same entries of an order, in the same batches."""
        mine, its = ((s.ranks, s.rank, s.batch_size, s.even, s.by) for s in (self, other))
        return mine == its

    def given(self, batches_taken: int) -> int:
        """Return the samples of the epoch that all ranks have used after this many batches on each."""
        assert self.order is not None
        assert self.batch_size is not None
        given = self.samples + (batches_taken - self.batches) * self.batch_size * self.ranks
        return min(given, self.order.length)

    def remaining_after(self, then: Share, batches_taken: int) -> Share:
        """Return this rank's share of the samples that `then` has left after this many batches."""
        return replace(self, order=then.order, samples=then.given(batches_taken), batches=batches_taken)

    @property
    def own_samples(self) -> int:
        """The number of this rank's samples since the current division: the same on all ranks."""
        assert self.order is not None
        left = max(0, self.order.length - self.samples)
        if self.by == BY_SAMPLES:
            return left // self.ranks if self.even else math.ceil(left / self.ranks)
        assert self.batch_size is not None
        a_round = self.batch_size * self.ranks
        return (left // a_round if self.whole else math.ceil(left / a_round)) * self.batch_size

    def own_indices(self) -> list[int]:
        """Return this rank's samples since the current division. Pads with samples from the beginning of the
        order, as torch's and Accelerate's samplers do."""
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
        """The batches of the epoch on this rank, including those before the current division."""
        assert self.batch_size is not None
        own, size = self.own_samples, self.batch_size
        return self.batches + (own // size if self.whole else math.ceil(own / size))


class RemainingSampler(Sampler[int]):
    """One rank's samples of the rest of an epoch's order."""

    def __init__(self, share: Share) -> None:
        self._share = share

    def __iter__(self) -> Iterator[int]:
        return iter(self._share.own_indices())

    def __len__(self) -> int:
        return self._share.own_samples


def share_of(loader: Any, generators: rng.Generators | None = None) -> Share | None:
    """Return how a loader divides samples among ranks: from its sampler, or from another part of it that has
    `num_replicas` (or `world_size`) and `rank`; None if no part has. generators: those of its parts."""
    batches = getattr(loader, "batch_sampler", None)
    if _is_of_accelerate("BatchSamplerShard", batches):
        return _share_of_shard(batches, generators)
    batch_size = getattr(batches, "batch_size", None) if batches is not None else 1
    if batches is None or _is_batch_sampler(batches):
        sampler = getattr(loader if batches is None else batches, "sampler", None)
        whole = bool(getattr(batches, "drop_last", False))
        found = _share_of_sampler(sampler, generators)
        if found is not None:
            return replace(found, batch_size=batch_size, whole=whole)
    size = batch_size if type(batch_size) is int and batches is not None else None
    dataset = getattr(loader, "dataset", None)
    parts = (batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None), dataset)
    for part in (*parts, getattr(dataset, "_distributed", None), loader):
        ranks, rank = _number(part, "num_replicas", "world_size"), _number(part, "rank")
        if ranks is not None and rank is not None and 0 <= rank < ranks:
            return Share(ranks, rank, batch_size=size)
    return None


def _share_of_shard(shard: Any, generators: rng.Generators | None) -> Share:
    """Return the share of Accelerate's BatchSamplerShard, which gives each rank whole batches, or pieces of
    them (`split_batches`), of a sampler that is the same on all ranks: round k has the entries k·B·W to
    (k + 1)·B·W of its order, rank by rank."""
    ranks, rank, size = shard.num_processes, shard.process_index, shard.batch_size
    batches, found = shard.batch_sampler, None
    if type(size) is int and _is_batch_sampler(batches) and (shard.even_batches or shard.drop_last):
        size = size // ranks if shard.split_batches else size
        found = _share_of_sampler(batches.sampler, generators)
    if found is None or found.ranks > 1:
        return Share(ranks, rank)  # the order is unknown, or ranks have unequal parts of it
    whole = bool(shard.drop_last)
    return replace(found, ranks=ranks, rank=rank, batch_size=size, whole=whole, by=BY_BATCHES)


def _is_of_accelerate(name: str, value: object) -> bool:
    """Whether a value has the `__iter__` of this class of Accelerate. Does not import Accelerate."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), name, None)
    return kind is not None and isinstance(value, kind) and type(value).__iter__ is kind.__iter__


def _is_batch_sampler(batches: object) -> bool:
    # torchdata's `__iter__` is equivalent to torch's.
    torchdatas = getattr(
        sys.modules.get("torchdata.stateful_dataloader.sampler"), "BatchSampler", BatchSampler
    )
    known = (BatchSampler.__iter__, torchdatas.__iter__)
    return isinstance(batches, BatchSampler) and type(batches).__iter__ in known


def _share_of_sampler(sampler: Any, generators: rng.Generators | None) -> Share | None:
    """Return the share of a sampler whose order is known; None for others."""
    if isinstance(sampler, DistributedSampler):
        order: Order | None = None
        if type(sampler).__iter__ is DistributedSampler.__iter__:
            length = len(sampler.dataset)  # type: ignore[arg-type]
            seed = sampler.seed + sampler.epoch
            order = Order("seeded", length, seed) if sampler.shuffle else Order("sequential", length)
        return Share(sampler.num_replicas, sampler.rank, even=sampler.drop_last, order=order)
    if _is_of_accelerate("SeedableRandomSampler", sampler):
        length, seed = len(sampler.data_source), sampler.initial_seed + sampler.epoch
        known = not sampler.replacement and sampler.num_samples == length
        return Share(1, 0, order=Order("seeded", length, seed) if known else None)
    if type(sampler) is SequentialSampler:
        return Share(1, 0, order=Order("sequential", len(sampler.data_source)))
    if type(sampler) is not RandomSampler:
        return None
    if sampler.replacement or sampler.num_samples != len(sampler.data_source):
        return Share(1, 0)
    own = sampler.generator
    path = generators.path_of(own) if generators is not None and own is not None else None
    is_saved = own is None or path is not None
    return Share(1, 0, order=Order("drawn", len(sampler.data_source), sampler=path) if is_saved else None)


def _number(part: object, *names: str) -> int | None:
    values = (getattr(part, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)
