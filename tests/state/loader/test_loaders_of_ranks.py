"""Loaders that ranks divide among themselves: on the same ranks each resumes exactly, also within an epoch
that was divided again. Each rank is a loader with its own number here; no process group is needed."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from fresh import in_fresh_process
from torch.utils.data import BatchSampler, DistributedSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from flashckpt.state import rng
from flashckpt.state.loader.sources import epoch_length, source_of

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


def sampler(rank: int, **options: Any) -> DistributedSampler[int]:
    data: Any = range(SAMPLES)
    return DistributedSampler(data, RANKS, rank, **options)


def items() -> runs.Items:
    return runs.Items("/dev/null", SAMPLES)


SAME: dict[str, Make] = {
    "shuffled": lambda rank: runs.loader(items(), 0, batch_size=2, sampler=sampler(rank, seed=4)),
    "batch sampler": lambda rank: runs.loader(
        items(), 0, batch_sampler=BatchSampler(sampler(rank), 3, drop_last=False)
    ),
    "own batch sampler": lambda rank: runs.loader(items(), 0, batch_sampler=Lengths(SAMPLES, rank, RANKS)),
    "torchdata": lambda rank: StatefulDataLoader(items(), 2, sampler=sampler(rank)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("name", SAME)
def test_each_rank_resumes_exactly(name: str) -> None:
    """Each boundary of two epochs, on each rank."""
    around = rng.capture()
    for rank in (0, RANKS - 1):
        runs.seed(rank)
        record = runs.run(source_of(SAME[name](rank)), range(2))
        for cut, position in record.positions.items():
            got = runs.resume(partial(SAME[name], rank), position, range(runs.first_epoch(cut), 2))
            assert got.seen == runs.rest(record, cut), (rank, cut)
    rng.restore(around)


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


def test_the_length_of_a_rest_in_one_process_is_known_before_it_begins() -> None:
    loader = runs.loader(runs.Items("/dev/null", 40), 0, shuffle=True, generator=runs.owned(3))
    position, source = runs.from_wire(of_three(0, 0)), source_of(loader)
    source.begin(0, position)
    assert epoch_length(loader, position) == len(source) == 3 + 6  # 22 of 40 samples, in batches of 4


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
            got = runs.resume(partial(make, loads), position, range(runs.first_epoch(cut), 2))
            if got.seen != (expected := runs.rest(whole, cut, 1)):
                wrong.append(f"rank {rank}, {cut}: {got.seen} and not {expected}")
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
