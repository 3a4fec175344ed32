"""Where no boundary is to come, comes too late, or is not waited for: the signal acts at once, as without
the library, and what is sealed is saved by the keeper. Real processes, real signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import keepers_of
from tests.signals.processes import Job, control_status
from tests.waiting import until


@pytest.fixture
def stopped(runtime: Path) -> Iterator[list[int]]:
    """Keepers that a test has stopped; they go on at its end."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def stop_keeper(runtime: Path, stopped: list[int]) -> None:
    """A keeper that does not answer: storage of any slowness looks no other to a trainer."""
    [pid] = keepers_of(runtime)
    os.kill(pid, signal.SIGSTOP)
    stopped.append(pid)


def go_on(stopped: list[int]) -> None:
    while stopped:
        os.kill(stopped.pop(), signal.SIGCONT)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_iteration_longer_than_the_grace_period(name: str, tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, signals={"grace": "500ms"})
    process.send(name)
    ended = process.ended()
    assert ended.status == control_status(name)
    until(lambda: job.run.exists() and job.steps() == [6], "the keeper to save what was sealed")
    until(lambda: job.endings() == ["dead"], "the attempt to be over")


def test_a_commit_longer_than_the_grace_period(tmp_path: Path, runtime: Path, stopped: list[int]) -> None:
    """The boundary is sealed; the keeper commits it when it can, though the trainer is gone."""
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, signals={"grace": "3s"})
    stop_keeper(runtime, stopped)
    process.send("SIGTERM")
    until(lambda: process.has_logged("SIGTERM: the loop ends"), "the signal to be noted")
    job.go.touch()
    assert process.ended().status == -signal.SIGTERM
    assert job.steps() == []
    go_on(stopped)
    until(lambda: job.steps() == [7], "the keeper to commit the boundary that was reached")
    assert "after 18 None" in job.finish().out
    assert set(job.times().values()) == {1}


def test_a_handler_that_returns_after_the_grace_period(
    tmp_path: Path, runtime: Path, stopped: list[int]
) -> None:
    """The loop does not wait for what the handler has not ended."""
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, signals={"grace": "2s"}, handler="flag", where="before")
    stop_keeper(runtime, stopped)
    process.send("SIGTERM")
    until(lambda: process.has_logged("SIGTERM: the loop ends"), "the signal to be noted")
    job.go.touch()
    ended = process.ended()
    assert ended.status == 0
    assert ended.out.count("flag SIGTERM") == 1
    assert "after 7 SIGTERM" in ended.out
    assert "not everything is persisted" in ended.err
    go_on(stopped)
    until(lambda: job.steps() == [7], "the keeper to commit the boundary that was reached")


def test_a_second_interrupt_acts_at_once(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6)
    process.send("SIGINT")
    until(lambda: process.has_logged("SIGINT: the loop ends"), "the signal to be noted")
    process.send("SIGINT")
    ended = process.ended()
    assert ended.status == control_status("SIGINT")
    assert "KeyboardInterrupt" in ended.err
    until(lambda: job.steps() == [6], "the keeper to save what was sealed")


def test_a_second_signal_while_the_commit_is_waited_for(
    tmp_path: Path, runtime: Path, stopped: list[int]
) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6)
    stop_keeper(runtime, stopped)
    process.send("SIGTERM")
    until(lambda: process.has_logged("SIGTERM: the loop ends"), "the signal to be noted")
    job.go.touch()
    until(lambda: "[6, " in job.log.read_text(), "the end of the iteration")
    process.send("SIGINT")
    until(lambda: process.popen.poll() is not None or process.send("SIGINT"), "its end")
    # Whichever of the two is taken for the first: the one that ends a process is not outdone.
    assert process.ended().status == -signal.SIGTERM
    go_on(stopped)
    until(lambda: job.steps() in ([6], [7]), "the keeper to save what was sealed")


def test_launchers_that_pass_on_what_all_have_got_do_not_cut_it_short(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6)
    for _ in range(3):
        process.send("SIGTERM")
        until(lambda: process.has_logged("SIGTERM: the loop ends"), "the signal to be noted")
    job.go.touch()
    assert process.ended().status == -signal.SIGTERM
    assert job.steps()[-1] == 7


def test_in_wait_the_iteration_goes_on(tmp_path: Path, runtime: Path, stopped: list[int]) -> None:
    job = Job(tmp_path / "job", "")
    process = job.held_script("waiting")
    stop_keeper(runtime, stopped)
    job.go.touch()
    until(lambda: process.has_said("waits"), "the wait")
    process.send("SIGINT")
    until(lambda: process.has_logged("SIGINT: the loop ends"), "the signal to be noted")
    go_on(stopped)
    ended = process.ended()
    assert ended.status == control_status("SIGINT")
    assert "waited" in ended.out
    assert job.steps()[-1] == 6


def test_in_the_wait_at_the_end_of_a_loop(tmp_path: Path, runtime: Path, stopped: list[int]) -> None:
    job = Job(tmp_path / "job", "", fresh=True)
    process = job.held_script("closing")
    stop_keeper(runtime, stopped)
    job.go.touch()
    process.send("SIGTERM")
    until(lambda: process.has_logged("SIGTERM: the loop ends"), "the signal to be noted")
    go_on(stopped)
    ended = process.ended()
    assert ended.status == -signal.SIGTERM
    assert "after" not in ended.out
    assert job.steps()[-1] == 6
    until(lambda: job.endings() == ["closed"], "the attempt to be closed")


@pytest.mark.parametrize("script", ["attaching", "between"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_outside_of_a_loop_as_without(script: str, name: str, tmp_path: Path, runtime: Path) -> None:
    process = Job(tmp_path / "job", "").held_script(script)
    process.send(name)
    ended = process.ended()
    assert ended.status == control_status(name)
    assert "the loop ends" not in ended.err


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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_loop_that_is_left_by_break_gives_the_signal_back(name: str, tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "")
    process = job.held_script("leaving")
    process.send(name)
    until(lambda: process.has_logged(f"{name}: the loop ends"), "the signal to be noted")
    job.go.touch()
    ended = process.ended()
    assert ended.status == control_status(name)
    assert "slept" not in ended.out, "it came at once, not with the end of the process"


def test_an_exception_after_the_signal_does_not_swallow_it(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "")
    process = job.held_script("failing")
    process.send("SIGTERM")
    until(lambda: process.has_logged("SIGTERM: the loop ends"), "the signal to be noted")
    job.go.touch()
    ended = process.ended()
    assert ended.status == control_status("SIGTERM")
    assert "ValueError: of the user's own" in ended.err
    until(lambda: job.steps() == [5], "the keeper to save what was sealed")


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
    job = Job(tmp_path / "job", "plain", fresh=True)
    ended = job.start(**{"hold_at": 6, "raise": True}).ended()
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
