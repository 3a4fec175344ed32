"""Steps at rest: commits that were not finished, damage, orphans. Nothing that could still be good goes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit import attempts, starting
from flashckpt.commit.attempts import local_owner
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.lineage import branch, next_start, quarantined_here
from flashckpt.errors import NoSuchStepError
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.format.records import Tombstone
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import Kind
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import commit, is_whole, name_of, new_run, part_of, publish
from tests.keeper.test_keeper_deaths import flip_image
from tests.recovery.messes import old
from tests.recovery.scene import recovered, rows, whole_tree


@pytest.fixture
def run(tmp_path: Path, runtime: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(run: Path) -> LocalStore:
    return new_run(run)


def begun(store: LocalStore, parent: CommitName | None = None, world: int = 1) -> AttemptName:
    """An attempt that is over."""
    name, found = starting.claim(store, local_owner())
    snapshot, step = (None, 0) if parent is None else (parent.id, parent.step)
    starting.start(store, name, snapshot, step, world, found)
    attempts.mark_ended(store, name, "dead")
    return name


def visible(store: LocalStore) -> list[int]:
    return [each.step for each in Catalogue.of(store).visible()]


def shard_of(run: Path, step: int, attempt: AttemptName) -> Path:
    [shard] = (run / name_of(step, attempt).id.data_folder).glob("shard-*")
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
    assert (run / name_of(2, attempt).id.data_folder / "part-00000.json").exists()


def test_parts_of_a_branch_that_was_left_are_not_committed(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    commit(store, 1, attempt)
    commit(store, 2, attempt)
    made = branch(store, 1)
    publish(store, 3, attempt)  # by a keeper that was late
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
    before = whole_tree(run / "data")
    report = recovered(run)
    assert rows(report) == [("parts", "kept", 2)]
    assert report.damaged
    assert "checksum" in report.findings[0].detail
    assert visible(store) == [1]
    assert whole_tree(run / "data") == before


def test_a_damaged_part_keeps_its_shards(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    commit(store, 1, attempt)
    publish(store, 2, attempt)
    flip(run / name_of(2, attempt).id.data_folder / "part-00000.json", 60)
    report = recovered(run)
    assert rows(report) == [("parts", "kept", None)]
    assert report.damaged
    assert shard_of(run, 2, attempt).exists(), "nobody knows that it is not needed"


def test_parts_without_a_start_are_kept(store: LocalStore, run: Path) -> None:
    commit(store, 1, begun(store))
    attempt = attempts.claim(store, local_owner())
    attempts.mark_ended(store, attempt, "dead")
    publish(store, 2, attempt)
    report = recovered(run)
    assert rows(report) == [("parts", "kept", 2)]
    assert visible(store) == [1]


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
    assert rows(report) == [("step", "quarantined", 2)]
    assert report.resume is not None
    assert (report.resume.step, report.resume.attempt) == (1, attempt)
    assert {path for path in run.rglob("*") if path.is_file()} >= files, "nothing was deleted"
    assert quarantined_here(Catalogue.of(store), name_of(2, attempt)) is not None
    assert next_start(store).candidates[0].step == 1, "what a resume tries first"
    again = recovered(run)
    assert rows(again) == [("step", "was quarantined", 2)]
    assert again.damaged
    assert len(Catalogue.of(store).quarantines) == 1


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
    assert rows(report) == [("step", "was quarantined", 2)]
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


class BadSector(LocalStore):
    """Gives no bytes of the shards in one folder."""

    def __init__(self, url: str, folder: str) -> None:
        super().__init__(url)
        self._bad = folder

    def read_chunks(self, path: str, *args: Any, **how: Any) -> None:
        if path.startswith(self._bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        super().read_chunks(path, *args, **how)


def test_storage_that_fails_quarantines_nothing(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2):
        commit(store, step, attempt)
    report = recover(BadSector(store.url, name_of(2, attempt).id.data_folder))
    assert rows(report) == [("step", "failed", 2)]
    assert report.failed
    assert "may be whole" in report.findings[0].detail
    assert Catalogue.of(store).quarantines == ()


class BadPart(LocalStore):
    """Gives no bytes of the parts in one folder."""

    def __init__(self, url: str, folder: str) -> None:
        super().__init__(url)
        self._bad = f"{folder}/part-"

    def read(self, path: str, max_bytes: int) -> bytes:
        if path.startswith(self._bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().read(path, max_bytes)

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        if path.startswith(self._bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().read_bytes(path, offset, num_bytes)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_part_that_cannot_be_read_stays_and_hinders_nothing_else(
    store: LocalStore, run: Path, dry_run: bool
) -> None:
    attempt = begun(store)
    publish(store, 1, attempt)
    publish(store, 2, attempt)
    bad = name_of(1, attempt).id.data_folder
    files = whole_tree(run / bad)
    report = recover(BadPart(store.url, bad), dry_run=dry_run)
    outcomes = {(each.boundary, each.outcome.value) for each in report.findings}
    assert outcomes == {(1, "failed"), (2, "sound" if dry_run else "committed")}
    assert report.failed
    assert visible(store) == ([] if dry_run else [2])
    assert whole_tree(run / bad) == files


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
    assert rows(report) == [("step", "quarantined", 1)]
    assert report.resume is None
    assert "files of every one are missing, cut short or damaged" in report.resume_problem


def test_constants_that_rotted_are_damage_of_every_step(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2, 3):
        commit(store, step, attempt, constants=True)
    flip_image(next(run.glob("frozen/*")))
    report = recovered(run)
    assert rows(report) == [
        ("step", "quarantined", 3),
        ("step", "quarantined", 2),
        ("step", "quarantined", 1),
    ]
    assert (report.whole, report.resume) == (0, None)
    assert "files of every one are missing, cut short or damaged" in report.resume_problem


def test_a_run_without_steps(store: LocalStore, run: Path) -> None:
    begun(store)
    report = recovered(run)
    assert (report.findings, report.resume, report.resume_problem) == ((), None, "")


# Debris


def test_orphans_go_and_nothing_else(store: LocalStore, run: Path) -> None:
    first = begun(store)
    commit(store, 1, first, constants=True)
    idle = begun(store, name_of(1, first))
    publish(store, 3, idle, world=2)  # its trainer died before the next part
    second = begun(store, name_of(1, first))
    commit(store, 2, second)
    part_of(store, 3, second)
    data = run / "data" / str(idle)
    keep = {path for path in run.rglob("*") if path.is_file() and not path.is_relative_to(data)}
    folder = run / name_of(2, second).id.data_folder
    torn = [
        old(folder / f".part-00000.json.{'c' * 16}.tmp"),
        old(run / "commits" / f".{name_of(2, second).stem}.json.{'c' * 16}.tmp"),
        old(run / "attempts" / str(second) / f".alive.{'d' * 16}.tmp"),
        old(run / "attempts" / f".{idle.number:06d}.json.{'e' * 16}.tmp"),
    ]
    young = run / "attempts" / str(second) / f".alive.{'f' * 16}.tmp"
    young.write_bytes(b"its write may be going on")
    mine = folder / "notes.txt"
    mine.write_text("a user's own")
    report = recovered(run)
    found = {each.place for each in report.findings if each.kind is Kind.ORPHANS}
    assert {str(path.relative_to(run)) for path in torn} < found
    assert f"{name_of(3, idle).id.data_folder}/part-00000.json" in found
    left = {path for path in run.rglob("*") if path.is_file() and "events" not in path.parts}
    assert left == keep | {mine, young}
    assert not data.exists()
    assert [each.place for each in recovered(run).findings] == [f"attempts/{idle}"]
    assert not (run / "attempts" / str(idle)).exists()
    assert is_whole(store, 1, first)
    assert is_whole(store, 2, second)


def test_what_the_newest_attempt_has_begun_stays(store: LocalStore, run: Path) -> None:
    """A keeper on another node may be writing, whether or not its end was written down."""
    attempt = begun(store, world=2)
    part_of(store, 3, attempt, ranks=(1,), world=2, keeper=1)
    assert rows(recovered(run)) == []
    assert shard_of(run, 3, attempt).exists()


def test_an_interrupted_deletion_is_ended(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2, 3):
        commit(store, step, attempt)
    name = name_of(1, attempt)
    store.create(name.id.tombstone_path, Tombstone(id=name.id).to_bytes())
    (run / name.path).unlink()
    assert {row[:2] for row in rows(recovered(run))} == {("orphans", "removed")}
    assert not (run / name.id.data_folder).exists()
    assert Catalogue.of(store).tombstones == frozenset()
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
    old(run / name_of(1, attempt).id.data_folder / f".part-00000.json.{'c' * 16}.tmp")
    before = whole_tree(run / "data")
    report = recover(LocalStore(store.url, ReadOnly()))
    assert rows(report) == [("parts", "failed", 3), ("step", "failed", 2), ("orphans", "failed", None)]
    assert all("Read-only file system" in each.detail for each in report.findings)
    assert report.failed
    assert report.resume is not None
    assert report.resume.step == 1
    assert whole_tree(run / "data") == before
