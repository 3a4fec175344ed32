"""A remote that has lost steps, or loses them while they are read: nothing begins anew, and no older step is
taken, without a word."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import flashckpt
from flashckpt.restore import step_choice
from flashckpt.restore.step_reading import StepReading
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.checkpointer.damaged import record, shard
from tests.checkpointer.test_loop import Job
from tests.checkpointer.test_nearest_tier import attached, remote, resumed
from tests.events import ledger
from tests.folders import flip
from tests.waiting import until

__all__ = ["remote"]
pytestmark = pytest.mark.usefixtures("runtime")


@pytest.mark.parametrize("lost", ["shards", "records"])
def test_a_remote_of_which_no_step_is_whole_is_not_taken_for_an_empty_one(
    run: Path, remote: Path, tmp_path: Path, lost: str
) -> None:
    for step in (2, 4):
        if lost == "shards":
            shard(remote, step).unlink()
        else:
            flip(record(remote, step), 20)
    with pytest.raises(flashckpt.RunError, match="files of every one are missing, cut short or damaged"):
        attached(tmp_path / "new", remote, Job())
    assert not (tmp_path / "new").exists() or flashckpt.steps(tmp_path / "new") == []
    assert resumed(run, remote) == (4, "local")


def test_that_a_newer_step_of_the_remote_is_incomplete_is_said(
    run: Path, remote: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard(remote, 4).unlink()
    assert resumed(tmp_path / "new", remote) == (2, "remote")
    assert "passed over: step 4 of attempt" in caplog.text


@pytest.mark.parametrize("lost", ["all", "catalogue"])
def test_a_run_that_went_on_from_a_remote_that_is_empty_now(
    run: Path, remote: Path, tmp_path: Path, lost: str
) -> None:
    new = tmp_path / "new"
    assert resumed(new, remote) == (4, "remote")
    until(lambda: [line for line in ledger(new) if line["event"] == "resume"], "the ledger")
    gone = remote if lost == "all" else remote / "catalogue"

    def removed() -> bool:
        shutil.rmtree(gone, ignore_errors=True)  # the keeper may write there
        return not gone.exists()

    until(removed, "it is gone")
    why = {
        "all": "which it read in .* and which is not here",
        "catalogue": "files of checkpoints here and no catalogue",
    }
    with pytest.raises(flashckpt.UnusableRunError, match=why[lost]):
        attached(new, remote, Job())


def test_a_run_without_a_step_that_was_trained_elsewhere_begins_with_a_warning(
    run: Path, remote: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(str(remote))
    for name in run_view.checkpoints(store):
        run_view.delete(store, name)
    with attached(tmp_path / "new", remote, Job()) as checkpointer:
        assert checkpointer.resumed is None
    assert "the run was trained elsewhere" in caplog.text


@pytest.mark.parametrize("when", ["before its records", "before its bytes"])
def test_a_step_that_another_job_deletes_while_it_is_read_gives_way_to_no_older_one(
    run: Path, remote: Path, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(remote))
    newest = run_view.visible(store)[-1]
    where, name = (step_choice, "step_of") if when == "before its records" else (StepReading, "read")
    read = getattr(where, name)

    def deleted(*args: Any, **named: Any) -> Any:
        run_view.delete(store, newest)
        return read(*args, **named)

    monkeypatch.setattr(where, name, deleted)
    with pytest.raises(flashckpt.RunError, match="step 4 .* was deleted there while it was read"):
        attached(tmp_path / "new", remote, Job())
