"""A step that was copied is the very step, or it is not there: after a kill anywhere, on damaged bytes, with
two copiers at once, and where a target fills up."""

from __future__ import annotations

import errno
import os
import re
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from flashckpt import crashpoints
from flashckpt.commit import attempts, lineage, retention
from flashckpt.commit import steps as steps_module
from flashckpt.commit.attempts import open_run
from flashckpt.commit.verification import verify
from flashckpt.errors import DamagedError, NoSuchStepError, RunError
from flashckpt.format.names import (
    AttemptName,
    claim_path,
    manifest_path,
    step_attempt_folder,
)
from flashckpt.format.replicas import ranks_of
from flashckpt.persist import deletions
from flashckpt.persist.deletions import Unused, unused_files
from flashckpt.recovery import storage
from flashckpt.recovery.recover import recover
from flashckpt.store.base import Read, Store
from flashckpt.store.local import LocalStore, System
from flashckpt.tiers.run_copy import copy_run
from flashckpt.tiers.spool import spool
from flashckpt.tiers.step_copy import Copied, Outcome, StepCopier
from tests.commit.runs import HOLDER, attempt_at, publish
from tests.contracts.flat_store import FlatStore
from tests.tiers.copied import add, files, flipped, made, mirrored, of_step
from tests.tiers.copied import near as near
from tests.tiers.copied import pair as pair
from tests.tiers.copied import tmp_path as tmp_path

POINTS = [
    "copy.written:3",  # two constants, one shard of four
    "copy.files",
    "copy.part",
    "copy.files:2",
    "copy.records",
    "manifest.checked",
    "manifest.linked",
]


def test_what_was_copied_is_the_same(pair: tuple[Store, Store], tmp_path: Path) -> None:
    source, target = pair
    made(source, [10, 20, 30])
    second = attempt_at(source, lineage.visible(source)[1].attempt, 20)
    add(source, 40, second)

    done = copy_run(source, target, all_steps=True)
    assert [(each.step, each.copied.outcome) for each in done.steps if each.copied] == [
        (step, Outcome.COPIED) for step in (40, 20, 10)
    ], "step 30 is of another branch"
    assert all(each.is_visible for each in done.steps)
    assert lineage.visible(target) == lineage.visible(source)
    assert verify(target).ok
    theirs = of_step(tmp_path / "source")
    mine = of_step(tmp_path / "target")
    assert mine == {name: data for name, data in theirs.items() if f"steps/{30:012d}" not in name}
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp")]

    remains = f"{step_attempt_folder(40, second)}/.shard-00000-5f2c0a1b.safetensors.0123456789abcdef.tmp"
    if target.capabilities.rename:
        target.create(remains, b"of a copier that was killed as another committed the step")
    again = copy_run(source, target, all_steps=True)
    assert not target.exists(remains)
    assert {each.copied.outcome for each in again.steps if each.copied} == {Outcome.THERE}
    assert again.sent_bytes == 0


@pytest.mark.parametrize("name", [".", "steps", "link", ".."])
def test_a_run_is_no_copy_of_itself(tmp_path: Path, name: str) -> None:
    """Who is told that the step is there already has it once, and thinks twice."""
    source = LocalStore(str(tmp_path / "above" / "run"))
    made(source, [10])
    (tmp_path / "above" / "run" / "link").symlink_to("../run")
    before = files(tmp_path)
    with pytest.raises(RunError, match=r"one is in the other.* Nothing was copied"):
        copy_run(source, LocalStore(f"{source.url}/{name}"))
    assert files(tmp_path) == before


def test_a_full_folder_of_files_on_their_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    message = rf"bytes that is copied .*\$TMPDIR.*{re.escape(str(tmp_path))}"
    with pytest.raises(OSError, match=message):
        spool(1 << 50)
    assert not list(tmp_path.iterdir())


