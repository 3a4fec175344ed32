"""How the live loader divides an epoch among ranks, read from its samplers; whether it can go on from a
position that was saved; and the sampler of what is left of an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from flashckpt.errors import MismatchError
from flashckpt.state import rng
from flashckpt.state.loader.position import BY_BATCHES, BY_BATCHES_UNPADDED, Moved, Order, Position, Share

log = logging.getLogger(__name__)


class Rest(Sampler[int]):
    """What was left of an epoch's order when ranks divided it, for one of them."""

    def __init__(self, share: Share) -> None:
        self._share = share

    def __iter__(self) -> Iterator[int]:
        return iter(self._share.own_indices())

    def __len__(self) -> int:
        return self._share.own_samples


def share_of(loader: Any, generators: rng.Generators | None = None) -> Share | None:
    """How a loader's samples are divided among ranks: as its sampler says, or whatever else of it names
    `num_replicas` (or `world_size`) and `rank`; None where nothing does. generators: those of its parts."""
    batches = getattr(loader, "batch_sampler", None)
    if _is_accelerate_s("BatchSamplerShard", batches):
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
    """Of Accelerate's sampler that gives each rank whole batches, or pieces of them (`split_batches`), of a
    sampler that is the same on all ranks: round k has the entries k·B·W to (k + 1)·B·W of its order, rank by
    rank."""
    ranks, rank, size = shard.num_processes, shard.process_index, shard.batch_size
    batches, found = shard.batch_sampler, None
    if type(size) is int and _is_batch_sampler(batches):
        size = size // ranks if shard.split_batches else size
        found = _share_of_sampler(batches.sampler, loader, generators)
    if found is None or found.ranks > 1:
        return Share(ranks, rank)  # of an order that is not known
    by = BY_BATCHES if shard.even_batches else BY_BATCHES_UNPADDED
    return replace(found, ranks=ranks, rank=rank, batch_size=size, whole=bool(shard.drop_last), by=by)


def _is_accelerate_s(name: str, value: object) -> bool:
    """Whether a value iterates as this class of Accelerate does, which is not imported for it."""
    import sys

    kind = getattr(sys.modules.get("accelerate.data_loader"), name, None)
    return kind is not None and isinstance(value, kind) and type(value).__iter__ is kind.__iter__


def _is_batch_sampler(batches: object) -> bool:
    known = (BatchSampler.__iter__, *_torchdata_s("BatchSampler"))
    return isinstance(batches, BatchSampler) and type(batches).__iter__ in known


def _torchdata_s(name: str) -> list[Any]:
    """torchdata's own `__iter__` of a sampler that gives what torch's gives."""
    import sys

    module = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return [getattr(module, name).__iter__] if hasattr(module, name) else []


def _share_of_sampler(sampler: Any, loader: Any, generators: rng.Generators | None) -> Share | None:
    """Of the samplers of torch whose order is known."""
    if isinstance(sampler, DistributedSampler):
        order: Order | None = None
        if type(sampler).__iter__ is DistributedSampler.__iter__:
            length = len(sampler.dataset)  # type: ignore[arg-type]
            seed = sampler.seed + sampler.epoch
            order = Order("seeded", length, seed) if sampler.shuffle else Order("sequential", length)
        return Share(sampler.num_replicas, sampler.rank, even=sampler.drop_last, order=order)
    if _is_accelerate_s("SeedableRandomSampler", sampler):
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
    """ "" for none of its own; None for one whose state is not saved under a path."""
    if generator is None:
        return ""
    return generators.path_of(generator) if generators is not None else None


