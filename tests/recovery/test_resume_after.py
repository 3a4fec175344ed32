"""The whole morning: a real training run and its keeper killed, recovered by the shell, trained on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.folders import data_of
from tests.processes import end, keepers_of
from tests.resume.training import ROOT, Trainer, last_of_each
from tests.waiting import until


def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from flashckpt.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


def kill_both_in_step(job: Trainer, runtime: Path, step: int) -> None:
    """The keeper first, and stopped before: no death is seen, nothing is saved."""
    process = job.start(hold_at=step)
    assert process.stdout is not None
    assert process.stdout.readline() == f"held {step}\n"
    [keeper] = keepers_of(runtime)
    os.kill(keeper, signal.SIGSTOP)
    job.kill(process)
    end([keeper])


@pytest.mark.parametrize("recipe", ["plain"])
def test_training_goes_on_bit_for_bit_from_what_was_recovered(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None], recipe: str
) -> None:
    (tmp_path / "reference").mkdir()
    reference = Trainer(tmp_path / "reference", runtime, recipe)
    reference.finish()
    kill_keepers(remove_regions=True)
    # A keeper that is killed as it leaves may leave its folder.
    of_reference = set(runtime.glob("flashckpt-*/*/"))

    job = Trainer(tmp_path, runtime, recipe, persist_every=3)
    kill_both_in_step(job, runtime, 8)
    before = flashckpt.steps(job.run)
    done = shell("recover", job.run, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    step = report["resume"]["step"]
    assert step > max(before, default=0), "more was saved than the keeper had come to"
    assert flashckpt.steps(job.run)[-1] == step
    assert report["resume"]["tier"] == "local"
    assert flashckpt.verify(job.run).ok
    assert set(runtime.glob("flashckpt-*/*/")) <= of_reference, "nothing stays in memory"
    assert not any(path.is_file() for path in runtime.glob("flashckpt-*/*/*"))

    job.finish()
    assert job.resumed_steps() == [step]
    assert last_of_each(job.records()) == last_of_each(reference.records())
    ours, theirs = flashckpt.load(job.run), flashckpt.load(reference.run)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_resumes_from_what_the_report_said_where_a_step_is_damaged(tmp_path: Path, runtime: Path) -> None:
    job = Trainer(tmp_path, runtime, "plain", persist_every=3)
    kill_both_in_step(job, runtime, 8)
    assert shell("recover", job.run).returncode == 0
    newest = flashckpt.steps(job.run)[-1]
    # The keeper that was killed may have left a shard that no checkpoint names.
    store = LocalStore(str(job.run))
    record = run_view.read(store, run_view.visible(store)[-1])
    [shard] = [
        data_of(job.run, newest) / each.name
        for head in record.parts.heads
        for each in head.files
        if each.name.startswith("rank-")
    ]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = shell("recover", job.run, "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)["resume"]["step"]
    assert said < newest
    job.finish()
    assert job.resumed_steps() == [said]


def test_beside_a_job_the_shell_names_its_process(tmp_path: Path, runtime: Path) -> None:
    job = Trainer(tmp_path, runtime, "plain")
    process = job.start(hold_at=5)
    assert process.stdout is not None
    process.stdout.readline()
    done = shell("recover", job.run)
    job.kill(process)
    assert done.returncode == 3
    assert f"process {process.pid}" in done.stderr
    until(lambda: flashckpt.steps(job.run), "the job's own keeper to save what it had")
