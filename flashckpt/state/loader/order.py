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
from dataclasses import dataclass, is_dataclass, replace
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from flashckpt.state import rng

_T = TypeVar("_T")


def checked_fields(kind: type[_T], saved: Any) -> _T:
    """Return an instance of a class from its fields, in which other dataclasses are dicts. Raises ValueError
    unless names and types match."""
    hints = _hints(kind)  # type: ignore[arg-type]
    if not isinstance(saved, dict) or saved.keys() != hints.keys():
        raise ValueError(f"its {kind.__name__.lower()} has other fields")
    fields = dict(saved)
    for name, types in hints.items():
        inner: Any = next(filter(is_dataclass, types), None)
        if inner is not None and isinstance(saved[name], dict):
            fields[name] = checked_fields(inner, saved[name])
        elif Any not in types and type(saved[name]) not in types:
            raise ValueError(f"{name} of its {kind.__name__.lower()} is a {type(saved[name]).__name__}")
    return kind(**fields)


@functools.cache
def _hints(kind: type) -> dict[str, set[Any]]:
    """Return the types of each field of a class."""
    hints = get_type_hints(kind)
    unions = {name: get_args(h) if isinstance(h, UnionType) else (h,) for name, h in hints.items()}
    return {name: {get_origin(each) or each for each in types} for name, types in unions.items()}


GLOBAL = ""
"""In the place of a generator's path: torch's global generator."""


@dataclass(frozen=True)
class Order:
    """The order of an epoch's samples, the same on all ranks: sequential, or a permutation.

    length: the number of samples.
    seed: of a permutation: an int, or a generator's state.
    drawn_by: for the permutation of a RandomSampler, the path of the generator whose state before the first
        index decides it, or GLOBAL.
    """

    length: int
    seed: int | bytes | None = None
    drawn_by: str | None = None

    def indices(self) -> Sequence[int]:
        """Return the whole order. Not for one that is drawn (see `settled`)."""
        assert self.drawn_by is None
        if self.seed is None:
            return range(self.length)
        generator = torch.Generator()
        if isinstance(self.seed, bytes):
            rng.restore_one(generator, self.seed)
        else:
            generator.manual_seed(self.seed)
        drawn: list[int] = torch.randperm(self.length, generator=generator, device="cpu").tolist()
        return drawn

    def settled(self, at_draw: Mapping[str, Any]) -> Order:
        """Return the same order, independent of the generators. at_draw: the generator states before the
        first index was drawn. Raises DamagedError for an invalid generator state."""
        if self.drawn_by is None:
            return self
        state, generator = drawing_state(self.drawn_by, at_draw), torch.Generator()
        rng.restore_one(generator, state)
        if self.drawn_by != GLOBAL:
            return Order(self.length, state)
        # As torch's RandomSampler draws its seed.
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        return Order(self.length, int(drawn))


def drawing_state(drawn_by: str, states: Mapping[str, Any]) -> Any:
    """Return the state of the generator `Order.drawn_by` in the result of `Generators.capture_all`."""
    return states["global"].get("torch") if drawn_by == GLOBAL else states["own"].get(drawn_by)


