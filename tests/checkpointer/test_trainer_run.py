"""TrainerRun: a loop that draws earlier than it trains, and whose boundaries are calls, resumes exactly."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import flashckpt
from flashckpt import BoundaryError, MismatchError, OptionError, StateError
from flashckpt.checkpointer.trainer_run import Deferred, DisabledRun, attach_trainer
from flashckpt.store import open_store
from tests import run_view
from tests.waiting import until_room, until_slots

pytestmark = pytest.mark.usefixtures("runtime")

EPOCHS, BATCHES = 3, 5


class Cut(Exception):
    """The trainer dies here."""


def augmented(index: int) -> torch.Tensor:
    noise = random.random() + float(np.random.random()) + float(torch.rand(()))
    return torch.full((4,), index + noise)


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCHES * 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return augmented(index)


class StatefulStream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES * 2:
            self.at += 1
            yield augmented(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def own_generator() -> Any:
    return DataLoader(Items(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Items(), batch_size=2, shuffle=True),
    "generator of its own": own_generator,
    "stateful stream": lambda: DataLoader(StatefulStream(), batch_size=2),
}


class Counters(Deferred):
    """What this trainer resets before its loop."""

    def __init__(self) -> None:
        self.value, self.mean = 0, torch.zeros(2)

    def read(self) -> dict[str, Any]:
        return {"value": self.value, "mean": self.mean}

    def put(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.mean = state["mean"].clone()


class Trainer:
    """Draws `ahead` batches before it trains on one. `cut` raises Cut after so many iterations in this
    process."""

    def __init__(self, path: Path, kind: str, ahead: int, **options: Any) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.counters = Counters()
        self.loaders = [LOADERS[kind]()]
        self.ahead, self.stopped = ahead, False
        self.seen: dict[tuple[int, int], list[Any]] = {}
        state = {"model": self.model, "optimizer": self.optimizer, "counters": self.counters}
        self.run = attach_trainer(
            path,
            state,
            integration="testing",
            on_stop=self.stop,
            **{"every": 1, "persist_every": 1, **options},
        )
        self.taps = [self.run.tap(each, f"loader{i}") for i, each in enumerate(self.loaders)]

    def stop(self) -> None:
        self.stopped = True

    def fit(self, cut: int | None = None, epochs: int = EPOCHS) -> dict[str, Any]:
        try:
            first = self.run.epoch
            self.noise()
            self.counters.apply()
            self.run.restore_again()
            for epoch in range(first, epochs):
                self.epoch(epoch, self.run.trained if epoch == first else 0, epochs, cut)
                if self.stopped:
                    break
            self.run.close()
        except BaseException:
            self.run.abandon()
            raise
        return self.result()

    def noise(self) -> None:
        """What a trainer does before its loop: it draws, and it resets."""
        random.random(), np.random.random(), torch.rand(3)
        self.counters.value = 0

    def epoch(self, epoch: int, trained: int, epochs: int, cut: int | None) -> None:
        draws = zip(*self.taps, strict=True)
        queue: deque[Any] = deque()
        is_over = False
        while True:
            while not is_over and len(queue) <= self.ahead:
                try:
                    queue.append(next(draws))
                except StopIteration:
                    is_over = True
            if not queue:
                break
            self.run.begin()
            self.train(queue.popleft(), (epoch, trained))
            trained += 1
            if cut is not None and len(self.seen) > cut:
                raise Cut
            if trained < BATCHES:
                self.end_iteration(trained)
                if self.stopped:
                    return
        random.random()  # the epoch's own code
        self.run.end_epoch(last=epoch + 1 >= epochs)
        self.until_captured()

    def end_iteration(self, trained: int) -> None:
        self.run.end_iteration(trained=trained)
        self.until_captured()

    def until_captured(self) -> None:
        """So that no boundary is passed by."""
        if not isinstance(self.run, DisabledRun):
            until_room(self.run.checkpointer)

    def train(self, batches: Any, key: tuple[int, int]) -> None:
        loss = torch.stack([self.model(x).square().sum() for x in batches]).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.counters.value += 1
        self.counters.mean += loss.item()
        self.seen[key] = [*(x.tolist() for x in batches), loss.item()]

    def result(self) -> dict[str, Any]:
        return {
            "model": {name: each.tolist() for name, each in self.model.state_dict().items()},
            "counters": (self.counters.value, self.counters.mean.tolist()),
            "random": (random.random(), float(np.random.random()), float(torch.rand(()))),
            "step": self.run.checkpointer.completed,
        }


def after_cut(path: Path, cut: int, *kind: Any) -> Trainer:
    """A trainer attached again after another died in its iteration number `cut`."""
    first = Trainer(path, *kind)
    until_slots(first.run.checkpointer)
    with pytest.raises(Cut):
        first.fit(cut)
    return Trainer(path, *kind)


@pytest.mark.parametrize(
    ("kind", "ahead"),
    [("shuffled", 2), ("generator of its own", 1), ("stateful stream", 2), ("stateful stream", 0)],
)
def test_batches_drawn_ahead_are_drawn_again(kind: str, ahead: int, tmp_path: Path) -> None:
    plain = Trainer(tmp_path / "plain", kind, ahead)
    expected = plain.fit()
    assert expected["step"] == EPOCHS * BATCHES
    for cut in (1, 3, 5, 9):  # with one of an epoch's last batches ahead, at its end, in its last iteration
        trainer = after_cut(tmp_path / f"cut{cut}", cut, kind, ahead)
        # The iteration that was cut has no boundary.
        assert trainer.run.resumed.step == cut
        assert trainer.fit() == expected
        assert {key: plain.seen[key] for key in trainer.seen} == trainer.seen
        assert min(trainer.seen) == divmod(cut, BATCHES)


def test_batches_are_drawn_again_one_at_a_time(tmp_path: Path) -> None:
    """A loop that trains between two of them keeps its own random numbers."""
    plain = Trainer(tmp_path / "plain", "shuffled", 2)
    plain.fit()
    for cut in (3, 4):
        path = tmp_path / f"cut{cut}"
        first = Trainer(path, "shuffled", 2)
        until_slots(first.run.checkpointer)
        with pytest.raises(Cut):
            first.fit(3)
        trainer = Trainer(path, "shuffled", 0)
        if cut == 4:  # a boundary at which one of the two is still to be drawn again
            with pytest.raises(Cut):
                trainer.fit(1)
            trainer = Trainer(path, "shuffled", 0)
        trainer.fit(epochs=1)
        assert sorted(trainer.seen) == [(0, number) for number in range(cut, BATCHES)]
        assert trainer.seen == {key: plain.seen[key] for key in trainer.seen}


def test_an_iterator_of_an_epoch_that_has_ended_gives_no_batch(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "run", "shuffled", 0)
    for epoch, batches in enumerate((BATCHES, 2)):
        draws = iter(trainer.taps[0])
        for number in range(batches):
            batch = next(draws)
            trainer.run.begin()
            trainer.train([batch], (epoch, number))
            if number < batches - 1:
                trainer.end_iteration(number + 1)
        trainer.run.end_epoch()
        with pytest.raises(StopIteration) if batches == BATCHES else pytest.raises(BoundaryError):
            next(draws)
    trainer.run.abandon()


@pytest.mark.parametrize("cut", [4, 2])
def test_a_stop_ends_at_a_boundary_and_in_the_last_iteration_with_the_epoch(cut: int, tmp_path: Path) -> None:
    expected = Trainer(tmp_path / "plain", "shuffled", 1).fit()
    first = Trainer(tmp_path / "run", "shuffled", 1)
    train = first.train

    def stopping(batches: Any, key: tuple[int, int]) -> None:
        train(batches, key)
        if len(first.seen) == cut + 1:
            first.run.checkpointer.stop()

    first.train = stopping  # type: ignore[method-assign]
    first.fit()
    assert first.stopped
    assert len(first.seen) == cut + 1
    assert flashckpt.steps(tmp_path / "run")[-1] == cut + 1
    second = Trainer(tmp_path / "run", "shuffled", 1)
    assert second.run.epoch == (1 if cut == 4 else 0)
    assert second.fit() == expected
    assert len(second.seen) == EPOCHS * BATCHES - cut - 1


def test_a_run_that_begins_elsewhere_and_is_saved_before_its_first_draw(tmp_path: Path) -> None:
    first = Trainer(tmp_path / "run", "shuffled", 0)
    first.run.begin_at(step=2, epoch=0, batches=2)
    with pytest.raises(BoundaryError, match="is at step 2 already"):
        first.run.begin_at(step=4, epoch=0, batches=4)
    assert (first.run.trained, first.taps[0].drawn) == (2, 2)
    first.run.checkpointer.save()
    first.run.checkpointer.wait()
    first.run.abandon()
    second = Trainer(tmp_path / "run", "shuffled", 0)
    assert (second.run.trained, second.taps[0].drawn) == (2, 2)
    second.counters.apply()
    second.run.restore_again()
    assert len([*second.taps[0]]) == BATCHES - 2
    assert second.taps[0].drawn == BATCHES
    second.run.abandon()


def test_a_tap_passes_for_its_loader(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "run", "shuffled", 0)
    [tap], [loader] = trainer.taps, trainer.loaders
    assert isinstance(tap, DataLoader)
    assert (tap.dataset, tap.batch_size, len(tap)) == (loader.dataset, 2, BATCHES)
    before = torch.get_rng_state()
    old, new = iter(tap), iter(tap)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn before the first next()"
    assert tap.drawn == 0
    next(new)
    assert tap.drawn == 1
    with pytest.raises(BoundaryError, match="older iterator"):
        next(old)
    assert len([*new]) == BATCHES - 1
    assert tap.drawn == BATCHES
    next(iter(tap))
    assert tap.drawn == BATCHES + 1
    trainer.run.abandon()


def test_batches_ahead_of_a_loader_that_is_begun_anew_are_refused(tmp_path: Path) -> None:
    """Only one pass of a loader has a position."""
    trainer = Trainer(tmp_path / "run", "shuffled", 0)
    trainer.run.begin()
    trainer.train([[*trainer.taps[0]][0]], (0, 0))
    next(iter(trainer.taps[0]))
    with pytest.raises(BoundaryError, match=f"{BATCHES - 1} batches of its pass before"):
        trainer.run.end_iteration(trained=1)
    trainer.run.abandon()


def test_gradients_that_the_trainer_has_dropped_come_back(tmp_path: Path) -> None:
    def accumulated(trainer: Trainer) -> list[Any]:
        return [None if p.grad is None else p.grad.tolist() for p in trainer.model.parameters()]

    first = Trainer(tmp_path / "run", "shuffled", 0)
    until_slots(first.run.checkpointer)
    first.run.begin()
    first.model(next(iter(first.taps[0]))).sum().backward()
    first.run.checkpointer.save()  # the policy waits for an optimizer's step
    first.end_iteration(1)
    expected = accumulated(first)
    first.run.abandon()
    second = Trainer(tmp_path / "run", "shuffled", 0)
    assert second.run.resumed is not None
    assert accumulated(second) == expected
    second.optimizer.zero_grad()
    second.run.restore_again()
    assert accumulated(second) == expected
    second.run.abandon()
    third = Trainer(tmp_path / "run", "shuffled", 0)
    third.optimizer.zero_grad(set_to_none=False)
    with pytest.raises(StateError, match="in place"):
        third.run.restore_again()
    third.run.abandon()


def test_deferred_state_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    after_cut(tmp_path / "run", 2, "shuffled", 0).run.abandon()
    trainer = Trainer(tmp_path / "run", "shuffled", 0)
    assert trainer.counters.pending["value"] == 2
    trainer.counters.put = lambda state: None  # type: ignore[method-assign]
    with pytest.raises(StateError, match="Counters: mean, value differ"):
        trainer.counters.apply()
    trainer.run.abandon()


def test_a_run_belongs_to_one_integration(tmp_path: Path) -> None:
    after_cut(tmp_path / "run", 2, "shuffled", 0).run.abandon()
    trainer = Trainer(tmp_path / "other", "shuffled", 0)
    state = {"model": trainer.model, "optimizer": trainer.optimizer, "counters": trainer.counters}
    with pytest.raises(MismatchError, match=r"made by flashckpt.testing, and flashckpt.another"):
        attach_trainer(tmp_path / "run", state, integration="another", on_stop=trainer.stop)
    with pytest.raises(MismatchError, match=r"and a loop of the program"):
        flashckpt.attach(tmp_path / "run", state=state)
    with pytest.raises(flashckpt.RunHeldError):
        attach_trainer(tmp_path / "other", state, integration="testing", on_stop=trainer.stop)
    trainer.run.abandon()


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"flashckpt.testing has no option persistevery"):
        attach_trainer(tmp_path, {}, integration="testing", on_stop=print, persistevery=3)


def with_assets(run: Path, assets: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    """What a run has once a trainer with these assets was attached to it."""
    state = {"model": nn.Linear(2, 2)}
    attach_trainer(run, state, integration="tests", on_stop=list, every=None, assets=assets).close()
    return run_view.assets(open_store(run))


def test_assets_are_those_of_the_first_attempt(tmp_path: Path) -> None:
    for assets in (lambda: {"config.json": b"first"}, lambda: pytest.fail("they are there")):
        assert with_assets(tmp_path / "run", assets) == {"config.json": b"first"}


def fail() -> dict[str, bytes]:
    raise ValueError("the generation config is not valid")


@pytest.mark.parametrize("assets", [lambda: {"../x": b""}, fail], ids=["name", "raises"])
def test_assets_that_cannot_be_kept_do_not_stop_training(
    assets: Callable[[], dict[str, bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert with_assets(tmp_path / "run", assets) == {}
    assert "needs --config" in caplog.text
