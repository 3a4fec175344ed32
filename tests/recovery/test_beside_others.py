"""A recovery beside a job, beside another recovery, and beside a keeper that outlived its trainer."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.commit.lineage import branch
from flashckpt.errors import KeeperError, RunHeldError
from flashckpt.format.names import ALIVE
from flashckpt.keeper import node_keepers as keepers
from flashckpt.memory.held_regions import sealed_in
from flashckpt.options import Keep
from flashckpt.recovery import node
from flashckpt.recovery.storage import prune
from flashckpt.store import open_store
from tests import run_view
from tests.events import ledger
from tests.keeper.driver import Process, committed, eventually
from tests.keeper.fake import keeper_pid
from tests.keeper.test_keeper_deaths import flip_image
from tests.memory.mounts import fill
from tests.processes import end
from tests.recovery.scene import Crash, recovered, regions_of, resume, rows, whole_tree

ROOT = Path(__file__).parents[2]
RECOVER = """
import sys
from flashckpt.recovery.recover import recover
from flashckpt.store import open_store
from flashckpt.recovery.report import Watcher
class Slow(Watcher):
    def stage(self, name):
        if name == sys.argv[2]:
            print(name, flush=True)
            sys.stdin.readline()
recover(open_store(sys.argv[1]), watcher=Slow())
print("done", flush=True)
"""


@contextlib.contextmanager
def held_at(run: Path, stage: str) -> Iterator[subprocess.Popen[str]]:
    """A recovery in a process of its own that stands still at a stage until it is written a line."""
    child = subprocess.Popen(
        [sys.executable, "-c", RECOVER, str(run), stage],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout.readline() == f"{stage}\n"
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_running_job_is_named_and_not_touched(run: Path, runtime: Path) -> None:
    """Also if its attempt is not the newest any more: it is not recovered under its feet."""
    crash = Crash(run, runtime).slots().commit(1)
    store = open_store(str(run))
    for is_overtaken in (False, True):
        if is_overtaken:
            run_view.end(store, run_view.supersede(store))
        for dry_run in (True, False):
            with pytest.raises(RunHeldError, match=str(crash.trainer.pid)) as refused:
                recovered(run, dry_run=dry_run)
            assert is_overtaken or crash.attempt in str(refused.value)
            assert prune(store, Keep(last=1), dry_run=dry_run).kept == (1,), "it needs no job to be away"
    assert node.RECOVERY_LOCK not in crash.folder.names()
    crash.both_killed()


def test_of_two_recoveries_one_is_refused_until_the_other_is_dead(run: Path, runtime: Path) -> None:
    crash = Crash(run, runtime).slots()
    crash.seal(1)
    crash.both_killed()
    with held_at(run, "clearing") as first:
        with pytest.raises(RunHeldError, match=str(first.pid)):
            recovered(run)
        end([first.pid])
        report = recovered(run)
    assert resume(report) == (1, crash.attempt, "local")
    assert not os.path.exists(crash.folder.path)
    assert rows(recovered(run)) == []


@pytest.mark.parametrize("stage", ["draining", "committing", "clearing"])
def test_a_job_that_begins_meanwhile_ends_it(run: Path, runtime: Path, stage: str) -> None:
    """The recovery deletes nothing more, and the job's own keeper has the rest."""
    crash = Crash(run, runtime).slots().commit(1)
    crash.seal(2)
    crash.both_killed()
    with held_at(run, stage) as first:
        begun: list[Process] = []
        # It waits for the keeper's lock, deposes who has it and starts a keeper of its own.
        thread = threading.Thread(target=lambda: begun.append(Process(run, runtime, timeout_s=0.5)))
        thread.start()
        store = open_store(str(run))
        eventually(lambda: len([each for each in store.list(ALIVE) if each.name[0] != "."]) == 2)
        out, err = first.communicate("\n", timeout=240)
        thread.join(60)
    assert "done" not in out
    assert "A job has begun" in err
    [second] = begun
    assert 2 in [step for _, step in second.do("survivors")] or 2 in committed(run)
    eventually(lambda: committed(run) == [1, 2])
    second.kill()


