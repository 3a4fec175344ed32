"""Warnings: a signal of the scheduler's, a file that appears. The loop ends in order, the process goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from flashckpt.checkpointer.signals import NoticeFile
from tests.signals.processes import Job, Process
from tests.waiting import until

SLURM = {"SLURM_JOB_ID": "17"}


def assert_ended_in_order(job: Job, process: Process, reason: str) -> None:
    job.go.touch()
    ended = process.ended()
    assert ended.status == 0, ended.err
    assert f"after 7 {reason}" in ended.out
    assert job.steps()[-1] == 7
    assert job.stops() == [(7, reason)]
    until(lambda: job.endings() == ["closed"], "the attempt to be closed")


def noted(process: Process, what: str) -> None:
    until(lambda: process.has_logged(f"{what}: the loop ends"), "the warning to be noted")


def test_a_warning_signal_that_is_named(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain", fresh=True)
    process = job.held(6, signals={"warning_signals": ["SIGUSR2", "SIGUSR1"]})
    process.send("SIGUSR1")
    noted(process, "SIGUSR1")
    assert_ended_in_order(job, process, "SIGUSR1")


def test_it_comes_to_the_users_own_handler_at_once(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, signals={"warning_signals": ["SIGUSR1"]}, handler="flag", where="before")
    process.send("SIGUSR1")
    until(lambda: process.has_said("flag SIGUSR1"), "the user's handler")
    noted(process, "SIGUSR1")
    assert_ended_in_order(job, process, "SIGUSR1")


def test_slurm_warns_every_process_with_sigusr1(tmp_path: Path, runtime: Path) -> None:
    """Workers die of it; the epoch goes on where it was left."""
    job = Job(tmp_path / "job", "workers")
    process = job.held(6, environment=SLURM)
    process.send("SIGUSR1", group=True)
    noted(process, "SIGUSR1")
    assert_ended_in_order(job, process, "SIGUSR1")


def test_a_worker_that_ends_while_the_run_is_let_go(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    job = Job(tmp_path / "job", "")
    process = job.held_script("bereaved")
    process.send("SIGUSR1")
    noted(process, "SIGUSR1")
    job.go.touch()
    ended = process.ended()
    assert (ended.status, ended.out) == (0, ["held", "after"]), ended.err
    assert job.steps()[-1] == 6
    until(lambda: job.endings() == ["closed"], "the attempt to be closed")


def test_outside_of_slurm_sigusr1_does_what_it_does(tmp_path: Path, runtime: Path) -> None:
    process = Job(tmp_path / "job", "plain").held(6)
    process.send("SIGUSR1")
    assert process.ended().status == -signal.SIGUSR1


def test_in_slurm_a_handler_of_the_users_own_has_sigusr1_to_itself(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, environment=SLURM, handler="flag", where="before")
    process.send("SIGUSR1")
    until(lambda: process.has_said("flag SIGUSR1"), "the user's handler")
    job.go.touch()
    assert "after 18 None" in process.ended().out


def test_after_a_warning_a_signal_still_takes_its_course(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, environment=SLURM)
    process.send("SIGUSR1")
    noted(process, "SIGUSR1")
    process.send("SIGTERM")
    job.go.touch()
    assert process.ended().status == -signal.SIGTERM
    assert job.steps()[-1] == 7


@pytest.mark.parametrize("recipe", ["plain", "epochs"])
def test_a_notice_file(recipe: str, tmp_path: Path, runtime: Path) -> None:
    job, notice = Job(tmp_path / "job", recipe), tmp_path / "notice"
    process = job.held(2, signals={"notice_file": str(notice)})
    notice.touch()
    noted(process, "notice file")
    job.go.touch()
    ended = process.ended()
    assert ended.status == 0, ended.err
    assert "after 3 notice file" in ended.out
    assert job.steps()[-1] == 3


def test_a_notice_file_that_was_there_before_is_an_old_one(tmp_path: Path, runtime: Path) -> None:
    job, notice = Job(tmp_path / "job", "plain"), tmp_path / "notice"
    notice.touch()
    os.utime(notice, (1, 1))
    assert not NoticeFile(notice).is_new()
    process = job.held(6, signals={"notice_file": str(notice)})
    until(lambda: process.has_logged("is there already"), "the word about it")
    assert not process.has_logged("the loop ends")
    notice.write_text("again")
    noted(process, "notice file")
    assert_ended_in_order(job, process, "notice file")