def _number(part: object, *names: str) -> int | None:
    values = (getattr(part, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)


# Going on with a position


@dataclass(frozen=True)
class LiveLoader:
    """What a loader is, for a position to go on with.

    name: its class. share: in an epoch of its own. divides: it can be given any order. is_global: the
    position means the same on any rank, of any number of them.
    """

    name: str
    share: Share | None
    divides: bool
    is_global: bool

    def keeps(self, position: Position) -> bool:
        """Whether what a position keeps beside the place in the epoch (the numbers inside workers, a loader's
        own state) is that of the rank which has it now."""
        then, moved = _read(position)
        if then is not None and self.share is not None:
            return (then.ranks, then.rank) == (self.share.ranks, self.share.rank)
        return moved is None or not moved.is_resized or self.is_global

    def goes_on(self, position: Position) -> tuple[Share | None, bool]:
        """How it goes on from a position in the middle of an epoch: its share, and whether that divides anew
        what was left. Raises MismatchError where a sample would be given twice or left out."""
        (then, moved), now = _read(position), self.share
        resized = moved is not None and moved.is_resized
        if then is not None and now is not None:
            if then.divides_as(now) and (then.batches or then.order == now.order):
                return self._as_before(replace(then, whole=now.whole), resized), False
            if then.ranks == now.ranks == 1 and not then.batches:
                return self._as_before(now, resized), False
            if self.divides and _is_one_order(then, now):
                return now.go_on(then, position.batches_taken), True
            if (then.ranks, then.rank) == (now.ranks, now.rank) and not then.batches and not resized:
                return now, False  # what differs is said, as ever
        elif (then is None or not then.batches) and self._may_go_on(moved):
            return now, False
        raise self._refused(position, then, moved)

    def _as_before(self, share: Share, resized: bool) -> Share:
        if resized and share.ranks == 1:
            log.warning(
                "%s divides nothing among the ranks (it has no DistributedSampler): each goes over all of "
                "its data, and a rank that is new goes on at the batch and in the order of an old one.",
                self.name,
            )
        return share

    def _may_go_on(self, moved: Moved | None) -> bool:
        """Where it is not known which part of the data the ranks give."""
        if moved is None or (self.is_global and moved.alike):
            return True
        if not moved.is_resized:
            log.warning(
                "Not exact if the data are divided otherwise than before: the checkpoint is of another "
                "layout, and %s does not say which part of the data it gives (by num_replicas and rank).",
                self.name,
            )
        return not moved.is_resized

    def _refused(self, position: Position, then: Share | None, moved: Moved | None) -> MismatchError:
        before = _shown(then, None if moved is None else moved.ranks)
        here = _shown(self.share, None if moved is None else moved.world)
        return MismatchError(
            f"The checkpoint was taken after {position.batches_taken} batches of an epoch, with the data "
            f"divided among {before}, and {self.name} divides them among {here}: what is left cannot be "
            "divided anew, so samples would be given twice or left out. The model and all else were put "
            "back; no batch was drawn. Go on with the ranks and the data of before, or from a step at an "
            "epoch's end (flashckpt branch). A DataLoader with torch's DistributedSampler, or that of "
            "Accelerate, resumes on any number of ranks; a loader whose position means the same on every "
            "rank says so by position_is_global = True.",
            differences=(("loader", before, here),),
        )


def _read(position: Position) -> tuple[Share | None, Moved | None]:
    made_of = position.made_of
    return Share.read(made_of.get("share")), Moved.read(made_of.get("moved"))


def says_global(loader: object) -> bool:
    """Whether the program says that a loader's position means the same on any rank."""
    names = ("dataset", "sampler", "batch_sampler")
    parts = (loader, *(getattr(loader, name, None) for name in names))
    return any(getattr(part, "position_is_global", False) is True for part in parts)


def _is_one_order(then: Share, now: Share) -> bool:
    lengths = [s.order.length for s in (then, now) if s.order is not None and s.batch_size is not None]
    return len(lengths) == 2 and lengths[0] == lengths[1]


def _shown(share: Share | None, world: int | None) -> str:
    if share is None:
        return "ranks that it does not name" if world is None else f"{world} ranks in a way it does not name"
    samples = f" ({share.order.length} samples)" if share.order is not None else ""
    return f"{share.ranks} data-parallel rank{'s' if share.ranks > 1 else ''}{samples}"
