"""Tombstones that nobody needs to find any more, and constants that nothing names."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit.attempts import attempts, mark_ended
from flashckpt.commit.lineage import steps
from flashckpt.commit.retention import prune, sweep_dead
from flashckpt.commit.steps import Committed, read_manifest
from flashckpt.commit.steps import commit as commit_step
from flashckpt.format.names import (
    EVENTS,
    AttemptName,
    attempt_folder,
    constants_name,
    manifest_path,
    part_name,
    step_attempt_folder,
)
from flashckpt.format.records import Tombstone
from flashckpt.options import Keep, Remote
from flashckpt.recovery.pruning import prune as prune_by_hand
from flashckpt.recovery.recover import recover
from flashckpt.store import local
from flashckpt.store.base import Entry
from flashckpt.store.local import LocalStore
from flashckpt.tiers.mirror import Mirror
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

    def list(self, *what: Any) -> list[Entry]:
        self.looks += 1
        return super().list(*what)

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


LEFT = [
    ".run.json.0123456789abcdef.tmp",
    ".probe-0123456789abcdef",
    "attempts/.000002.json.0123456789abcdef.tmp",
    "attempts/{attempt}/.alive.0123456789abcdef.tmp",
    "steps/{step:012d}/{attempt}/.part-00001.json.0123456789abcdef.tmp",
]


def left_behind(store: LocalStore, attempt: AttemptName, step: int) -> list[Path]:
    """What writers of small files left that were killed, two days ago; and a young one beside each."""
    paths = [Path(store.local_path(each.format(attempt=attempt, step=step))) for each in LEFT]
    for path in paths:
        path.write_bytes(b"half")
        path.with_name(path.name.replace("0123", "4567")).write_bytes(b"half")
        os.utime(path, (0, time.time() - 2 * 86400))
    return paths


def by_claim(store: LocalStore) -> None:
    sweep_dead(store)


def by_hand(store: LocalStore) -> None:
    prune_by_hand(store, Keep(last=2))


def by_recovery(store: LocalStore) -> None:
    assert {each.detail for each in recover(store).findings} == {"its write was cut off"}


def by_copier(store: LocalStore) -> None:
    source = LocalStore(f"{store.url}-source")
    shutil.copytree(store.url, source.url)
    Mirror(source, Remote(url=store.url, keep=Keep(last=2))).bring(None, lambda last, step: True)


@pytest.mark.parametrize("by", [by_claim, by_hand, by_recovery, by_copier])
def test_what_a_killed_writer_of_a_small_file_left_goes_after_a_day(
    store: LocalStore, by: Callable[[LocalStore], None]
) -> None:
    attempt = attempt_at(store)
    commit(store, 100, attempt)
    mark_ended(store, attempt, "closed" if by is by_recovery else "dead")
    old = left_behind(store, attempt, 100)
    by(store)
    assert [path for path in old if path.exists()] == []
    young = [path.with_name(path.name.replace("0123", "4567")) for path in old]
    if by is not by_recovery:  # which knows that nobody writes to an attempt that is over
        assert all(path.exists() for path in young), "its writer may be at it"
    assert is_whole(store, 100, attempt)


def test_the_second_name_of_an_old_manifest_is_young(store: LocalStore) -> None:
    """Whoever buries the step has just made it, and may have to bring the manifest back by it."""
    attempt = attempt_at(store)
    commit(store, 100, attempt)
    manifest = manifest_path(100, attempt)
    second = f"{step_attempt_folder(100, attempt)}/.manifest.json.0123456789abcdef.tmp"
    assert store.copy(manifest, second)
    os.utime(store.local_path(manifest), (0, time.time() - 2 * 86400))
    sweep_dead(store)
    assert store.exists(second)


@pytest.mark.parametrize("by", [by_claim, by_hand, by_recovery, by_copier])
def test_a_store_whose_clock_is_days_behind_keeps_what_is_young_by_its_own(
    store: LocalStore, by: Callable[[LocalStore], None]
) -> None:
    attempt = attempt_at(store)
    commit(store, 100, attempt)
    mark_ended(store, attempt, "closed" if by is by_recovery else "dead")
    old = left_behind(store, attempt, 100)[:3]  # which are no attempt's
    for path in Path(store.url).rglob("*"):
        os.utime(path, (0, path.stat().st_mtime - 3 * 86400))
    by(store)
    assert [path for path in old if path.exists()] == []
    assert all(path.with_name(path.name.replace("0123", "4567")).exists() for path in old)


@pytest.mark.parametrize("suffix", ["", ".0a1b2c3d-000000"])
def test_the_ledgers_of_a_run_that_is_started_for_ever_are_bounded(scratch: str, suffix: str) -> None:
    """Those of the attempts that the run has are all there, and of the others the newest."""
    store = new_run(f"{scratch}/run")
    kept = attempt_at(store)
    commit(store, 100, kept)
    names, most = [kept], 0
    store.append(f"{EVENTS}/{kept}{suffix}.jsonl", b"{}\n", 1000)
    for number in range(2, 121):
        sweep_dead(store)
        names.append(attempt_at(store, parent=kept, step=100))
        assert names[-1].number == number
        store.append(f"{EVENTS}/{names[-1]}{suffix}.jsonl", b"{}\n", 1000)
        store.append(f"{EVENTS}/keeper{f'.{number:08x}-000000' if suffix else ''}.jsonl", b"{}\n", 1000)
        most = max(most, len([each for each in store.list(EVENTS) if not each.name.startswith("keeper")]))
    left = {each.name.partition(".")[0] for each in store.list(EVENTS)}
    present = {str(each.name) for each in attempts(store)}
    assert str(kept) in present <= left, "what commands read"
    assert {str(each) for each in names[-64:]} <= left
    assert most < 64 + 16 + 8


class _Counted:
    """An entry of a real listing; what is asked of it beyond its name is noted."""

    def __init__(self, entry: os.DirEntry[str], asked: list[str]) -> None:
        self.name, self._entry, self._asked = entry.name, entry, asked

    def stat(self, **how: Any) -> os.stat_result:
        self._asked.append(self.name)
        return self._entry.stat(**how)


def test_foreign_files_among_the_steps_are_listed_and_no_more(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand of them made a start take minutes: each was asked for its length, a dozen times."""
    first = attempt_at(store)
    commit(store, 100, first)
    attempt_at(store, parent=first, step=100)
    for number in range(50):
        Path(store.url, "steps", f"foreign-{number}").touch()
        Path(store.url, "steps", f"foreign-folder-{number}").mkdir()
    asked: list[str] = []
    scandir = os.scandir

    @contextmanager
    def counting(folder: int) -> Iterator[Iterator[_Counted]]:
        with scandir(folder) as found:
            yield (_Counted(each, asked) for each in found)

    monkeypatch.setattr(local.os, "scandir", counting)
    sweep_dead(store)
    assert steps(store) == [100]
    newest = attempt_at(store, parent=first, step=100)
    commit(store, 200, newest)
    prune(store, newest, Keep(last=2), in_hand=set())
    assert "000000000100" in asked
    assert not [name for name in asked if name.startswith("foreign")]
