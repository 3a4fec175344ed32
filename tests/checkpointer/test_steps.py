"""What a step is: iterations, in every kind of loop; and the end of a loop whose boundaries are marked by
hand. Real runs in this process; those that are killed stand in tests/resume/test_epochs_stopped.py."""

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.checkpointer.test_loop import Job, Stream, loader
from tests.waiting import abandon, newest_sealed, until

pytestmark = pytest.mark.usefixtures("runtime")


def weights(job: Job) -> torch.Tensor:
    return job.model.weight.detach().clone()


def saved(run: Path) -> torch.Tensor:
    return flashckpt.load(run)["model.weight"].clone()


@pytest.mark.parametrize(("loader", "every"), [(Stream(3), 1), (loader(3), None)], ids=["stream", "length"])
def test_an_epochs_end_is_no_step(loader: Iterable[Any], every: Any, tmp_path: Path) -> None:
    """And what its code has made is what is saved under the step of its last batch."""
    run, job, seen = tmp_path / "run", Job(), []
    with flashckpt.attach(run, every=every, persist_every=None, **job.named) as checkpointer:
        for _ in checkpointer.epochs(2):
            for x in checkpointer.batches(loader):
                job.train(x)
                seen.append(checkpointer.completed)
            assert checkpointer.completed == len(seen)
            with torch.no_grad():
                job.model.weight.mul_(0.5)
        assert checkpointer.completed == 6
    assert seen == list(range(6))
    assert flashckpt.steps(run)[-1] == 6
    assert torch.equal(saved(run), weights(job))


def test_a_save_in_an_epochs_code_is_of_its_end(tmp_path: Path) -> None:
    """Also where `len(checkpointer.epochs(n))` was asked for meanwhile, for a progress bar."""
    run, job, ends = tmp_path / "run", Job(), []
    with flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer:
        epochs = checkpointer.epochs(3)
        assert len(checkpointer.epochs(3)) == 3
        for _ in epochs:
            for x in checkpointer.batches(loader(3)):
                job.train(x)
            checkpointer.save()
            with torch.no_grad():
                job.model.weight.mul_(0.5)
            ends.append(weights(job))
            if len(ends) == 3:
                assert checkpointer.completed == 9
        checkpointer.wait()
        assert flashckpt.steps(run) == [3, 6, 9]
        for step, end in zip([3, 6, 9], ends, strict=True):
            assert torch.equal(flashckpt.load(run, step)["model.weight"], end)


@pytest.mark.every_set
@pytest.mark.parametrize("marks", [False, True])
def test_a_save_before_a_break_out_of_the_epochs_is_taken_by_close(marks: bool, tmp_path: Path) -> None:
    """Where step() has marked the last batch, its boundary was captured already, and counted as the snapshot
    that save() had ordered after it."""
    run, job = tmp_path / "run", Job()
    every = 1 if marks else None
    with flashckpt.attach(run, every=every, persist_every=None, **job.named) as checkpointer:
        for _ in checkpointer.epochs(100):
            for x in checkpointer.batches(loader(3)):
                job.train(x)
                if marks:
                    checkpointer.step()
            nn.init.ones_(job.model.weight)
            checkpointer.save()
            break
    assert flashckpt.steps(run) == [3]
    assert torch.equal(saved(run), torch.ones(4, 4))


def test_a_save_that_nothing_answers_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    checkpointer = flashckpt.attach(tmp_path / "run", every=None, persist_every=None, **job.named)
    for _ in checkpointer.epochs(100):
        for x in checkpointer.batches(loader(3)):
            job.train(x)
        checkpointer.save()
        break
    abandon(checkpointer)
    assert "ordered after step 3 was not taken" in caplog.text


def test_wait_in_an_epochs_code_takes_what_was_saved(tmp_path: Path) -> None:
    """It is on disk when wait() returns, whatever was still to come in the epoch."""
    run, job = tmp_path / "run", Job()
    with flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer:
        for epoch in checkpointer.epochs(2):
            for x in checkpointer.batches(loader(3)):
                job.train(x)
                if epoch == 1:
                    checkpointer.save()  # the last of these orders is for the boundary that ends the epoch
            if epoch == 0:
                checkpointer.save()
            checkpointer.wait()
            assert torch.equal(saved(run), weights(job))
            with torch.no_grad():
                job.model.weight.mul_(0.5)
    assert torch.equal(saved(run), weights(job))


def test_an_iteration_left_by_break_counts_if_it_trained(tmp_path: Path) -> None:
    """Batches of an epoch may be limited before the body or after it: no state has another's number."""
    for after in (False, True):
        run, job = tmp_path / f"run {after}", Job()
        with flashckpt.attach(run, every=1, persist_every=1, **job.named) as checkpointer:
            for _ in checkpointer.epochs(2):
                for taken, x in enumerate(checkpointer.batches(loader(6)), 1):
                    if taken == 3 and not after:
                        break
                    job.train(x)
                    if taken == 2 and after:
                        break
            assert checkpointer.completed == 4
        assert flashckpt.steps(run)[-1] == 4
        assert torch.equal(saved(run), weights(job))