# A keeper that lingers


@pytest.fixture
def lingers(tmp_path: Path, runtime: Path) -> Crash:
    """A trainer that dies; its keeper, stopped until then, has yet to see it."""
    crash = Crash(tmp_path / "run", runtime, linger_s=600).slots().commit(1)
    crash.seal(2)
    crash.trainer.kill()
    return crash


def test_a_keeper_that_lingers_saves_all_and_stays_until_asked_to_go(lingers: Crash, runtime: Path) -> None:
    before, pid = whole_tree(lingers.run, runtime), lingers._stopped
    looked = recovered(lingers.run, dry_run=True)
    assert whole_tree(lingers.run, runtime) == before
    assert looked.keeper == pid
    assert ("snapshot", "sound", 2) in rows(looked)

    lingers.wake()
    report = recovered(lingers.run)
    assert report.keeper == keeper_pid(lingers.folder) == pid
    assert ("snapshot", "was committed", 2) in rows(report)
    assert committed(lingers.run) == [1, 2]
    assert resume(report) == (2, lingers.attempt, "memory")
    assert len(regions_of(lingers.folder)) == 3, "its memory is as near as it was"
    assert node.RECOVERY_LOCK not in lingers.folder.names()

    keepers.end_process(lingers.folder)
    assert recovered(lingers.run).keeper is None
    assert committed(lingers.run) == [1, 2]
    assert regions_of(lingers.folder) == []


def test_what_a_keeper_found_torn_is_told(lingers: Crash) -> None:
    [newest] = [each.slot.name for each in sealed_in(lingers.folder) if each.step == 2]
    flip_image(Path(lingers.folder.path) / newest)
    lingers.wake()
    report = recovered(lingers.run)
    assert ("snapshot", "torn", 2) in rows(report)
    assert report.damaged
    assert committed(lingers.run) == [1]


def test_a_keeper_that_cannot_save_is_told_with_its_reason(small_disk: Path, runtime: Path) -> None:
    crash = Crash(small_disk / "run", runtime, kib=1024, linger_s=600).slots()
    crash.seal(2)
    filler = fill(small_disk, left=256 << 10)
    crash.trainer.kill()
    crash.wake()
    report = recovered(crash.run)
    assert rows(report, "snapshot") == [("snapshot", "failed", 2)]
    assert "No space left" in report.findings[0].detail
    assert resume(report) == (2, crash.attempt, "memory")
    filler.unlink()
    again = recovered(crash.run)
    assert not again.failed, "there is room now: what has failed before is tried again, not told again"
    assert committed(crash.run) == [2]


def test_what_a_keeper_may_not_save_any_more_is_kept_and_no_failure(lingers: Crash) -> None:
    store = open_store(str(lingers.run))
    branch(store, 1)
    lingers.wake()
    eventually(lambda: any(line["event"] == "error" for line in ledger(lingers.run)))
    report = recovered(lingers.run)
    assert ("snapshot", "kept", 2) in rows(report)
    assert "has taken over" in next(each.detail for each in report.findings if each.step == 2)
    assert not report.failed
    assert committed(lingers.run) == [1]
    assert report.resume.step == 1

    keepers.end(keepers.find(str(lingers.run)), discard=True)
    assert regions_of(lingers.folder) == []


@pytest.mark.long
def test_a_keeper_that_does_not_answer_is_named(lingers: Crash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(keepers, "_DEATHS_S", 0.3)
    with pytest.raises(KeeperError, match=rf"process {lingers._stopped}\) lives and does not answer"):
        recovered(lingers.run)
    assert committed(lingers.run) == [1]
    assert len(regions_of(lingers.folder)) == 3
    lingers.wake()
    eventually(lambda: committed(lingers.run) == [1, 2])
