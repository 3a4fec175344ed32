"""An older copy of the run's folder is put back while this node's memory has snapshots of later attempts."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.format.names import AttemptName
from flashckpt.keeper.node_keepers import keepers
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.checkpointer.damaged import trained
from tests.checkpointer.test_loop import Job
from tests.waiting import abandon, until

pytestmark = pytest.mark.usefixtures("runtime")

X = torch.ones(2, 4)


def left_in_memory(run: Path, steps: int) -> None:
    """An attempt that trains so many steps and ends without closing: its keeper commits the last one, and
    lingers with it."""
    job = Job()
    # Nothing is deleted beside the test, which exchanges the folder.
    checkpointer = flashckpt.attach(
        run, every=None, persist_every=None, keep=flashckpt.Keep(last=10), **job.named
    )
    for _ in range(steps):
        job.train(X)
        checkpointer.step()
    checkpointer.save()
    checkpointer.wait()
    abandon(checkpointer)
    until(lambda: [each.state for each in keepers()] == ["lingering"], "a keeper that has saved all")


def newest(run: Path) -> AttemptName:
    return run_view.attempts(LocalStore(str(run)))[-1]


def emptied(run: Path) -> bool:
    for each in run.iterdir():
        shutil.rmtree(each, ignore_errors=True) if each.is_dir() else each.unlink(missing_ok=True)
    return not any(run.iterdir())


@pytest.fixture
def put_back(tmp_path: Path) -> tuple[Path, AttemptName]:
    """A run with step 2 and, in memory, step 6 of its third attempt, of which its folder knows nothing any
    more; with that attempt."""
    run, backup = tmp_path / "run", tmp_path / "backup"
    trained(run, [2])
    shutil.copytree(run, backup)
    for _ in range(2):
        left_in_memory(run, 2)
    later = newest(run)
    until(lambda: emptied(run), "an empty folder: its keeper may be writing a small file")
    shutil.copytree(backup, run, dirs_exist_ok=True)
    return run, later


def check_goes_on(run: Path, later: AttemptName) -> None:
    job = Job()
    with flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer:
        assert (checkpointer.resumed.step, checkpointer.resumed.tier) == (2, "local")
        for _ in range(2):
            job.train(X)
            checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
        assert checkpointer.report()["newest_committed_step"] == 4
        assert flashckpt.steps(run) == [2, 4]
        assert newest(run).number > later.number, "snapshots in memory would be newer than its own"
    assert torch.equal(flashckpt.load(run, 4)["model.weight"], job.model.weight)


def test_what_is_captured_after_it_is_the_newest(
    put_back: tuple[Path, AttemptName], caplog: pytest.LogCaptureFixture
) -> None:
    run, later = put_back
    with caplog.at_level(logging.WARNING, "flashckpt"):
        check_goes_on(run, later)
    [said] = [each.getMessage() for each in caplog.records if str(later) in each.getMessage()]
    assert "step 6" in said
    assert "put" in said


def test_snapshots_that_no_keeper_holds_are_found_by_name(
    put_back: tuple[Path, AttemptName], kill_keepers: Callable[..., None]
) -> None:
    kill_keepers()
    check_goes_on(*put_back)
