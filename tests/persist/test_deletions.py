"""What a keeper's deletions remove, and when they look for more than the commits name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashckpt.commit.commit_step import collect
from flashckpt.commit.view import View
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.options import Keep
from flashckpt.persist import deletions as deletions_module
from flashckpt.persist.deletions import Deletions
from flashckpt.persist.ledger import Ledger
from flashckpt.store.local import LocalStore, System
from flashckpt.threads import Worker
from tests.catalogue.snapshots import files_of
from tests.commit.runs import attempt_at, commit, folder_of, name_of, publish
from tests.persist.node import visible_steps
from tests.run_view import snapshots

TWO, ALL = Keep(last=2), Keep(last=100)


class Counted(Deletions):
    """Deletions with what they count, and a step that is being copied to the mirror."""

    def __init__(self, store: LocalStore) -> None:
        self.counts: list[tuple[str, int]] = []
        self.pinned: CommitName | None = None
        self.events = Ledger(store)
        worker = Worker("deletions", os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        super().__init__(
            store, self.events, worker, lambda *row: self.counts.append(row), lambda: self.pinned
        )


@contextmanager
def deletions_of(store: LocalStore) -> Iterator[Counted]:
    found = Counted(store)
    yield found
    found.events.close()
    found.worker.close()


@pytest.fixture
def deletions(store: LocalStore) -> Iterator[Counted]:
    with deletions_of(store) as found:
        yield found


def run(deletions: Deletions) -> None:
    for _ in range(100):
        deletions.next()
        while deletions.worker.busy:
            deletions.worker.wait()
            deletions.worker.collect()
        if not deletions.is_pending:
            break
    assert not deletions.is_pending, "it is not tried without end"


def saved(
    deletions: Deletions, store: LocalStore, step: int, attempt: AttemptName, keep: Keep = ALL, **how: object
) -> None:
    """Commit a step, and delete what is kept no longer."""
    outcome = commit(store, step, attempt, keep=keep, **how)
    assert outcome
    deletions.committed(name_of(step, attempt), keep, outcome.view, outcome.dropped)
    run(deletions)


def boundaries(store: LocalStore) -> list[int]:
    """The boundaries that have files."""
    return [each.boundary for each in snapshots(store)]


@pytest.mark.parametrize("is_told", [True, False])
def test_the_files_of_a_void_snapshot_go_when_they_are_told_of_and_else_from_time_to_time(
    store: LocalStore, deletions: Counted, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    if not is_told:
        monkeypatch.setattr(deletions_module, "_COMMITS_BETWEEN", 4)
    attempt = attempt_at(store)
    saved(deletions, store, 1, attempt)
    publish(store, 2, attempt)
    for step in (3, 4):
        saved(deletions, store, step, attempt)
    assert boundaries(store) == [1, 2, 3, 4], "data/ is not listed after each commit"
    if is_told:
        deletions.left_garbage()
    saved(deletions, store, 5, attempt)
    assert boundaries(store) == [1, 3, 4, 5]


def test_the_first_deletion_of_a_keeper_looks_for_what_others_left(
    store: LocalStore, deletions: Counted
) -> None:
    attempt = attempt_at(store)
    publish(store, 1, attempt)
    for step in (2, 3):
        assert commit(store, step, attempt)
    saved(deletions, store, 4, attempt)
    assert boundaries(store) == [2, 3, 4]


def test_what_a_commit_has_dropped_goes_with_all_that_is_older_and_uncommitted(
    store: LocalStore, deletions: Counted
) -> None:
    attempt = attempt_at(store)
    for step in (10, 20, 30, 40):
        publish(store, step - 5, attempt)
        saved(deletions, store, step, attempt, TWO)
        publish(store, step + 5, attempt)
    assert boundaries(store) == [30, 40, 45], "45 may still be committed"
    assert deletions.counts == [("pruned", 1), ("pruned", 1)]


def test_a_commit_frees_all_that_it_has_made_garbage_and_what_is_late_goes_from_time_to_time(
    store: LocalStore, deletions: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each attempt: steps, unfinished snapshots, and the frozen files that the last step gives up."""
    monkeypatch.setattr(deletions_module, "_COMMITS_BETWEEN", 10)
    first = attempt_at(store)
    for step in (1, 2):
        saved(deletions, store, step, first, TWO, constants=True)
    second = attempt_at(store, name_of(2, first))
    saved(deletions, store, 3, second, TWO, constants=True)
    late = f"data/{first}/{first}.{9:020d}/rank-00000-5f2c0a1b.safetensors"
    store.create(late, b"a keeper of the attempt before has just written it")
    for step in range(4, 9):
        publish(store, 10 * step - 5, second)
        saved(deletions, store, 10 * step, second, TWO, constants=step < 6)
        left = files_of(store, "data")
        collect(store, View.of(store).catalogue)
        assert set(left) - set(files_of(store, "data")) <= {late}, "nothing else was left"
        store.create(late, b"and again")
    assert visible_steps(store) == [70, 80]
    for step, is_left in ((90, True), (100, False)):
        saved(deletions, store, step, second, TWO)
        assert store.exists(late) is is_left


