"""A resume takes the nearest good one of a step, and says which: memory, the run's folder, its remote."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt.checkpointer.run import Checkpointer
from flashckpt.format.layout import PAGE
from flashckpt.memory.region import SlotHeader
from flashckpt.replication.run_copy import copy_run
from flashckpt.store import obstore_client
from flashckpt.store.local import LocalStore
from tests.checkpointer.damaged import quarantined, record, shard, trained
from tests.checkpointer.test_loop import Job
from tests.checkpointer.test_older_backup import left_in_memory
from tests.events import ledger
from tests.folders import flip
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def remote(run: Path, tmp_path: Path) -> Path:
    """With all steps of the run."""
    copy_run(LocalStore(str(run)), LocalStore(str(tmp_path / "remote")), all_steps=True)
    return tmp_path / "remote"


def attached(run: Path, remote: Path | str, job: Job, **more: Any) -> Checkpointer:
    """It saves what it is told to, and its keeper copies that to the remote."""
    named = {**more, **job.named}
    return flashckpt.attach(run, every=None, persist_every=None, remote=remote, **named)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A remote that nobody answers for, as options of `attach`."""
    monkeypatch.setattr(obstore_client, "_BRIEF_DEADLINE_S", 0.3)
    keys = {"access_key_id": "a", "secret_access_key": "b", "region": "eu", "endpoint": "http://127.0.0.1:9"}
    options = flashckpt.Options(grace="1s", remote_storage_options=keys)
    return {"remote": "s3://bucket/run", "options": options}


def resumed(run: Path, remote: Path, job: Job | None = None) -> tuple[int, str]:
    with attached(run, remote, job or Job()) as checkpointer:
        assert checkpointer.resumed.step == checkpointer.completed
        return checkpointer.resumed.step, checkpointer.resumed.tier


def weights_of(run: Path, step: int) -> torch.Tensor:
    found: torch.Tensor = flashckpt.load(run, step)["model.weight"]
    return found


def test_an_empty_folder_goes_on_from_the_remote(run: Path, remote: Path, tmp_path: Path) -> None:
    weights, job, new = weights_of(run, 4), Job(), tmp_path / "new"
    with attached(new, remote, job) as checkpointer:
        assert (checkpointer.resumed.step, checkpointer.resumed.tier) == (4, "remote")
        assert torch.equal(job.model.weight, weights)
        until(lambda: [line for line in ledger(new) if line["event"] == "resume"], "the ledger")
        [line] = [line for line in ledger(new) if line["event"] == "resume"]
        assert (line["step"], line["tier"]) == (4, "remote")
        job.train(torch.ones(2, 4))
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
    assert flashckpt.steps(new) == [5]
    # What it commits is of the same history.
    until(lambda: flashckpt.steps(remote) == [2, 4, 5], "the copy")
    assert resumed(new, remote)[0] == 5


def test_a_run_that_has_committed_nothing_since_goes_on_from_the_remote_again(
    run: Path, remote: Path, tmp_path: Path, away: dict[str, Any]
) -> None:
    new = tmp_path / "new"
    assert resumed(new, remote) == (4, "remote")
    assert resumed(new, remote) == (4, "remote")
    until(lambda: sum(line["event"] == "resume" for line in ledger(new)) == 2, "the ledger")
    # And with a remote that does not answer, or without one, it does not begin again.
    job, weights = Job(), Job().model.weight.detach().clone()
    for here in (new, tmp_path / "new node"):
        with pytest.raises(flashckpt.RunError, match="has no step, and the mirror"):
            attached(here, job=job, **away)
    assert not here.exists(), "a run of its own would keep the remote's out"
    with pytest.raises(flashckpt.UnusableRunError, match=f"which it read in {remote}, its mirror"):
        flashckpt.attach(new, **job.named)
    assert torch.equal(job.model.weight, weights)
    assert resumed(new, remote) == (4, "remote")


def test_of_a_step_whose_slot_is_damaged_the_runs_own_copy_comes_before_an_older_one(
    run: Path, runtime: Path
) -> None:
    left_in_memory(run, 2)
    weights, job = weights_of(run, 6), Job()
    for slot in runtime.rglob("slot-*"):
        flip(slot, SlotHeader.unpacked(slot.read_bytes()[:PAGE]).image_offset + PAGE)
    with flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer:
        assert (checkpointer.resumed.step, checkpointer.resumed.tier) == (6, "local")
    assert torch.equal(job.model.weight, weights)


@pytest.mark.parametrize("harm", ["flipped", "record"])
def test_of_a_damaged_step_the_remotes_copy_comes_before_an_older_one(
    run: Path, remote: Path, harm: str
) -> None:
    weights, path, job = weights_of(run, 4), shard(run, 4), Job()
    if harm == "flipped":
        flip(path, path.stat().st_size - 9)
    else:
        flip(record(run, 4), 20)
    assert resumed(run, remote, job) == (4, "remote")
    assert torch.equal(job.model.weight, weights)
    assert resumed(run, remote) == (4, "remote")


def test_where_both_are_damaged_an_older_one_is_taken_and_all_is_said(
    run: Path, remote: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for each in (run, remote):
        path = shard(each, 4)
        flip(path, path.stat().st_size - 9)
    with caplog.at_level(logging.WARNING, "flashckpt"):
        assert resumed(run, remote) == (2, "local")
    assert "(local): " in caplog.text
    assert "(remote): " in caplog.text
    assert not quarantined(remote), "of the remote another node may see all"
    assert quarantined(run) == [4], "for what is damaged here"


def test_a_run_that_went_on_elsewhere_goes_on_from_there(run: Path, remote: Path, tmp_path: Path) -> None:
    job, other = Job(), tmp_path / "other"
    with attached(other, remote, job) as checkpointer:
        job.train(torch.ones(2, 4))
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
    until(lambda: flashckpt.steps(remote) == [2, 4, 5], "the copy")
    again = Job()
    assert resumed(run, remote, again) == (5, "remote")
    assert torch.equal(again.model.weight, job.model.weight)


def test_of_two_runs_none_is_loaded(run: Path, remote: Path, tmp_path: Path) -> None:
    trained(tmp_path / "another", [1])
    job, starts = Job(), sorted(run.rglob("*"))
    weights = job.model.weight.detach().clone()
    with pytest.raises(flashckpt.UnusableRunError, match="different runs"):
        attached(run, tmp_path / "another", job)
    assert sorted(run.rglob("*")) == starts
    assert torch.equal(job.model.weight, weights)
