"""The order of writes: what is named before what, and what commits when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashckpt import crashpoints
from flashckpt.catalogue.changes import Committed
from flashckpt.commit import commit_step
from flashckpt.commit.commit_step import KEEP_ALL, Outcome, collect, is_overtaken
from flashckpt.commit.steps import is_whole, missing_ranks, read_step
from flashckpt.commit.view import View
from flashckpt.errors import SupersededError
from flashckpt.format.catalogue import Folder
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.options import Keep
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit import runs
from tests.commit.runs import attempt_at, folder_of, name_of, new_run, part_of, publish, put


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


@pytest.fixture
def attempt(store: LocalStore) -> AttemptName:
    return attempt_at(store)


def commit(
    store: Store, step: int, attempt: AttemptName, boundary: int | None = None, keep: Keep = KEEP_ALL
) -> Outcome:
    id = name_of(step, attempt, boundary).id
    return commit_step.commit(View.of(store), commit_step.folder_of(View.of(store), id), keep)


def commits(store: Store) -> list[CommitName]:
    return list(View.of(store).checkpoints)


def test_a_step_is_committed_by_the_catalogue_alone(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)
    assert commits(store) == []
    done = commit(store, 100, attempt)
    assert (done.state, done.dropped) == (Committed.YES, ())
    assert done.view.checkpoints == (name_of(100, attempt),)
    assert done.view == View.of(store)
    assert commits(store) == [name_of(100, attempt)]
    assert runs.is_whole(store, 100, attempt)
    assert commit(store, 100, attempt).state is Committed.YES


def test_parts_must_cover_every_rank_once(store: LocalStore, attempt: AttemptName) -> None:
    """A keeper that knew one of two ranks was replaced by one that knew both."""
    publish(store, 100, attempt, ranks=(0,), world=4)
    publish(store, 100, attempt, ranks=(0, 2), world=4)
    assert commit(store, 100, attempt).state is Committed.WAITING
    assert missing_ranks(store, folder_of(store, name_of(100, attempt).id), 4) == [1, 3]
    publish(store, 100, attempt, ranks=(1,), world=4)
    assert commit(store, 100, attempt).state is Committed.WAITING
    assert commits(store) == []
    publish(store, 100, attempt, ranks=(3,), world=4)
    assert commit(store, 100, attempt)
    record = read_step(store, name_of(100, attempt))
    assert [record.rank(rank).values["rank"] for rank in range(4)] == [0, 1, 2, 3]
    assert len(record.parts) == 3, "each rank is taken from one part"
    assert runs.is_whole(store, 100, attempt)


def test_an_older_snapshot_is_overtaken(store: LocalStore, attempt: AttemptName) -> None:
    for step in (100, 200):
        publish(store, step, attempt)
    assert commit(store, 200, attempt)
    assert is_overtaken(View.of(store), name_of(100, attempt).id)
    assert commit(store, 100, attempt).state is Committed.OVERTAKEN
    assert commits(store) == [name_of(200, attempt)]


def test_a_part_moved_to_another_snapshot_does_not_count(store: LocalStore, attempt: AttemptName) -> None:
    part = part_of(store, 100, attempt)
    file = put(store, part)
    part_of(store, 200, attempt)
    here, there = (folder_of(store, name_of(step, attempt).id) for step in (100, 200))
    assert store.create(f"{there.path}/{file.name}", store.read(f"{here.path}/{file.name}", 1 << 20))
    assert commit(store, 200, attempt).state is Committed.WAITING
    assert missing_ranks(store, there, 1) == [0]


@pytest.mark.parametrize("damage", ["gone", "longer"])
def test_a_shard_that_is_not_there_is_never_named(
    store: LocalStore, attempt: AttemptName, damage: str
) -> None:
    part, name = part_of(store, 100, attempt), name_of(100, attempt)
    path = Path(store.url, f"{folder_of(store, name.id).path}/{part.ranks[0].shard.file}")
    whole = path.read_bytes()

    def harm() -> None:
        path.unlink() if damage == "gone" else path.write_bytes(whole + b"x")

    put(store, part)
    harm()
    assert commit(store, 100, attempt).state is Committed.WAITING
    assert commits(store) == []
    path.write_bytes(whole)
    assert commit(store, 100, attempt)
    assert is_whole(View.of(store), name)
    harm()
    assert not is_whole(View.of(store), name)


def test_nothing_is_committed_once_a_newer_attempt_has_begun(store: LocalStore, attempt: AttemptName) -> None:
    """A view that is older than the newer attempt does not help."""
    assert runs.commit(store, 100, attempt)
    publish(store, 200, attempt, ranks=(0,), world=2)
    rest, view = part_of(store, 200, attempt, ranks=(1,), world=2), View.of(store)
    folder = folder_of(store, rest.id)
    newer = attempt_at(store, name_of(100, attempt))
    commit_step.publish_part(store, folder, rest, "5f2c0000")
    with pytest.raises(SupersededError, match=str(newer)):
        commit_step.commit(view, folder, KEEP_ALL)
    with pytest.raises(SupersededError, match=str(newer)):
        commit_step.folder_of(View.of(store), rest.id)
    assert commits(store) == [name_of(100, attempt)]


def test_the_parent_of_the_newest_attempt_is_committed_in_its_folder(
    store: LocalStore, attempt: AttemptName
) -> None:
    """It was resumed from memory."""
    newer = attempt_at(store, name_of(200, attempt))
    publish(store, 200, attempt)
    assert commit(store, 200, attempt)
    assert commits(store) == [name_of(200, attempt)]
    assert folder_of(store, name_of(200, attempt).id) == Folder(newer, name_of(200, attempt).id)
    assert runs.is_whole(store, 200, attempt)
    for step in (100, 300):
        with pytest.raises(SupersededError, match=str(newer)):
            commit(store, step, attempt)


@pytest.mark.parametrize("point", ["manifest.checked", "version.created"])
def test_a_process_that_may_not_commit_any_more_reports_nothing(
    store: LocalStore, attempt: AttemptName, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`guard` is asked before the version is created, and before the commit is reported."""
    publish(store, 100, attempt)
    asked, passed = list[str](), list[str]()
    monkeypatch.setattr(crashpoints, "point", passed.append)

    def guard() -> None:
        asked.append(passed[-1] if passed else "")
        if point in passed or point == "manifest.checked":
            raise SupersededError("stopped")

    view, folder = View.of(store), folder_of(store, name_of(100, attempt).id)
    with pytest.raises(SupersededError, match="stopped"):
        commit_step.commit(view, folder, KEEP_ALL, guard=guard)
    assert bool(commits(store)) is (point == "version.created")


