"""Where no boundary is to come, comes too late, or is not waited for: the signal acts at once, as without
the library, and what is sealed is saved by the keeper. Real processes, real signals."""

import os
import signal
from pathlib import Path

import pytest

from tests.processes import keepers_of
from tests.signals.processes import Job
from tests.waiting import until


def stop_keeper(runtime: Path) -> int:
    """A keeper that does not answer: storage of any slowness looks no other to a trainer."""
    [pid] = keepers_of(runtime)
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_iteration_longer_than_the_grace_period(name: str, tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, options={"grace": "500ms"})
    process.send(name)
    ended = process.ended()
    assert ended.status == -signal.Signals[name]
    until(lambda: job.run.exists() and job.steps() == [6], "the keeper to save what was sealed")
    until(lambda: job.endings() == ["dead"], "the attempt to be over")


def test_a_commit_longer_than_the_grace_period(tmp_path: Path, runtime: Path) -> None:
    """The boundary is sealed; the keeper commits it when it can, though the trainer is gone."""
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, options={"grace": "2s"})
    keeper = stop_keeper(runtime)
    process.send("SIGTERM")
    process.until_noted("SIGTERM")
    job.go.touch()
    assert process.ended().status == -signal.SIGTERM
    assert job.steps() == []
    os.kill(keeper, signal.SIGCONT)
    until(lambda: job.steps() == [7], "the keeper to commit the boundary that was reached")
    assert "after 18 None" in job.finish().out
    assert set(job.times().values()) == {1}


def test_a_second_interrupt_acts_at_once(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6)
    process.send("SIGINT")
    process.until_noted("SIGINT")
    process.send("SIGINT")
    ended = process.ended()
    assert ended.status == -signal.SIGINT
    assert "KeyboardInterrupt" in ended.err
    until(lambda: job.steps() == [6], "the keeper to save what was sealed")


def test_a_second_signal_while_the_commit_is_waited_for(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6)
    keeper = stop_keeper(runtime)
    process.send("SIGTERM")
    process.until_noted("SIGTERM")
    job.go.touch()
    until(lambda: "[6, " in job.log.read_text(), "the end of the iteration")
    process.send("SIGINT")
    until(lambda: process.popen.poll() is not None or process.send("SIGINT"), "its end")
    # Whichever of the two is taken for the first: the one that ends a process is not outdone.
    assert process.ended().status == -signal.SIGTERM
    os.kill(keeper, signal.SIGCONT)
    until(lambda: job.steps() in ([6], [7]), "the keeper to save what was sealed")


@pytest.mark.long
def test_workers_that_are_signalled_while_a_batch_is_drawn(tmp_path: Path, runtime: Path) -> None:
    """The batch never comes. The loop ends at the boundary before it, and no batch is lost or given twice."""
    job = Job(tmp_path / "job", "", fresh=True)
    process = job.script("drawing")
    until(lambda: process.has_said("draws"), "the draw that waits")
    process.send("SIGTERM", group=True)
    ended = process.ended()
    assert ended.status == -signal.SIGTERM
    assert job.steps()[-1] == 5
    until(lambda: job.endings() == ["closed"], "the attempt to be closed")
    assert "RuntimeError" not in ended.err
    job.go.touch()
    rest = job.script("drawing").ended()
    assert rest.status == 0, rest.err
    did = [line for line in ended.out + rest.out if line.startswith("did")]
    assert did == [f"did {step} {4 * (4.0 * step + 1)}" for step in range(20)]


def test_a_forked_child_dies_as_it_would_have(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "")
    process = job.script("forking")
    until(lambda: process.has_said("child"), "the child")
    child = int(next(line for line in process.said() if line.startswith("child")).split()[1])
    os.kill(child, signal.SIGTERM)
    ended = process.ended()
    assert ended.status == 0, ended.err
    assert f"status {-signal.SIGTERM}" in ended.out
    assert "after 8" in ended.out, "and its parent was not asked to end"


def test_an_exception_raises_and_what_was_sealed_is_saved(tmp_path: Path, runtime: Path) -> None:
    """Nobody asked for any of it to be persisted."""
    job = Job(tmp_path / "job", "plain")
    ended = job.start(hold_at=6, raises=True).ended()
    assert ended.status == 1
    assert "ValueError: of the user's own" in ended.err
    until(lambda: job.run.exists() and job.steps() == [6], "the keeper to save what was sealed")
    until(lambda: job.endings() == ["dead"], "the attempt to be over")


def test_the_watchdog_leaves_a_loop_by_hand_that_ends_alone(tmp_path: Path, runtime: Path) -> None:
    """It waits for a slot, as long as grace says and longer than a boundary may be missing."""
    job = Job(tmp_path / "job", "plain")
    process = job.held_script("by_hand")
    process.send("SIGTERM")
    job.go.touch()
    assert process.ended().status == -15
    assert job.steps()[-1] == 6
