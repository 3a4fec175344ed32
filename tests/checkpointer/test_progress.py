"""Progress over epochs: what continues where a run is resumed, and what stays the program's: its seeding and
its loaders. Each "process" here is a new Progress over new loaders."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from flashckpt.checkpointer.progress import Progress
from flashckpt.errors import DamagedError
from flashckpt.format.typed import decode_json, encode_json
from flashckpt.state.loader.source import Source

ITEMS = 8
Seen = dict[int, list[int]]


def shuffled(generator: torch.Generator | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(ITEMS), batch_size=1, shuffle=True, generator=generator, **options)  # type: ignore[arg-type]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def stored(progress: Progress) -> Any:
    """Return a progress as it is read from a snapshot."""
    return decode_json(encode_json(progress.value()))


class Run:
    """`.epochs()` as a program has it: `loader(epoch)` gives the loader of an epoch. Keeps what was saved at
    every boundary: (epoch, batches) within an epoch, (epoch, None) after it."""

    def __init__(self, loader: Callable[[int], Any]) -> None:
        self.loader = loader
        self.seen: Seen = {}
        self.saved: dict[tuple[int, int | None], Any] = {}

    def go(self, epochs: int, saved: Any = None) -> Seen:
        progress = self.progress = Progress()
        progress.manages_epochs = True
        if saved is not None:
            progress.restore(copy.deepcopy(saved))
        while progress.epoch < epochs:
            epoch = progress.epoch
            source = progress.open_batches(self.loader(epoch))
            if source is not None:
                self._go_through(source, epoch)
            progress.next_epoch()
        return self.seen

    def _go_through(self, source: Source, epoch: int) -> None:
        while True:
            try:
                batch = source.next()
            except StopIteration:
                break
            self.seen.setdefault(epoch, []).append(int(batch))
            self.saved[epoch, source.batches_taken] = stored(self.progress)
        self.progress.close_batches()
        self.saved[epoch, None] = stored(self.progress)


def check_every_boundary(program: Callable[[], Callable[[int], Any]], epochs: int = 3) -> None:
    straight = Run(program())
    straight.go(epochs)
    straight.progress.close()
    for boundary, saved in straight.saved.items():
        run = Run(program())
        got = run.go(epochs, saved)
        run.progress.close()
        for key, values in got.items():
            assert values == straight.seen[key][-len(values) :], (boundary, key)
        epoch, taken = boundary
        expected = {key for key in straight.seen if key > epoch}
        if taken is not None and taken < ITEMS:
            expected.add(epoch)
        assert got.keys() == expected, boundary


def one_loader() -> Callable[[int], Any]:
    loader = shuffled(seeded(3))
    return lambda epoch: loader


def reseeded_by_epoch() -> Callable[[int], Any]:
    generator = torch.Generator()
    loader = shuffled(generator)

    def loader_of(epoch: int) -> Any:
        generator.manual_seed(100 + epoch)
        return loader

    return loader_of


def shared_by_two() -> Callable[[int], Any]:
    generator = seeded(4)
    loaders = [shuffled(generator), shuffled(generator)]
    return lambda epoch: loaders[epoch % 2]


def shared_by_new_ones() -> Callable[[int], Any]:
    generator = seeded(4)
    return lambda epoch: shuffled(generator)


@pytest.mark.parametrize(
    "program",
    [
        one_loader,
        reseeded_by_epoch,
        lambda: lambda epoch: shuffled(seeded(100 + epoch)),
        shared_by_two,
        shared_by_new_ones,
    ],
    ids=["one", "reseeded", "new and seeded", "two share one", "new ones share one"],
)
def test_generators_of_loaders_are_as_if_never_stopped(program: Any) -> None:
    """The program's seeding for an epoch is not undone, and a generator that goes on does."""
    check_every_boundary(program, epochs=4)


@pytest.mark.parametrize("sets_epoch", [False, True])
def test_only_a_whole_run_sets_the_epoch_of_samplers_and_data_set(sets_epoch: bool) -> None:
    class Data(list[int]):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    told: list[int] = []
    sampler: DistributedSampler[Any] = DistributedSampler(range(ITEMS), num_replicas=1, rank=0)  # type: ignore[arg-type]
    progress = Progress()
    progress.manages_epochs = True
    for epoch in range(3):
        sampler.set_epoch(7 * epoch)  # the program's own
        expected = list(sampler)
        loader = DataLoader(Data(range(ITEMS)), batch_size=1, sampler=sampler)  # type: ignore[arg-type]
        source = progress.open_batches(loader, sets_epoch=sets_epoch)
        assert source is not None
        assert sampler.epoch == (epoch if sets_epoch else 7 * epoch)
        assert sets_epoch or [int(source.next()) for _ in range(ITEMS)] == expected
        progress.close_batches()
        progress.next_epoch()
    assert told == ([0, 1, 2] if sets_epoch else [])


@pytest.mark.process
def test_a_loader_for_each_epoch_keeps_no_workers_of_the_old_ones() -> None:
    progress = Progress()
    progress.manages_epochs = True
    pids: list[list[int]] = []
    for _ in range(5):
        source: Any = progress.open_batches(shuffled(num_workers=1, persistent_workers=True))
        source.next()
        pids.append([worker.pid for worker in source._iterator._workers])
        progress.close_batches()
        progress.next_epoch()
    alive = {child.pid for child in torch.multiprocessing.active_children()}
    still = [pid for epoch in pids for pid in epoch if pid in alive]
    assert len(still) <= 2
    assert not alive.intersection(pids[0])
    assert len(progress.value()["sources"]) <= 1
    progress.close()


def test_a_held_place_stays_while_a_batch_is_drawn_and_dropped() -> None:
    progress = Progress()
    progress.manages_epochs = True
    source = progress.open_batches(shuffled(seeded(3)))
    assert source is not None
    order = [int(source.next()) for _ in range(2)]
    progress.hold_place()
    before = stored(progress)
    order.append(int(source.next()))
    assert stored(progress) == before
    resumed = Progress()
    resumed.restore(before)
    resumed.manages_epochs = True
    again = resumed.open_batches(shuffled(seeded(3)))
    assert int(again.next()) == order[-1], "it was not trained on"
    progress.close_batches()
    progress.next_epoch()
    assert progress.value()["sources"] != before["sources"]


def test_an_ended_iterator_is_said_where_more_epochs_were_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    batches = (torch.tensor(number) for number in range(3))
    assert Run(lambda epoch: batches).go(2) == {0: [0, 1, 2]}
    assert "can be iterated over only once" in caplog.text


@pytest.mark.parametrize("name", ["step", "taps", "sources"])
def test_what_is_no_progress_is_refused_and_changes_nothing(name: str) -> None:
    good = Run(one_loader())
    good.go(1)
    saved = {**good.saved[0, 2], name: [{"name": 1}]}
    progress = Progress()
    with pytest.raises(DamagedError, match="No loader was touched"):
        progress.restore(saved)
    assert (progress.step, progress.epoch, len(progress.value()["sources"])) == (0, 0, 0)


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flashckpt")
