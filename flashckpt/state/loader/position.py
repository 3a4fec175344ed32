"""A loader's position in plain values: the position that is saved at a boundary, this rank's share of an
epoch's samples, and the change of layout since the position was taken. Whether the live loader can continue
from a position, and the positions of old ranks merged for a rank of another layout.

Data-parallel rank and size are those of the sampler: ranks that get the same data (tensor or pipeline
parallel) have the same numbers. torch's samplers give rank r of W the entries r, r + W, … of one order, and
Accelerate's give it the batches r, r + W, …: in both, after k batches of B samples on each rank, the first
k·B·W entries were used. The rest can be divided among any number of ranks without a repeated or missing
sample, except for the padding or dropping at the end, which is torch's.

Owns this arithmetic and the reading of samplers (torch's, Accelerate's, torchdata's). Draws only from copies
of generators, and never changes a loader.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from flashckpt.errors import DamagedError, MismatchError
from flashckpt.format.typed import encode_json
from flashckpt.state import rng

log = logging.getLogger(__name__)

_EXPLAINED = {
    "dataloader": "a torch DataLoader",
    "stateful": "a loader with its own state",
    "replayed": "an iterable that is replayed",
    "received": "a loader from which the first rank draws for all",
}


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


BY_SAMPLES, BY_BATCHES, BY_BATCHES_UNPADDED = "samples", "batches", "batches, unpadded"


@dataclass(frozen=True)
class Order:
    """The order of an epoch's samples, the same on all ranks.

    how: "sequential"; "seeded" (a permutation by `seed`); or "drawn" (a RandomSampler's permutation, from the
        generator states at the epoch's start).
    length: the number of samples.
    seed: an int, or a generator's state.
    sampler, loader: for "drawn", the paths of the sampler's and the loader's own generators; None for the
        global generator.
    """

    how: str
    length: int
    seed: int | bytes | None = None
    sampler: str | None = None
    loader: str | None = None

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

    def settled(self, start: Mapping[str, Any], *, base_seed: bool) -> Order:
        """Return the same order as "seeded", independent of the generators. start: the generator states at
        the epoch's start. base_seed: the loader has drawn the base seed of its workers first, as it does
        except for persistent workers. Raises DamagedError for an invalid generator state."""
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
    """This rank's part of an epoch.

    ranks, rank: the data-parallel size and rank; 1 and 0 if nothing divides the samples.
    batch_size: None if unknown code makes the batches.
    even: drop samples that cannot be divided evenly (`drop_last` of the sampler) instead of padding.
    whole: drop a batch that is not full (`drop_last` of the loader).
    order: None if unknown.
    samples: the samples of the epoch that all ranks together used before the current division.
    batches: the batches of the epoch that each rank used before the current division.
    by: the entries of the order that ranks take in turn: single samples, or batches of consecutive samples,
        with a padded or unpadded last round.
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
        return asdict(self)

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
        by_batches = self.by in (BY_BATCHES, BY_BATCHES_UNPADDED) and self.batch_size is not None
        if self.by != BY_SAMPLES and not by_batches:
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
        """The number of this rank's samples since the current division: the same on all ranks, unless batches
        are unpadded."""
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


@dataclass(frozen=True)
class LayoutChange:
    """The change of layout since a position was taken. ranks, world: the old and new number of ranks. alike:
    whether the old ranks' loaders had the same order and state, as far as it is known."""

    ranks: int
    world: int
    alike: bool

    @classmethod
    def read(cls, saved: Any) -> LayoutChange | None:
        """Return the change with these attributes, or None for None. Raises ValueError for other values."""
        return None if saved is None else checked_fields(cls, saved)

    @property
    def is_resized(self) -> bool:
        return self.ranks != self.world


class Position(NamedTuple):
    """A loader's position at a boundary.

    kind: the kind of source that saved it.
    epoch: None before the first epoch.
    batches_taken: the batches of this epoch.
    over: the epoch has no more batches.
    length: the batches of an epoch; None if unknown.
    made_of: settings such as the batch size, which must not change; if known, the rank's share ("share") and
        the change of layout ("moved").
    start: generator states at the epoch's start; None if nothing was drawn yet or nothing will be drawn
        again.
    first: generator states before the first batch, if other code may have drawn since the iterator was
        created; else None.
    now: generator states at the boundary.
    parts: the further needs of this kind of source.
    ahead: empty, unless batches were drawn and not yet trained on at the boundary. Then the position is the
        one before the first of them, `now` holds the generator states before its draw, and `ahead` holds the
        states before each further draw, and last those at the boundary.
    has_ended: the loader had returned its last batch at the boundary; it may draw as it ends.
    """

    kind: str
    epoch: int | None
    batches_taken: int
    over: bool
    length: int | None
    made_of: dict[str, Any]
    start: dict[str, Any] | None
    first: dict[str, Any] | None
    now: Any
    parts: dict[str, Any]
    ahead: list[Any]
    has_ended: bool

    def value(self) -> dict[str, Any]:
        """Return plain values, for `read`."""
        made_of, share = self.made_of, self.made_of.get("share")
        if share is not None:
            made_of = {**made_of, "share": share.value()}
        states = [
            each.value() if isinstance(each, rng.Recorded) else each for each in (self.now, *self.ahead)
        ]
        return {**self._asdict(), "made_of": made_of, "now": states[0], "ahead": states[1:]}

    @property
    def boundary(self) -> dict[str, Any]:
        """The generator states at the boundary."""
        states: dict[str, Any] = self.ahead[-1] if self.ahead else self.now
        return states

    @classmethod
    def read(cls, saved: Mapping[str, Any], kind: str, parts: frozenset[str]) -> Position:
        """Check and return a position. Raises MismatchError for a position of another kind of source,
        DamagedError for a malformed one."""
        saved_kind = saved.get("kind")
        if saved_kind in _EXPLAINED and saved_kind != kind:
            raise MismatchError(
                f"The checkpoint was taken with {_EXPLAINED[saved_kind]}, and the loop now has "
                f"{_EXPLAINED[kind]}. The model and the rest of the state were already restored; no batch "
                "was drawn. Start again with the saved kind of loader.",
                differences=(("loader", saved_kind, kind),),
            )
        try:
            position = checked_fields(cls, saved)
            position._check(kind, parts)
        except ValueError as error:
            raise DamagedError(
                f"The loader's position in the checkpoint cannot be read ({error}). No batch was drawn. "
                "Resume from an older step."
            ) from error
        return position

    def _check(self, kind: str, parts: frozenset[str]) -> None:
        """Raise ValueError if a field is invalid."""
        if self.kind != kind or self.batches_taken < 0 or self.parts.keys() != parts:
            raise ValueError(f"{self.batches_taken} batches of kind {self.kind}, with {sorted(self.parts)}")
        Share.read(self.made_of.get("share"))
        LayoutChange.read(self.made_of.get("moved"))
        states = [self.now, *(each for each in (self.start, self.first) if each is not None), *self.ahead]
        if not all(isinstance(each, dict) and each.keys() == {"global", "own"} for each in states):
            raise ValueError("generator states are missing")


def is_at_end(position: Position) -> bool:
    """Whether no batch follows, as far as the loader's length is known."""
    return position.over or (position.length is not None and position.batches_taken >= position.length)


# The samplers of the live loader


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
        return _share_of_shard(batches, loader, generators)
    batch_size = getattr(batches, "batch_size", None) if batches is not None else 1
    if batches is None or _is_batch_sampler(batches):
        sampler = getattr(loader if batches is None else batches, "sampler", None)
        whole = bool(getattr(batches, "drop_last", False))
        found = _share_of_sampler(sampler, loader, generators)
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


def _share_of_shard(shard: Any, loader: Any, generators: rng.Generators | None) -> Share:
    """Return the share of Accelerate's BatchSamplerShard, which gives each rank whole batches, or pieces of
    them (`split_batches`), of a sampler that is the same on all ranks: round k has the entries k·B·W to
    (k + 1)·B·W of its order, rank by rank."""
    ranks, rank, size = shard.num_processes, shard.process_index, shard.batch_size
    batches, found = shard.batch_sampler, None
    if type(size) is int and _is_batch_sampler(batches):
        size = size // ranks if shard.split_batches else size
        found = _share_of_sampler(batches.sampler, loader, generators)
    if found is None or found.ranks > 1:
        return Share(ranks, rank)  # the order is unknown
    by = BY_BATCHES if shard.even_batches else BY_BATCHES_UNPADDED
    return replace(found, ranks=ranks, rank=rank, batch_size=size, whole=bool(shard.drop_last), by=by)


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


def _share_of_sampler(sampler: Any, loader: Any, generators: rng.Generators | None) -> Share | None:
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
    paths = [_path_of(generators, each) for each in (sampler.generator, getattr(loader, "generator", None))]
    known = None not in paths
    drawn = Order("drawn", len(sampler.data_source), None, *(path or None for path in paths))
    return Share(1, 0, order=drawn if known else None)


def _path_of(generators: rng.Generators | None, generator: object) -> str | None:
    """Return the path of a generator; "" for no own generator; None if its state is not saved."""
    if generator is None:
        return ""
    return generators.path_of(generator) if generators is not None else None


def _number(part: object, *names: str) -> int | None:
    values = (getattr(part, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)


# Continuing from a position


@dataclass(frozen=True)
class LiveLoader:
    """The facts of a loader that decide whether it can continue from a position.

    name: its class.
    share: its share of a whole epoch.
    divides: it can continue with any order of samples.
    is_global: its position means the same on each rank, for any number of ranks.
    """

    name: str
    share: Share | None
    divides: bool
    is_global: bool

    def keeps(self, position: Position) -> bool:
        """Whether the state in a position (generators inside workers, a loader's own state) belongs to this
        rank."""
        then, moved = _read(position)
        if then is not None and self.share is not None:
            return (then.ranks, then.rank) == (self.share.ranks, self.share.rank)
        return moved is None or not moved.is_resized or self.is_global

    def continue_from(self, position: Position) -> tuple[Share | None, bool]:
        """Return the share with which the loader continues in the middle of an epoch, and whether the rest of
        the epoch is divided again. Raises MismatchError if samples would be repeated or skipped."""
        (then, moved), now = _read(position), self.share
        resized = moved is not None and moved.is_resized
        if then is not None and now is not None:
            if then.divides_as(now) and (then.batches or then.order == now.order):
                return self._as_before(replace(then, whole=now.whole), resized), False
            if then.ranks == now.ranks == 1 and not then.batches:
                return self._as_before(now, resized), False
            if self.divides and _is_one_order(then, now):
                return now.remaining_after(then, position.batches_taken), True
            if (then.ranks, then.rank) == (now.ranks, now.rank) and not then.batches and not resized:
                return now, False  # Source._check warns of differences
        elif (then is None or not then.batches) and self._may_continue(moved):
            return now, False
        raise self._refused(position, then, moved)

    def _as_before(self, share: Share, resized: bool) -> Share:
        if resized and share.ranks == 1:
            log.warning(
                "%s does not divide its data among the ranks (it has no DistributedSampler): each rank reads "
                "all data, and a new rank continues at the batch and in the order of an old rank.",
                self.name,
            )
        return share

    def _may_continue(self, moved: LayoutChange | None) -> bool:
        """Whether a loader may continue although the ranks' parts of the data are unknown."""
        if moved is None or (self.is_global and moved.alike):
            return True
        if not moved.is_resized:
            log.warning(
                "Not exact if the data are divided in another way than before: the checkpoint has another "
                "layout of ranks, and %s does not name its part of the data (by num_replicas and rank).",
                self.name,
            )
        return not moved.is_resized

    def _refused(self, position: Position, then: Share | None, moved: LayoutChange | None) -> MismatchError:
        before = _shown(then, None if moved is None else moved.ranks)
        here = _shown(self.share, None if moved is None else moved.world)
        return MismatchError(
            f"The checkpoint was taken after {position.batches_taken} batches of an epoch, with the data "
            f"divided among {before}, and {self.name} divides them among {here}. The rest cannot be divided "
            "again: samples would be repeated or skipped. The model and all other state were restored; no "
            "batch was drawn. Resume with the former ranks and data, or from a step at an epoch's end "
            "(flashckpt branch). A DataLoader with torch's DistributedSampler, or with Accelerate's, resumes "
            "on any number of ranks; a loader whose position means the same on each rank sets "
            "position_is_global = True.",
            differences=(("loader", before, here),),
        )


def _read(position: Position) -> tuple[Share | None, LayoutChange | None]:
    made_of = position.made_of
    return Share.read(made_of.get("share")), LayoutChange.read(made_of.get("moved"))


def says_global(loader: object) -> bool:
    """Whether a part of the loader has position_is_global = True."""
    names = ("dataset", "sampler", "batch_sampler")
    parts = (loader, *(getattr(loader, name, None) for name in names))
    return any(getattr(part, "position_is_global", False) is True for part in parts)


def _is_one_order(then: Share, now: Share) -> bool:
    lengths = [s.order.length for s in (then, now) if s.order is not None and s.batch_size is not None]
    return len(lengths) == 2 and lengths[0] == lengths[1]


def _shown(share: Share | None, world: int | None) -> str:
    if share is None:
        return "an unknown number of ranks" if world is None else f"{world} ranks in an unknown way"
    samples = f" ({share.order.length} samples)" if share.order is not None else ""
    return f"{share.ranks} data-parallel rank{'s' if share.ranks > 1 else ''}{samples}"


# The saved progress of old ranks, merged for a rank of another layout
#
# A rank that resumes a run on another number of ranks, or on another mesh, has no values of its own. It gets
# those of one old rank, after a comparison with the other ranks: all must be at the same point of the epoch.
# The loader's sampler divides the rest of the epoch when the loop begins.


_SAME = ("step", "epoch", "has_ended", "open", "iterated", "taps", "to_skip")


def merged_progress(
    values: Mapping[int, Mapping[str, Any]], rank: int, world: int, old_world: int
) -> dict[str, Any]:
    """Return the progress of `rank` in another layout, of `world` ranks.

    values: old rank -> progress: of the rank with this number, or with this number modulo `old_world`, and of
    any other old ranks, which are compared (`goes_by_others`). Raises MismatchError if the old ranks are at
    different points, DamagedError if a progress cannot be read.
    """
    try:
        return _merged_progress(values, rank, world, old_world)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise DamagedError(
            f"The saved progress of the ranks cannot be read ({error!r}). Nothing was loaded. Resume from an "
            "older step."
        ) from error


def goes_by_others(progress: Mapping[str, Any]) -> bool:
    """Whether a merge needs the progress of other ranks, too: for a loader that draws its order or has its
    own state, which may differ among ranks."""
    try:
        positions = [entry["position"] for entry in progress["sources"]]
        return any("state" in each["parts"] or _is_drawn(each["made_of"].get("share")) for each in positions)
    except (KeyError, TypeError, AttributeError):
        return True  # merged_progress raises for it


def merged_rng(values: Mapping[int, Mapping[str, Any]], rank: int, old_world: int) -> dict[str, Any]:
    """Return the global generator states of `rank` in a new layout: those of the old rank with its number. A
    new rank gets each state that all old ranks in `values` share; where they differ, it gets a state derived
    from an old rank's state and its own number."""
    own = dict(values[_source_rank(values, rank, old_world)])
    if rank in values:
        return own
    return {
        name: state
        if all(each.get(name) == state for each in values.values())
        else _derived(name, state, rank)
        for name, state in own.items()
    }


def _source_rank(values: Mapping[int, Any], rank: int, old_world: int) -> int:
    """Return the old rank whose values a new rank gets: the one with its number, or an evenly chosen one."""
    source = rank % old_world
    return source if source in values else sorted(values)[rank % len(values)]


def _merged_progress(
    values: Mapping[int, Mapping[str, Any]], rank: int, world: int, old_world: int
) -> dict[str, Any]:
    source = _source_rank(values, rank, old_world)
    merged: dict[str, Any] = copy.deepcopy(dict(values[source]))
    for other, value in values.items():
        _check_same(source, merged, other, value, _SAME)
    for entry in merged["sources"]:
        position = entry["position"]
        found = {
            other: each["position"]
            for other, value in values.items()
            for each in value["sources"]
            if each["name"] == entry["name"]
        }
        if entry["name"] in merged["open"]:
            _check_open(source, position, found)
        if rank not in values:
            for number, states in enumerate((position["now"], *position["ahead"])):
                theirs = {r: (each["now"], *each["ahead"])[number] for r, each in found.items()}
                states["global"] = merged_rng(
                    {r: each["global"] for r, each in theirs.items()}, rank, old_world
                )
        made_of = position["made_of"]
        # For a position that moved before and was not resumed since, the first layout counts.
        before = (
            LayoutChange(**made_of["moved"]) if "moved" in made_of else LayoutChange(old_world, world, True)
        )
        alike = before.alike and all(_have_same_order(position, each) for each in found.values())
        made_of["moved"] = asdict(LayoutChange(before.ranks, world, alike))
        share = made_of.get("share")
        if not alike and share is not None and not share["batches"]:
            share["order"] = None  # each rank had an order of its own
    return merged


def _check_open(source: int, position: Mapping[str, Any], found: Mapping[int, Mapping[str, Any]]) -> None:
    share = position["made_of"].get("share")
    for other, its in found.items():
        _check_same(source, position, other, its, ("epoch", "batches_taken"))
        drawn = ({"batches drawn ahead": len(each["ahead"])} for each in (position, its))
        _check_same(source, next(drawn), other, next(drawn), ("batches drawn ahead",))
        its_share = its["made_of"].get("share")
        if share is not None and its_share is not None:
            _check_same(source, share, other, its_share, tuple(share.keys() - {"rank"}))


def _check_same(
    source: int, mine: Mapping[str, Any], other: int, its: Mapping[str, Any], names: tuple[str, ...]
) -> None:
    for name in names:
        if mine[name] != its[name]:
            raise MismatchError(
                f"The ranks of the checkpoint are at different points: {name} is {mine[name]} on rank "
                f"{source} and {its[name]} on rank {other}. Another number of ranks cannot resume it; "
                "nothing was loaded. Resume on the former ranks, or from another step.",
                differences=((name, f"rank {source}: {mine[name]}", f"rank {other}: {its[name]}"),),
            )


def _have_same_order(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two ranks' loaders drew the same order, or have the same state of their own."""
    if "state" in one["parts"]:
        return encode_json(one["parts"]["state"]) == encode_json(other["parts"].get("state"))
    if not _is_drawn(one["made_of"].get("share")) or one["start"] is None or other["start"] is None:
        return True
    return bool(_order_states(one) == _order_states(other))


def _order_states(position: Mapping[str, Any]) -> Any:
    """Return the generator states that determine the order. If the sampler has its own generator, only its
    state: the program may seed the global generators by rank."""
    sampler, start = position["made_of"]["share"]["order"]["sampler"], position["first"] or position["start"]
    return (start["global"]["torch"], start["own"]) if sampler is None else start["own"][sampler]


def _is_drawn(share: Any) -> bool:
    """Whether a loader draws its order from random numbers."""
    return share is not None and share["order"] is not None and share["order"]["how"] == "drawn"


def _derived(name: str, state: Any, rank: int) -> Any:
    """Return a global generator's state, in the form of `rng.capture`, seeded by another rank's state and
    this rank's number."""
    digest = hashlib.blake2b(encode_json([name, state, rank]), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    if name == "python":
        return rng.capture_one(random.Random(seed))
    if name == "numpy":
        return rng.capture_one(np.random.RandomState(seed % 2**32))
    if name == "torch":
        return rng.capture_one(torch.Generator().manual_seed(seed))
    # The state of a device: seed and offset, 8 bytes each. Other forms stay unchanged.
    return [digest + bytes(8) if len(each) == 16 else each for each in state]
