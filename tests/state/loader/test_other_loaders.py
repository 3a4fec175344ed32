"""Loaders with their own state are saved by it, others are replayed; loaders that cannot be resumed are
refused."""

import functools
import logging
import random
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import runs
import torch
from fresh import in_fresh_process
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from flashckpt.errors import BoundaryError, OptionError, StateError
from flashckpt.format.typed import Encoded, decode_json, encode_json
from flashckpt.state.loader.source import ReplayedSource
from flashckpt.state.loader.sources import source_of
from flashckpt.state.loader.stateful import decoded_state, encoded_state
from flashckpt.state.values import StoredTensor
from tests.resume.loaders import Sticky

Pair = namedtuple("Pair", ["a", "b"])


class Stream(IterableDataset[Any]):
    """Draws from the main process's generators; has no state."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(18):
            yield index, torch.rand(1).item()


class Endless(IterableDataset[Any]):
    """An endless stream in which each `iter()` continues where the last one was left."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            yield self.at, random.random()
            if self.at % 18 == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Once(Endless):
    """The loaded state affects only the next `iter()`; any other starts again."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, 19):
            yield self.at, random.random()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


class Buffered(IterableDataset[Any]):
    """Shuffles in a buffer that its state leaves out, and draws for each item."""

    def __init__(self) -> None:
        self.begin, self.at, self.epoch = 0, 0, 0
        self.numbers = np.random.default_rng(4)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order, held = random.Random(self.epoch), list[int]()
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, 19):
            held.append(self.at)
            if len(held) == 5:
                yield held.pop(order.randrange(5)), random.random(), float(self.numbers.random())
        while held:
            yield held.pop(), random.random(), float(self.numbers.random())

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


def hugging_face_shuffled() -> Any:
    # With a function that cannot be pickled.
    return hugging_face().map(lambda row: {"x": -row["x"]}).shuffle(seed=1, buffer_size=5)


def hugging_face() -> Any:
    data = pytest.importorskip("datasets")
    rows = {"x": list(range(18))}
    return data.Dataset.from_dict(rows).to_iterable_dataset(num_shards=3)


class Wrapped(IterableDataset[Any]):
    """A program's own class around a data set of Hugging Face."""

    def __init__(self) -> None:
        self.parts = [hugging_face()]

    def __iter__(self) -> Iterator[Any]:
        yield from self.parts[0]

    def state_dict(self) -> Any:
        return self.parts[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.parts[0].load_state_dict(state)


def batches_of_hugging_face() -> Any:
    """The state of `.batch()` in datasets 4.7 forgets the items that the open batch had taken from a
    shard."""
    pytest.importorskip("datasets", minversion="4.8")
    return hugging_face().map(lambda row: {"x": row["x"]}).batch(4)


class Counting:
    """A loader with a state: a list of tensors, whose epochs differ. `empty_end`: the state of an epoch's end
    first returns an empty rest, before the next epoch."""

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
    # A sampler without state: torchdata skips the batches that were taken.
    batches = [list(range(start, start + 4)) for start in range(0, 20, 4)]
    return StatefulDataLoader(runs.Items("/dev/null"), batch_sampler=Shuffled(batches), num_workers=workers)


def torchdata_stream(make: Callable[[], Any], workers: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(make(), 4, num_workers=workers, **options)


def torchdata_nodes(make: Callable[[], Any]) -> Any:
    from torchdata import nodes

    return nodes.Loader(nodes.Batcher(make(), batch_size=4))


def shuffled_nodes() -> Any:
    """Shuffled by the global generators, at the first batch of an epoch."""
    from torchdata import nodes

    return torchdata_nodes(lambda: nodes.SamplerWrapper(RandomSampler(range(20))))


def streamed_nodes() -> Any:
    from torchdata import nodes

    return torchdata_nodes(lambda: nodes.IterableWrapper(range(20)))


def peeked(data: Any) -> Any:
    """A loader whose first item is read before the run."""
    next(iter(data))
    return data


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
    "stateful data set": lambda: DataLoader(runs.StatefulStream(), batch_size=4),
    "sticky data set": lambda: DataLoader(Sticky(), batch_size=4),
    "sticky data set, peeked at": lambda: DataLoader(peeked(Sticky()), batch_size=4),
    "sticky, itself": Sticky,
    "torchdata, sticky data set": functools.partial(torchdata_stream, Sticky, 0),
    "torchdata, sticky data set, peeked at": functools.partial(torchdata_stream, lambda: peeked(Sticky()), 0),
    "data set that goes on": lambda: DataLoader(Endless(), batch_size=4),
    "torchdata, data set that goes on": functools.partial(torchdata_stream, Endless, 0),
    "data set, loaded once": lambda: DataLoader(Once(), batch_size=4),
    "torchdata, data set, loaded once": functools.partial(torchdata_stream, Once, 0),
    "hugging face": lambda: DataLoader(hugging_face(), batch_size=4),
    "hugging face, wrapped": lambda: DataLoader(Wrapped(), batch_size=4),
    "buffered": lambda: DataLoader(Buffered(), batch_size=4),
    "buffered, itself": Buffered,
    "torchdata, buffered": functools.partial(torchdata_stream, Buffered, 0),
    "hugging face, shuffled": lambda: DataLoader(hugging_face_shuffled(), batch_size=4),
    "torchdata, hugging face, shuffled": functools.partial(torchdata_stream, hugging_face_shuffled, 0),
    "hugging face, itself": batches_of_hugging_face,
    "torchdata, hugging face": functools.partial(torchdata_stream, hugging_face, 0),
    "torchdata nodes": shuffled_nodes,
    "torchdata nodes, a stream": streamed_nodes,
    "stateful": Counting,
    "stateful, empty end": functools.partial(Counting, empty_end=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "list": lambda: [[i, float(i)] for i in range(5)],
}


def resume(
    name: str, positions: dict[runs.Key, bytes], draws: bool, sets_epoch: bool, leave_after: int = 1 << 30
) -> dict[runs.Key, runs.Record]:
    if not draws:
        runs.loop_draws = lambda: None
    options: dict[str, Any] = {"leave_after": leave_after, "sets_epoch": sets_epoch}
    return {
        cut: runs.resume(LOADERS[name], position, range(runs.first_epoch(cut), 3), **options)
        for cut, position in positions.items()
    }


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.process
def test_other_loaders_resume(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "stream":
        # An iterable's draws batch by batch are not covered; without other draws it is exact.
        monkeypatch.setattr(runs, "loop_draws", lambda: None)
    # Data sets of Hugging Face are used with `set_epoch` and without it.
    for sets_epoch in (False, True) if "hugging face" in name else (True,):
        runs.seed(3)
        record = runs.run(source_of(LOADERS[name]()), range(3), sets_epoch=sets_epoch)
        last = max(taken for epoch, taken in record.seen if epoch == 0 and isinstance(taken, int))
        cuts = [(0, 0), (0, 1), (0, last), (0, last + 1), (0, "end"), (0, "after"), (1, 0), (1, 2)]
        positions = {cut: record.positions[cut] for cut in [*cuts, (1, "after")]}
        for cut, got in in_fresh_process(resume, name, positions, name != "stream", sets_epoch).items():
            assert got.seen == runs.rest(record, cut), cut


# Not those that keep the loaded state until a generator function runs.
LEFT_EARLY = [
    name
    for name in LOADERS
    if any(word in name for word in ("data set", "torchdata", "sticky"))
    and not any(word in name for word in ("loaded once", "torchdata, buffered"))
]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("name", LEFT_EARLY)
@pytest.mark.process
def test_epochs_left_early(name: str) -> None:
    runs.seed(3)
    record = runs.run(source_of(LOADERS[name]()), range(3), leave_after=2)
    positions = {cut: record.positions[cut] for cut in [(0, "after"), (1, 0), (1, 1), (1, "after")]}
    for cut, got in in_fresh_process(resume, name, positions, True, True, 2).items():
        last = [key for key in record.seen if key[0] == 2]
        assert list(got.seen)[-len(last) :] == last
        assert got.seen == {key: value for key, value in record.seen.items() if key in got.seen}, cut


@pytest.mark.parametrize("name", ["sticky data set", "sticky, itself", "stateful"])
def test_a_resume_that_has_drawn_nothing_saves_the_position_that_it_has(name: str) -> None:
    source = source_of(LOADERS[name]())
    source.begin(0)
    source.next()
    position = runs.saved(source)
    again = source_of(LOADERS[name]())
    again.begin(0, position)
    assert runs.saved(again) == position


def items_alone(rows: list[Any]) -> list[Any]:
    # Draws inside workers are not covered.
    return [row[0] if isinstance(row, tuple) else row for row in rows]


def test_torchdata_streams_in_persistent_workers_are_refused() -> None:
    with pytest.raises(BoundaryError, match="persistent_workers=False"):
        source_of(torchdata_stream(Sticky, 2, persistent_workers=True))
    source_of(torchdata_stream(Stream, 2, persistent_workers=True))


@pytest.mark.long
@pytest.mark.parametrize("make", [Sticky, Once, hugging_face_shuffled])
@pytest.mark.process
def test_torchdata_streams_with_workers(make: Callable[[], Any]) -> None:
    loader = functools.partial(torchdata_stream, make, 2, collate_fn=items_alone)
    runs.seed(3)
    record = runs.run(source_of(loader()), range(3))
    last = max(taken for epoch, taken in record.seen if epoch == 0 and isinstance(taken, int))
    for cut in [(0, 1), (0, 2), (0, last), (0, "end"), (0, "after"), (1, 1), (1, last), (1, "end")]:
        got = runs.resume(loader, record.positions[cut], range(runs.first_epoch(cut), 3))
        assert got.seen == runs.rest(record, cut), cut


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.process
def test_torchdata_with_workers_resumes_and_logs_its_limits(
    persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches and the main process's generators are exact; the workers' own are not, which is logged once."""

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
        make = functools.partial(torchdata_loader, 2, persistent=persistent)
        got = runs.resume(make, record.positions[cut], range(runs.first_epoch(cut), 2))
        assert main_part(got).items() <= main_part(record).items(), cut
        assert (1, "end") in got.seen


def test_a_replay_is_announced_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    source = source_of(DataLoader(Stream(), batch_size=4))
    source.begin(0)
    for _ in range(3):
        source.next()
    position = runs.saved(source)
    again = source_of(DataLoader(Stream(), batch_size=4))
    assert isinstance(again, ReplayedSource)
    again.begin(0, position)
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert "drawn again" in caplog.text
    assert again.batches_taken == 3


@pytest.mark.process
def test_a_stream_with_workers_is_replayed() -> None:
    source = source_of(DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True))
    runs.seed(3)
    source.begin(0)
    source.next()
    position = runs.saved(source)
    expected = runs.plain(source.next())
    source.close()
    again = source_of(DataLoader(Stream(), batch_size=4, num_workers=1))
    again.begin(0, position)
    assert runs.plain(again.next()) == expected
    again.close()


class Moving(DataLoader[Any]):
    """A subclass that changes batches after the draw."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {"moved": batch}


@pytest.mark.process
def test_workers_of_a_replayed_loader_are_new_in_each_epoch() -> None:
    """So its batches and random numbers are exact, although it asks for persistent workers."""

    def make() -> Any:
        options: dict[str, Any] = {"shuffle": True, "num_workers": 2, "persistent_workers": True}
        return Moving(runs.Items("/dev/null", 12), 2, **options)

    runs.seed(3)
    whole = runs.run(source_of(make()), range(3), leave_after=2)
    for cut in [(0, 1), (0, "after"), (1, 1), (1, "after")]:
        epochs = range(runs.first_epoch(cut), 3)
        got = runs.resume(make, whole.positions[cut], epochs, leave_after=2)
        assert got.seen == runs.rest(whole, cut), cut
    source = source_of(make())
    source.begin(0)
    assert set(source.next()) == {"moved"}
    assert source.position()["kind"] == "replayed iterable"
    [*workers] = torch.multiprocessing.active_children()
    source.close()
    assert not {each.pid for each in workers} & {p.pid for p in torch.multiprocessing.active_children()}


def test_out_of_order_is_refused() -> None:
    with pytest.raises(BoundaryError, match="in_order=True"):
        source_of(DataLoader(runs.Items("/dev/null"), num_workers=1, in_order=False))
    source_of(DataLoader(runs.Items("/dev/null"), in_order=False))


def test_other_loaders_of_accelerate_are_refused() -> None:
    for name in ("MpDeviceLoaderWrapper", "DataLoaderShard"):  # the latter as in releases before 1.0
        loader = type(name, (), {"__module__": "accelerate.data_loader", "__iter__": lambda self: iter(())})
        with pytest.raises(BoundaryError, match="draws batches in an unknown way"):
            source_of(loader())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
def test_a_torchdata_stream_without_state_is_resumed_repeatedly() -> None:
    def numbers(source: Any, batches: int) -> list[Any]:
        return [source.next()[0].tolist() for _ in range(batches)]

    whole = source_of(torchdata_stream(Stream, 0))
    whole.begin(0)
    expected = numbers(whole, 5)
    position, given = None, []
    for count in (1, 2, 2):  # torchdata counts the batches that it skips twice
        source = source_of(torchdata_stream(Stream, 0))
        source.begin(0, position)
        given += numbers(source, count)
        position = runs.saved(source)
    assert given == expected


def test_an_object_that_is_not_iterable_is_refused() -> None:
    with pytest.raises(OptionError, match="cannot be iterated"):
        source_of(5)


def test_states_of_loaders_keep_their_types() -> None:
    state = {
        "a": [1, (2.5, None)], 3: torch.tensor(4), "t": torch.rand(2, 3), "n": np.arange(3),
        "bf": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), "none": torch.empty(0, 2),
        "small": np.uint32(7), "single": np.float32(0.1), "ordered": OrderedDict(b=1, a=torch.ones(1)),
        "set": {1, 2}, "deque": deque([torch.zeros(2)], maxlen=3), "counter": Counter(x=2),
        "date": np.datetime64("2024-01-01"),
    }  # fmt: skip
    encoded = encoded_state(state, "loader")
    back = decoded_state(Encoded(decode_json(encode_json(encoded))))
    assert is_equal(back, state)
    state["n"][0] = 9
    assert decoded_state(encoded)["n"].tolist() == [0, 1, 2], (
        "the encoded state shares no memory with the loader"
    )


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values have the same types and contents, at all levels."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return StoredTensor.of(a, "a") == StoredTensor.of(b, "b")
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "value",
    [
        object(), np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]), torch.zeros(2).to_sparse(),
        {torch.zeros(1)}, torch.nn.Parameter(torch.zeros(1)), Pair(1, 2), np.ma.array([1]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_state_that_cannot_be_saved_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(StateError, match=r"loader\.inner\.1") as caught:
        encoded_state({"inner": [0, value]}, "loader")
    assert caught.value.location.startswith("loader.inner.1")


@pytest.fixture(autouse=True)
def _warnings_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="flashckpt")


RECORDED: dict[str, Callable[[], Any]] = {
    "main": functools.partial(runs.LOADERS["main, transformed"], "/dev/null"),
    "2 persistent": functools.partial(runs.LOADERS["2 persistent by its own"], "/dev/null"),
    "replayed": lambda: DataLoader(Stream(), batch_size=4),
    "list": lambda: list(range(9)),
    "stateful": lambda: DataLoader(runs.StatefulStream(), batch_size=4),
}


@pytest.mark.process
@pytest.mark.parametrize("name", RECORDED)
def test_a_position_is_immune_to_later_draws(name: str) -> None:
    """Also that of batches drawn ahead, and in the next epoch."""
    runs.seed(3)
    source = source_of(RECORDED[name]())
    source.count_trained()
    source.begin(0)
    kept: list[tuple[Any, bytes]] = []

    def keep() -> None:
        kept.append((source.position(), encode_json(source.position())))

    for batches in range(4):
        source.next()
        runs.loop_draws()
        if batches != 1:
            source.count_trained(batches)
        keep()
    source.begin(1)
    keep()
    source.next()
    runs.loop_draws()
    source.close()
    assert len({text for _, text in kept}) == 5
    for position, text in kept:
        assert encode_json(position) == text
