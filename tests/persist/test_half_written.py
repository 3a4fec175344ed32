"""Shards that keepers left half written which are certainly dead: they go, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.commit.steps import commit as commit_step
from flashckpt.commit.steps import is_committed
from flashckpt.format.names import part_name, shard_name, step_attempt_folder
from flashckpt.persist.unused_files import half_written, remove
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, is_whole, new_run, part_of, publish

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
