"""Loaders that keep their own state are asked, others replayed; what cannot be taken up is refused."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from fresh import in_fresh_process
from torch.utils.data import DataLoader, IterableDataset

from flashckpt.errors import BoundaryError, OptionError, StateError
from flashckpt.state.loader import source_of
from flashckpt.state.loader.asked import from_plain, to_plain


class Stream(IterableDataset[Any]):
    """Draws from the main process's generators; keeps no state."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(18):
            yield index, torch.rand(1).item()


class StatefulStream(IterableDataset[Any]):
    """Goes on from where it was, and then begins anew."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 18:
            self.at += 1
            yield self.at, random.random()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Counting:
    """A loader with a state: a list of tensors, whose epochs differ. `empty_end`: the state of an epoch's
    end gives an empty rest first, before the next epoch."""

    def __init__(self, *, empty_end: bool = False) -> None:
        self.empty_end = empty_end
        self.epoch, self.at, self.order = 0, 0, torch.arange(6)

    def __iter__(self) -> Iterator[Any]:
        if self.at == 6 and not self.empty_end:
            self.at = 0
        if self.at == 0:
            self.order = torch.randperm(6)
            self.epoch += 1
        while self.at < 6:
            self.at += 1
            yield [self.epoch, int(self.order[self.at - 1]), torch.rand(1).item()]
        if self.empty_end:
            self.at = 0

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at, self.order = state["epoch"], state["at"], state["order"]


def torchdata_loader(workers: int, *, plain_sampler: bool = False, persistent: bool = False) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if not plain_sampler:
        return StatefulDataLoader(
            runs.Items("/dev/null"), 4, shuffle=True, num_workers=workers, persistent_workers=persistent
        )
    # A sampler that torchdata cannot ask: it skips what was taken.
    batches = [list(range(start, start + 4)) for start in range(0, 20, 4)]
    return StatefulDataLoader(runs.Items("/dev/null"), batch_sampler=Shuffled(batches), num_workers=workers)


class Shuffled:
    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        yield from random.sample(self.batches, len(self.batches))

    def __len__(self) -> int:
        return len(self.batches)


pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")

LOADERS: dict[str, Callable[[], Any]] = {
    "torchdata": functools.partial(torchdata_loader, 0),
    "torchdata, plain sampler": functools.partial(torchdata_loader, 0, plain_sampler=True),
    "stateful data set": lambda: DataLoader(StatefulStream(), batch_size=4),
    "stateful": Counting,
    "stateful, empty end": functools.partial(Counting, empty_end=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "list": lambda: [[i, float(i)] for i in range(5)],
}


def resume(
    name: str, positions: dict[runs.Key, bytes], draws: bool = True, leave_after: int = 1 << 30
) -> dict[runs.Key, runs.Record]:
    if not draws:
        runs.loop_draws = lambda: None
    return {
        cut: runs.resume(
            LOADERS[name], position, range(cut[0] + (cut[1] == "after"), 3), leave_after=leave_after
        )
        for cut, position in positions.items()
    }


@pytest.mark.parametrize("name", LOADERS)
def test_other_loaders_resume(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "stream":
        # What an iterable draws batch by batch is not promised; without other draws it is exact.
        monkeypatch.setattr(runs, "loop_draws", lambda: None)
    runs.seed(3)
    record = runs.run(source_of(LOADERS[name]()), range(3))
    last = max(taken for epoch, taken in record.seen if epoch == 0 and isinstance(taken, int))
    cuts = [(0, 0), (0, 1), (0, last), (0, last + 1), (0, "end"), (0, "after"), (1, 0), (1, 2), (1, "after")]
    positions = {cut: record.positions[cut] for cut in cuts}
    for cut, got in in_fresh_process(resume, name, positions, name != "stream").items():
        order = list(record.seen)
        place = (cut[0] + 1, 0) if cut[1] == "after" else cut if cut in record.seen else (cut[0], "end")
        assert got.seen == {key: record.seen[key] for key in order[order.index(place) :]}, cut


def test_torchdata_epochs_left_early() -> None:
    runs.seed(3)
    record = runs.run(source_of(LOADERS["torchdata"]()), range(3), leave_after=2)
    positions = {cut: record.positions[cut] for cut in [(0, "after"), (1, 0), (1, 1), (1, "after")]}
    for cut, got in in_fresh_process(resume, "torchdata", positions, True, 2).items():
        assert got.seen.keys() >= {(2, 0), (2, 1)}
        assert got.seen == {key: value for key, value in record.seen.items() if key in got.seen}, cut


@pytest.mark.parametrize("persistent", [False, True])
def test_torchdata_with_workers_goes_on_and_says_what_it_lacks(
    persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches and the main process's numbers are exact; the workers' own are not, and that is said once."""

    def main_part(record: runs.Record) -> dict[runs.Key, Any]:
        return {
            key: (value[0][1], value[1]) if isinstance(value, tuple) else value
            for key, value in record.seen.items()
        }

    runs.seed(3)
    record = runs.run(source_of(torchdata_loader(2, persistent=persistent)), range(2))
    notices = [entry for entry in caplog.records if "StatefulDataLoader does not keep" in entry.message]
    assert len(notices) == 1
    for cut in [(0, 3), (0, "after"), (1, 1)]:
        first = cut[0] + (cut[1] == "after")
        make = functools.partial(torchdata_loader, 2, persistent=persistent)
        got = runs.resume(make, record.positions[cut], range(first, 2))
        assert main_part(got).items() <= main_part(record).items(), cut
        assert (1, "end") in got.seen