@dataclass(frozen=True)
class Share:
    """This rank's part of an epoch.

    ranks, rank: the data-parallel size and rank; 1 and 0 if nothing divides the samples.
    batch_size: None if unknown code makes the batches.
    even: drop samples that cannot be divided evenly (`drop_last` of torch's sampler, or of the loader that
        Accelerate divides) instead of padding.
    whole: drop a batch that is not full (`drop_last` of the loader).
    order: None if unknown.
    samples: the samples of the epoch that all ranks together used before the current division.
    batches: the batches of the epoch that each rank used before the current division.
    chunk: the consecutive entries of the order that ranks take in turn: 1, or those of a batch.
    """

    ranks: int
    rank: int
    batch_size: int | None = None
    even: bool = False
    whole: bool = False
    order: Order | None = None
    samples: int = 0
    batches: int = 0
    chunk: int = 1

    def value(self) -> dict[str, Any]:
        """Return plain values, for `checked_fields`."""
        # Not by `asdict`, which takes longer than all random numbers of a position.
        return {**vars(self), "order": None if self.order is None else dict(vars(self.order))}

    def __post_init__(self) -> None:
        """Raise ValueError if a field of a saved share is invalid."""
        is_sound = (
            0 <= self.rank < self.ranks
            and (self.batch_size is None or self.batch_size > 0)
            and self.chunk in (1, self.batch_size)
            and min(self.samples, self.batches) >= 0
            and (self.samples == 0 == self.batches if self.order is None else self.order.length >= 0)
        )
        if not is_sound:
            raise ValueError(f"its share is invalid: {self}")

    def can_follow(self, then: Share) -> bool:
        """Whether this rank can have its share of what `then` has left: of as many samples, in a known
        order."""
        known = [s.order.length for s in (self, then) if s.order is not None and s.batch_size is not None]
        return len(known) == 2 and known[0] == known[1]

    def divides_as(self, other: Share) -> bool:
        """Whether both have the same entries of an order, in the same batches."""
        mine, its = ((s.ranks, s.rank, s.batch_size, s.even, s.chunk) for s in (self, other))
        return mine == its

    def given(self, batches_taken: int) -> int:
        """Return the samples of the epoch that all ranks have used after this many batches on each."""
        assert self.order is not None
        assert self.batch_size is not None
        given = self.samples + (batches_taken - self.batches) * self.batch_size * self.ranks
        return min(given, self.order.length)

    def remaining_after(
        self, then: Share, batches_taken: int, at_draw: Mapping[str, Any] | None = None
    ) -> Share:
        """Return this rank's share of the samples that `then` has left after this many batches. at_draw: the
        generator states before the first index of its order was drawn."""
        order = then.order if then.order is None or at_draw is None else then.order.settled(at_draw)
        return replace(self, order=order, samples=then.given(batches_taken), batches=batches_taken)

    @property
    def own_samples(self) -> int:
        """The number of this rank's samples since the current division: the same on all ranks."""
        assert self.order is not None
        left = max(0, self.order.length - self.samples)
        a_round = self.chunk * self.ranks
        return (left // a_round if self.even else math.ceil(left / a_round)) * self.chunk

    def own_indices(self) -> list[int]:
        """Return this rank's samples since the current division. Pads with samples from the beginning of the
        order, as torch's and Accelerate's samplers do."""
        assert self.order is not None
        indices, length, chunk = self.order.indices(), self.order.length, self.chunk
        numbers = (
            self.samples + (number // chunk * self.ranks + self.rank) * chunk + number % chunk
            for number in range(self.own_samples)
        )
        return [indices[number % length] for number in numbers]

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
    size = batch_size if type(batch_size) is int and batch_size > 0 and batches is not None else None
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
    cuts = bool(shard.drop_last)
    return replace(found, ranks=ranks, rank=rank, batch_size=size, even=cuts, whole=cuts, chunk=size)


def _is_of_accelerate(name: str, value: object) -> bool:
    """Whether a value has the `__iter__` of this class of Accelerate. Does not import Accelerate."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), name, None)
    return kind is not None and isinstance(value, kind) and type(value).__iter__ is kind.__iter__


def _is_batch_sampler(batches: object) -> bool:
    return isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__


def _share_of_sampler(sampler: Any, generators: rng.Generators | None) -> Share | None:
    """Return the share of a sampler whose order is known; None for others."""
    order = None
    if isinstance(sampler, DistributedSampler):
        if type(sampler).__iter__ is DistributedSampler.__iter__:
            seed = sampler.seed + sampler.epoch if sampler.shuffle else None
            order = Order(len(sampler.dataset), seed)  # type: ignore[arg-type]
        return Share(sampler.num_replicas, sampler.rank, even=sampler.drop_last, order=order)
    if type(sampler) is SequentialSampler:
        return Share(1, 0, order=Order(len(sampler.data_source)))
    is_seeded = _is_of_accelerate("SeedableRandomSampler", sampler)
    if type(sampler) is not RandomSampler and not is_seeded:
        return None
    length, own = len(sampler.data_source), sampler.generator
    if sampler.replacement or sampler.num_samples != length:
        pass  # not each sample once
    elif is_seeded:
        order = Order(length, sampler.initial_seed + sampler.epoch)
    elif own is None:
        order = Order(length, drawn_by=GLOBAL)
    elif generators is not None and (path := generators.path_of(own)) is not None:
        order = Order(length, drawn_by=path)
    return Share(1, 0, order=order)


def _number(part: object, *names: str) -> int | None:
    values = (getattr(part, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)
