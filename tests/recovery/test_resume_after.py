"""The whole morning: a real training run and its keeper killed, recovered by the shell, trained on."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

import flashckpt
from tests.contracts.test_recover_contract import shell
from tests.processes import end, keepers_of
from tests.resume.training import Trainer, last_of_each


def kill_both_in_step(job: Trainer, runtime: Path, step: int) -> None:
    """The keeper first, and stopped before: no death is seen, nothing is saved."""
    process = job.start(hold_at=step)
    assert process.stdout.readline() == f"held {step}\n"
    [keeper] = keepers_of(runtime)
    os.kill(keeper, signal.SIGSTOP)
    job.kill(process)
    end([keeper])


def test_training_goes_on_bit_for_bit_from_what_was_recovered(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    (tmp_path / "reference").mkdir()
    reference = Trainer(tmp_path / "reference", runtime, "plain")
    reference.finish()
    kill_keepers(remove_regions=True)
    # A keeper that is killed as it leaves may leave its folder.
    of_reference = set(runtime.glob("flashckpt-*/*/"))

    job = Trainer(tmp_path, runtime, "plain", persist_every=3)
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
