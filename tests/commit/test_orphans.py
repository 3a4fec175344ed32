"""Temporary files whose writer was killed, and ledgers of attempts that are gone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt.commit import collect
from flashckpt.commit.attempts import attempts, mark_ended
from flashckpt.commit.catalogue import Catalogue
from flashckpt.format.names import EVENTS, AttemptName
from flashckpt.options import Keep, Remote
from flashckpt.recovery.recover import recover
from flashckpt.recovery.storage import prune as prune_by_hand
from flashckpt.replication.mirror import Mirror
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, commit, is_whole, name_of, new_run


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


LEFT = [
    ".run.json.0123456789abcdef.tmp",
    ".probe-0123456789abcdef",
    "attempts/.000002.json.0123456789abcdef.tmp",
    "attempts/{attempt}/.alive.0123456789abcdef.tmp",
    "commits/.{step:012d}-{attempt}-{step:010d}.json.0123456789abcdef.tmp",
    "data/{attempt}/{step:010d}/.part-00001.json.0123456789abcdef.tmp",
]


def left_behind(store: LocalStore, attempt: AttemptName, step: int) -> list[Path]:
    """Temporary files of two days ago, and a young one beside each."""
    paths = [Path(store.local_path(each.format(attempt=attempt, step=step))) for each in LEFT]
    for path in paths:
        path.write_bytes(b"half")
        path.with_name(path.name.replace("0123", "4567")).write_bytes(b"half")
        os.utime(path, (0, time.time() - 2 * 86400))
    return paths


def by_claim(store: LocalStore) -> None:
    catalogue = Catalogue.of(store)
    assert catalogue.newest_claimed is not None
    collect.tidy(store, catalogue.newest_claimed, catalogue)


def by_hand(store: LocalStore) -> None:
    prune_by_hand(store, Keep(last=2))


def by_recovery(store: LocalStore) -> None:
    assert {each.detail for each in recover(store).findings} == {"its write was interrupted"}


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
    stays = old[-1:] if by in (by_claim, by_copier) else []  # beside parts: it goes with the snapshot
    assert [path for path in old if path.exists()] == stays
    young = [path.with_name(path.name.replace("0123", "4567")) for path in old]
    if by is not by_recovery:  # which knows that nobody writes to an attempt that is over
        assert all(path.exists() for path in young), "its writer may be at it"
    assert is_whole(store, 100, attempt)


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
        names.append(attempt_at(store, name_of(100, kept)))
        collect.tidy(store, names[-1], Catalogue.of(store))
        assert names[-1].number == number
        store.append(f"{EVENTS}/{names[-1]}{suffix}.jsonl", b"{}\n", 1000)
        store.append(f"{EVENTS}/keeper{f'.{number:08x}-000000' if suffix else ''}.jsonl", b"{}\n", 1000)
        most = max(most, len([each for each in store.list(EVENTS) if not each.name.startswith("keeper")]))
    left = {each.name.partition(".")[0] for each in store.list(EVENTS)}
    present = {str(each.name) for each in attempts(store)}
    assert str(kept) in present <= left, "what commands read"
    assert {str(each) for each in names[-64:]} <= left
    assert most < 64 + 16 + 8
