"""Real trainers that hang: what the keeper tells of them, saves of them, and does not do to them."""

import signal
from pathlib import Path

import pytest

import flashckpt
from tests.events import ledger
from tests.keeper.driver import eventually, kill_keeper, runtime_of
from tests.watchdog.running import HANG_AT, running

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.mark.parametrize(
    ("hang", "function"), [("lock", "wait_for_a_lock"), ("gil", "hold_the_gil"), ("loader", "__getitem__")]
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
def test_a_stuck_trainer_is_ended_where_that_was_asked_for(tmp_path: Path) -> None:
    with running(tmp_path / "run", "gil", watchdog_action="kill") as run:
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
    with running(tmp_path / "run", "gil", hang_at=-1) as again:
        again.finishes()
    resumed = eventually(
        lambda: [line for line in ledger(run.folder) if line["event"] == "resume" and "tier" in line]
    )
    assert [(line["step"], line["tier"]) for line in resumed] == [(HANG_AT, "memory")]


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
