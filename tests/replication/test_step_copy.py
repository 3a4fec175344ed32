"""A step that was copied is the very step, or it is not there: after a kill anywhere, on damaged bytes, with
two copiers at once, and where a target fills up."""

import errno
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit.verification import verify
from flashckpt.commit.view import View, open_run
from flashckpt.errors import DamagedError, NoSuchStepError, RunError, SupersededError
from flashckpt.replication.run_copy import Copied, Outcome, StepCopier, copy_run, spool
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import attempt_at, folder_of, name_of
from tests.recovery.test_at_rest import Failing
from tests.replication.copied import (
    add,
    delete,
    files,
    flipped,
    is_of,
    killed_at,
    made,
    mirrored,
    named,
    of_step,
    once_at,
    visible,
    watch,
)
from tests.replication.copied import near as near
from tests.replication.copied import pair as pair
from tests.replication.copied import tmp_path as tmp_path

POINTS = [
    "catalogue.created",  # of the session
    "copy.files",
    "copy.part",
    "copy.written",
    "manifest.creating",
    "catalogue.created:2",
]


def test_what_was_copied_is_the_same(pair: tuple[Store, Store], tmp_path: Path) -> None:
    source, target = pair
    second = attempt_at(source, name_of(20, made(source, [10, 20, 30])), world=2)
    add(source, 40, second)

    done = copy_run(source, target, all_steps=True)
    assert [(each.name.step, each.outcome) for each in done.steps] == [
        (step, Outcome.COPIED) for step in (40, 20, 10)
    ], "step 30 is of another branch"
    assert all(each.is_visible for each in done.steps)
    assert View.of(target).visible() == View.of(source).visible()
    assert verify(target).ok
    theirs = of_step(tmp_path / "source")
    mine = of_step(tmp_path / "target")
    assert mine == {name: data for name, data in theirs.items() if f".{30:020d}/" not in name}
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp")]

    again = copy_run(source, target, all_steps=True)
    assert {each.outcome for each in again.steps} == {Outcome.THERE}
    assert again.sent_bytes == 0


@pytest.mark.parametrize("name", ["data", "link", ".."])
def test_a_run_is_no_copy_of_itself(tmp_path: Path, name: str) -> None:
    """Who is told that the step is there already has it once, and thinks twice."""
    source = LocalStore(str(tmp_path / "above" / "run"))
    made(source, [10])
    (tmp_path / "above" / "run" / "link").symlink_to("../run")
    before = files(tmp_path)
    with pytest.raises(RunError, match=r"inside the other.* Nothing was copied"):
        copy_run(source, LocalStore(f"{source.url}/{name}"))
    assert files(tmp_path) == before


