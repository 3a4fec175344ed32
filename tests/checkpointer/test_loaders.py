"""What a loop hands on of its loader, what it says about it, and what it refuses before it is trained on."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import flashckpt
from flashckpt.errors import BoundaryError, StateError
from tests.resume.loaders import LOADERS
from tests.waiting import until_slots

pytestmark = pytest.mark.usefixtures("runtime")


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.named: Any = {"model": self.model, "optimizer": self.optimizer}

    def train(self, number: float) -> None:
        self.model(torch.full((1, 1), float(number))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Keeping:
    """A loader with a state of its own; `spoil` makes another of it."""

    def __init__(self, spoil: Callable[[], object] | None = None, own: Sequence[int] = range(1, 7)) -> None:
        self.own, self.taken, self.spoil = own, 0, spoil

    def __iter__(self) -> Iterator[int]:
        while self.taken < len(self.own):
            self.taken += 1
            yield self.own[self.taken - 1]
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        if self.spoil is not None:
            return {"taken": self.taken, "inner": [self.spoil()]}
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def raising() -> object:
    raise ZeroDivisionError("not now")


def test_a_loader_whose_state_cannot_be_saved_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    job = Job()
    trained: list[int] = []

    def loop() -> None:
        trained.extend(flashckpt.loop(Keeping(threading.Lock), tmp_path / "run", every=1, **job.named))

    with pytest.raises(StateError, match=r"loader\.inner\.0 cannot be saved exactly") as caught:
        loop()
    assert caught.value.location == "loader.inner.0"
    assert trained == []


def test_a_loader_whose_state_cannot_be_read_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    batches = flashckpt.loop(Keeping(raising), tmp_path / "run", **Job().named)
    with pytest.raises(StateError, match="ZeroDivisionError"):
        next(batches)


def test_attributes_are_the_loaders(tmp_path: Path) -> None:
    job, loader = Job(), DataLoader([0.0, 1.0, 2.0], batch_size=2)
    with flashckpt.attach(tmp_path / "run", **job.named) as run:
        batches = run.enumerate(loader)
        assert batches.dataset is loader.dataset
        assert batches.batch_size == 2
        assert len(batches) == 2
        with pytest.raises(AttributeError, match="nothing_of_the_kind"):
            _ = batches.nothing_of_the_kind
        for position, batch in batches:
            job.train(batch.sum())
            assert len(batches) == 1 - position


def test_positions_go_on_over_a_restart(tmp_path: Path) -> None:
    def run(until: int) -> list[tuple[int, int, int]]:
        job, seen = Job(), []
        checkpointer = flashckpt.attach(tmp_path / "run", every=1, **job.named)
        for epoch in checkpointer.epochs(2):
            for position, number in checkpointer.enumerate([0, 1, 2, 3]):
                until_slots(checkpointer)
                seen.append((epoch, position, number))
                if len(seen) == until:
                    return seen
                job.train(number)
        checkpointer.close()
        return seen

    assert run(7) == [(0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 0, 0), (1, 1, 1), (1, 2, 2)]
    assert run(9) == [(1, 2, 2), (1, 3, 3)]


@pytest.mark.parametrize("loader", [itertools.count(), range(50)], ids=lambda v: type(v).__name__)
def test_drawing_again_from_what_is_at_hand_is_no_news(
    loader: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = itertools.count() if isinstance(loader, itertools.count) else loader
    job = Job()
    left = flashckpt.loop(loader, tmp_path / "run", every=1, steps=5, **job.named)
    for number in left:
        until_slots(left.checkpointer)
        job.train(number)
        if left.completed == 3:
            break
    del left
    caplog.set_level(logging.INFO, logger="flashckpt")
    caplog.clear()
    job = Job()
    assert [job.train(n) or n for n in flashckpt.loop(again, tmp_path / "run", steps=5, **job.named)] == [
        3,
        4,
    ]
    assert "drawn again" not in caplog.text


class Empty(Keeping):
    """Gives nothing any more."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize("empty", [Empty, list])
