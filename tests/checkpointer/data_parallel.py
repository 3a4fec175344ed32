"""The ranks of one epoch in one process: each has its own Progress and loader, and all take as many batches.
What they have saved is taken up by the ranks of another world, as it comes back from a snapshot."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from flashckpt.checkpointer.progress import Progress
from flashckpt.format.typed import decode_json, encode_json
from flashckpt.state.loader.other_ranks import merged_progress

Make = Callable[[int, int], Any]
Values = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class ReplicaAssignment:
    """ranks of batches of `batch` samples; even, whole: `drop_last` of the sampler and of the loader."""

    ranks: int
    batch: int
    even: bool = False
    whole: bool = False

    def loader(self, samples: int, rank: int, *, seed: int = 5, shuffle: bool = True, **options: Any) -> Any:
        data = range(samples)
        sampler: DistributedSampler[int] = DistributedSampler(
            data,
            self.ranks,
            rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=self.even,  # type: ignore[arg-type]
        )
        return DataLoader(data, self.batch, sampler=sampler, drop_last=self.whole, **options)  # type: ignore[arg-type]


def order_of(samples: int, epoch: int, *, seed: int = 5, shuffle: bool = True) -> list[int]:
    """The epoch's order, by torch's own sampler."""
    sampler = DistributedSampler(range(samples), 1, 0, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


class Ranks:
    """Ranks in an epoch that is begun, or taken up from what an old world's ranks have saved (`values`)."""

    def __init__(self, make: Make, ranks: int, epoch: int = 0, values: Values | None = None) -> None:
        self.loaders = [make(rank, ranks) for rank in range(ranks)]
        self.progresses = [Progress() for _ in range(ranks)]
        for rank, progress in enumerate(self.progresses):
            progress.manages_epochs, progress.epoch = True, epoch
            if values is not None:
                progress.restore(merged_progress(values, rank, ranks, len(values)))
        self.seen: list[int] = []
        self.by_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
        self.lengths = [length_of(p, each) for p, each in zip(self.progresses, self.loaders, strict=True)]
        self.sources = [
            progress.open_batches(loader, sets_epoch=True)
            for progress, loader in zip(self.progresses, self.loaders, strict=True)
        ]

    def take(self, batches: int) -> int:
        """So many batches on each rank, or as many as there are: as many on all of them."""
        for taken in range(batches):
            drawn = [self._next(rank) for rank in range(len(self.sources))]
            if None in drawn:
                assert drawn == [None] * len(drawn), "ranks have other numbers of batches"
                return taken
            for rank, batch in enumerate(drawn):
                batch = batch if isinstance(batch, list) else [batch]
                self.seen += batch
                self.by_rank[rank].append(batch)
        return batches

    def _next(self, rank: int) -> Any:
        source = self.sources[rank]
        try:
            batch = source.next() if source is not None else None
        except StopIteration:
            return None
        self.progresses[rank].count(1)
        return batch.tolist() if isinstance(batch, torch.Tensor) else batch

    def saved(self) -> Values:
        """What each rank saves at this boundary, as a snapshot gives it back."""
        found = {rank: decode_json(encode_json(p.value())) for rank, p in enumerate(self.progresses)}
        for progress in self.progresses:
            progress.close()
        return found


def length_of(progress: Progress, loader: Any) -> int | None:
    """None for a loader that does not know its length."""
    try:
        return progress.epoch_length(loader)
    except TypeError:
        return None


def go_through(
    divisions: Sequence[ReplicaAssignment],
    cuts: Sequence[int],
    samples: int,
    *,
    epoch: int = 0,
    shuffle: bool = True,
) -> tuple[list[int], ReplicaAssignment]:
    """One epoch: `divisions[i]` takes `cuts[i]` batches on each rank, the last one what is left. All that was
    given, in no order, and the division that reached the end."""
    values: Values | None = None
    seen: list[int] = []
    for number, division in enumerate(divisions):
        ranks = Ranks(
            lambda rank, _, d=division: d.loader(samples, rank, shuffle=shuffle),
            division.ranks,
            epoch,
            values,
        )
        cut = cuts[number] if number < len(cuts) else samples + 1
        taken = ranks.take(cut)
        assert len({source is None for source in ranks.sources}) == 1
        for rank, source in enumerate(ranks.sources):
            assert source is not None
            assert len(source) == ranks.lengths[rank] == ranks.lengths[0]
            assert source.batches_taken <= len(source)
            if taken < cut:
                assert source.batches_taken == len(source)
        seen += ranks.seen
        values = ranks.saved()
        if taken < cut or ranks.sources[0].batches_taken == ranks.lengths[0]:  # type: ignore[union-attr]
            # Whoever takes it up from here has no batch, on any rank.
            if ranks.sources[0].batches_taken:  # type: ignore[union-attr]
                after = Ranks(
                    lambda rank, ranks: ReplicaAssignment(ranks, 3).loader(samples, rank), 3, epoch, values
                )
                assert after.take(1) == 0
            return seen, division
        assert sorted(seen) == sorted(order_of(samples, epoch, shuffle=shuffle)[: len(seen)])
    raise AssertionError("the last division did not reach the end of the epoch")


def is_one_epoch(seen: list[int], order: list[int], last: ReplicaAssignment) -> bool:
    """Whether each sample of the epoch was given once. The last division pads the end with what the order
    begins with, or leaves out what does not fill a round of its ranks."""
    given, extra = Counter(seen), len(seen) - len(order)
    if extra <= 0:
        left_out = last.ranks * (last.batch if last.whole else 1) if last.even or last.whole else 1
        return given == Counter(order[: len(seen)]) and -extra < left_out
    padding = Counter((order * math.ceil(extra / len(order)))[:extra])
    return not last.even and extra < last.ranks and given == Counter(order) + padding
