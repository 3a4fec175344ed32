"""Constants in a region, after trainer and keeper were killed: saved whole, or said, and let go."""

import os
from pathlib import Path

from flashckpt.commit.verification import verify
from flashckpt.recovery.report import RecoveryReport
from flashckpt.store import open_store
from tests.events import ledger
from tests.folders import flip
from tests.keeper.driver import committed
from tests.keeper.test_keeper_shared import regions
from tests.recovery.scene import Crash, recovered, regions_of, rows, whole_tree


def shared(run: Path, runtime: Path, *commits: int) -> Crash:
    return Crash(run, runtime, constants_kib=64, keep=20).slots().commit(*commits)


def region_of(crash: Crash) -> Path:
    [name] = regions(crash.folder)
    return Path(crash.folder.path) / name


def details(report: RecoveryReport) -> list[str]:
    return [each.detail for each in report.findings if each.kind.value == "snapshot"]


def test_it_is_saved_whole_and_the_region_goes(run: Path, runtime: Path) -> None:
    crash = shared(run, runtime)
    crash.seal(2, 3)
    crash.both_killed()
    before = whole_tree(run, runtime)
    said = recovered(run, dry_run=True)
    assert whole_tree(run, runtime) == before
    done = recovered(run)
    assert rows(said) == [("snapshot", "sound", 3), ("snapshot", "dropped", 2)]
    assert rows(done) == [("snapshot", "committed", 3), ("snapshot", "dropped", 2)]
    assert committed(run) == [3]
    assert len(list(run.glob("data/*/*/frozen-*"))) == 1
    assert verify(open_store(str(run))).ok
    assert not os.path.exists(crash.folder.path), "nothing is left in memory, not even the folder"
    assert rows(recovered(run)) == []


def test_a_flipped_byte_is_named_and_never_written(run: Path, runtime: Path) -> None:
    crash = shared(run, runtime)
    crash.seal(2, 3)
    flip(region_of(crash), -20_000)  # of base.weight
    crash.both_killed()
    said, done = recovered(run, dry_run=True), recovered(run)
    assert rows(said) == [("snapshot", "kept", 3), ("snapshot", "dropped", 2)]
    assert "differ (base.weight)" in said.findings[0].detail
    assert rows(done) == [("snapshot", "torn", 3), ("snapshot", "torn", 2)]
    assert all("base.weight" in each.detail for each in done.findings)
    assert "base.scale" not in done.findings[0].detail
    assert done.damaged
    assert said.resume is done.resume is None
    assert committed(run) == []
    assert not list(run.glob("data/*/*/frozen-*"))
    assert not os.path.exists(crash.folder.path)


def test_a_region_is_not_needed_where_its_file_stands(run: Path, runtime: Path) -> None:
    crash = shared(run, runtime, 1)
    crash.seal(2)
    flip(region_of(crash), -20_000)  # of base.weight
    crash.both_killed()
    [file] = run.glob("data/*/*/frozen-*")
    said = recovered(run, dry_run=True)
    done = recovered(run)
    assert rows(said) == [("snapshot", "kept", 2), ("snapshot", "was committed", 1)]
    assert "saved if their file at rest is whole" in said.findings[0].detail
    assert rows(done) == [("snapshot", "committed", 2), ("snapshot", "was committed", 1)]
    assert list(run.glob("data/*/*/frozen-*")) == [file]
    [line] = [line for line in ledger(run) if line["event"] == "persist" and line.get("by") == "recover"]
    assert line["num_bytes"] < file.stat().st_size + (256 << 10), "the ordinary leaves alone"
    assert committed(run) == [1, 2]
    assert verify(open_store(str(run))).ok
    assert not os.path.exists(crash.folder.path)


def test_without_region_and_shard_it_stays(run: Path, runtime: Path) -> None:
    crash = shared(run, runtime)
    slots = crash.seal(2, 3)
    region_of(crash).unlink()
    crash.both_killed()
    done = recovered(run)
    assert rows(done) == [("snapshot", "failed", 3), ("snapshot", "failed", 2)]
    assert "not in this node's memory" in details(done)[0]
    assert done.failed
    assert done.resume is None
    assert sorted(regions_of(crash.folder)) == sorted(slots), "another process may have the region"
    assert committed(run) == []
    assert not list(run.glob("data/*/*/*"))


def test_a_region_stays_while_a_slot_cannot_be_opened(run: Path, runtime: Path) -> None:
    """That slot may name the region."""
    crash = shared(run, runtime)
    [slot] = crash.seal(2)
    crash.both_killed()
    path, region = Path(crash.folder.path) / slot, region_of(crash)
    path.chmod(0o644)
    [found] = [each for each in recovered(run).findings if each.place == slot]
    assert (found.outcome.value, found.damage) == ("kept", True)
    assert region.exists()
    path.chmod(0o600)
    assert rows(recovered(run)) == [("snapshot", "committed", 2)]
    assert not os.path.exists(crash.folder.path)