def test_retention_is_part_of_the_commit(store: LocalStore, attempt: AttemptName) -> None:
    two, files = Keep(last=1), {}
    for step in (100, 200, 300):
        publish(store, step, attempt)
        done = commit(store, step, attempt, keep=two)
        assert done
        files[step] = read_step(store, name_of(step, attempt)).shard_path(0)
    assert done.dropped == (name_of(100, attempt),), "two stay, however few are asked for"
    assert commits(store) == [name_of(200, attempt), name_of(300, attempt)]
    assert store.exists(files[100]), "its files are deleted by the collector"
    collect(store, View.of(store).catalogue)
    assert [store.exists(path) for path in files.values()] == [False, True, True]
    publish(store, 400, attempt)
    folder = folder_of(store, name_of(400, attempt).id)
    spared = frozenset([name_of(200, attempt).id])
    assert commit_step.commit(View.of(store), folder, two, in_use=spared).dropped == ()


def test_a_base_that_no_checkpoint_names_is_never_named(store: LocalStore, attempt: AttemptName) -> None:
    """Its file may be deleted at any time."""
    own = folder_of(store, name_of(50, attempt).id)
    part = part_of(store, 100, attempt)
    forged = replace(part.ranks[0], constants=runs.constants_of(store, own, 0)[1], base=own)
    put(store, replace(part, ranks=(forged,)))
    assert commit(store, 100, attempt).state is not Committed.YES
    assert commits(store) == []
    runs.commit(store, 200, attempt)
    collect(store, View.of(store).catalogue)
    assert commits(store) == [name_of(200, attempt)]
