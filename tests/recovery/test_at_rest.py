"""Steps at rest: commits that were not finished, damage, debris. Nothing that could still be good goes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.commit import attempts, lineage
from flashckpt.commit.holder import here
from flashckpt.commit.lineage import VisibleStep, branch, candidates
from flashckpt.commit.retention import bury
from flashckpt.errors import NoSuchStepError
from flashckpt.format.names import AttemptName, step_attempt_folder
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import Kind
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import commit, is_whole, new_run, part_of, publish
from tests.keeper.test_keeper_deaths import flip_image
from tests.recovery.scene import recovered, rows, whole_tree


@pytest.fixture
def run(tmp_path: Path, runtime: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(run: Path) -> LocalStore:
    return new_run(run)


def begun(store: LocalStore, parent: AttemptName | None = None, step: int = 0, world: int = 1) -> AttemptName:
    """An attempt that is over."""
    name = attempts.claim(store, here())
    attempts.start(store, name, parent, step, world)
    attempts.mark_ended(store, name, "dead")
    return name


def visible(store: LocalStore) -> list[int]:
    return [each.step for each in lineage.visible(store)]


def shard_of(run: Path, step: int, attempt: AttemptName) -> Path:
    [shard] = (run / step_attempt_folder(step, attempt)).glob("shard-*")
    return shard


# Commits that were not finished


def test_parts_that_are_all_there_are_committed(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    commit(store, 1, attempt)
    publish(store, 2, attempt)
    report = recovered(run)
    assert rows(report) == [("parts", "committed", 2)]
    assert visible(store) == [1, 2]
    assert is_whole(store, 2, attempt)
    assert report.resume is not None
    assert report.resume.step == 2


def test_parts_of_several_keepers(store: LocalStore, run: Path) -> None:
    attempt = begun(store, world=4)
    publish(store, 2, attempt, ranks=(0, 1), world=4, keeper=0)
    publish(store, 3, attempt, ranks=(0, 1), world=4, keeper=0)
    publish(store, 3, attempt, ranks=(2, 3), world=4, keeper=1)
    report = recovered(run)
    assert rows(report) == [("parts", "committed", 3), ("parts", "kept", 2)]
    assert not report.failed
    assert visible(store) == [3]
    assert (run / step_attempt_folder(2, attempt) / "part-00000.json").exists()


def test_parts_of_a_branch_that_was_left_are_not_committed(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    commit(store, 1, attempt)
    commit(store, 2, attempt)
    publish(store, 3, attempt)
    made = branch(store, 1)
    report = recovered(run)
    assert rows(report) == [("parts", "kept", 3)]
    assert str(made) in report.findings[0].detail
    assert visible(store) == [1]
    assert shard_of(run, 3, attempt).exists()
    assert report.resume is not None
    assert report.resume.step == 1


def test_parts_with_a_damaged_shard_do_not_become_the_newest_step(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    commit(store, 1, attempt)
    publish(store, 2, attempt)
    flip(shard_of(run, 2, attempt), 4200)
    before = whole_tree(run / "steps")
    report = recovered(run)
    assert rows(report) == [("parts", "kept", 2)]
    assert report.damaged
    assert "checksum" in report.findings[0].detail
    assert visible(store) == [1]
    assert whole_tree(run / "steps") == before


def test_a_damaged_part_keeps_its_shards(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    commit(store, 1, attempt)
    publish(store, 2, attempt)
    flip(run / step_attempt_folder(2, attempt) / "part-00000.json", 60)
    report = recovered(run)
    assert rows(report) == [("parts", "kept", 2)]
    assert report.damaged
    assert shard_of(run, 2, attempt).exists(), "nobody knows that it is not needed"


def test_parts_without_a_start_are_kept(store: LocalStore, run: Path) -> None:
    attempt = attempts.claim(store, here())
    attempts.mark_ended(store, attempt, "dead")
    publish(store, 2, attempt)
    report = recovered(run)
    assert rows(report) == [("parts", "kept", 2)]
    assert visible(store) == []


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


# Damage


def test_a_flipped_byte_is_marked_and_the_older_step_is_named(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2):
        commit(store, step, attempt)
    flip_image(shard_of(run, 2, attempt))
    files = {path for path in run.rglob("*") if path.is_file()}
    report = recovered(run)
    assert rows(report) == [("step", "marked", 2)]
    assert report.resume is not None
    assert (report.resume.step, report.resume.attempt) == (1, attempt)
    assert {path for path in run.rglob("*") if path.is_file()} >= files, "nothing was deleted"
    assert lineage.marked_here(store, VisibleStep(2, attempt)) is not None
    assert candidates(store)[0].step == 1, "what a resume tries first"
    again = recovered(run)
    assert rows(again) == [("step", "was marked", 2)]
    assert again.damaged
    assert len(lineage.marks(store, 2, attempt)) == 1


def test_a_marked_step_that_is_whole_again_is_said(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2):
        commit(store, step, attempt)
    shard = shard_of(run, 2, attempt)
    data = shard.read_bytes()
    flip_image(shard)
    recovered(run)
    shard.write_bytes(data)
    report = recovered(run)
    assert rows(report) == [("step", "was marked", 2)]
    assert "whole now" in report.findings[0].detail
    assert not report.damaged
    assert report.resume is not None
    assert report.resume.step == 1, "as a resume does, which puts marked steps last"


def test_a_missing_shard_is_named_and_not_marked(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2):
        commit(store, step, attempt)
    shard = shard_of(run, 2, attempt)
    away = shard.rename(run.parent / "away")
    for read in (True, False):
        report = recovered(run, read=read)
        assert rows(report) == [("step", "kept", 2)]
        assert report.damaged
        assert report.resume is not None
        assert report.resume.step == 1
    away.rename(shard)
    whole = recovered(run)
    assert rows(whole) == []
    assert whole.resume is not None
    assert whole.resume.step == 2, "put back, it is the newest again"


def test_storage_that_fails_marks_nothing(
    store: LocalStore, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begun(store)
    for step in (1, 2):
        commit(store, step, attempt)
    bad = str(shard_of(run, 2, attempt))

    def failing(path: str, **how: Any) -> tuple[bytes, list[int], bool]:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return whole(path, **how)

    whole = _native.check_file
    monkeypatch.setattr(_native, "check_file", failing)
    report = recovered(run)
    assert rows(report) == [("step", "failed", 2)]
    assert report.failed
    assert "may be whole" in report.findings[0].detail
    assert lineage.marks(store, 2, attempt) == []


def test_a_run_of_which_nothing_can_be_used(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    commit(store, 1, attempt)
    shard_of(run, 1, attempt).unlink()
    report = recovered(run)
    assert report.resume is None
    assert "not taken for a fresh run" in report.resume_problem


def test_a_run_of_which_all_steps_are_damaged(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    commit(store, 1, attempt)
    flip_image(shard_of(run, 1, attempt))
    report = recovered(run)
    assert rows(report) == [("step", "marked", 1)]
    assert report.resume is None
    assert "none of them can be used" in report.resume_problem


def test_constants_that_rotted_are_damage_of_every_step(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2, 3):
        commit(store, step, attempt, constants=True)
    flip_image(next(run.glob(f"attempts/{attempt}/constants-*")))
    report = recovered(run)
    assert rows(report) == [("step", "marked", 3), ("step", "marked", 2), ("step", "marked", 1)]
    assert (report.whole, report.resume) == (0, None)
    assert "none of them can be used" in report.resume_problem


def test_a_run_without_steps(store: LocalStore, run: Path) -> None:
    begun(store)
    report = recovered(run)
    assert (report.findings, report.resume, report.resume_problem) == ((), None, "")


# Debris


def test_debris_goes_and_nothing_else(store: LocalStore, run: Path) -> None:
    first = begun(store)
    commit(store, 1, first, constants=True)
    idle = attempts.claim(store, here())
    attempts.mark_ended(store, idle, "dead")
    second = begun(store, first, 1)
    commit(store, 2, second)
    part_of(store, 3, second)
    keep = {path for path in run.rglob("*") if path.is_file() and f"{3:012d}" not in str(path)}
    keep -= {path for path in keep if idle.nonce in str(path) or path.name == f"{idle.number:06d}.json"}
    torn = [
        run / step_attempt_folder(2, second) / "shard-00000-00000000beef.safetensors",
        run / step_attempt_folder(2, second) / f".manifest.json.{'c' * 16}.tmp",
        run / "attempts" / str(second) / f".alive.{'d' * 16}.tmp",
        run / "attempts" / f".{idle.number:06d}.json.{'e' * 16}.tmp",
    ]
    for path in torn:
        path.write_bytes(b"cut off")
    mine = run / step_attempt_folder(2, second) / "notes.txt"
    mine.write_text("a user's own")
    report = recovered(run)
    found = {each.place for each in report.findings if each.kind is Kind.DEBRIS}
    assert {str(path.relative_to(run)) for path in torn} < found
    assert f"attempts/{idle.number:06d}.json" in found
    left = {path for path in run.rglob("*") if path.is_file() and "events" not in path.parts}
    assert left == keep | {mine}
    assert not (run / f"steps/{3:012d}").exists()
    assert not (run / f"attempts/{idle}").exists()
    assert is_whole(store, 1, first)
    assert is_whole(store, 2, second)


def test_debris_of_an_attempt_that_may_have_a_keeper_elsewhere_stays(store: LocalStore, run: Path) -> None:
    """Its trainer was on another node and nobody has written down its end: a keeper there may be writing."""
    attempt = attempts.claim(store, here("/elsewhere", "trainer-1.lock"))
    attempts.start(store, attempt, None, 0, 1)
    part_of(store, 3, attempt)
    report = recovered(run)
    assert rows(report) == []
    assert shard_of(run, 3, attempt).exists()
    [info] = attempts.attempts(store)
    assert info.ended == "", "nor is it called dead"


def test_of_several_ranks_one_keepers_word_is_not_enough(store: LocalStore, run: Path) -> None:
    """Its end is written down by the keeper of one node; that of another may be writing."""
    attempt = begun(store, world=2)
    part_of(store, 3, attempt, ranks=(1,), world=2, keeper=1)
    assert rows(recovered(run)) == []
    assert shard_of(run, 3, attempt).exists()
    begun(store)
    assert rows(recovered(run)) == [("debris", "removed", 3)], "a newer attempt has begun: it is over"


def test_leftovers_of_a_pruned_step_go_and_its_tombstone_stays(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2, 3):
        commit(store, step, attempt)
    data = shard_of(run, 1, attempt)
    saved, name = data.read_bytes(), data
    bury(store, 1, attempt)
    name.write_bytes(saved)
    assert rows(recovered(run)) == [("debris", "removed", 1)]
    folder = run / step_attempt_folder(1, attempt)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert visible(store) == [2, 3]


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = whole_tree(tmp_path, runtime)
    with pytest.raises(NoSuchStepError):
        recovered(tmp_path)
    assert whole_tree(tmp_path, runtime) == before


class ReadOnly(System):
    """A file system on which nothing can be made or removed any more."""

    def _refuse(self) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def create(self, name: str, folder: int) -> int:
        self._refuse()
        return -1

    def remove(self, name: str, folder: int) -> None:
        self._refuse()


def test_storage_that_cannot_be_written_is_told_thing_by_thing(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2):
        commit(store, step, attempt)
    publish(store, 3, attempt)
    flip_image(shard_of(run, 2, attempt))
    (run / step_attempt_folder(1, attempt) / "shard-00000-00000000beef.safetensors").write_bytes(b"cut off")
    before = whole_tree(run / "steps")
    report = recover(LocalStore(store.url, ReadOnly()))
    assert rows(report) == [("parts", "failed", 3), ("step", "failed", 2), ("debris", "failed", 1)]
    assert all("Read-only file system" in each.detail for each in report.findings)
    assert report.failed
    assert report.resume is not None
    assert report.resume.step == 1
    assert whole_tree(run / "steps") == before
