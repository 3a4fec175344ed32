"""Real trainers that hang: what the keeper tells of them, saves of them, and does not do to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import flashckpt
from tests.events import ledger
from tests.keeper.driver import eventually, kill_keeper, runtime_of
from tests.watchdog.running import HANG_AT, running

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.mark.parametrize(
    ("hang", "function"),
    [
        ("python", "spin_in_python"),
        ("gil", "hold_the_gil"),
        ("lock", "wait_for_a_lock"),
        ("loader", "__getitem__"),
    ],
)
def test_a_hang_is_told_once_with_stacks_and_saved_and_the_run_goes_on(
    tmp_path: Path, hang: str, function: str
) -> None:
    with running(tmp_path / "run", hang, fresh=hang == "gil") as run:
        run.hangs()
        stuck = run.wait_told("stuck")
        assert stuck["stacks"], stuck["reason"]
        assert any(f"in {function}" in line for line in stuck["stacks"]), stuck["stacks"]
        assert any("in main" in line for line in stuck["stacks"])
        assert stuck["pid"] == run.pid
        assert stuck["seconds"] >= stuck["limit_seconds"] == 4.0
        # Nothing but the hang asked for it: the newest snapshot is committed while the trainer hangs.
        eventually(lambda: flashckpt.steps(run.folder) == [HANG_AT])
        assert run.lives()
        run.release()
        assert run.wait_told("goes-on")["seconds"] >= 4.0
        run.finishes()
        assert len(run.told("stuck")) == len(run.told("goes-on")) == 1
        assert run.told("kill") == []


@pytest.mark.long
def test_a_keeper_that_replaces_another_in_a_hang_reports_it_again(tmp_path: Path, runtime: Path) -> None:
    with running(tmp_path / "run", "lock") as run:
        run.hangs()
        run.wait_told("stuck")
        kill_keeper(runtime_of(run.folder, runtime))
        eventually(lambda: len(run.told("stuck")) == 2)
        eventually(lambda: flashckpt.steps(run.folder) == [HANG_AT], timeout_s=60)
        run.release()
        run.wait_told("goes-on")
        run.finishes()
        assert len(run.told("goes-on")) == 1


@pytest.mark.long
@pytest.mark.parametrize("hang", ["gil", "lock"])
def test_a_stuck_trainer_is_ended_where_that_was_asked_for(
    tmp_path: Path, runtime: Path, hang: str, kill_keepers: Callable[..., None]
) -> None:
    with running(tmp_path / "run", hang, watchdog_action="kill") as run:
        run.hangs()
        assert run.process.wait(120) == -signal.SIGKILL
        [killed], [stuck] = eventually(lambda: run.told("kill")), eventually(lambda: run.told("stuck"))
        assert stuck["stacks"], stuck["reason"]
        assert stuck["time"] <= killed["time"]
        assert killed["saved"] is True
        assert run.told("goes-on") == []
        [death] = eventually(lambda: [line for line in ledger(run.folder) if line["event"] == "death"])
        assert death["pid"] == run.pid
    assert flashckpt.steps(run.folder) == [HANG_AT]
    with running(tmp_path / "run", hang, hang_at=-1) as again:
        again.finishes()
    resumed = eventually(
        lambda: [line for line in ledger(run.folder) if line["event"] == "resume" and "tier" in line]
    )
    assert [(line["step"], line["tier"]) for line in resumed] == [(HANG_AT, "memory")]


@pytest.mark.long
def test_a_stopped_trainer_is_told_as_stopped_and_never_ended(tmp_path: Path) -> None:
    with running(tmp_path / "run", "lock", watchdog_action="kill") as run:
        run.hangs()
        os.kill(run.pid, signal.SIGSTOP)
        assert run.wait_told("stopped")["seconds"] >= 4.0
        eventually(lambda: flashckpt.steps(run.folder) == [HANG_AT])
        run.release()
        os.kill(run.pid, signal.SIGCONT)
        run.wait_told("goes-on")
        run.finishes()
        assert len(run.told("stopped")) == 1
        assert run.told("stuck") == run.told("kill") == []


@pytest.mark.long
def test_a_trainer_without_a_signal_is_reported_without_stacks(tmp_path: Path, runtime: Path) -> None:
    with running(tmp_path / "run", "gil", no_signal_is_free=True, fresh=True) as run:
        run.hangs()
        stuck = run.wait_told("stuck")
        assert stuck["stacks"] == []
        assert "no signal handler" in stuck["reason"]
        run.release()
        run.finishes()


@pytest.mark.long
def test_loader_workers_and_other_children_are_never_signalled(tmp_path: Path) -> None:
    with running(tmp_path / "run", "worker") as run:
        run.hangs()
        stuck = run.wait_told("stuck")
        assert stuck["stacks"], stuck["reason"]
        assert any("_try_get_data" in line or "in get" in line or "poll" in line for line in stuck["stacks"])
        run.release()
        run.wait_told("goes-on")
        run.finishes()


@pytest.mark.long
def test_a_slow_step_is_told_with_what_steps_take(tmp_path: Path) -> None:
    with running(tmp_path / "run", "slow", hang_at=40, watchdog="1h") as run:
        run.hangs()
        run.finishes()
        found = eventually(lambda: [line for line in ledger(run.folder) if line["event"] == "slow"])
        [slow] = [line for line in found if line["step"] == 41]
        assert slow["seconds"] >= 5.0
        assert slow["usual_seconds"] < slow["seconds"]
        assert run.told("stuck") == []