def test_an_empty_epoch_right_after_a_resume_is_no_end(empty: Callable[[], Any], tmp_path: Path) -> None:
    full = Keeping() if empty is Empty else [*range(1, 7)]
    job = Job()
    batches = flashckpt.loop(full, tmp_path / "run", every=None, **job.named)
    for number in batches:
        job.train(number)
    assert batches.completed == 6
    job = Job()
    with pytest.raises(BoundaryError, match="begin another epoch|gave no batch"):
        list(flashckpt.loop(empty(), tmp_path / "run", epochs=2, **job.named))
    job = Job()
    assert len([job.train(n) for n in flashckpt.loop(full, tmp_path / "run", epochs=2, **job.named)]) == 6


def test_a_loop_of_steps_says_once_what_it_leaves_to_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for expected in (0, 1):
        caplog.clear()
        job = Job()
        run = flashckpt.attach(tmp_path / "run", **job.named)
        for number in range(3):
            job.train(number)
            run.step()
        run.save()
        run.close()
        said = [each for each in caplog.records if "are the program's to restore" in each.getMessage()]
        assert len(said) == expected


def given_in_lives(
    life: Callable[[Path, list[Any], int], None], left_after: list[int], run: Path
) -> list[Any]:
    """What the lives of one run are given that are each stopped after so many batches (-1: at the end)."""
    given: list[Any] = []
    for batches in left_after:
        life(run, given, batches)
    return given


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("taken", [[5, 5], [2, 3]])
@pytest.mark.parametrize("name", ["torchdata nodes", "torchdata, sticky", "sticky itself", "shards"])
def test_a_run_that_ends_with_an_epoch_goes_on_with_the_next(
    name: str, taken: list[int], tmp_path: Path, runtime: Path
) -> None:
    """Nobody knows yet at the boundary of a last batch that none follows."""
    assert name not in ("torchdata nodes", "torchdata, sticky") or pytest.importorskip("torchdata")

    def life(run: Path, given: list[Any], leave_after: int) -> None:
        job, own = Job(), LOADERS[name]()
        with flashckpt.attach(run, every=1, **job.named) as checkpointer:
            for epoch in checkpointer.epochs(3):
                for position, batch in checkpointer.enumerate(own):
                    job.train(1)
                    given.append((epoch, position, batch.tolist(), float(torch.rand(()))))
                    leave_after -= 1
                    if leave_after == 0:
                        checkpointer.stop()
                if checkpointer.stopping:
                    return

    assert given_in_lives(life, [*taken, -1], tmp_path / "run") == given_in_lives(
        life, [-1], tmp_path / "whole"
    )


def drawn_nodes() -> Any:
    """Shuffled by the global numbers, when its state is asked for already."""
    from torchdata import nodes

    return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(RandomSampler(range(20))), batch_size=4))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("taken", [[5, 2], [2, 1]])
@pytest.mark.parametrize("make", [LOADERS["torchdata nodes"], drawn_nodes], ids=["told", "drawn"])
def test_torchdata_nodes_in_a_loop_that_asks_for_their_state_first(
    make: Any, taken: list[int], tmp_path: Path, runtime: Path
) -> None:
    """Their `iter()` after `state_dict()` passes over a state that was loaded in between."""
    pytest.importorskip("torchdata")

    def life(run: Path, given: list[Any], leave_after: int) -> None:
        job = Job()
        torch.manual_seed(7)
        batches = flashckpt.loop(make(), run, epochs=3, every=1, **job.named)
        for batch in batches:
            job.train(1)
            given.append((torch.as_tensor(batch).tolist(), float(torch.rand(()))))
            leave_after -= 1
            if leave_after == 0:
                batches.stop()

    assert given_in_lives(life, [*taken, -1], tmp_path / "run") == given_in_lives(
        life, [-1], tmp_path / "whole"
    )
