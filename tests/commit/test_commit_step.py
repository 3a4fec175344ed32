"""The order of writes: what is named before what, and what commits when."""

import threading
from pathlib import Path

import pytest

from flashckpt import crashpoints
from flashckpt.catalogue.changes import Committed
from flashckpt.commit import commit_step
from flashckpt.commit.commit_step import KEEP_ALL, Outcome, is_overtaken
from flashckpt.commit.steps import heads_at_rest, is_whole, lacking, read_step
from flashckpt.commit.view import View
from flashckpt.errors import SupersededError
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit import runs
from tests.commit.runs import folder_of, name_of, part_of, publish, put


def commit(store: Store, step: int, attempt: AttemptName) -> Outcome:
    id = name_of(step, attempt).id
    return commit_step.commit(View.of(store), commit_step.folder_of(View.of(store), id), KEEP_ALL)


def commits(store: Store) -> list[CommitName]:
    return list(View.of(store).checkpoints)


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
    assert heads_at_rest(store, there) == {}


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


@pytest.mark.parametrize("point", ["manifest.checked", "version.created"])
def test_a_process_that_may_not_commit_any_more_reports_nothing(
    store: LocalStore, attempt: AttemptName, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`guard` is asked before the version is created, and before the commit is reported."""
    publish(store, 100, attempt)
    passed = list[str]()
    monkeypatch.setattr(crashpoints, "point", passed.append)

    def guard() -> None:
        if point in passed or point == "manifest.checked":
            raise SupersededError("stopped")

    view, folder = View.of(store), folder_of(store, name_of(100, attempt).id)
    with pytest.raises(SupersededError, match="stopped"):
        commit_step.commit(view, folder, KEEP_ALL, guard=guard)
    assert bool(commits(store)) is (point == "version.created")


class AtOnce(LocalStore):
    """Gives no head of a part before so many of them are asked for."""

    def __init__(self, url: str, heads: int) -> None:
        super().__init__(url)
        self._all = threading.Barrier(heads, timeout=240)

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        self._all.wait()
        return super().read_bytes(path, offset, num_bytes)


def test_heads_of_parts_of_many_nodes_are_read_together(store: LocalStore, attempt: AttemptName) -> None:
    """One after the other, those of thousands would take minutes."""
    nodes = commit_step._AT_ONCE
    for rank in range(nodes):
        publish(store, 100, attempt, ranks=(rank,), world=nodes)
    view = View.of(AtOnce(store.url, nodes))
    folder = folder_of(store, name_of(100, attempt).id)
    assert commit_step.commit(view, folder, KEEP_ALL, is_of_many=True)
    assert commits(store) == [name_of(100, attempt)]


def test_parts_must_cover_every_rank_once(store: LocalStore, attempt: AttemptName) -> None:
    """A keeper that knew one of two ranks was replaced by one that knew both."""
    publish(store, 100, attempt, ranks=(0,), world=4)
    publish(store, 100, attempt, ranks=(0, 2), world=4)
    assert commit(store, 100, attempt).state is Committed.WAITING
    heads = heads_at_rest(store, folder_of(store, name_of(100, attempt).id))
    assert lacking(heads, 4) == [1, 3]
    publish(store, 100, attempt, ranks=(1,), world=4)
    assert commit(store, 100, attempt).state is Committed.WAITING
    assert commits(store) == []
    publish(store, 100, attempt, ranks=(3,), world=4)
    assert commit(store, 100, attempt)
    record = read_step(store, name_of(100, attempt))
    assert [record.rank(rank).values["rank"] for rank in range(4)] == [0, 1, 2, 3]
    assert len(record.parts) == 3, "each rank is taken from one part"
    assert runs.is_whole(store, 100, attempt)
