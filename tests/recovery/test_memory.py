"""What both processes left in memory when they were killed: saved, or kept, and never made into a lie."""

import os
from pathlib import Path

from flashckpt.commit.needed import needed_slots
from flashckpt.commit.view import View
from flashckpt.keeper import node_keepers as keepers
from flashckpt.memory.held_regions import sealed_in
from flashckpt.store import open_store
from tests import run_view
from tests.commit.runs import name_of
from tests.events import ledger
from tests.folders import flip
from tests.keeper.driver import committed
from tests.keeper.test_keeper_deaths import flip_image
from tests.memory.mounts import fill
from tests.recovery.messes import left_branch, overtaken_branch
from tests.recovery.scene import Crash, recovered, regions_of, resume, rows


def visible(run: Path) -> list[tuple[int, str]]:
    return [(each.step, str(each.attempt)) for each in View.of(open_store(str(run))).visible()]


def test_the_newest_sealed_step_is_committed_and_its_memory_is_let_go(run: Path, runtime: Path) -> None:
    crash = Crash(run, runtime).slots().commit(1)
    crash.seal(2, 3)
    crash.both_killed()
    assert len(regions_of(crash.folder)) == 3

    report = recovered(run)

    assert rows(report) == [
        ("snapshot", "committed", 3),
        ("snapshot", "dropped", 2),
        ("snapshot", "was committed", 1),
    ]
    assert committed(run) == [1, 3]
    assert resume(report) == (3, crash.attempt, "local")
    assert not os.path.exists(crash.folder.path), "nothing is left in memory, not even the folder"
    assert run_view.endings(open_store(str(run))) == {crash.name: "dead"}
    events = [(line["event"], line.get("step")) for line in ledger(run) if line.get("by") == "recover"]
    assert events == [("persist", 3), ("commit", 3), ("death", None)]
    again = recovered(run)
    assert rows(again) == [], "nothing is left to do"
    assert resume(again) == (3, crash.attempt, "local")


def test_damaged_slots_are_never_persisted_and_harm_nothing_else(run: Path, runtime: Path) -> None:
    """Of three slots a leaf, the record and the page have a flipped byte; the oldest one is whole."""
    crash = Crash(run, runtime).slots(4)
    _, record, page, newest = crash.seal(1, 2, 3, 4)
    for name, offset in ((record, 800), (page, 40)):
        flip(Path(crash.folder.path) / name, offset)
    flip_image(Path(crash.folder.path) / newest)
    crash.both_killed()
    report = recovered(run)
    assert ("snapshot", "committed", 1) in rows(report)
    found = {each.place: each for each in report.findings if each.damage}
    outcomes = {place: each.outcome.value for place, each in found.items()}
    assert outcomes == {newest: "torn", record: "torn", page: "kept"}
    assert "model.weight" in found[newest].detail
    assert report.damaged
    assert committed(run) == [1]
    assert not list(run.glob("data/*/*4/rank-*"))
    # What is not a slot of ours any more is nobody's to remove.
    assert regions_of(crash.folder) == [page]


def test_a_branch_that_was_left_never_becomes_visible(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    crash = left_branch(run, runtime)
    [slot] = [each.slot.name for each in sealed_in(crash.folder) if each.step == 7]
    report = recovered(run)
    kept = [each for each in report.findings if each.step == 7]
    assert [(each.outcome.value, each.place) for each in kept] == [("kept", slot)]
    assert "has taken over" in kept[0].detail
    assert visible(run) == [(1, crash.attempt)]
    assert resume(report) == (1, crash.attempt, "local")
    assert not list(run.glob("data/*/*7")), "not a byte of it is written"
    assert regions_of(crash.folder) == [slot], "it stays until the branch has committed, or it is given up"

    other = Crash(tmp_path / "other", runtime).slots().commit(1)
    other.seal(2)
    other.both_killed()
    keepers.end(keepers.find(str(run)), discard=True)
    assert regions_of(crash.folder) == []
    assert len(regions_of(other.folder)) == 3, "no other run's memory, though both have left a folder"


def test_what_a_branch_has_overtaken_is_dropped(run: Path, runtime: Path) -> None:
    second = overtaken_branch(run, runtime)
    report = recovered(run)
    assert rows(report, "snapshot")[0] == ("snapshot", "committed", 3)
    assert ("snapshot", "dropped", 7) in rows(report)
    assert visible(run)[-1] == (3, second.attempt)
    assert all(step <= 3 for step, _ in visible(run))
    assert regions_of(second.folder) == []


def test_a_full_disk_loses_nothing(small_disk: Path, runtime: Path) -> None:
    """The region with the constants stays, too."""
    run = small_disk / "run"
    crash = Crash(run, runtime, kib=1024, constants_kib=64).slots()
    crash.seal(1)
    [slot] = crash.seal(2)
    crash.both_killed()
    filler = fill(small_disk, left=256 << 10)
    report = recovered(run)
    assert rows(report, "snapshot") == [("snapshot", "failed", 2), ("snapshot", "kept", 1)]
    assert report.failed
    assert "No space left" in report.findings[0].detail
    assert len(regions_of(crash.folder)) == 3
    assert resume(report) == (2, crash.attempt, "memory"), "a job would still find it"
    assert run_view.endings(open_store(str(run))) == {crash.name: ""}, (
        "it is not over before everything of it is saved"
    )
    filler.unlink()
    assert rows(recovered(run)) == [("snapshot", "committed", 2), ("snapshot", "dropped", 1)]
    assert committed(run) == [2]


def test_the_good_copy_of_a_step_that_was_damaged_at_rest_stays(run: Path, runtime: Path) -> None:
    crash = Crash(run, runtime).slots().commit(1, 2)
    crash.both_killed()
    [shard] = run.glob("data/*/*2/rank-*")
    flip_image(shard)
    for _ in range(2):
        report = recovered(run)
        assert resume(report) == (2, crash.attempt, "memory")
        assert report.damaged
        assert len(regions_of(crash.folder)) == 1
    assert shard.exists()
    # Another attempt takes it up.
    second = Crash(run, runtime, start=False)
    assert [step for _, step in second.trainer.do("survivors")] == [2]
    second.both_killed()


def test_the_parent_of_the_newest_attempt_is_saved_beside_a_newer_step(run: Path, runtime: Path) -> None:
    """Other nodes had no step 3, or it was torn: all went on from step 2, and died before another."""
    crash = Crash(run, runtime).slots().commit(1)
    loaded, _ = crash.seal(2, 3)
    crash.both_killed()
    store, older = open_store(str(run)), crash.name
    run_view.end(store, run_view.begin(store, name_of(2, older).id, 2), "dead")
    assert loaded in needed_slots(store, [*sealed_in(crash.folder)], ()), "a keeper that leaves keeps it"

    report = recovered(run)

    assert rows(report) == [
        ("snapshot", "kept", 3),  # until the newest attempt has committed a step
        ("snapshot", "committed", 2),
        ("snapshot", "was committed", 1),
    ]
    assert resume(report) == (2, crash.attempt, "local")