def test_retention_is_applied_where_the_commit_was_another_keepers(
    store: LocalStore, deletions: Counted
) -> None:
    attempt = attempt_at(store)
    for step in (1, 2, 3):
        assert commit(store, step, attempt)
    deletions.committed(name_of(3, attempt), TWO, View.of(store), None)
    run(deletions)
    assert visible_steps(store) == boundaries(store) == [2, 3]
    assert deletions.counts == [("pruned", 1)]


def test_a_step_that_is_copied_to_the_mirror_goes_once_it_is_released(
    store: LocalStore, deletions: Counted
) -> None:
    attempt = attempt_at(store)
    for step in (1, 2, 3):
        assert commit(store, step, attempt)
    deletions.pinned = name_of(1, attempt)
    deletions.committed(name_of(3, attempt), TWO, View.of(store), None)
    run(deletions)
    assert visible_steps(store) == boundaries(store) == [1, 2, 3]
    deletions.pinned = None
    assert deletions.is_pending
    run(deletions)
    assert visible_steps(store) == boundaries(store) == [2, 3]


def test_a_superseded_keeper_drops_nothing(store: LocalStore, deletions: Counted) -> None:
    first = attempt_at(store)
    for step in (1, 2, 3):
        assert commit(store, step, first)
    seen = View.of(store)
    attempt_at(store, name_of(3, first))
    deletions.committed(name_of(3, first), TWO, seen, None)
    run(deletions)
    assert visible_steps(store) == boundaries(store) == [1, 2, 3]


class Immovable(System):
    """The files of a folder cannot be removed."""

    def __init__(self, folder: str) -> None:
        self.stuck = folder

    def remove(self, name: str, folder: int) -> None:
        if os.readlink(f"/proc/self/fd/{folder}").endswith(self.stuck):
            raise PermissionError(1, "Operation not permitted", name)
        super().remove(name, folder)


def test_a_file_that_cannot_be_removed_keeps_no_other(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = attempt_at(store)
    for step in (100, 200, 300):
        publish(store, step, attempt)
    stuck = LocalStore(store.url, Immovable(folder_of(store, name_of(100, attempt).id).path))
    with deletions_of(stuck) as deletions:
        for step in (400, 500):
            saved(deletions, stuck, step, attempt)
    assert boundaries(store) == [100, 400, 500]
    said = [record.levelname for record in caplog.records if "could not be deleted" in record.message]
    assert said == ["WARNING"], "once"
    assert deletions.counts == [("prune_failed", 1)] * 2


def test_the_parent_that_was_resumed_from_memory_is_kept_and_dropped_like_others(
    store: LocalStore, deletions: Counted, tmp_path: Path
) -> None:
    """The newest attempt writes it into a folder of its own."""
    first = attempt_at(store)
    publish(store, 50, first)
    publish(store, 100, first, world=2)
    parent = name_of(100, first)
    second = attempt_at(store, parent)
    saved(deletions, store, 100, first, TWO)
    assert snapshots(store) == [name_of(50, first).id, parent.id]
    for step in (200, 300):
        saved(deletions, store, step, second, TWO)
    assert snapshots(store) == [name_of(step, second).id for step in (200, 300)]
    assert not list((tmp_path / "run" / "data").glob(f"{first}/*")), "its folder in the older attempt's"
