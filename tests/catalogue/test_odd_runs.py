"""Runs as accidents and other programs leave them: what cannot be read refuses itself, and nothing else."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt.catalogue.changes import parent_of, quarantine, visible
from flashckpt.catalogue.requests import Stores
from flashckpt.errors import DamagedError, FormatError, RunError, RunHeldError, UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, Catalogue, Folder, version_path
from flashckpt.format.checked_json import dump
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import DATA, AttemptName, SnapshotId
from flashckpt.options import Keep
from flashckpt.store.base import Entry, Store
from flashckpt.store.local import LocalStore
from tests.catalogue.processes import start_in
from tests.catalogue.snapshots import HOME, RUN, Job, boundaries, faults, files_of, nonce, write_part
from tests.commit.runs import of_format
from tests.recovery.test_at_rest import Failing


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


def saved(store: Store, *boundaries: int, last: int = 9) -> Job:
    job = Job(store)
    for boundary in boundaries:
        job.save(boundary, Keep(last=last))
    return job


def folder_at(job: Job, boundary: int) -> Folder:
    return Folder(job.name, SnapshotId(job.name, boundary))


def test_numbers_at_their_end(store: LocalStore, tmp_path: Path) -> None:
    saved(store, 1)
    (tmp_path / "run/data/999999999-deadbeef").mkdir()
    job = Job(store)
    assert job.name.number == 2, "an empty folder is no writer"
    assert job.catalogue.foreign == frozenset()
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


def test_versions_that_are_missing_in_the_middle(store: LocalStore) -> None:
    job = saved(store, 1, 2, 3)
    store.remove_files(version_path(number, RUN) for number in (2, 3, 4))
    assert len(store.list(CATALOGUE)) == 2
    next_one = Job(store)
    assert parent_of(next_one.catalogue) == SnapshotId(job.name, 3)
    next_one.save(4, Keep(last=9))
    assert boundaries(next_one.catalogue) == [1, 2, 3, 4]
    assert faults(store) == []


def test_a_newest_version_that_rots_stops_no_living_job(store: LocalStore) -> None:
    """It has it in memory. A start stops, until the job has made the next one."""
    job = saved(store, 1)
    store.replace(job.catalogue.path, b"{}")
    with pytest.raises(DamagedError, match="flashckpt recover"):
        Job(store)
    job.save(2)
    assert boundaries(Job(store).catalogue) == [1, 2]


def test_an_older_catalogue_that_is_put_back_ends_a_living_job(store: LocalStore) -> None:
    """The next start adopts all that is whole."""
    job = saved(store, 1, 2)
    store.remove(job.catalogue.path)
    with pytest.raises(RunError, match="was deleted, or was replaced"):
        job.save(3)
    assert boundaries(Job(store).catalogue) == [1, 2, 3]
    assert faults(store, is_collected=False) == []


def test_a_catalogue_of_another_format_is_refused_and_not_rebuilt(store: LocalStore) -> None:
    job = saved(store, 1)
    path = job.catalogue.path
    store.replace(path, of_format(2, store.read(path, Catalogue.MAX_BYTES)))
    before = all_files(store)
    for change in (lambda: Job(store), lambda: job.run(HOME.rebuild(nonce()))):
        with pytest.raises(FormatError, match="written in format 2; .* Nothing was changed"):
            change()
    assert all_files(store) == before


def all_files(store: Store) -> list[str]:
    return [*files_of(store, CATALOGUE), *files_of(store, DATA)]


def test_a_file_that_is_missing_makes_no_other_be_deleted(store: LocalStore, tmp_path: Path) -> None:
    """One file of the run is missing: the newest whole checkpoints stay."""
    job = saved(store, 1, 2, 3)
    job.write(SnapshotId(job.name, 4))
    for number, gone in enumerate(all_files(store)):
        copy = LocalStore(str(shutil.copytree(store.url, tmp_path / str(number))))
        copy.remove(gone)
        before = [each for each in (1, 2, 3, 4) if not gone.startswith(folder_at(job, each).path)]
        after = Job(copy)
        after.save(9, Keep(last=3))
        whole = [each.id.boundary for each in visible(after.catalogue) if after.run(HOME.is_whole(each))]
        assert whole == [*before[-2:], 9], gone


Entries = list[Entry]


class Odd(LocalStore):
    """Its listings are not as they should be."""

    def __init__(self, root: str, change: Callable[[Entries], Entries]) -> None:
        super().__init__(root)
        self._change = change

    def list(self, folder: str) -> Entries:
        return self._change(super().list(folder))


def test_listings_that_have_each_name_twice(store: LocalStore) -> None:
    first = saved(store, 1, 2, 3, last=2)
    first.write(SnapshotId(first.name, 4))
    odd = Job(Odd(store.url, lambda entries: [*entries, *entries]))
    assert parent_of(odd.catalogue) == SnapshotId(first.name, 4)
    odd.save(5)
    assert boundaries(Job(store).catalogue) == [4, 5]
    assert faults(store) == []


def test_listings_that_lack_their_last_name(store: LocalStore) -> None:
    """No start resumes an older checkpoint for it, and nothing that a checkpoint needs is deleted."""
    job = saved(store, 1, 2, 3, last=2)
    odd = Odd(store.url, lambda entries: entries[:-1] if len(entries) > 1 else entries)
    with pytest.raises(RunHeldError, match="Step 3 was committed"):
        Job(odd)
    run = Stores({"home": odd}).run
    for catalogue in (job.catalogue, run(HOME.newest())):
        run(HOME.collect(catalogue))
        run(HOME.trim(catalogue))
    assert boundaries(Job(store).catalogue) == [2, 3]
    assert faults(store, is_collected=False) == []


def test_a_long_reason_of_a_damage(store: LocalStore) -> None:
    job = saved(store, 1)
    for why in ("x" * 9000, "\x1b" * 2000):
        made = quarantine(job.catalogue, checkpoint=job.catalogue.checkpoints[0], why=why)
        assert Catalogue.from_bytes(made.to_bytes(), "file") == made


def test_a_sector_that_cannot_be_read(store: LocalStore, tmp_path: Path) -> None:
    """Of a manifest, of a part, and of a version: it is damage of that file alone."""
    job = saved(store, 1, 2)
    job.write(SnapshotId(job.name, 3))
    root = str(tmp_path / "run")
    bad = job.catalogue.checkpoints[1].manifest_path
    assert parent_of(Job(Failing(root, f"{folder_at(job, 3).path}/")).catalogue) == SnapshotId(job.name, 2)
    assert parent_of(Job(Failing(root, bad)).catalogue) == SnapshotId(job.name, 1)
    last = Stores({"home": store}).run(HOME.newest())
    sick = Failing(root, last.path)
    with pytest.raises(DamagedError, match="flashckpt recover"):
        Job(sick)
    assert Stores({"home": sick}).run(HOME.rebuild(nonce())).version == last.version + 1


def test_a_part_of_another_format(store: LocalStore) -> None:
    job = saved(store, 1)
    job.write(SnapshotId(job.name, 2))
    path = next(path for path in files_of(store, folder_at(job, 2).path) if "/node-" in path)
    store.replace(path, of_format(2, dump({"kind": "part"})))
    assert parent_of(Job(store).catalogue) == SnapshotId(job.name, 1)


def test_a_run_that_is_deleted_while_it_is_read(store: LocalStore, tmp_path: Path) -> None:
    """A version is listed, and gone when it is read, each time."""
    job = saved(store, 1)

    class Vanishing(LocalStore):
        def read(self, path: str, max_bytes: int) -> bytes:
            raise FileNotFoundError(errno.ENOENT, "gone", path)

    for newest in (HOME.newest(job.catalogue, (9, RUN)), HOME.newest()):
        with pytest.raises(RunError, match="was deleted"):
            Stores({"home": Vanishing(str(tmp_path / "run"))}).run(newest)


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
        Job(store)
    made = job.run(HOME.rebuild(nonce()))
    assert boundaries(made) == [1]


def test_an_empty_folder_is_collected(store: LocalStore, tmp_path: Path) -> None:
    job = saved(store, 1)
    (tmp_path / "run/data/000001-00000001").mkdir()
    job.run(HOME.collect(job.catalogue))
    assert not (tmp_path / "run/data/000001-00000001").exists()
