"""Steps at rest: commits that were not finished, damage, orphans. Nothing that could still be good goes."""

import errno
import os
from pathlib import Path
from typing import Any

from flashckpt.commit.lineage import damage
from flashckpt.commit.view import View
from flashckpt.format.names import AttemptName
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import Kind
from flashckpt.store.local import LocalStore, System
from tests import run_view
from tests.commit.runs import commit, is_whole, name_of, part_of, publish
from tests.folders import flip
from tests.keeper.test_keeper_deaths import flip_image
from tests.recovery.messes import old
from tests.recovery.scene import begun, recovered, resume, rows, trained, whole_tree
from tests.replication.copied import visible


def folder_of(run: Path, step: int, attempt: AttemptName) -> Path:
    return run / run_view.folder_of(LocalStore(str(run)), name_of(step, attempt).id)


def shard_of(run: Path, step: int, attempt: AttemptName) -> Path:
    [shard] = folder_of(run, step, attempt).glob("rank-*")
    return shard


def part_file_of(run: Path, step: int, attempt: AttemptName) -> Path:
    [part] = folder_of(run, step, attempt).glob("node-*")
    return part


# Commits that were not finished


def test_parts_of_several_keepers(store: LocalStore, run: Path) -> None:
    attempt = begun(store, world=4)
    for step, ranks in ((2, (0, 1)), (3, (0, 1)), (3, (2, 3)), (4, (0, 1))):
        publish(store, step, attempt, ranks=ranks, world=4)
    report = recovered(run)
    assert rows(report, "parts") == [("parts", "committed", 3)]
    assert not report.failed
    assert visible(store) == [3]
    assert is_whole(store, 3, attempt)
    assert resume(report) == (3, str(attempt), "local")
    assert part_file_of(run, 4, attempt).exists()
    assert not folder_of(run, 2, attempt).exists(), "a newer step has overtaken it"


def test_parts_with_a_damaged_shard_are_not_resumed(store: LocalStore, run: Path) -> None:
    """And of a damaged part the shard stays: a checkpoint may need it."""
    attempt = trained(store, 1)
    publish(store, 2, attempt)
    publish(store, 3, attempt)
    flip(shard_of(run, 2, attempt), 4200)
    flip(part_file_of(run, 3, attempt), 60)
    said = recovered(run, dry_run=True)
    assert rows(said) == [("parts", "quarantined", 2)]
    assert "not the bytes that were captured" in said.findings[0].detail
    report = recovered(run)
    assert rows(report) == [("parts", "committed", 2), ("step", "quarantined", 2)]
    assert report.damaged
    assert "not the bytes that were captured" in report.findings[1].detail
    assert resume(report) == (1, str(attempt), "local")
    assert shard_of(run, 2, attempt).exists()
    assert shard_of(run, 3, attempt).exists()


# Damage


def test_a_flipped_byte_is_marked_and_the_older_step_is_named(store: LocalStore, run: Path) -> None:
    attempt = trained(store, 1, 2)
    data = shard_of(run, 2, attempt).read_bytes()
    flip_image(shard_of(run, 2, attempt))
    files = {path for path in run.rglob("*") if path.is_file()}
    report = recovered(run)
    assert rows(report) == [("step", "quarantined", 2)]
    assert resume(report) == (1, str(attempt), "local")
    assert {path for path in run.rglob("*") if path.is_file()} >= files, "nothing was deleted"
    assert damage(View.of(store), name_of(2, attempt).id) is not None
    again = recovered(run)
    assert rows(again) == [("step", "was quarantined", 2)]
    assert again.damaged
    assert len(View.of(store).damaged) == 1

    shard_of(run, 2, attempt).write_bytes(data)
    mended = recovered(run)
    assert rows(mended) == [("step", "was quarantined", 2)]
    assert "whole now" in mended.findings[0].detail
    assert not mended.damaged
    assert resume(mended) == (2, str(attempt), "local"), "it counts again"
    assert not View.of(store).damaged
    assert rows(recovered(run)) == []


def test_a_missing_shard_is_named_and_not_marked(store: LocalStore, run: Path) -> None:
    attempt = trained(store, 1, 2)
    shard = shard_of(run, 2, attempt)
    away = shard.rename(run.parent / "away")
    for read in (True, False):
        report = recovered(run, read=read)
        assert rows(report) == [("step", "kept", 2)]
        assert report.damaged
        assert report.resume.step == 1
    away.rename(shard)
    whole = recovered(run)
    assert rows(whole) == []
    assert resume(whole) == (2, str(attempt), "local"), "put back, it is the newest again"


