"""When a keeper's deletions look for more than the commits name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.format.names import AttemptName
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.options import Keep
from flashckpt.persist.deletions import Deletions
from flashckpt.persist.ledger import Ledger
from flashckpt.persist.writer import Writer
from flashckpt.store.local import LocalStore
from flashckpt.threads import Worker
from tests.commit.runs import attempt_at, commit, name_of, publish

NONCE = "11ff0001"


@pytest.fixture
def deletions(store: LocalStore, tmp_path: Path) -> Iterator[Deletions]:
    (tmp_path / "memory").mkdir()
    folder = RuntimeFolder.open(str(tmp_path / "memory"), "0" * 32)
    life = LifeLock.acquire(folder, f"keeper-{NONCE}.lock")
    assert life is not None
    ledger = Ledger(store)
    worker = Worker("deletions", os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    writer = Writer(store, NONCE)
    yield Deletions(store, Regions(folder, life), ledger, worker, writer, lambda name, number: None)
    ledger.close()
    worker.close()
    life.release(folder)
    folder.close()


def saved(deletions: Deletions, store: LocalStore, step: int, attempt: AttemptName) -> None:
    """Commit a step, and delete what is kept no longer."""
    outcome = commit(store, step, attempt)
    assert outcome
    deletions.committed(name_of(step, attempt), Keep(last=2), outcome.catalogue)
    while deletions.is_pending:
        deletions.next(0.0)
        deletions.worker.wait()
        deletions.worker.collect()


def data_of(store: LocalStore, attempt: AttemptName) -> list[int]:
    """The boundaries that have data."""
    return sorted(int(entry.name) for entry in store.list(f"data/{attempt}"))


def test_the_data_of_a_void_snapshot_goes_with_the_next_deletion(
    store: LocalStore, deletions: Deletions
) -> None:
    attempt = attempt_at(store)
    saved(deletions, store, 1, attempt)
    publish(store, 2, attempt)
    for step in (3, 4):
        saved(deletions, store, step, attempt)
    assert data_of(store, attempt) == [2, 3, 4], "data/ is not listed after each commit"
    deletions.left_orphans()
    saved(deletions, store, 5, attempt)
    assert data_of(store, attempt) == [4, 5]


def test_the_first_deletion_of_a_keeper_looks_for_what_others_left(
    store: LocalStore, deletions: Deletions
) -> None:
    attempt = attempt_at(store)
    publish(store, 1, attempt)
    for step in (2, 3):
        assert commit(store, step, attempt)
    saved(deletions, store, 4, attempt)
    assert data_of(store, attempt) == [3, 4]
