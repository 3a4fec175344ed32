"""A keeper whose run is not where it was: moved, or gone with another run in its place."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from flashckpt.recovery.recover import recover
from flashckpt.store import open_store
from tests import run_view
from tests.commit.runs import half_steps
from tests.events import ledger
from tests.keeper.driver import begun, begun_process, committed, eventually, runtime_of, saved
from tests.keeper.fake import FakeTrainer, keeper_pid, open_runtime


def killed_with_its_snapshot_in_memory(run: Path, runtime: Path, **options: float) -> tuple[str, int]:
    """A trainer that died at step 7, with a keeper that is held still and has not noticed. Its attempt, and
    the keeper's process. It is the run's second: to a fresh run in its place it would be the newest."""
    store, _ = open_runtime(run, runtime)
    run_view.end(store, run_view.begin(store))
    trainer = begun_process(run, runtime, **options)
    trainer.do("snapshot", 7, False)
    folder = runtime_of(run, runtime)
    keeper = eventually(lambda: keeper_pid(folder))
    os.kill(keeper, signal.SIGSTOP)
    trainer.kill()
    return trainer.attempt, int(keeper)


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "deleted"])
def test_another_run_in_its_place_is_never_written_to(
    run: Path, tmp_path: Path, runtime: Path, moved: bool
) -> None:
    aside = tmp_path / "aside"
    attempt, keeper = killed_with_its_snapshot_in_memory(run, runtime, linger_s=0.5)
    if moved:
        run.rename(aside)
    else:
        shutil.rmtree(run)
    fresh = begun(run, runtime)
    saved(fresh, 1)
    os.kill(keeper, signal.SIGCONT)
    # It has had every chance once it has left: what it holds it has tried to save, or given up.
    eventually(lambda: not Path(f"/proc/{keeper}").exists())
    assert not list(run.glob(f"*/*/{attempt}")), "a step of the other run stands in this one"
    assert not any(attempt in path.name for path in run.rglob("*"))
    assert not any(line["event"] in ("death", "error") for line in ledger(run))
    assert not half_steps(open_store(run))
    fresh.end()
    assert committed(run) == [1]
    if moved:
        report = recover(open_store(aside))
        assert (7, "committed") in [(each.step, each.outcome.value) for each in report.findings]
        assert committed(aside) == [7]


def test_a_run_that_was_moved_is_followed(run: Path, tmp_path: Path, runtime: Path) -> None:
    moved = tmp_path / "moved"
    _, keeper = killed_with_its_snapshot_in_memory(run, runtime)
    run.rename(moved)
    os.kill(keeper, signal.SIGCONT)
    again = FakeTrainer(moved, runtime)
    assert [step for _, step in again.survivors()] == [7]
    again.start()
    again.take_slots()
    saved(again, 8)
    assert keeper_pid(again.folder) == keeper, "the keeper that had the slots has kept them"
    again.end()
    assert 8 in committed(moved)
    assert not run.exists()


def test_recover_finds_what_a_keeper_holds_of_a_moved_run(run: Path, tmp_path: Path, runtime: Path) -> None:
    moved = tmp_path / "moved"
    _, keeper = killed_with_its_snapshot_in_memory(run, runtime)
    run.rename(moved)
    os.kill(keeper, signal.SIGCONT)
    report = recover(open_store(moved))
    assert not report.failed, report.findings
    assert committed(moved) == [7]
    assert report.resume.step == 7
    assert not run.exists()
