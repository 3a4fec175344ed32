"""Shards that keepers left half written which are certainly dead: they go, and nothing else does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashckpt.commit import commit_step
from flashckpt.commit import steps as committed
from flashckpt.commit.catalogue import Catalogue, snapshots_with_data
from flashckpt.format.names import AttemptName, part_name, shard_name
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.options import Keep
from flashckpt.persist.deletions import Deletions, half_written, remove
from flashckpt.persist.ledger import Ledger
from flashckpt.persist.writer import Writer
from flashckpt.store.local import LocalStore, System
from flashckpt.threads import Worker
from tests.commit.runs import attempt_at, is_whole, name_of, new_run, part_of, publish
from tests.descriptors import closed_after

DEAD, LIVING = "dead0001", "11ff0001"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


def commit(store: LocalStore, step: int, attempt: AttemptName) -> bool:
    return bool(commit_step.commit(store, name_of(step, attempt).id, 1))


def folder_of(step: int, attempt: AttemptName) -> str:
    return name_of(step, attempt).id.data_folder


def swept(store: LocalStore, *writers: str) -> list[str]:
    found = half_written(store, writers)
    for each in found:
        remove(store, each)
    return sorted(each.path for each in found)


def test_only_what_dead_writers_left_and_no_part_names_goes(store: LocalStore) -> None:
    attempt = attempt_at(store)
    publish(store, 100, attempt, nonce=f"{DEAD}0001")
    assert commit(store, 100, attempt)
    part_of(store, 100, attempt, nonce=f"{DEAD}0002")
    part_of(store, 200, attempt, nonce=f"{DEAD}0003")
    part_of(store, 200, attempt, nonce=f"{LIVING}0001")
    publish(store, 300, attempt, nonce=f"{DEAD}0004")
    gone = swept(store, DEAD)
    assert gone == [
        f"{folder_of(100, attempt)}/{shard_name(0, DEAD + '0002')}",
        f"{folder_of(200, attempt)}/{shard_name(0, DEAD + '0003')}",
    ]
    assert is_whole(store, 100, attempt)
    there = [entry.name for entry in store.list(folder_of(200, attempt))]
    assert there == [shard_name(0, LIVING + "0001")]
    assert commit(store, 300, attempt), "a part that waits for its record keeps its shard"
    assert swept(store, DEAD) == []
    assert swept(store) == []


def test_a_step_whose_part_cannot_be_read_is_left_alone(store: LocalStore) -> None:
    attempt = attempt_at(store)
    publish(store, 100, attempt, nonce=f"{DEAD}0001")
    path = Path(store.local_path(f"{folder_of(100, attempt)}/{part_name(0)}"))
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    assert swept(store, DEAD) == []
    path.write_bytes(bytes(data[:20]) + bytes([data[20] ^ 1]) + bytes(data[21:]))
    assert commit(store, 100, attempt)
    assert committed.is_whole(store, name_of(100, attempt))


class Immovable(System):
    """The first step's files cannot be removed."""

    def remove(self, name: str, folder: int) -> None:
        if os.readlink(f"/proc/self/fd/{folder}").endswith(f"/{100:010d}"):
            raise PermissionError(1, "Operation not permitted", name)
        super().remove(name, folder)


@contextmanager
def deletions_of(store: LocalStore, tmp_path: Path, *dead: str) -> Iterator[Deletions]:
    """Those of a living keeper; `dead`: nonces of keepers whose locks are free."""
    (tmp_path / "memory").mkdir()
    folder = closed_after(RuntimeFolder.open(str(tmp_path / "memory"), "0" * 32))
    life = LifeLock.acquire(folder, f"keeper-{LIVING}.lock")
    assert life is not None
    for nonce in dead:
        os.close(folder.open_file(f"keeper-{nonce}.lock", os.O_RDWR | os.O_CREAT))
    regions, ledger = Regions(folder, life), Ledger(store)
    worker = Worker("deletions", os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    yield Deletions(store, regions, ledger, worker, Writer(store, LIVING), lambda name, number: None)
    ledger.close()
    worker.close()
    life.release(folder)
    folder.close()


def run(deletions: Deletions) -> None:
    for now in range(1, 100):
        deletions.next(2.0 * now)
        while deletions.worker.busy:
            deletions.worker.wait()
            deletions.worker.collect()
        if not deletions.is_pending:
            break
    assert not deletions.is_pending, "it is not tried without end"


def test_a_shard_that_cannot_be_removed_keeps_no_other(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = attempt_at(store)
    publish(store, 50, attempt)
    assert commit(store, 50, attempt)  # else the records would count as lost
    for step in (100, 200, 300):
        part_of(store, step, attempt, nonce=f"{DEAD}0001")
    stuck = LocalStore(store.url, Immovable())
    with deletions_of(stuck, tmp_path, DEAD) as deletions:
        run(deletions)
    left = {path.parts[-2] for path in Path(store.url).rglob("shard-*")}
    assert left == {f"{50:010d}", f"{100:010d}"}
    said = [record.levelname for record in caplog.records if "could not be removed" in record.message]
    assert said == ["WARNING"], "once"


def test_the_first_deletion_of_each_attempt_looks_for_uncommitted_data(
    store: LocalStore, tmp_path: Path
) -> None:
    """Of what a keeper of another node left this one knows nothing."""
    first = attempt_at(store)
    publish(store, 10, first)
    assert commit(store, 10, first)
    with deletions_of(store, tmp_path) as deletions:
        deletions.committed(name_of(10, first), Keep(last=2), Catalogue.of(store))
        run(deletions)
        publish(store, 50, first, world=2)
        second = attempt_at(store, name_of(10, first))
        for step in (200, 300):
            publish(store, step, second)
            assert commit(store, step, second)
            deletions.committed(name_of(step, second), Keep(last=2), Catalogue.of(store))
        run(deletions)
    assert list(snapshots_with_data(store)) == [name_of(step, second).id for step in (200, 300)]


def test_uncommitted_data_goes_once_it_is_older_than_what_is_kept(store: LocalStore, tmp_path: Path) -> None:
    attempt = attempt_at(store)
    with deletions_of(store, tmp_path) as deletions:
        for step in (10, 20, 30, 40):
            publish(store, step, attempt)
            publish(store, step + 5, attempt)
            assert commit(store, step, attempt)
            deletions.committed(name_of(step, attempt), Keep(last=2), Catalogue.of(store))
            run(deletions)
    there = [each.boundary for each in snapshots_with_data(store)]
    assert there == [30, 35, 40, 45]


def test_a_late_commit_of_the_attempt_before_takes_no_deletion_away(
    store: LocalStore, tmp_path: Path
) -> None:
    """The keeper of both attempts commits what the second one has resumed from in memory."""
    first = attempt_at(store)
    publish(store, 50, first)
    publish(store, 100, first)
    second = attempt_at(store, name_of(100, first))
    with deletions_of(store, tmp_path) as deletions:
        assert commit(store, 100, first)
        deletions.committed(name_of(100, first), Keep(last=2), Catalogue.of(store))
        run(deletions)
        for step in (200, 300):
            publish(store, step, second)
            assert commit(store, step, second)
            deletions.committed(name_of(step, second), Keep(last=2), Catalogue.of(store))
        run(deletions)
    assert list(snapshots_with_data(store)) == [name_of(step, second).id for step in (200, 300)]