def test_a_replay_is_announced_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    source = source_of(DataLoader(Stream(), batch_size=4))
    source.begin(0)
    for _ in range(3):
        source.next()
    position = source.position()
    counted: list[tuple[int, int]] = []
    again = source_of(
        DataLoader(Stream(), batch_size=4), on_replay=lambda done, total: counted.append((done, total))
    )
    again.begin(0, position)
    assert counted == [(1, 3), (2, 3), (3, 3)]
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert "drawn again" in caplog.text
    assert again.batches_taken == 3


def test_a_stream_with_workers_is_replayed(tmp_path: Path) -> None:
    source = source_of(DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True))
    runs.seed(3)
    source.begin(0)
    source.next()
    position = source.position()
    expected = runs.plain(source.next())
    source.close()
    again = source_of(DataLoader(Stream(), batch_size=4, num_workers=1))
    again.begin(0, position)
    assert runs.plain(again.next()) == expected
    again.close()


class Moving(DataLoader[Any]):
    """A subclass that changes batches on their way."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {"moved": batch}


def test_a_dataloader_with_an_iterator_of_its_own_is_replayed() -> None:
    source = source_of(Moving(runs.Items("/dev/null"), batch_size=4, num_workers=1))
    source.begin(0)
    assert set(source.next()) == {"moved"}
    assert source.position()["kind"] == "replayed"
    source.close()


def test_out_of_order_is_refused() -> None:
    with pytest.raises(BoundaryError, match="in_order=True"):
        source_of(DataLoader(runs.Items("/dev/null"), num_workers=1, in_order=False))
    source_of(DataLoader(runs.Items("/dev/null"), in_order=False))


def test_accelerates_loaders_are_refused() -> None:
    shard = type(
        "DataLoaderShard", (), {"__module__": "accelerate.data_loader", "__iter__": lambda self: iter(())}
    )
    with pytest.raises(BoundaryError, match="one batch more than it has given"):
        source_of(shard())


def test_what_is_no_iterable_is_refused() -> None:
    with pytest.raises(OptionError, match="cannot be iterated"):
        source_of(5)


def test_states_of_loaders_become_plain_and_come_back() -> None:
    state = {"a": [1, (2.5, None)], 3: torch.tensor(4), "t": torch.rand(2, 3), "n": torch.arange(3).numpy()}
    plain = runs.from_wire(runs.to_wire(to_plain(state)))
    back = from_plain(plain)
    assert back["a"] == [1, (2.5, None)]
    assert back[3].shape == ()
    assert torch.equal(back["t"], state["t"])
    assert back["n"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.zeros(1, dtype=torch.bfloat16)])
def test_a_state_that_cannot_be_saved_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(StateError, match=r"at loader\.inner\[1\]") as caught:
        to_plain({"inner": [0, value]})
    assert caught.value.location == "loader.inner[1]"


@pytest.fixture(autouse=True)
def _warnings_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="flashckpt")