def test_constants_are_sent_once(pair: tuple[Store, Store]) -> None:
    source, target = pair
    attempt = made(source, [10, 20])
    first = mirrored(source, target).copy(10, attempt)
    second = StepCopier(source, target).copy(20, attempt)
    assert first.sent_bytes == first.num_bytes
    manifest = steps_module.read_step(source, 20, attempt).manifest
    assert second.sent_bytes == sum(each.num_bytes for each in manifest.shards)


@pytest.mark.process
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point(pair: tuple[Store, Store], point: str, tmp_path: Path) -> None:
    source, target = pair
    attempt = made(source, [10, 20])
    if point.startswith("copy.written") and not target.capabilities.rename:
        return  # an object has its name at once
    mirrored(source, target).copy(10, attempt)
    before = files(tmp_path / "target")

    child = os.fork()
    if not child:
        crashpoints.arm(point.replace(":3", ":1"))
        StepCopier(source, target).copy(20, attempt)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "the point was never reached"

    there = [each.step for each in lineage.visible(target)]
    assert there == ([10, 20] if point == "manifest.linked" else [10])
    assert verify(target).ok
    after = files(tmp_path / "target")
    assert {name: after[name] for name in before} == before

    StepCopier(source, target).copy(20, attempt)
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp")]


@pytest.mark.parametrize("point", POINTS)
def test_another_copier_comes_in_between(
    pair: tuple[Store, Store], point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once, at their worst: the other does all of it while this one stands at a point."""
    source, target = pair
    attempt = made(source, [10])
    wanted, _, count = point.partition(":")
    passed: list[str] = []

    def between(name: str) -> None:
        passed.append(name)
        if passed.count(wanted) == int(count or 1) and name == wanted:
            passed.extend([wanted] * 9)
            StepCopier(source, target).copy(10, attempt)

    copier = mirrored(source, target)
    monkeypatch.setattr(crashpoints, "point", between)
    done = copier.copy(10, attempt)
    assert done.outcome is Outcome.COPIED
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp")]


def test_copiers_at_once(pair: tuple[Store, Store], tmp_path: Path) -> None:
    source, target = pair
    made(source, [10, 20, 30])
    open_run(target, create=True, run_id=open_run(source, create=False).run_id)
    with ThreadPoolExecutor(4) as pool:
        how = {"all_steps": True}
        done = [pool.submit(copy_run, source, target, **how) for _ in range(4)]  # type: ignore[arg-type]
        assert all(each.result().ok for each in done)
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": flipped,
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "gone": lambda data: None,
}


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        *[("shard-00001", harm) for harm in HARMS],
        *[
            (file, harm)
            for file in ("constants-00001", "part-00001", "manifest")
            for harm in ("flipped", "gone")
        ],
    ],
)
def test_a_damaged_source_is_told_and_not_published(
    pair: tuple[Store, Store], file: str, harm: str, tmp_path: Path
) -> None:
    source, target = pair
    attempt = made(source, [20])
    copier = mirrored(source, target)
    path = next(each for each in (tmp_path / "source").rglob("*") if f"/{file}" in unquote(str(each)))
    whole = path.read_bytes()
    harmed = HARMS[harm](whole)
    path.unlink()
    if harmed is not None:
        path.write_bytes(harmed)

    error = NoSuchStepError if (file, harm) == ("manifest", "gone") else DamagedError
    with pytest.raises(error):
        copier.copy(20, attempt)
    assert list(lineage.newest_first(target)) == []
    assert not target.exists(manifest_path(20, attempt))
    left = [name for name in of_step(tmp_path / "target") if file in name]
    assert not left, "what was not compared has no name there"

    path.write_bytes(whole)
    assert copier.copy(20, attempt).outcome is Outcome.COPIED
    assert verify(target).ok


class Stop(Exception):
    pass


def stopped(copier: StepCopier, step: int, attempt: AttemptName, patch: pytest.MonkeyPatch, at: str) -> None:
    """Copy up to a point, the first time."""

    def stop(name: str) -> None:
        if name == at:
            raise Stop

    with patch.context() as armed:
        armed.setattr(crashpoints, "point", stop)
        with pytest.raises(Stop):
            copier.copy(step, attempt)


@pytest.mark.parametrize("file", ["shard-00001", "constants-00000"])
def test_what_rotted_before_the_manifest_is_not_published(
    pair: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    source, target = pair
    attempt = made(source, [10])
    stopped(mirrored(source, target), 10, attempt, monkeypatch, "copy.records")
    path = next(each for each in (tmp_path / "target").rglob("*") if f"/{file}" in unquote(str(each)))
    whole = path.read_bytes()
    path.write_bytes(flipped(whole))
    with pytest.raises(RunError, match="is not whole"):
        StepCopier(source, target).copy(10, attempt)
    assert not target.exists(manifest_path(10, attempt))
    path.write_bytes(whole)
    done = StepCopier(source, target).copy(10, attempt)
    assert (done.outcome, done.sent_bytes) == (Outcome.COPIED, 0)
    assert verify(target).ok


@pytest.mark.parametrize("age_s", [86400.0, -3600.0], ids=["young", "old"])
def test_a_recovery_of_the_target_beside_a_copy(
    pair: tuple[Store, Store], runtime: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    """The copy goes on between the recovery's look and its removals."""
    source, target = pair
    attempt = made(source, [10, 20])
    mirrored(source, target).copy(10, attempt)
    stopped(StepCopier(source, target), 20, attempt, monkeypatch, "copy.files")
    monkeypatch.setattr(deletions, "COPY_AGE_S", age_s)
    surveyed: list[Unused] = []

    def survey(*args: Any) -> list[Unused]:
        surveyed.extend(unused_files(*args))
        StepCopier(source, target).copy(20, attempt)
        return surveyed

    monkeypatch.setattr(storage, "unused_files", survey)
    assert recover(target).findings == ()
    assert bool(surveyed) is (target.capabilities.rename or age_s < 0)
    assert [each.step for each in lineage.visible(target)] == [10, 20]
    assert verify(target).ok


def test_debris_of_an_attempt_that_ended_stays_for_a_day_where_a_copier_may_be_at_work(
    near: tuple[Store, Store], runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, target = near
    attempt = made(source, [10, 20])
    mirrored(source, target).copy(10, attempt)
    stopped(StepCopier(source, target), 20, attempt, monkeypatch, "copy.files")
    before = of_step(tmp_path / "target")
    assert recover(target).findings == ()
    assert before.items() <= of_step(tmp_path / "target").items()
    monkeypatch.setattr(deletions, "COPY_AGE_S", -3600.0)
    [gone] = recover(target).findings
    assert "shard-00000" in gone.place
    assert not target.exists(gone.place)


@pytest.mark.parametrize("file", ["shard-00001", "constants-00000", "part-00000"])
def test_what_goes_as_the_manifest_is_published_is_sent_again(
    pair: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    source, target = pair
    attempt = made(source, [10])

    def lose(name: str) -> None:
        if name == "manifest.linked":
            for each in (tmp_path / "target").rglob("*"):
                if f"/{file}" in unquote(str(each)):
                    each.unlink()

    copier = mirrored(source, target)
    monkeypatch.setattr(crashpoints, "point", lose)
    assert copier.copy(10, attempt).outcome is Outcome.COPIED
    assert verify(target).ok
    assert [each.step for each in lineage.visible(target)] == [10]


def test_a_file_in_the_target_is_trusted_only_if_it_is_whole(
    pair: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    attempt = made(source, [10])
    copier = mirrored(source, target)

    stopped(copier, 10, attempt, monkeypatch, "copy.files")
    path = next(each for each in (tmp_path / "target").rglob("*") if "/shard-00000" in unquote(str(each)))
    whole = path.read_bytes()
    path.write_bytes(flipped(whole))
    with pytest.raises(RunError, match="is not whole.*--step 10 --repair` reads what is there"):
        StepCopier(source, target).copy(10, attempt)
    assert list(lineage.newest_first(target)) == []
    assert path.read_bytes() == flipped(whole), "it may be another's"
    path.write_bytes(whole)
    done = StepCopier(source, target).copy(10, attempt)
    assert done.outcome is Outcome.COPIED
    assert done.sent_bytes < done.num_bytes


class BadSector(LocalStore):
    """Gives the records, and no bytes of shards."""

    def read_ranges(self, path: str, *args: Any, **how: Any) -> Read:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_a_disk_that_gives_no_bytes_is_no_damage(tmp_path: Path) -> None:
    made(LocalStore(str(tmp_path / "source")), [10])
    target = LocalStore(str(tmp_path / "target"))
    with pytest.raises(OSError, match="source/steps/.*shard") as told:
        copy_run(BadSector(str(tmp_path / "source")), target)
    assert told.value.errno == errno.EIO
    assert list(lineage.newest_first(target)) == []


class FullDisk(System):
    """Has room for so many more writes of either kind."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def _take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, file: int, data: memoryview) -> int:
        self._take()
        return super().write(file, data)

    def write_shard(self, path: str, *args: Any, **how: Any) -> tuple[bytes, bytes, bool]:
        self._take()
        return super().write_shard(path, *args, **how)


def test_a_target_that_fills_up_at_every_write(tmp_path: Path) -> None:
    source = LocalStore(str(tmp_path / "source"))
    made(source, [10])
    writes, is_full = 0, True
    while is_full:
        disk = FullDisk(writes)
        with suppress(OSError):
            copy_run(source, LocalStore(str(tmp_path / f"target-{writes}"), disk))
        is_full = disk.left < 0
        target = LocalStore(str(tmp_path / f"target-{writes}"))
        assert [each.step for each in lineage.visible(target)] == ([] if is_full else [10])
        assert copy_run(source, target).ok
        assert verify(target).ok
        writes += 1
    assert writes > 9


def test_two_histories_are_not_mixed(near: tuple[Store, Store], tmp_path: Path) -> None:
    source, target = near
    attempt = made(source, [10])
    copy_run(source, target)
    mine = attempt_at(target, attempt, 10)
    add(target, 20, mine)
    theirs = attempt_at(source, attempt, 10)
    add(source, 20, theirs)
    before = of_step(tmp_path / "target")
    with pytest.raises(RunError, match="trained by itself"):
        copy_run(source, target)
    assert of_step(tmp_path / "target") == before


def test_a_run_that_went_on_further_is_not_hidden(near: tuple[Store, Store]) -> None:
    """The target's attempt has a number that the source has never seen, and a lower one than the source's."""
    source, target = near
    attempt = made(source, [10])
    copy_run(source, target)
    add(target, 20, attempt_at(target, attempt, 10))
    assert attempts.claim(source, attempts.read_claim(source, attempt).holder, above=2)
    newer = attempts.newest_claimed(source)
    assert newer is not None
    attempts.start(source, newer, attempt, 10, 2)
    add(source, 30, newer)
    with pytest.raises(RunError, match="trained by itself"):
        copy_run(source, target)
    assert [each.step for each in lineage.visible(target)] == [10, 20]


def test_another_run_s_place_is_refused(near: tuple[Store, Store], tmp_path: Path) -> None:
    source, target = near
    made(source, [10])
    made(target, [10])
    before = files(tmp_path / "target")
    with pytest.raises(RunError, match="another run"):
        copy_run(source, target)
    assert files(tmp_path / "target") == before


def test_a_living_trainer_is_not_superseded(near: tuple[Store, Store]) -> None:
    source, target = near
    attempt = made(source, [10])
    copy_run(source, target)
    attempts.beat(target, attempt, 7)
    add(source, 20, attempt_at(source, attempt, 10))

    def refuse() -> None:
        raise RunError("a trainer lives there")

    with pytest.raises(RunError, match="a trainer lives there"):
        copy_run(source, target, may_supersede=refuse)
    assert attempts.newest_claimed(target) == attempt


def test_what_was_deleted_there_stays_deleted(near: tuple[Store, Store]) -> None:
    source, target = near
    attempt = made(source, [10, 20])
    copy_run(source, target, all_steps=True)
    retention.bury(target, 10, attempt)
    done = copy_run(source, target, 10)
    assert [each.copied.outcome for each in done.steps if each.copied] == [Outcome.BURIED]
    assert [each.step for each in lineage.visible(target)] == [20]


@pytest.mark.parametrize("point", ["copy.files", "copy.part", "copy.records"])
def test_a_step_that_is_deleted_meanwhile(
    near: tuple[Store, Store], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = near
    attempt = made(source, [10, 20])
    asked: list[str] = []

    def delete(name: str) -> None:
        if name == point and not asked:
            asked.append(name)
            retention.bury(source, 20, attempt)

    monkeypatch.setattr(crashpoints, "point", delete)
    done = copy_run(source, target)
    # All of it may have been read before.
    assert [each.step for each in lineage.visible(target)] == [each.step for each in done.steps]
    assert verify(target).ok
    with pytest.raises(NoSuchStepError):
        StepCopier(source, target).copy(20, attempt)


def test_files_that_the_target_has_lost_are_sent_again(near: tuple[Store, Store], tmp_path: Path) -> None:
    source, target = near
    attempt = made(source, [10])
    copy_run(source, target)
    lost = next(each for each in (tmp_path / "target").rglob("*") if "/shard-00001" in unquote(str(each)))
    lost.unlink()
    done: Copied = StepCopier(source, target).copy(10, attempt)
    assert done.outcome is Outcome.COPIED
    assert 0 < done.sent_bytes < done.num_bytes
    assert verify(target).ok


def test_a_copy_goes_back(tmp_path: Path) -> None:
    """What local storage has lost comes from the copy; its newer attempts stay."""
    source, target = LocalStore(str(tmp_path / "source")), FlatStore(f"flat://{tmp_path / 'target'}")
    attempt = made(source, [10, 20])
    copy_run(source, target, all_steps=True)
    second = attempt_at(source, attempt, 20)
    add(source, 30, second)
    folder = step_attempt_folder(20, attempt)
    source.remove_tree(folder)
    assert [each.step for each in lineage.visible(source)] == [10, 30]
    copy_run(target, source, 20)
    assert [each.step for each in lineage.visible(source)] == [10, 20, 30]
    assert verify(source).ok


def test_the_disks_of_two_nodes_are_copied_apart(near: tuple[Store, Store], tmp_path: Path) -> None:
    """Their manifests have the same name and list other parts: together they would be neither's."""
    first, target = near
    second = LocalStore(str(tmp_path / "second"))
    open_run(first, create=True)
    open_run(second, create=True, run_id=open_run(first, create=False).run_id)
    name = attempts.claim(first, HOLDER)
    second.create(claim_path(name.number), first.read(claim_path(name.number), 1 << 20))
    for rank, store in enumerate((first, second)):
        ranks = ranks_of([rank])
        attempts.start(store, name, None, 0, 2, ranks=ranks)
        publish(store, 10, name, ranks=(rank,), world=2, keeper=rank)
        assert steps_module.commit(store, 10, name, 2, ranks)
    copy_run(first, target)
    before = of_step(tmp_path / "target")
    with pytest.raises(RunError, match="another node's part"):
        copy_run(second, target)
    assert of_step(tmp_path / "target") == before
    assert [each.step for each in lineage.visible(target)] == [10]
    assert verify(target).ok
