"""Loaders that ranks divide among themselves: on the same ranks each resumes exactly, also within an epoch
that was divided again. Each rank is a loader with its own number here; no process group is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from fresh import in_fresh_process
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from flashckpt.state import rng
from flashckpt.state.loader.sources import source_of

RANKS, SAMPLES = 3, 22
Make = Callable[[int], Any]


class Lengths(Sampler[list[int]]):
    """A program's own batch sampler: gets rank and size, and shuffles by the epoch that is set."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.samples, self.rank, self.world_size, self.epoch = samples, rank, world_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()[self.rank :: self.world_size]
        return iter([order[:3], order[3:4], order[4:]])


class OtherOrder(DistributedSampler[int]):
    """Has another order: a subclass of torch's with its own `__iter__`."""

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()][::-1])


class Shard(IterableDataset[Any]):
    """Draws from the global generator; its own part of the items."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.rank, SAMPLES, RANKS):
            yield index, torch.rand(1).item()


def sampler(rank: int, ranks: int = RANKS, **options: Any) -> DistributedSampler[int]:
    data: Any = range(SAMPLES)
    return DistributedSampler(data, ranks, rank, **options)


def items() -> runs.Items:
    return runs.Items("/dev/null", SAMPLES)


def streamed(rank: int, workers: int = 0) -> Any:
    return StatefulDataLoader(items(), 2, sampler=sampler(rank), num_workers=workers)


SAME: dict[str, Make] = {
    "shuffled": lambda rank: runs.loader(items(), 0, batch_size=2, sampler=sampler(rank, seed=4)),
    "in order": lambda rank: runs.loader(items(), 0, batch_size=2, sampler=sampler(rank, shuffle=False)),
    "cut short": lambda rank: runs.loader(
        items(), 0, batch_size=3, sampler=sampler(rank, drop_last=True), drop_last=True
    ),
    "own generator": lambda rank: runs.loader(
        items(), 0, batch_size=2, sampler=sampler(rank), generator=runs.owned(rank)
    ),
    "single items": lambda rank: runs.loader(items(), 0, batch_size=None, sampler=sampler(rank)),
    "batch sampler": lambda rank: runs.loader(
        items(), 0, batch_sampler=BatchSampler(sampler(rank), 3, drop_last=False)
    ),
    "own batch sampler": lambda rank: runs.loader(items(), 0, batch_sampler=Lengths(SAMPLES, rank, RANKS)),
    "subclass": lambda rank: runs.loader(
        items(), 0, batch_size=2, sampler=OtherOrder(range(SAMPLES), RANKS, rank)  # type: ignore[arg-type]
    ),
    "torchdata": streamed,
    "iterable": lambda rank: runs.loader(Shard(rank), 0, batch_size=2),
}  # fmt: skip


def rest(record: runs.Record, cut: runs.Key, epochs: int) -> dict[runs.Key, Any]:
    """Return the record of the whole run from a boundary on."""
    order = list(record.seen)
    epoch, taken = cut
    place = (epoch + 1, 0) if taken == "after" else cut if cut in record.seen else (epoch, "end")
    found = order[order.index(place) :] if place in order else []
    return {key: record.seen[key] for key in found if key[0] < epochs}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("name", SAME)
def test_each_rank_resumes_exactly(name: str) -> None:
    """Each boundary of two epochs, on each rank."""
    around = rng.capture()
    for rank in range(RANKS):
        runs.seed(rank)
        record = runs.run(source_of(SAME[name](rank)), range(2))
        for cut, position in record.positions.items():
            first = cut[0] + (cut[1] == "after")
            got = runs.resume(partial(SAME[name], rank), position, range(first, 2))
            assert got.seen == rest(record, cut, 2), (rank, cut)
    rng.restore(around)


def test_ranks_see_every_sample_of_an_epoch() -> None:
    """The test above compares a run with itself; this one with the expected samples of all ranks."""
    for epoch in range(2):
        seen: list[int] = []
        for rank in range(RANKS):
            record = runs.run(source_of(SAME["shuffled"](rank)), range(2))
            seen += [i for (e, _), found in record.seen.items() if e == epoch and isinstance(found, tuple)
                     for i in found[0][1]]  # fmt: skip
        assert sorted(set(seen)) == list(range(SAMPLES))
        assert len(seen) == 24


def divided(rank: int, workers: int, persistent: bool, loads: str = "/dev/null") -> Any:
    """Return one of two ranks that continue an epoch of three ranks."""
    options: dict[str, Any] = {"persistent_workers": True} if persistent else {}
    data = runs.Items(loads, 40)
    shares = DistributedSampler(range(40), 2, rank, seed=3)  # type: ignore[arg-type]
    return runs.loader(data, workers, batch_size=3, sampler=shares, collate_fn=runs.collate, **options)


def of_three(rank: int, workers: int) -> bytes:
    shares = DistributedSampler(range(40), 3, rank, seed=3)  # type: ignore[arg-type]
    loader = runs.loader(runs.Items("/dev/null", 40), workers, batch_size=2, sampler=shares)
    source = source_of(loader)
    source.begin(0)
    for _ in range(3):
        source.next()
    position = runs.to_wire(source.position())
    source.close()
    return position


def in_divided_epoch(workers: int, persistent: bool, folder: str) -> list[str]:
    """Continue from three ranks on two, and stop again at each boundary; return the differences."""
    wrong = []
    for rank in range(2):
        runs.seed(rank)
        before = of_three(rank, workers)
        make = partial(divided, rank, workers, persistent)
        # Only 2 of 3 epochs' boundaries: persistent workers carry their states into the next epoch.
        whole = runs.resume(make, before, range(3))
        seen = [key for key in whole.seen if key[0] == 0]
        if seen != [(0, 3), (0, 4), (0, 5), (0, 6), (0, "end")]:  # 22 of 40 samples: 11, in batches of 3
            wrong.append(f"rank {rank} has the batches {seen}")
        for cut, position in whole.positions.items():
            if cut not in [(0, 3), (0, 4), (0, 6), (0, "end"), (0, "after"), (1, 2)]:
                continue
            loads = f"{folder}/{rank}-{cut[0]}-{cut[1]}"
            first = cut[0] + (cut[1] == "after")
            got = runs.resume(partial(make, loads), position, range(first, 2))
            if got.seen != rest(whole, cut, 2):
                wrong.append(f"rank {rank}, {cut}: {got.seen} and not {rest(whole, cut, 2)}")
            # After an epoch's end it knows that no batch follows, which the whole run did not know yet.
            own = list(got.positions)[1 if cut[1] == "end" else 0 :]
            at = [key for key in own if got.positions[key] != whole.positions[key]]
            if at:
                wrong.append(f"rank {rank}, {cut}: saves something else at {at}")
    return wrong


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_an_epoch_divided_again_resumes_exactly(workers: int, persistent: bool, tmp_path: Path) -> None:
    assert in_fresh_process(in_divided_epoch, workers, persistent, str(tmp_path)) == []
