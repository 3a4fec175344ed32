"""Tombstones that nobody needs to find any more, and constants that nothing names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashckpt.commit.lineage import steps
from flashckpt.commit.retention import prune
from flashckpt.commit.steps import Committed, read_manifest
from flashckpt.commit.steps import commit as commit_step
from flashckpt.format.names import (
    AttemptName,
    attempt_folder,
    constants_name,
    part_name,
    step_attempt_folder,
)
from flashckpt.format.records import Tombstone
from flashckpt.options import Keep
from flashckpt.store.base import Entry
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, commit, is_whole, new_run, publish

DEAD, LIVING = "dead0001", "11ff0001"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


def test_tombstones_of_steps_that_nobody_can_commit_go(store: LocalStore) -> None:
    attempt = attempt_at(store)
    for step in (100, 200, 300, 400):
        commit(store, step, attempt)
    gone = prune(store, attempt, Keep(last=2), in_hand={100, 400})
    assert [each.step for each in gone] == [100, 200]
    assert not os.path.exists(store.local_path(step_attempt_folder(200, attempt)))
    assert isinstance(read_manifest(store, 100, attempt), Tombstone)
    # Who has 100 in hand and commits late finds it, and stops.
    publish(store, 100, attempt)
    assert commit_step(store, 100, attempt, 1) is Committed.BURIED
    prune(store, attempt, Keep(last=2), in_hand={400})
    assert not os.path.exists(store.local_path(step_attempt_folder(100, attempt)))
    assert steps(store) == [300, 400]
    assert is_whole(store, 300, attempt)


def test_tombstones_of_another_attempt_stay(store: LocalStore) -> None:
    """Its keepers are another node's perhaps: of those nothing is known."""
    first = attempt_at(store)
    for step in (100, 200, 300):
        commit(store, step, first)
    prune(store, first, Keep(last=2))
    second = attempt_at(store, first, 300)
    commit(store, 400, second)
    prune(store, second, Keep(last=3), in_hand=())
    assert isinstance(read_manifest(store, 100, first), Tombstone)
    assert steps(store) == [200, 300, 400]


def test_the_empty_folder_of_a_step_in_hand_stays(store: LocalStore) -> None:
    attempt = attempt_at(store)
    for step in (100, 200, 300):
        commit(store, step, attempt)
    for step in (250, 260, 900):
        store.make_folder(f"steps/{step:012d}")
    prune(store, attempt, Keep(last=2), in_hand={250})
    left = [int(entry.name) for entry in store.list("steps")]
    assert left == [200, 250, 300, 900], "what is in hand, or newer than the newest, may be written to"


class Counting(LocalStore):
    """How often a prune looks at storage."""

    looks = 0

    def list(self, folder: str) -> list[Entry]:
        self.looks += 1
        return super().list(folder)

    def read(self, path: str, max_bytes: int) -> bytes:
        self.looks += 1
        return super().read(path, max_bytes)


def test_what_a_prune_costs_does_not_grow_with_the_commits_before_it(store: LocalStore) -> None:
    attempt, costs = attempt_at(store), []
    for step in range(1, 31):
        commit(store, step, attempt)
        counting = Counting(store.url)
        prune(counting, attempt, Keep(last=3), in_hand={step, step - 1})
        costs.append(counting.looks)
    assert max(costs[10:]) == costs[9]
    assert len(store.list("steps")) == 3


def constants_files(store: LocalStore, attempt: AttemptName) -> list[str]:
    return [each.name for each in store.list(attempt_folder(attempt)) if each.name.startswith("constants-")]


def left_of_constants(store: LocalStore, attempt: AttemptName, number: int) -> str:
    """A constants shard that no part names."""
    name = constants_name(0, number)
    Path(store.local_path(f"{attempt_folder(attempt)}/{name}")).write_bytes(b"half")
    return name


def test_constants_that_no_part_names_go_but_for_the_newest(store: LocalStore) -> None:
    attempt, first = attempt_at(store), constants_name(0, 1)
    for step in (100, 200):
        commit(store, step, attempt, constants=True)
    _, newest = [left_of_constants(store, attempt, number) for number in (2, 10)]
    prune(store, attempt, Keep(last=2))
    assert len(constants_files(store, attempt)) == 3, "another keeper may be about to name them"
    prune(store, attempt, Keep(last=2), in_hand=())
    assert sorted(constants_files(store, attempt)) == [first, newest]
    assert is_whole(store, 100, attempt)
    publish(store, 250, attempt, constants=True)
    for step in (300, 400):
        commit(store, step, attempt)
    prune(store, attempt, Keep(last=3), in_hand={250})
    assert steps(store) == [200, 300, 400]
    assert is_whole(store, 200, attempt)
    prune(store, attempt, Keep(last=2), in_hand=())
    assert constants_files(store, attempt) == [newest]
    assert steps(store) == [300, 400]


def test_no_constants_go_where_a_part_may_name_any(store: LocalStore) -> None:
    attempt = attempt_at(store)
    for step in (100, 200):
        commit(store, step, attempt)
    for number in (1, 2):
        left_of_constants(store, attempt, number)
    publish(store, 300, attempt)
    path = Path(store.local_path(f"{step_attempt_folder(300, attempt)}/{part_name(0)}"))
    path.write_bytes(path.read_bytes()[:-9])
    prune(store, attempt, Keep(last=2), in_hand=())
    assert len(constants_files(store, attempt)) == 2
