"""A catalogue in a folder: its contract, power lost at every moment, a full disk, names that are no files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from flashckpt.catalogue.changes import Keep
from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import Folder, version_path
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import SnapshotId
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.catalogue.snapshots import HOME, RUN, Job, boundaries, faults, files_of
from tests.contracts.catalogue_contract import CatalogueContract
from tests.crash.forgetful import Model, Recorder
from tests.memory.mounts import small_tmpfs


class TestCatalogueInAFolder(CatalogueContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(LocalStore, str(tmp_path))

    @pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
    def test_a_version_that_is_no_file(self, tmp_path: Path, kind: str) -> None:
        store = LocalStore(str(tmp_path))
        job = Job(store)
        job.save(1)
        path = tmp_path / version_path(4, RUN)
        make = {
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "link": lambda: path.symlink_to("../data"),
        }
        make[kind]()
        with pytest.raises(DamagedError, match="Version 4"):
            job.save(2)
        assert (tmp_path / version_path(3, RUN)).is_file()


def test_power_lost_at_every_moment(scratch: str) -> None:
    """Whatever the disk had not made durable is lost, or some of it: each commit that was reported is there,
    all that is named is whole, and the next job goes on."""
    recorder, reported = Recorder(scratch), list[tuple[int, int]]()
    job = Job(LocalStore(f"{scratch}/run", recorder))
    for boundary in (1, 2, 3, 4):
        job.save(boundary)
        reported.append((len(recorder.changes), boundary))
    luck = random.Random(7)
    for moment in range(len(recorder.changes) + 1):
        model = Model()
        for change in recorder.changes[:moment]:
            change(model)
        newest = max((boundary for when, boundary in reported if when <= moment), default=0)
        for lucky in (None, luck):
            left = f"{scratch}/left"
            model.lose_power(left, lucky)
            store = LocalStore(f"{left}/run")
            assert faults(store, is_collected=False) == [], f"after change {moment}"
            after = Job(store)
            assert newest in [0, *boundaries(after.catalogue)], f"after change {moment}"
            after.save(9)
            assert faults(store) == [], f"after change {moment}"
            shutil.rmtree(left)


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    assert os.statvfs(path).f_bavail == 0


@pytest.mark.process
def test_a_full_disk_gives_up_its_old_versions() -> None:
    """Not a byte is free: the version of a commit takes the room of older versions and of garbage."""
    with small_tmpfs(1 << 20) as disk:
        job = Job(LocalStore(str(disk / "run")))
        for boundary in range(1, 20):
            job.save(boundary)
        id = SnapshotId(job.name, 20)
        job.write(id)
        manifest = job.run(HOME.gather(Folder(job.name, id)))
        assert isinstance(manifest, Manifest)
        made = job.run(HOME.publish(job.catalogue, manifest))
        fill(disk / "filler")
        before = len(files_of(job.store, "catalogue"))
        job.catalogue = job.run(HOME.commit(job.catalogue, job.name, made, Keep(last=2)))
        assert job.catalogue.has(id)
        assert before > 10
        assert len(files_of(job.store, "catalogue")) <= 3
        assert faults(job.store, is_collected=False) == []


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_starts_that_die_leave_little(tmp_path: Path, count: int) -> None:
    """Each of them dies before its first commit."""
    store = LocalStore(str(tmp_path))
    Job(store).save(1)
    before = _size(tmp_path)
    for _ in range(count):
        job = Job(store)
        job.run(HOME.collect(job.catalogue))
        job.run(HOME.trim(job.catalogue))
    assert job.catalogue.failed_starts == count - 1
    assert boundaries(job.catalogue) == [1]
    grown = _size(tmp_path) - before
    print(f"{grown} bytes more")
    assert grown < 100_000


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))
