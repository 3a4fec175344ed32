"""The behaviour of a source where exactness ends, and its respect for the user's loader."""

import copy
import functools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import runs
import torch

from flashckpt.errors import BoundaryError, DamagedError, MismatchError
from flashckpt.state.loader.dataloader import Reported
from flashckpt.state.loader.sources import source_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _warnings_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="flashckpt")


def taken(make: Any, batches: int) -> tuple[Any, dict[str, Any]]:
    runs.seed(3)
    source = source_of(make())
    source.begin(0)
    for _ in range(batches):
        source.next()
        runs.loop_draws()
    position = runs.saved(source)
    source.close()
    return source, position


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.process
def test_a_sampler_that_draws_global_numbers_later_logs_that_it_is_not_exact(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        ahead = {"prefetch_factor": 1} if workers else {}
        return runs.loader(runs.Items("/dev/null"), workers, sampler=runs.LazyGlobal(), **ahead)

    source, position = taken(make, 3)
    source.begin(0, position)
    assert "Not exact" in caplog.text
    assert "python" in caplog.text
    source.close()


@pytest.mark.process
def test_exact_loaders_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("main, lazy", "2 workers, lazy", "main, shuffled"):
        source, position = taken(functools.partial(runs.LOADERS[name], "/dev/null"), 3)
        source.begin(0, position)
        assert caplog.text == "", name
        source.close()


def test_draws_between_begin_and_next_are_undone() -> None:
    def make() -> Any:
        return runs.LOADERS["main, shuffled"]("/dev/null")

    runs.seed(3)
    source = source_of(make())
    source.begin(0)
    source.next()
    position = runs.saved(source)
    expected = runs.plain(source.next()), runs.numbers_now()
    again = source_of(make())
    again.begin(0, position)
    runs.seed(5)
    assert (runs.plain(again.next()), runs.numbers_now()) == expected


@pytest.mark.parametrize("asks", [False, True])
def test_an_end_that_was_drawn_ahead_is_drawn_again(asks: bool) -> None:
    """A RandomSampler draws from its generator as it ends. A trainer may not ask for the end again."""

    def begun(position: Any, *, drawn: int) -> Any:
        source = source_of(runs.LOADERS["main, shuffled by its own"]("/dev/null"))
        source.count_trained()
        source.begin(0, position)
        for _ in range(drawn):
            source.next()
        return source

    def next_order(source: Any) -> Any:
        source.leave_ahead()
        source.begin(1)
        return source.next()[0].tolist()

    first = begun(None, drawn=6)
    with pytest.raises(StopIteration):
        first.next()
    first.count_trained(5)
    again = begun(runs.saved(first), drawn=1)
    assert again.redraws
    if asks:
        with pytest.raises(StopIteration):
            again.next()
    again.count_trained(6)
    assert next_order(again) == next_order(first)


@pytest.mark.parametrize("name", ["2 persistent", "main, shuffled by its own"])
@pytest.mark.process
def test_a_position_carried_over_keeps_the_global_generators(name: str) -> None:
    """Another loop may have run since the position was taken (validation after training)."""
    source, position = taken(functools.partial(runs.LOADERS[name], "/dev/null"), 3)
    runs.seed(5)
    expected = runs.numbers_now()
    source.begin(1, position)
    assert runs.numbers_now() == expected
    source.close()


@pytest.mark.process
def test_another_number_of_workers(caplog: pytest.LogCaptureFixture) -> None:
    runs.seed(3)
    source = source_of(runs.loader(runs.Items("/dev/null"), 2, shuffle=True))
    source.begin(0)
    for _ in range(3):
        source.next()
    position, expected = runs.saved(source), source.next()[0].tolist()
    source.close()
    for workers in (0, 3):
        again = source_of(runs.loader(runs.Items("/dev/null"), workers, shuffle=True))
        again.begin(1, position)
        assert f"has {workers} workers and had 2" in caplog.text
        caplog.clear()
        again.begin(0, position)
        assert f"has {workers} workers and had 2" in caplog.text
        assert again.next()[0].tolist() == expected
        again.close()


@pytest.mark.process
def test_a_second_resume_after_another_number_of_workers_is_exact() -> None:
    make = functools.partial(runs.loader, runs.Items("/dev/null"), shuffle=True)
    runs.seed(3)
    first = runs.run(source_of(make(workers=0)), range(1))
    second = runs.resume(functools.partial(make, workers=2), first.positions[0, 2], range(1))
    for cut in (3, 4, 5):
        runs.seed(77)  # only the saved position can give the workers their seed
        got = runs.run(source_of(make(workers=2)), range(1), runs.from_wire(second.positions[0, cut]))
        assert got.seen == {key: second.seen[key] for key in got.seen}, cut


class FailsOnce(runs.Eager):
    calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        if self.calls == 2:  # by then the workers are seeded
            raise OSError("not now")
        return super().__iter__()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's half-made iterator
@pytest.mark.process
def test_workers_are_seeded_anew_after_an_iterator_that_could_not_be_made() -> None:
    def make() -> Any:
        sampler = FailsOnce()
        return runs.loader(runs.Items("/dev/null"), 2, batch_size=None, sampler=sampler), sampler

    runs.seed(3)
    source = source_of(make()[0])
    source.begin(0)
    with pytest.raises(OSError, match="not now"):
        source.next()
    runs.loop_draws()
    source.begin(1)
    source.next()
    position = runs.saved(source)
    expected = runs.plain(source.next()), runs.plain(source.next())
    source.close()
    loader, sampler = make()
    sampler.calls = 2
    again = source_of(loader)
    again.begin(1, position)
    assert (runs.plain(again.next()), runs.plain(again.next())) == expected
    again.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.process
def test_a_skip_beyond_the_end_is_refused(workers: int) -> None:
    """Also where the length is unknown."""
    source = source_of(runs.loader(runs.Items("/dev/null"), workers, batch_sampler=runs.EagerBatches()))
    source.begin(0)
    with pytest.raises(MismatchError, match="ended after 6 batches"):
        source.skip(8)
    source.close()


@pytest.mark.process
def test_another_length_is_logged_and_a_shorter_loader_ends(caplog: pytest.LogCaptureFixture) -> None:
    for workers in (0, 2):
        _, position = taken(lambda w=workers: runs.loader(runs.Items("/dev/null"), w), 5)
        shorter = source_of(runs.loader(runs.Items("/dev/null", 12), workers))
        shorter.begin(0, position)
        assert "has 3 batches an epoch and had 6" in caplog.text
        with pytest.raises(StopIteration):
            shorter.next()
        shorter.close()


@pytest.mark.process
def test_the_users_loader_is_not_changed() -> None:
    for name in ("2 persistent by its own", "2 workers, collate, init", "main, shuffled"):
        loader = runs.LOADERS[name]("/dev/null")
        before = copy.copy(vars(loader))
        source = source_of(loader)
        source.begin(0)
        source.next()
        position = runs.saved(source)
        source.begin(0, position)
        source.next()
        source.close()
        assert all(vars(loader)[key] is value for key, value in before.items())
        assert vars(loader).keys() == before.keys()


@pytest.mark.process
def test_close_ends_the_workers() -> None:
    for name in ("2 persistent", "2 workers"):
        source = source_of(runs.LOADERS[name]("/dev/null"))
        source.begin(0)
        source.next()
        workers = list(source._iterator._workers)  # type: ignore[attr-defined]
        assert all(worker.is_alive() for worker in workers)
        source.close()
        assert not any(worker.is_alive() for worker in workers)


class Failing(runs.Items):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise ValueError("item nine")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.process
def test_after_a_failure_the_position_is_unknown(workers: int) -> None:
    source = source_of(runs.loader(Failing("/dev/null"), workers))
    source.begin(0)
    source.next(), source.next()
    with pytest.raises(ValueError, match="item nine"):
        source.next()
    with pytest.raises(BoundaryError, match="Start the loop again"):
        source.next()
    source.begin(1)
    source.next()
    source.close()


def test_an_unknown_length() -> None:
    with pytest.raises(TypeError, match="number of batches"):
        len(source_of(runs.loader(runs.Items("/dev/null"), 0, batch_sampler=runs.EagerBatches())))


@pytest.mark.parametrize(
    "spoil",
    [
        {"batches_taken": "3"}, {"batches_taken": -1}, {"over": None}, {"now": {}}, {"kind": None},
        {"parts": {}}, {"at_iter": {"global": {}, "own": {}}}, {"extra": 1}, {"at_iter": None},
        {"parts": {"states": None, "seeder": None, "skipped": 0}}, {"now": {"global": {}, "own": None}},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_position_is_refused(spoil: dict[str, Any]) -> None:
    _, position = taken(lambda: runs.loader(runs.Items("/dev/null"), 0, shuffle=True), 2)
    with pytest.raises(DamagedError, match=r"[Rr]esume from an older step"):
        source_of(runs.loader(runs.Items("/dev/null"), 0)).begin(0, {**position, **spoil})


def test_a_share_that_was_divided_after_its_position_is_refused() -> None:
    _, position = taken(lambda: runs.loader(runs.Items("/dev/null"), 0, shuffle=True), 2)
    position["share"]["batches"] = 3
    with pytest.raises(DamagedError, match="2 batches, fewer than before"):
        source_of(runs.loader(runs.Items("/dev/null"), 0, shuffle=True)).begin(0, position)


def test_a_position_of_another_kind_of_loader_is_refused() -> None:
    _, position = taken(lambda: runs.loader(runs.Items("/dev/null"), 0), 2)
    with pytest.raises(MismatchError, match="already restored; no batch was drawn") as caught:
        source_of([1, 2, 3]).begin(0, position)
    assert caught.value.differences == (("loader", "torch DataLoader", "replayed iterable"),)


class Pinnable(list[int]):
    def pin_memory(self) -> str:
        return "pinned"


def test_torch_pins_the_batch_inside_a_report() -> None:
    """torch's pinning thread gets the report and must pin the batch inside it."""
    report = Reported({"images": Pinnable()}, {"python": b"p", "torch": b"t"})
    pinned = torch.utils.data._utils.pin_memory.pin_memory(report)
    assert type(pinned) is Reported
    assert pinned == ({"images": "pinned"}, {"python": b"p", "torch": b"t"})


@pytest.mark.gpu
@pytest.mark.process
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_pinned_if_the_loader_pins() -> None:
    source = source_of(runs.loader(runs.Items("/dev/null"), 2, collate_fn=runs.collate, pin_memory=True))
    source.begin(0)
    batch = source.next()
    assert type(batch) is runs.Pair
    assert batch.index.is_pinned()
    source.close()


class Late:
    """As collators with a seed do: the generator is made with the first batch."""

    numbers: random.Random | None = None

    def __call__(self, samples: list[Any]) -> list[Any]:
        self.numbers = self.numbers or random.Random(1)
        return [*samples, self.numbers.random()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.process
def test_a_generator_that_is_made_late_is_named(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Workers say it themselves."""
    handler = logging.StreamHandler()
    logging.getLogger("flashckpt").addHandler(handler)
    try:
        source = source_of(runs.loader(runs.Items("/dev/null"), workers, collate_fn=Late()))
        runs.run(source, range(2))
    finally:
        logging.getLogger("flashckpt").removeHandler(handler)
    said = capfd.readouterr().err
    assert said.count("Not exact: the random generators collate.numbers of the loader were made with") == 1
