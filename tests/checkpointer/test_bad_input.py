"""What can be wrong with a run, a disk or a machine: a named error that says what, and nothing changed."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.checkpointer.test_loop import Job, loader
from tests.commit.runs import of_format
from tests.folders import data_of, records
from tests.waiting import until

MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
pytestmark = pytest.mark.usefixtures("runtime")


def trained(run: Path, steps: list[int]) -> None:
    """A run with these committed steps and nothing in memory: its keeper has ended."""
    job = Job()
    with flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer:
        while checkpointer.completed < steps[-1]:
            job.train(torch.ones(2, 4) * checkpointer.completed)
            checkpointer.step()
            if checkpointer.completed in steps:
                checkpointer.save()
                checkpointer.wait()
    assert flashckpt.steps(run) == steps


def shard(run: Path, step: int) -> Path:
    [path] = data_of(run, step).glob("rank-*")
    return path


def record(run: Path, step: int) -> Path:
    """The manifest of the newest commit of a step number."""
    newest = [name for name in records(run) if name.step == step][-1]
    return run / run_view.manifest_of(LocalStore(str(run)), newest.id)


def quarantined(run: Path) -> list[int]:
    """The step numbers of the checkpoints that failed two verifications."""
    return [name.step for name in run_view.damaged(LocalStore(str(run)))]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_damaged_step_is_named_and_the_older_one_taken(
    tmp_path: Path, kill_keepers: object, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    trained(run, [2, 4])
    kill_keepers(remove_regions=True)  # type: ignore[operator]
    flip(shard(run, 4), -5)
    with caplog.at_level(logging.ERROR, "flashckpt"):
        resumed = flashckpt.attach(run, **Job().named)
    assert resumed.completed == 2
    assert any("step 4" in record.getMessage() for record in caplog.records)
    resumed.close()
    assert quarantined(run) == [4], "the damaged step is quarantined, and nothing of it deleted"
    assert shard(run, 4).exists()


def huge() -> torch.Tensor:
    """Twice as large as the machine's memory, of pages that nobody ever writes."""
    num_bytes = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | MAP_NORESERVE), dtype=torch.uint8)


def committed(checkpointer: flashckpt.Checkpointer) -> bool:
    """Whether wait() is well now; a try that was under way when room was made may still fail."""
    try:
        checkpointer.wait()
    except flashckpt.PersistError:
        return False
    return True


@pytest.mark.parametrize("harm", ["flipped", "truncated", "missing"])
def test_a_run_of_which_nothing_can_be_used_is_no_fresh_start(
    harm: str, tmp_path: Path, kill_keepers: object
) -> None:
    run = tmp_path / "run"
    trained(run, [2])
    kill_keepers(remove_regions=True)  # type: ignore[operator]
    path = shard(run, 2)
    if harm == "flipped":
        flip(path, -9)
    elif harm == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    job = Job()
    before = job.model.weight.detach().clone()
    with pytest.raises(flashckpt.UnusableRunError):
        flashckpt.attach(run, **job.named)
    assert torch.equal(job.model.weight, before)


RANKS = {
    "RANK=0 WORLD_SIZE=2": "started as one of several, and there is no process group",
    "WORLD_SIZE=2": "WORLD_SIZE=2: this process was started as one of several",
    "RANK=2 WORLD_SIZE=2": "RANK=2 of WORLD_SIZE=2: there is no such rank",
    "RANK=1 WORLD_SIZE=1": "RANK=1 of WORLD_SIZE=1: there is no such rank",
    "RANK=0 WORLD_SIZE=0": "RANK=0 of WORLD_SIZE=0: there is no such rank",
    "RANK=3": "RANK=3 without WORLD_SIZE: how many ranks there are is unknown",
}
ALONE = ["RANK=0", "RANK=0 WORLD_SIZE=1", "WORLD_SIZE=1", "SLURM_PROCID=3 SLURM_NTASKS=4", "LOCAL_RANK=1"]


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    for each in variables.split():
        name, _, value = each.partition("=")
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", RANKS)
def test_a_rank_of_several_that_is_in_no_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: str
) -> None:
    """Before a step is awaited for ever, and before each of them trains the whole run."""
    set_variables(monkeypatch, variables)
    with pytest.raises(flashckpt.OptionError, match=f"{RANKS[variables]}.* Nothing was started"):
        flashckpt.attach(tmp_path / "run", **Job().named)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variables", ALONE)