def test_a_full_folder_of_files_on_their_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    message = rf"kept here meanwhile .*\$TMPDIR.*{re.escape(str(tmp_path))}"
    with pytest.raises(OSError, match=message):
        spool(1 << 50)
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point(
    pair: tuple[Store, Store], point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    attempt = made(source, [10, 20])
    mirrored(source, target).copy(name_of(10, attempt))
    before = of_step(tmp_path / "target")

    killed_at(point, target, monkeypatch, lambda: StepCopier(source, target).copy(name_of(20, attempt)))

    there = visible(target)
    assert there == ([10, 20] if point == "catalogue.created:2" else [10])
    assert verify(target).ok
    after = of_step(tmp_path / "target")
    assert {name: after[name] for name in before} == before

    StepCopier(source, target).copy(name_of(20, attempt))
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp")]


@pytest.mark.parametrize("point", POINTS)
def test_another_copier_comes_in_between(
    near: tuple[Store, Store], point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once, at their worst: the other does all of it while this one stands at a point."""
    source, target = near
    attempt = made(source, [10])
    copier = mirrored(source, target)
    watch(target, monkeypatch, once_at(point, lambda: StepCopier(source, target).copy(name_of(10, attempt))))
    if point == "catalogue.created":
        with pytest.raises(SupersededError):
            copier.copy(name_of(10, attempt))
    else:
        assert copier.copy(name_of(10, attempt)).outcome is Outcome.COPIED
    assert visible(target) == [10]
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp")]


@pytest.mark.parametrize("is_superseded", [True, False])
def test_a_folder_that_is_gone_is_told_as_what_it_is(
    near: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch, is_superseded: bool
) -> None:
    """Another copier has superseded this one, and has deleted the folder that it writes into."""
    source, target = near
    made(source, [10])
    open_run(target, create=True, run_id=open_run(source, create=False).run_id)
    write_shard, failing = target.write_shard, [True]

    def fails_once(*arguments: Any, **named: Any) -> Any:
        if not failing:
            return write_shard(*arguments, **named)
        failing.pop()
        if is_superseded:
            assert copy_run(source, target).ok
        raise FileNotFoundError(errno.ENOENT, "no such file or directory")

    monkeypatch.setattr(target, "write_shard", fails_once)
    with pytest.raises(SupersededError if is_superseded else FileNotFoundError):
        copy_run(source, target)
    assert visible(target) == ([10] if is_superseded else [])
    assert copy_run(source, target).ok


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": flipped,
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "gone": lambda data: None,
}


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        *[("rank-00001", harm) for harm in HARMS],
        *[(file, "flipped") for file in ("frozen-", "node-00001", "manifest-")],
    ],
)
def test_a_damaged_source_is_told_and_not_published(
    near: tuple[Store, Store], file: str, harm: str, tmp_path: Path
) -> None:
    source, target = near
    attempt = made(source, [20])
    copier = mirrored(source, target)
    path = named(tmp_path / "source", file)[0]
    whole = path.read_bytes()
    harmed = HARMS[harm](whole)
    path.unlink()
    if harmed is not None:
        path.write_bytes(harmed)

    with pytest.raises(DamagedError):
        copier.copy(name_of(20, attempt))
    assert visible(target) == []
    left = [name for name in of_step(tmp_path / "target") if is_of(name, file)]
    assert not left, "what was not compared has no name there"

    path.write_bytes(whole)
    assert copier.copy(name_of(20, attempt)).outcome is Outcome.COPIED
    assert verify(target).ok


def test_a_disk_that_gives_no_bytes_is_no_damage(tmp_path: Path) -> None:
    source, target = (LocalStore(str(tmp_path / name)) for name in ("source", "target"))
    folder = folder_of(source, name_of(10, made(source, [10])).id)
    with pytest.raises(OSError, match="source/data/.*safetensors") as told:
        copy_run(Failing(source.url, f"{folder.path}/rank-"), target)
    assert told.value.errno == errno.EIO
    assert visible(target) == []


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
        assert visible(target) == ([] if is_full else [10])
        assert copy_run(source, target).ok
        assert verify(target).ok
        writes += 1
    assert writes > 9


@pytest.mark.parametrize("point", ["copy.files", "manifest.creating"])
def test_a_step_that_is_deleted_meanwhile(
    near: tuple[Store, Store], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = near
    attempt = made(source, [10, 20])
    watch(target, monkeypatch, once_at(point, lambda: delete(source, name_of(20, attempt))))
    done = copy_run(source, target)
    # All of it may have been read before.
    assert visible(target) == [each.name.step for each in done.steps]
    assert verify(target).ok
    with pytest.raises(NoSuchStepError):
        StepCopier(source, target).copy(name_of(20, attempt))


@pytest.mark.parametrize("file", ["rank-00001", "frozen-", "node-00000", "manifest-", "data/"])
def test_what_the_target_has_lost_is_named_and_a_repair_sends_it_again(
    near: tuple[Store, Store], tmp_path: Path, file: str
) -> None:
    source, target = near
    attempt = made(source, [10])
    copy_run(source, target)
    for each in named(tmp_path / "target", file):
        each.unlink()
    before = files(tmp_path / "target")
    with pytest.raises(DamagedError, match="not whole there: .*--step 10@.*:10 --repair` reads"):
        StepCopier(source, target).copy(name_of(10, attempt))
    assert files(tmp_path / "target") == before
    done: Copied = StepCopier(source, target, repairs=True).copy(name_of(10, attempt))
    assert done.outcome is Outcome.REPAIRED
    assert done.sent_bytes < done.num_bytes or file == "data/"
    assert of_step(tmp_path / "target") == of_step(tmp_path / "source")
    assert verify(target).ok