def test_an_epoch_that_a_stop_kept_from_beginning_is_still_to_come(tmp_path: Path) -> None:
    """It was counted as over, and a run that went on began with the next one."""
    run, seen = tmp_path / "run", []

    def train(stop_at: int) -> None:
        job = Job()
        with flashckpt.attach(run, every=1, **job.named) as checkpointer:
            for epoch in checkpointer.epochs(3):
                if epoch == stop_at:
                    checkpointer.stop()
                for x in checkpointer.batches(loader(3)):
                    job.train(x)
                    seen.append(epoch)

    train(1)
    train(-1)
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("every", [4, None])
def test_a_loop_by_hand_loses_nothing_at_its_end(every: Any, tmp_path: Path) -> None:
    run, job = tmp_path / "run", Job()
    with flashckpt.attach(run, every=every, persist_every=None, **job.named) as checkpointer:
        for number in range(6):
            job.train(torch.ones(2, 4) * number)
            checkpointer.step()
        with torch.no_grad():
            job.model(torch.ones(2, 4))  # an evaluation trains nothing
    assert flashckpt.steps(run)[-1] == 6
    assert torch.equal(saved(run), weights(job))
    again = flashckpt.attach(run, **Job().named)
    assert again.completed == 6
    again.close()


@pytest.mark.every_set
@pytest.mark.parametrize("raises", [False, True])
def test_an_iteration_by_hand_that_was_not_marked_is_not_captured(
    raises: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor anything where an exception ends the loop."""
    run, job = tmp_path / "run", Job()
    with (
        pytest.raises(ZeroDivisionError) if raises else nullcontext(),
        flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer,
    ):
        for number in range(3):
            job.train(torch.ones(2, 4) * number)
            checkpointer.step()
        if raises:
            raise ZeroDivisionError
        job.train(torch.ones(2, 4))
    assert flashckpt.steps(run) == []
    assert ("trained on after step 3" in caplog.text) is not raises


@pytest.mark.parametrize("kind", ["loop", "batches", "by hand"])
def test_with_every_1_the_first_step_is_captured(kind: str, tmp_path: Path) -> None:
    """Its slots are waited for, once: nothing here waits for them."""
    run, job = tmp_path / "run", Job()
    if kind == "loop":
        batches: Any = flashckpt.loop(loader(3), run, every=1, **job.named)
        checkpointer = batches.checkpointer
    else:
        checkpointer = flashckpt.attach(run, every=1, **job.named)
        batches = (
            checkpointer.batches(loader(3)) if kind == "batches" else itertools.repeat(torch.ones(2, 4), 3)
        )
    for done, x in enumerate(batches):
        assert max(0, newest_sealed(checkpointer)) == done
        job.train(x)
        if kind == "by hand":
            checkpointer.step()
    checkpointer.close()
    assert flashckpt.steps(run)[-1] == 3


@pytest.mark.parametrize(("save", "ready"), [(True, True), (False, False)])
def test_an_epochs_code_that_outgrows_the_slots_is_saved(save: bool, ready: bool, tmp_path: Path) -> None:
    """The snapshot before it, whose number is another, is asked for as the slots are exchanged."""
    run, job, tensors = tmp_path / "run", Job(), [torch.zeros(4)]
    with flashckpt.attach(run, every=1, persist_every=None, tensors=tensors, **job.named) as checkpointer:
        for _ in checkpointer.epochs(1):
            for x in checkpointer.batches(Stream(3)):
                job.train(x)
            assert newest_sealed(checkpointer) == 2
            tensors += [torch.ones(1 << 22)]
            if ready:
                room = checkpointer._capture.memory_needed(ordered=True)
                assert room is not None
                checkpointer._keeper_link.slots.ask(room)
                until(lambda: checkpointer._keeper_link.slots.ready, "larger slots")
            with torch.no_grad():
                job.model.weight.mul_(0.5)
            if save:
                checkpointer.save()
    assert torch.equal(saved(run), weights(job))


def test_a_view_with_the_same_bytes_is_no_unchanged_state(tmp_path: Path) -> None:
    run, tensors = tmp_path / "run", {"a": torch.zeros(8, dtype=torch.int32)}
    with flashckpt.attach(run, every=None, persist_every=None, tensors=tensors) as checkpointer:
        checkpointer.save()
        for view in (tensors["a"].view(torch.float32), tensors["a"].view(torch.float32).view(2, 4)):
            checkpointer.wait()
            before = checkpointer.completed
            tensors["a"] = view
            checkpointer.save()
            checkpointer.wait()
            assert checkpointer.completed == before + 1
            found = flashckpt.load(run)["tensors.a"]
            assert (found.dtype, found.shape) == (view.dtype, view.shape)


def test_starts_that_get_no_further_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A finished run that is started and closed again and again is none of them."""
    run, job = tmp_path / "run", Job()
    for x in flashckpt.loop(loader(3), run, every=None, persist_every=2, **job.named):
        job.train(x)
    store = LocalStore(str(run))

    def is_closed() -> bool:
        return run_view.has_ended(store, run_view.attempts(store)[-1])

    for _ in range(3):
        flashckpt.attach(run, **Job().named).close()
        until(is_closed, "the keeper records the end")
    for _ in range(4):
        assert "starts in a row" not in caplog.text
        abandon(flashckpt.attach(run, **Job().named))
    assert caplog.text.count("4 starts in a row have resumed from step 3") == 1
