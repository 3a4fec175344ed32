"""Warnings: a signal of the scheduler's, a file that appears. The loop ends in order, the process goes on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt.checkpointer.signals import NoticeFile, Signals
from flashckpt.options import Options
from tests.signals.processes import Job
from tests.waiting import until


def test_slurm_warns_every_process_with_sigusr1(tmp_path: Path, runtime: Path) -> None:
    """The signal kills the workers of the loader. The next start continues the epoch at the same batch."""
    job = Job(tmp_path / "job", "workers")
    process = job.held(6, environment={"SLURM_JOB_ID": "17"})
    process.send("SIGUSR1", group=True)
    process.until_noted("SIGUSR1")
    job.go.touch()
    ended = process.ended()
    assert ended.status == 0, ended.err
    assert "after 7 SIGUSR1" in ended.out
    assert job.steps()[-1] == 7
    assert job.stops() == [(7, "SIGUSR1")]
    until(lambda: job.endings() == ["closed"], "the attempt to be closed")


def test_a_worker_that_ends_while_the_run_is_let_go(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    job = Job(tmp_path / "job", "")
    process = job.held_script("bereaved")
    process.send("SIGUSR1")
    process.until_noted("SIGUSR1")
    job.go.touch()
    ended = process.ended()
    assert (ended.status, ended.out) == (0, ["held", "after"]), ended.err
    assert job.steps()[-1] == 6
    until(lambda: job.endings() == ["closed"], "the attempt to be closed")


def own(number: int, frame: object) -> None: ...


@pytest.mark.parametrize(
    ("slurm_job", "found", "is_watched"),
    [
        ("", signal.SIG_DFL, False),
        ("17", signal.SIG_DFL, True),
        ("17", own, False),
        ("17", signal.SIG_IGN, False),
    ],
)
def test_sigusr1_is_watched_in_slurm_unless_the_program_handles_or_ignores_it(
    slurm_job: str, found: Any, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", slurm_job)
    before = signal.signal(signal.SIGUSR1, found)
    signals = Signals(Options())
    try:
        signals.enter()
        assert (signal.getsignal(signal.SIGUSR1) is not found) == is_watched
        signals.leave()
        signals.close()
        assert signal.getsignal(signal.SIGUSR1) is found
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.every_set
@pytest.mark.parametrize("is_old", [False, True])
def test_a_notice_file_ends_the_loop_unless_it_was_there_before(
    is_old: bool, tmp_path: Path, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notice, w = tmp_path / "notice", torch.zeros(3)
    if is_old:
        notice.touch()
        os.utime(notice, (1, 1))
        assert not NoticeFile(notice).is_new()
    looped = flashckpt.loop(range(4), tmp_path / "run", options=Options(notice_file=str(notice)), w=w)
    assert ("is there already" in caplog.text) == is_old
    for number in looped:
        w += 1
        if number == 1:
            assert "the loop ends" not in caplog.text
            notice.write_text("now")
            until(lambda: "notice file: the loop ends" in caplog.text, "the notice to be noted")
    assert (looped.completed, looped.checkpointer.stop_reason) == (2, "notice file")
    assert flashckpt.steps(tmp_path / "run")[-1] == 2