class Failing(LocalStore):
    """Gives no bytes of the files whose paths begin so."""

    def __init__(self, url: str, bad: str) -> None:
        super().__init__(url)
        self._bad = bad

    def _look(self, path: str) -> None:
        if path.startswith(self._bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def read_chunks(self, path: str, *args: Any, **how: Any) -> None:
        self._look(path)
        super().read_chunks(path, *args, **how)

    def read(self, path: str, max_bytes: int) -> bytes:
        self._look(path)
        return super().read(path, max_bytes)

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        self._look(path)
        return super().read_bytes(path, offset, num_bytes)


def test_storage_that_fails_quarantines_nothing(store: LocalStore, run: Path) -> None:
    attempt = trained(store, 1, 2)
    report = recover(Failing(store.url, f"{folder_of(run, 2, attempt).relative_to(run)}/rank-"))
    assert rows(report) == [("step", "failed", 2)]
    assert report.failed
    assert "may be whole" in report.findings[0].detail
    assert View.of(store).damaged == {}


def test_a_part_that_cannot_be_read_stays_and_hinders_nothing_else(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    publish(store, 1, attempt)
    publish(store, 2, attempt)
    bad = folder_of(run, 2, attempt)
    files, failing = whole_tree(bad), Failing(store.url, f"{bad.relative_to(run)}/node-")
    for dry_run, outcome, steps in ((True, "sound", []), (False, "committed", [1])):
        report = recover(failing, dry_run=dry_run)
        assert (1, outcome) in {
            (each.id and each.id.boundary, each.outcome.value) for each in report.findings
        }
        assert visible(store) == steps
        assert whole_tree(bad) == files


def test_constants_that_rotted_are_damage_of_every_step(store: LocalStore, run: Path) -> None:
    attempt = begun(store)
    for step in (1, 2, 3):
        commit(store, step, attempt, constants=True)
    flip_image(next(run.glob("data/*/*/frozen-*")))
    report = recovered(run)
    assert rows(report) == [
        ("step", "quarantined", 3),
        ("step", "quarantined", 2),
        ("step", "quarantined", 1),
    ]
    assert (report.whole, report.resume) == (0, None)
    shard_of(run, 3, attempt).unlink()
    assert "not taken for a fresh run" in recovered(run).resume_problem
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
    torn = [
        old(run / f".probe-{'c' * 16}"),
        old(run / f".assets.json.{'c' * 16}.tmp"),
        old(run / "alive" / f".{second}.{'d' * 16}.tmp"),
    ]
    young = run / "alive" / f".{second}.{'f' * 16}.tmp"
    young.write_bytes(b"its write may be going on")
    mine = folder_of(run, 2, second) / "notes.txt"
    mine.write_text("a user's own")
    report = recovered(run)
    found = {each.place for each in report.findings if each.kind is Kind.ORPHANS}
    assert {str(path.relative_to(run)) for path in torn} < found
    assert sum(place.startswith(f"data/{idle}/") for place in found) == 2, "a part and a shard"
    left = {path for path in run.rglob("*") if path.is_file() and "events" not in path.parts}
    assert left == keep | {mine, young}
    assert recovered(run).findings == ()
    assert not data.exists()
    assert is_whole(store, 1, first)
    assert is_whole(store, 2, second)


def test_what_the_newest_attempt_has_begun_stays(store: LocalStore, run: Path) -> None:
    """A keeper on another node may be writing, whether or not its end was written down."""
    attempt = begun(store, world=2)
    part_of(store, 3, attempt, ranks=(1,), world=2)
    assert rows(recovered(run)) == []
    assert shard_of(run, 3, attempt).exists()


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
    attempt = trained(store, 1, 2)
    publish(store, 3, attempt)
    flip_image(shard_of(run, 2, attempt))
    old(run / f".assets.json.{'c' * 16}.tmp")
    before = whole_tree(run / "data")
    report = recover(LocalStore(store.url, ReadOnly()))
    assert rows(report) == [("parts", "failed", None), ("step", "failed", 2), ("orphans", "failed", None)]
    assert [each.id and each.id.boundary for each in report.findings] == [3, 2, None]
    assert all("Read-only file system" in each.detail for each in report.findings)
    assert report.failed
    assert resume(report) == (1, str(attempt), "local")
    assert whole_tree(run / "data") == before
