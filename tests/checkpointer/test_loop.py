"""The loop as people drive it, well and badly: what is a boundary, what is refused, what is released."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import flashckpt
from flashckpt import BoundaryError
from tests.waiting import newest_sealed, until, until_slots

pytestmark = pytest.mark.usefixtures("runtime")


class Job:
    """A small model with its optimizer; `train` is one iteration."""

    def __init__(self, width: int = 4) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(self, x: torch.Tensor) -> None:
        self.model(x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def named(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


class Stream:
    """Batches that know no length."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2, 4) * number for number in range(self.batches)])


def loader(batches: int = 6) -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(batches * 8.0).view(batches * 2, 4), batch_size=2, shuffle=True)  # type: ignore[arg-type]


READS_AHEAD = flashckpt.Options(read_ahead_check=False)
LEFT = "the loop was left by `break` or an exception in the iteration after step"


def lines(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [text for text in caplog.messages if text.startswith(start)]


@pytest.mark.parametrize("then", ["close", "save", "boundary", "raise"])
def test_an_iteration_of_batches_left_by_break(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: str
) -> None:
    """Reported if nothing captures it later, and if no error says so."""
    job = Job()
    with (
        pytest.raises(KeyError) if then == "raise" else nullcontext(),
        flashckpt.attach(tmp_path / "run", every=1, **job.named) as checkpointer,
    ):
        for x in checkpointer.batches(loader()):
            job.train(x)
            if then == "raise":
                raise KeyError
            break
        if then == "save":
            checkpointer.save()
        if then == "boundary":
            job.train(x)
            checkpointer.step()
    assert len(lines(caplog, LEFT)) == (then == "close")


@pytest.mark.parametrize("in_epochs", [True, False])
def test_a_second_loop_over_batches_is_refused(in_epochs: bool, tmp_path: Path) -> None:
    """A resume in it would run the code between the two again: a scheduler would step twice."""
    run, job = tmp_path / "run", Job()
    checkpointer = flashckpt.attach(run, every=1, **job.named)
    for _ in checkpointer.epochs(2) if in_epochs else [0]:
        for x in checkpointer.batches(loader(3)):
            job.train(x)
        with pytest.raises(BoundaryError, match="code between the two again") as raised:
            checkpointer.batches(loader(2))
        assert raised.value.step == 3
        break
    checkpointer.close()
    again = Job()
    with flashckpt.attach(run, every=1, **again.named) as checkpointer:
        assert checkpointer.resumed.step == (2 if in_epochs else 3)


@pytest.mark.parametrize("marks", [False, True])
def test_an_iterator_that_outlives_its_epoch_ends_no_other(marks: bool, tmp_path: Path) -> None:
    """As a bar of tqdm in a variable does. What step() has marked in it has no batch behind it."""
    run, job, seen = tmp_path / "run", Job(), []
    with flashckpt.attach(run, every=1, options=flashckpt.Options(grace="5s"), **job.named) as checkpointer:
        for epoch in checkpointer.epochs(3):
            kept = checkpointer.batches(Stream(4))
            for number, x in enumerate(kept):
                until_slots(checkpointer)
                job.train(x)
                seen.append((epoch, number))
                if marks:
                    checkpointer.step()
                if number == 2:
                    break
    assert seen == [(epoch, number) for epoch in range(3) for number in range(3)]
    assert flashckpt.steps(run)[-1] == checkpointer.completed
    again = Job()
    with flashckpt.attach(run, every=1, **again.named) as checkpointer:
        assert torch.equal(again.model.weight, job.model.weight)
        assert list(checkpointer.epochs(3)) == []


def test_a_save_after_step_in_the_last_iteration_is_of_the_epochs_end(tmp_path: Path) -> None:
    run, job = tmp_path / "run", Job()
    with flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer:
        for _ in checkpointer.epochs(2):
            for x in checkpointer.batches(Stream(2)):
                job.train(x)
                checkpointer.step()
                if checkpointer.completed == 2:
                    checkpointer.save()
            with torch.no_grad():
                job.model.weight.mul_(0.5)
            if checkpointer.completed == 2:
                expected = job.model.weight.detach().clone()
    assert flashckpt.steps(run) == [2, 4]
    assert torch.equal(flashckpt.load(run, 2)["model.weight"], expected)


def test_a_finished_run_gives_no_more_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    for x in flashckpt.loop(loader(), str(tmp_path / "run"), **job.named):
        job.train(x)
    weight = job.model.weight.detach().clone()
    again = Job()
    assert list(flashckpt.loop(loader(), str(tmp_path / "run"), **again.named)) == []
    assert torch.equal(again.model.weight, weight)
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert any(each.startswith("resumed from step 6 (") for each in said), (
        "seen without any set-up of logging"
    )
    assert any("had ended before, at step 6, and gives no more batches" in each for each in said)


def test_a_loop_over_epochs_around_a_whole_run_is_refused(tmp_path: Path) -> None:
    run, job = tmp_path / "run", Job()
    seen = []

    def train() -> None:
        for epoch in range(3):
            for x in flashckpt.loop(loader(), run, **job.named):
                seen.append(epoch)
                job.train(x)

    with pytest.raises(BoundaryError, match=r"ended the run at step 6, .* loop\(…, epochs=3\)") as refusal:
        train()
    assert (seen, refusal.value.step) == ([0] * 6, 6)
    assert len(list(flashckpt.loop(loader(), run, options=READS_AHEAD, epochs=2, **job.named))) == 6
    assert len(list(flashckpt.loop(loader(), run, options=READS_AHEAD, steps=15, **job.named))) == 3


def test_a_loop_that_was_stopped_goes_on_in_the_same_process(tmp_path: Path) -> None:
    run, job, counts = tmp_path / "run", Job(), []
    for _ in range(3):
        batches = flashckpt.loop(loader(), run, epochs=2, every=None, persist_every=None, **job.named)
        for x in batches:
            job.train(x)
            if batches.completed % 4 == 3:
                batches.stop()
        counts.append(batches.completed)
        assert flashckpt.steps(run)[-1] == counts[-1], "the boundary of the stop is committed"
    assert counts == [4, 8, 12]


def test_steps_repeat_the_loader_and_end_the_run(tmp_path: Path) -> None:
    job = Job()
    batches = flashckpt.loop(loader(3), str(tmp_path / "run"), steps=8, **job.named)
    assert len(batches) == 8
    for x in batches:
        job.train(x)
    assert batches.completed == 8
    with pytest.raises(BoundaryError, match="epochs"):
        iter(batches)


def test_break_captures_nothing_is_reported_and_lets_the_run_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = str(tmp_path / "run")
    job = Job()
    batches = flashckpt.loop(loader(), run, every=1, **job.named)
    for x in batches:
        until_slots(batches.checkpointer)
        job.train(x)
        if batches.completed == 2:
            break  # the third iteration: nobody knows whether its body was done
    del batches
    [line] = lines(caplog, LEFT)
    assert line.startswith(f"{LEFT} 2,")
    assert "call .stop() in the place of `break`" in line
    again = Job()
    batches = flashckpt.loop(loader(), run, every=1, **again.named)
    assert batches.completed == 2
    assert batches.checkpointer.resumed.tier == "memory"
    for x in batches:
        again.train(x)
    assert batches.completed == 6


def test_a_marked_step_counts_once_and_is_captured_before_a_break(tmp_path: Path) -> None:
    run, job = str(tmp_path / "run"), Job()
    batches = flashckpt.loop(loader(), run, every=1, **job.named)
    for number, x in enumerate(batches, 1):
        until_slots(batches.checkpointer)
        job.train(x)
        batches.checkpointer.step()
        assert batches.completed == number
        if number == 3:
            break
    weight = job.model.weight.detach().clone()
    del batches
    again = Job()
    resumed = flashckpt.attach(run, **again.named)
    assert resumed.completed == 3
    assert torch.equal(again.model.weight, weight)
    resumed.close()


def test_read_ahead_is_refused(tmp_path: Path) -> None:
    job = Job()

    def prefetched(batches: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        held: list[torch.Tensor] = []
        for x in batches:
            held.append(x)
            if len(held) > 1:
                yield held.pop(0)
        yield from held

    batches = prefetched(flashckpt.loop(loader(), str(tmp_path / "run"), **job.named))
    with pytest.raises(BoundaryError, match="reads ahead"):
        next(iter(batches))


def test_a_loop_without_hooks_is_no_read_ahead(tmp_path: Path) -> None:
    """A body that calls neither module nor optimizer, but changes the state."""
    job = Job()
    batches = flashckpt.loop(loader(), str(tmp_path / "run"), **job.named)
    for _ in batches:
        job.model.weight.data.numpy()[0, 0] += 1.0
    assert batches.completed == 6


def test_another_thread_is_refused(tmp_path: Path) -> None:
    job, caught = Job(), []
    batches = flashckpt.loop(loader(), str(tmp_path / "run"), **job.named)
    job.train(next(batches))

    def ahead() -> None:
        try:
            next(batches)
        except BoundaryError as error:
            caught.append(str(error))

    thread = threading.Thread(target=ahead)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "Another thread" in caught[0]


def test_the_same_run_twice_in_one_process_is_refused(tmp_path: Path) -> None:
    job = Job()
    held = flashckpt.attach(str(tmp_path / "run"), **job.named)
    with pytest.raises(flashckpt.RunHeldError, match="this process"):
        flashckpt.attach(str(tmp_path / "run"), **Job().named)
    held.close()


def test_save_in_an_iteration_is_of_the_next_boundary(tmp_path: Path) -> None:
    run, job = str(tmp_path / "run"), Job()
    batches = flashckpt.loop(loader(), run, every=None, persist_every=None, **job.named)
    weights = {}
    for x in batches:
        until_slots(batches.checkpointer)
        if batches.completed == 2:
            batches.checkpointer.save()
        job.train(x)
        weights[batches.completed + 1] = job.model.weight.detach().clone()
    assert flashckpt.steps(run) == [3, 6]
    for step in (3, 6):
        assert torch.equal(flashckpt.load(run, step)["model.weight"], weights[step])


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(flashckpt.RunError, match="file"):
        flashckpt.attach(str(tmp_path / "file" / "run"), **Job().named)


def has_sealed(checkpointer: flashckpt.Checkpointer, step: int) -> bool:
    return newest_sealed(checkpointer) == step


def test_a_snapshot_that_the_keeper_is_persisting_is_resumed_from(tmp_path: Path) -> None:
    """The keeper pins what it writes. A new trainer reads it beside the keeper, and goes back no step."""
    run, job = str(tmp_path / "run"), Job()
    batches = flashckpt.loop(loader(), run, every=1, persist_every=None, **job.named)
    for x in batches:
        until_slots(batches.checkpointer)
        job.train(x)
        if batches.completed == 3:
            break
    ring = batches.checkpointer._keeper_link.slots.ring
    assert ring is not None
    until(partial(has_sealed, batches.checkpointer, 3), "the newest seal")
    newest = ring.newest_sealed()
    slot, sealed = newest
    pinned = slot.pin(15, sealed.word)
    assert pinned is not None
    del ring, newest, slot, batches
    resumed = flashckpt.attach(run, **Job().named)
    assert resumed.completed == 3
    assert resumed.resumed.tier == "memory"
    resumed.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_are_those_of_a_plain_loop(workers: int, tmp_path: Path) -> None:
    """Dropout, shuffling and workers draw exactly what they would without checkpoints; switched off, too."""

    def run(
        batches: Iterable[torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[float]:
        losses = []
        for x in batches:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def fresh() -> tuple[DataLoader[torch.Tensor], nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        data = torch.randn(24, 4)
        made = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
        return made, model, torch.optim.SGD(model.parameters(), lr=1e-3)

    loader, model, optimizer = fresh()
    expected = run(loader, model, optimizer) + run(loader, model, optimizer)
    for enabled in (True, False):
        loader, model, optimizer = fresh()
        named = {"model": model, "optimizer": optimizer}
        looped = flashckpt.loop(loader, tmp_path / "run", epochs=2, every=1, enabled=enabled, **named)
        assert run(looped, model, optimizer) == expected


def test_save_after_a_change_that_no_hook_sees_saves_the_change(tmp_path: Path) -> None:
    run, job = str(tmp_path / "run"), Job()
    with flashckpt.attach(run, every=1, **job.named) as checkpointer:
        for x in checkpointer.batches(loader()):
            job.train(x)
        with torch.no_grad():
            job.model.weight.fill_(42.0)
        checkpointer.save()
        checkpointer.wait()
        assert torch.equal(flashckpt.load(run)["model.weight"], job.model.weight)
        saved = checkpointer.completed
        checkpointer.save()
        assert checkpointer.completed == saved, "nothing changed: the same snapshot"


def test_a_loader_that_fails_lets_the_run_go(tmp_path: Path) -> None:
    """The kept exception holds the frame of the iterator, as a notebook's traceback does."""
    run, job = str(tmp_path / "run"), Job()

    def failing() -> Iterable[torch.Tensor]:
        yield torch.ones(2, 4)
        raise KeyboardInterrupt

    kept: list[BaseException] = []
    try:
        for x in flashckpt.loop(failing(), run, **job.named):
            job.train(x)
    except KeyboardInterrupt as error:
        kept.append(error)
    assert kept
    flashckpt.attach(run, **Job().named).close()


def test_numbers_drawn_before_the_loop_are_undone_between_epochs(tmp_path: Path) -> None:
    def train(run: str, stop_after: int | None) -> list[torch.Tensor]:
        torch.manual_seed(11)
        job, seen = Job(), []
        with flashckpt.attach(run, **job.named) as checkpointer:
            torch.rand(3)  # a user's own drawing before the loop
            for epoch in checkpointer.epochs(2):
                for x in checkpointer.batches(loader()):
                    seen.append(x)
                    job.train(x)
                if epoch == stop_after:
                    checkpointer.stop()
        return seen

    whole = train(str(tmp_path / "whole"), None)
    first = train(str(tmp_path / "cut"), 0)
    rest = train(str(tmp_path / "cut"), None)
    assert len(first) == len(rest) == 6
    assert all(map(torch.equal, whole, first + rest))
