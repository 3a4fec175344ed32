"""Runs as accidents and other programs leave them: what cannot be read refuses itself, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashckpt.catalogue.changes import Keep, newest, parent_of, quarantine
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.mirror import copy_checkpoint
from flashckpt.catalogue.requests import Put, Stores
from flashckpt.errors import DamagedError, DivergedError, RunError, UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, Catalogue, Folder, version_path
from flashckpt.format.checked_json import dump
from flashckpt.format.manifest import File as ManifestFile
from flashckpt.format.manifest import FrozenFile, Manifest, PartHead, RankFiles, part_name
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.catalogue.processes import start_in
from tests.catalogue.snapshots import HOME, RUN, Job, boundaries, faults, files_of, nonce, write_part
from tests.commit.runs import of_format
from tests.contracts.catalogue_contract import copied

MIRROR = Home("mirror")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


def begun(store: Store) -> Catalogue:
    return Stores({"home": store}).run(start_in(HOME, RUN, nonce()))


def saved(store: Store, *boundaries: int, last: int = 9) -> Job:
    job = Job(store)
    for boundary in boundaries:
        job.save(boundary, Keep(last=last))
    return job


def folder_at(job: Job, boundary: int) -> Folder:
    return Folder(job.name, SnapshotId(job.name, boundary))


# ---- snapshots of attempts that died before a checkpoint


def test_a_parent_from_memory_of_an_attempt_without_checkpoints(store: LocalStore) -> None:
    """The attempt that captured it is in no lineage of a checkpoint before."""
    first = Job(store)
    id = SnapshotId(first.name, 60)
    second = Job(store, offers=[id])
    second.write(id)
    assert second.commit(id, Keep()) is not None
    second.save(70)
    third = Job(store)
    assert parent_of(third.catalogue) == SnapshotId(second.name, 70)
    assert [each.id for each in third.catalogue.checkpoints] == [id, SnapshotId(second.name, 70)]


def test_the_same_is_adopted(store: LocalStore) -> None:
    first = Job(store)
    id = SnapshotId(first.name, 60)
    Job(store, offers=[id]).write(id)
    for _ in range(2):
        assert parent_of(Job(store).catalogue) == id


def test_a_mirror_that_begins_with_an_older_attempt(store: LocalStore, tmp_path: Path) -> None:
    job = saved(store, 5)
    later = Job(store)
    stores = Stores({"home": store, "mirror": LocalStore(str(tmp_path / "mirror"))}, copy=copied)
    last = newest(later.catalogue)
    assert last is not None
    there = stores.run(copy_checkpoint(HOME, later.catalogue, last, MIRROR, nonce(), Keep()))
    assert there is not None
    assert there.has(SnapshotId(job.name, 5))
    assert stores.run(MIRROR.newest()) == there


# ---- what is written can be read


def test_numbers_at_their_end(store: LocalStore, tmp_path: Path) -> None:
    saved(store, 1)
    (tmp_path / "run/data/999999999-deadbeef").mkdir()
    job = Job(store)
    assert job.name.number == 2, "an empty folder is no writer"
    folder = Folder(AttemptName(999999999, "deadbeef"), SnapshotId(job.name, 1))
    write_part(store, folder, (0,), 1)
    with pytest.raises(UnusableRunError, match="highest one"):
        Job(store)


def test_versions_at_their_end(store: LocalStore) -> None:
    job = saved(store, 1, 2)
    stray = version_path(999_999_999, RUN)
    store.create(stray, b"{}")
    with pytest.raises(DamagedError, match="999999999"):
        Job(store)
    with pytest.raises(UnusableRunError, match="highest number"):
        job.run(HOME.rebuild(nonce()))
    store.remove(stray)
    assert boundaries(Job(store).catalogue) == [1, 2]


def test_a_long_reason_of_a_damage(store: LocalStore) -> None:
    job = saved(store, 1)
    for why in ("x" * 9000, "\x1b" * 2000):
        made = quarantine(job.catalogue, checkpoint=job.catalogue.checkpoints[0], why=why)
        assert Catalogue.from_bytes(made.to_bytes(), "file") == made


def test_a_record_that_could_not_be_read_back_is_not_written(store: LocalStore) -> None:
    with pytest.raises((ValueError, DamagedError)):
        Stores({"home": store}).run(HOME.make("not a run's id"))
    assert store.list(CATALOGUE) == []


def test_one_name_is_not_used_for_two_records(store: LocalStore) -> None:
    job = saved(store, 1)

    def put(record: Catalogue) -> Any:
        yield Put("home", "catalogue/other", record)

    job.run(put(job.catalogue))
    job.run(put(job.catalogue))
    with pytest.raises(FileExistsError):
        job.run(put(Job(store).catalogue))


# ---- no fresh run beside checkpoints


def test_no_fresh_run_beside_checkpoints(store: LocalStore) -> None:
    job = saved(store, 1, 2)
    for path in files_of(store, f"data/{job.name}"):
        if "/rank-" in path:
            store.remove(path)
    with pytest.raises(UnusableRunError):
        begun(store)
    assert job.run(HOME.newest()) == job.catalogue


# ---- files that cannot be read, or are none


class Failing(LocalStore):
    """A store in which reads and listings of some paths fail. `fails` gives the error number, 0 for none."""

    def __init__(self, root: str, fails: Callable[[str], int]) -> None:
        super().__init__(root)
        self._fails = fails

    def read(self, path: str, max_bytes: int) -> bytes:
        self._check(path)
        return super().read(path, max_bytes)

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        self._check(path)
        return super().read_bytes(path, offset, num_bytes)

    def list(self, folder: str) -> Any:
        self._check(folder)
        return super().list(folder)

    def _check(self, path: str) -> None:
        if number := self._fails(path):
            raise OSError(number, "it fails here", path)


def test_a_sector_that_cannot_be_read(store: LocalStore, tmp_path: Path) -> None:
    """Of a manifest, of a part, and of a version: it is damage of that file alone."""
    job = saved(store, 1, 2)
    job.write(SnapshotId(job.name, 3))
    bad = job.catalogue.checkpoints[1].manifest_path
    parts = folder_at(job, 3).path
    root = str(tmp_path / "run")
    sick = Failing(root, lambda p: errno.EIO if p == bad or p.startswith(f"{parts}/") else 0)
    assert parent_of(begun(sick)) == SnapshotId(job.name, 1)
    last = Stores({"home": store}).run(HOME.newest())
    sick = Failing(root, lambda path: errno.EIO if path == last.path else 0)
    with pytest.raises(DamagedError, match="flashckpt recover"):
        begun(sick)
    assert Stores({"home": sick}).run(HOME.rebuild(nonce())).version == last.version + 1


@pytest.mark.parametrize("what", ["a shard is a link", "a shard is a folder", "its folder is a link"])
def test_a_checkpoint_of_links(store: LocalStore, tmp_path: Path, what: str) -> None:
    job = saved(store, 1, 2)
    folder = tmp_path / "run" / folder_at(job, 2).path
    shard = next(folder.glob("rank-*"))
    if what == "its folder is a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        shard.unlink()
        shard.mkdir() if "folder" in what else shard.symlink_to("node")
    assert parent_of(begun(store)) == SnapshotId(job.name, 1)


def test_a_part_of_another_format(store: LocalStore) -> None:
    job = saved(store, 1)
    job.write(SnapshotId(job.name, 2))
    path = next(path for path in files_of(store, folder_at(job, 2).path) if "/node-" in path)
    store.replace(path, of_format(2, dump({"kind": "part"})))
    assert parent_of(begun(store)) == SnapshotId(job.name, 1)


def test_a_run_that_is_deleted_while_it_is_read(store: LocalStore, tmp_path: Path) -> None:
    """A version is listed, and gone when it is read, each time."""
    job = saved(store, 1)
    ghost = LocalStore(str(tmp_path / "run"))

    class Vanishing(LocalStore):
        def read(self, path: str, max_bytes: int) -> bytes:
            raise FileNotFoundError(errno.ENOENT, "gone", path)

    with pytest.raises(RunError, match="was deleted"):
        Stores({"home": Vanishing(ghost._root)}).run(HOME.newest(job.catalogue, (9, RUN)))
    with pytest.raises(RunError, match="was deleted"):
        Stores({"home": Vanishing(ghost._root)}).run(HOME.newest())


# ---- strays


def test_a_stray_version_of_another_run(store: LocalStore) -> None:
    """A living job goes on; a start says what to remove."""
    job = saved(store, 1)
    other = "0" * 16
    store.create(version_path(7, other), b"{}")
    job.save(2)
    with pytest.raises(UnusableRunError, match=other):
        Job(store)
    store.remove(version_path(7, other))
    assert boundaries(Job(store).catalogue) == [1, 2]


def test_a_checkpoint_of_another_run_is_not_taken(store: LocalStore, tmp_path: Path) -> None:
    job = saved(store, 1)
    other = Stores({"home": LocalStore(str(tmp_path / "other"))})
    begun_there = other.run(start_in(HOME, "0" * 16, nonce()))
    folder = Folder(begun_there.writer, SnapshotId(begun_there.writer, 9))
    write_part(LocalStore(str(tmp_path / "other")), folder, (0,), 1)
    manifest = other.run(HOME.gather(folder))
    assert isinstance(manifest, Manifest)
    other.run(HOME.publish(begun_there, manifest))
    strange = folder.path.replace(str(begun_there.writer), "000009-deadbeef", 1)
    shutil.copytree(tmp_path / "other" / folder.path, tmp_path / "run" / strange)
    shutil.rmtree(tmp_path / "run" / CATALOGUE)
    with pytest.raises(UnusableRunError):
        begun(store)
    made = job.run(HOME.rebuild(nonce()))
    assert boundaries(made) == [1]


def test_empty_folders_are_no_foreign_writers(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "run/data/000007-0badcafe").mkdir(parents=True)
    job = saved(store, 1)
    assert job.catalogue.foreign == frozenset()
    job = saved(store, 2)
    job.run(HOME.collect(job.catalogue))
    (tmp_path / "run/data/000001-0badcafe").mkdir()
    job.run(HOME.collect(job.catalogue))
    assert not (tmp_path / "run/data/000001-0badcafe").exists()


# ---- deletion


def test_a_file_that_cannot_be_deleted_stops_no_other_deletion(store: LocalStore) -> None:
    job = saved(store, 1, 2, 3)
    stuck = folder_at(job, 1).path

    class Stuck(LocalStore):
        def remove(self, path: str) -> None:
            if path.startswith(f"{stuck}/"):
                raise PermissionError(errno.EACCES, "not yours", path)
            super().remove(path)

    job.write(SnapshotId(job.name, 4))
    assert job.commit(SnapshotId(job.name, 4), Keep(last=1)) is not None
    with pytest.raises(PermissionError):
        Stores({"home": Stuck(store._root)}).run(HOME.collect(job.catalogue))
    assert files_of(store, stuck)
    assert not files_of(store, folder_at(job, 2).path)
    job.run(HOME.collect(job.catalogue))
    assert faults(store) == []


# ---- frozen files and replicas


def test_a_frozen_file_that_is_lost(store: LocalStore) -> None:
    """Later snapshots that name it are hopeless, so that the keepers write it again."""
    job = Job(store)
    frozen = FrozenFile(folder_at(job, 1), "frozen-00000-5f2c.safetensors", 7)
    job.save(1, frozen=frozen)
    store.remove(f"{frozen.base.path}/{frozen.name}")
    job.write(SnapshotId(job.name, 2), frozen=frozen)
    found = job.run(HOME.gather(folder_at(job, 2)))
    assert not isinstance(found, Manifest)
    assert found is not None
    again = FrozenFile(folder_at(job, 3), "frozen-00000-5f2d.safetensors", 7)
    job.save(3, frozen=again)
    assert boundaries(job.catalogue)[-1] == 3


def test_a_frozen_file_that_the_mirror_has_lost(store: LocalStore, tmp_path: Path) -> None:
    job, mirror = Job(store), LocalStore(str(tmp_path / "mirror"))
    stores = Stores({"home": store, "mirror": mirror}, copy=copied)
    frozen = FrozenFile(folder_at(job, 1), "frozen-00000-5f2c.safetensors", 7)
    for boundary in (1, 2):
        made = job.save(boundary, frozen=frozen)
        there = stores.run(copy_checkpoint(HOME, job.catalogue, made, MIRROR, nonce(), Keep()))
        assert there is not None
        last = newest(there)
        assert last is not None
        assert stores.run(MIRROR.is_whole(last))
        for path in files_of(mirror, "data"):
            if "/frozen-" in path and boundary == 1:
                mirror.remove(path)


def test_replicas_that_differ_are_not_committed(store: LocalStore) -> None:
    job = saved(store, 1)
    folder = folder_at(job, 2)
    for rank, checksum in enumerate(("ab" * 16, "cd" * 16)):
        shard = ManifestFile(f"rank-{rank:05d}-5f2c.safetensors", 4)
        store.create(f"{folder.path}/{shard.name}", b"data")
        files = RankFiles(rank, shard, None, (0,))
        tables = (((range(2),), checksum),)
        head = PartHead(id=folder.id, step=2, world=2, node=rank, ranks=(files,), tables=tables)
        store.create(f"{folder.path}/{part_name(rank, '5f2c')}", head.to_bytes())
    with pytest.raises(DivergedError, match="replicas of its ranks differ"):
        job.run(HOME.gather(folder))
    assert parent_of(begun(store)) == SnapshotId(job.name, 1)


def test_a_manifest_is_named_by_its_bytes(store: LocalStore) -> None:
    """Two processes that publish different manifests of a snapshot write two files."""
    job = saved(store, 1)
    folder = folder_at(job, 2)
    made = []
    for _ in range(2):
        write_part(store, folder, (0,), 1)
        manifest = job.run(HOME.gather(folder))
        assert isinstance(manifest, Manifest)
        made.append(job.run(HOME.publish(job.catalogue, manifest)))
        for path in files_of(store, folder.path):
            if "/node-" in path:
                os.rename(f"{store._root}/{path}", f"{store._root}/{folder.path}/x{len(made)}")
    assert made[0].manifest != made[1].manifest