def test_a_process_that_trains_alone_is_not_taken_for_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: str
) -> None:
    set_variables(monkeypatch, variables)
    with flashckpt.attach(tmp_path / "run", **Job().named) as checkpointer:
        checkpointer.step()
        checkpointer.save()
    assert flashckpt.steps(tmp_path / "run") == [1]


def test_another_format_is_refused(tmp_path: Path, kill_keepers: object) -> None:
    run = tmp_path / "run"
    trained(run, [2])
    newest = max(run.glob("catalogue/*"))
    newest.write_bytes(of_format(9, newest.read_bytes()))
    with pytest.raises(flashckpt.FormatError, match="format 9"):
        flashckpt.steps(run)
    with pytest.raises(flashckpt.FormatError):
        flashckpt.attach(run, **Job().named)


def test_a_run_that_another_process_holds_is_refused_with_its_pid(tmp_path: Path) -> None:
    code = (
        "import sys, torch, flashckpt; m = torch.nn.Linear(4, 4)\n"
        "c = flashckpt.attach(sys.argv[1], model=m); print('held', flush=True); sys.stdin.read(); c.close()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(flashckpt.RunHeldError, match=str(owner.pid)):
        flashckpt.attach(tmp_path / "run", **Job().named)
    owner.communicate()
    flashckpt.attach(tmp_path / "run", model=nn.Linear(4, 4)).close()


def test_too_little_memory_says_how_much_and_what_helps(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("huge", huge())
    checkpointer = flashckpt.attach(tmp_path / "run", every=None, model=model)
    with pytest.raises(flashckpt.OutOfSpaceError, match="slots=2") as caught:
        checkpointer.save()
    assert caught.value.needed > caught.value.available
    assert caught.value.available > 0


def test_a_loop_that_can_hold_no_snapshot_ends_in_its_first_steps(tmp_path: Path) -> None:
    job = Job()
    job.model.register_buffer("huge", huge())
    options = flashckpt.Options(read_ahead_check=False)
    batches = flashckpt.loop(loader(10**4), str(tmp_path / "run"), options=options, **job.named)
    keeper_link = batches.checkpointer._keeper_link

    def train() -> None:
        for x in batches:
            job.train(x)
            if batches.completed:
                until(lambda: keeper_link.slots.error is not None, "the keeper's answer")

    with pytest.raises(flashckpt.OutOfSpaceError):
        train()
    assert batches.completed < 5


def test_a_full_disk_is_told_at_wait_and_the_next_save_works(tmp_path: Path, small_disk: Path) -> None:
    """A real file system of a few MiB: training continues, wait() raises, room is made, wait() is well."""
    run = small_disk / "run"
    model = nn.Linear(512, 512)
    options = flashckpt.Options(grace="1s")
    with flashckpt.attach(run, every=None, persist_every=None, options=options, model=model) as checkpointer:
        filler = small_disk / "filler"
        checkpointer.step()
        filler.write_bytes(b"x" * (7 << 20))
        checkpointer.save()
        with pytest.raises(flashckpt.PersistError, match="No space"):
            checkpointer.wait()
        filler.unlink()
        until(lambda: committed(checkpointer), "the next try to succeed")
    assert flashckpt.verify(run).ok


def test_a_run_whose_disk_is_full_is_a_named_error_at_the_next_start(
    small_disk: Path, kill_keepers: Callable[..., None]
) -> None:
    run = small_disk / "run"
    trained(run, [2])
    kill_keepers(remove_regions=True)
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    job = Job()
    before = job.model.weight.detach().clone()
    with pytest.raises(flashckpt.RunError, match=f"{run} cannot be written: No space left"):
        flashckpt.attach(run, **job.named)
    assert torch.equal(job.model.weight, before)
    filler.unlink()
    with flashckpt.attach(run, **job.named) as checkpointer:
        assert checkpointer.resumed is not None
        assert checkpointer.resumed.step == 2


def test_what_is_no_path_no_step_and_no_dictionary(tmp_path: Path) -> None:
    for path in (None, b"run", 5):
        with pytest.raises(flashckpt.OptionError, match="the run's path is"):
            flashckpt.attach(path, **Job().named)  # type: ignore[arg-type]
    run = tmp_path / "run"
    trained(run, [2])
    for call in (flashckpt.load, flashckpt.verify, flashckpt.branch):
        with pytest.raises(flashckpt.OptionError, match="Pass a step number"):
            call(run, "2")  # type: ignore[operator]
    with pytest.raises(flashckpt.OptionError, match="^state=Linear"):
        flashckpt.attach(tmp_path / "other", state=nn.Linear(2, 2))  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()
