"""Shards that keepers left half written which are certainly dead: they go, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashckpt.commit.steps import commit as commit_step
from flashckpt.commit.steps import is_committed
from flashckpt.format.names import part_name, shard_name, step_attempt_folder
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.persist.deletions import Deletions, half_written, remove
from flashckpt.persist.ledger import Ledger
from flashckpt.persist.worker import Worker
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import attempt_at, is_whole, new_run, part_of, publish
from tests.descriptors import closed_after

DEAD, LIVING = "dead0001", "11ff0001"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


def swept(store: LocalStore, *writers: str) -> list[str]:
    found = half_written(store, writers)
    for each in found:
        remove(store, each)
    return sorted(each.path for each in found)


def test_only_what_dead_writers_left_and_no_part_names_goes(store: LocalStore) -> None:
    attempt = attempt_at(store)
    publish(store, 100, attempt, nonce=f"{DEAD}0001")
    assert commit_step(store, 100, attempt, 1)
    part_of(store, 100, attempt, nonce=f"{DEAD}0002")
    part_of(store, 200, attempt, nonce=f"{DEAD}0003")
    part_of(store, 200, attempt, nonce=f"{LIVING}0001")
    publish(store, 300, attempt, nonce=f"{DEAD}0004")
    gone = swept(store, DEAD)
    assert gone == [
        f"{step_attempt_folder(100, attempt)}/{shard_name(0, DEAD + '0002')}",
        f"{step_attempt_folder(200, attempt)}/{shard_name(0, DEAD + '0003')}",
    ]
    assert is_whole(store, 100, attempt)
    there = [entry.name for entry in store.list(step_attempt_folder(200, attempt))]
    assert there == [shard_name(0, LIVING + "0001")]
    assert commit_step(store, 300, attempt, 1), "a part that waits for its manifest keeps its shard"
    assert swept(store, DEAD) == []
    assert swept(store) == []


def test_a_step_whose_part_cannot_be_read_is_left_alone(store: LocalStore) -> None:
    attempt = attempt_at(store)
    publish(store, 100, attempt, nonce=f"{DEAD}0001")
    path = Path(store.local_path(f"{step_attempt_folder(100, attempt)}/{part_name(0)}"))
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    assert swept(store, DEAD) == []
    path.write_bytes(bytes(data[:20]) + bytes([data[20] ^ 1]) + bytes(data[21:]))
    assert commit_step(store, 100, attempt, 1)
    assert is_committed(store, 100, attempt)


class Immovable(System):
    """The first step's files cannot be removed."""

    def remove(self, name: str, folder: int) -> None:
        if f"/{100:012d}/" in os.readlink(f"/proc/self/fd/{folder}"):
            raise PermissionError(1, "Operation not permitted", name)
        super().remove(name, folder)


def test_a_shard_that_cannot_be_removed_keeps_no_other(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = attempt_at(store)
    for step in (100, 200, 300):
        part_of(store, step, attempt, nonce=f"{DEAD}0001")
    (tmp_path / "memory").mkdir()
    folder = closed_after(RuntimeFolder.open(str(tmp_path / "memory"), "0" * 32))
    life = LifeLock.acquire(folder, f"keeper-{LIVING}.lock")
    assert life is not None
    os.close(folder.open_file(f"keeper-{DEAD}.lock", os.O_RDWR | os.O_CREAT))
    regions, ledger = Regions(folder, life), Ledger(store)
    worker = Worker("deletions", os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    stuck = LocalStore(store.url, Immovable())
    deletions = Deletions(stuck, regions, ledger, worker, lambda: set(), lambda name, number: None)
    for now in range(1, 100):
        deletions.next(2.0 * now)
        while worker.busy:
            worker.wait()
            worker.collect()
        if not deletions.is_pending:
            break
    assert not deletions.is_pending, "it is not tried without end"
    left = [path.parts[-3] for path in Path(store.url).rglob("shard-*")]
    assert left == [f"{100:012d}"]
    said = [record.levelname for record in caplog.records if "could not be removed" in record.message]
    assert said == ["WARNING"], "once"
    ledger.close()
    worker.close()
    life.release(folder)
    folder.close()
