"""What several ranks of a dead job left in their nodes' memory: recovered node by node, one part each."""

import contextlib
from pathlib import Path

import pytest

from flashckpt.commit import attempts
from flashckpt.commit.view import open_run
from flashckpt.format.names import AttemptName
from flashckpt.memory.cache_folder import CacheFolder
from flashckpt.memory.held_regions import sealed_in
from flashckpt.memory.region import rank_of
from flashckpt.memory.runtime import RuntimeFolder, identity_of
from flashckpt.store.local import LocalStore
from tests.persist.node import Node, begun, files, is_committed, is_whole
from tests.recovery.scene import recovered, regions_of, rows, whole_tree


def died(
    store: LocalStore, base: Path, ranks: tuple[int, ...], world: int, attempt: AttemptName | None = None
) -> Node:
    """A node whose processes were all killed: each rank had sealed step 5, all but the last one step 6."""
    if attempt is None:
        attempt = begun(store, world)
        attempts.mark_ended(store, attempt, "dead")
    identity = identity_of(open_run(store, create=False).run_id, store.place())
    node = Node(store, base, attempt, ranks, world, identity)
    node.seal(5, persist=False)
    if len(ranks) > 1:
        node.seal(6, *ranks[:-1], persist=False)
    node.close(leaves_memory=True)
    return node


@pytest.mark.parametrize("world", [2, 4])
def test_the_newest_step_that_all_ranks_of_the_node_hold_is_saved(
    store: LocalStore, tmp_path: Path, runtime: Path, world: int
) -> None:
    node = died(store, runtime, tuple(range(world)), world)
    said = recovered(tmp_path / "run", dry_run=True)
    assert {(each.step, each.outcome.value) for each in said.findings} == {(5, "sound"), (6, "dropped")}
    assert said.resume.step == 5, "not all ranks have step 6"
    assert said.unseen == ()
    report = recovered(tmp_path / "run")
    saved = [row for row in rows(report) if row == ("snapshot", "committed", 5)]
    assert len(saved) == world
    shards = [f"rank-{rank:05d}" for rank in range(world)]
    assert files(store, 5, node.attempt) == ["manifest", "node-00000", *shards]
    assert is_whole(store, 5, node.attempt, world)
    assert files(store, 6, node.attempt) == [], "not all ranks have it"
    assert not report.failed
    assert regions_of(node.folder) == [], "and never will"
    assert rows(recovered(tmp_path / "run")) == []


def test_each_node_saves_its_part_and_the_last_one_commits(
    store: LocalStore, tmp_path: Path, runtime: Path, other_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that waits for another node's is no failure, and nothing is let go before the step is whole."""
    run = tmp_path / "run"
    first = died(store, runtime, (0, 1), 4)
    second = died(store, other_node, (2, 3), 4, first.attempt)
    before = regions_of(first.folder)
    said = recovered(run, dry_run=True)
    report = recovered(run)
    assert rows(said) == rows(report), "it says the same of older memory, too"
    assert {row for row in rows(report) if row[2] == 5} == {("snapshot", "kept", 5)}
    assert not report.failed
    assert report.unseen == (2, 3)
    assert (report.resume.tier, report.resume.of_all) == ("memory", False), "the other node may have lost it"
    assert not is_committed(store, 5, first.attempt)
    assert sorted(regions_of(first.folder)) == sorted(before)
    assert files(store, 5, first.attempt) == ["node-00000", "rank-00000", "rank-00001"]

    monkeypatch.setenv("FLASHCKPT_RUNTIME", str(other_node))
    done = recovered(run)
    assert ("snapshot", "committed", 5) in rows(done)
    assert is_whole(store, 5, first.attempt, 4)
    assert (done.resume.step, done.resume.tier, done.resume.of_all) == (5, "local", True)
    assert regions_of(second.folder) == []

    monkeypatch.setenv("FLASHCKPT_RUNTIME", str(runtime))
    again = recovered(run)
    assert ("snapshot", "committed", 5) in rows(again), "these very contents are at rest"
    assert regions_of(first.folder) == []


def test_a_step_that_is_partly_in_memory_and_partly_in_the_cache_is_saved(
    store: LocalStore, tmp_path: Path, runtime: Path
) -> None:
    """A keeper died between two copies into the cache, and memory of the copied rank is gone."""
    node, cache = died(store, runtime, (0, 1), 2), tmp_path / "cache"
    cache.mkdir()
    with contextlib.closing(RuntimeFolder.at(node.folder.path)) as memory:
        with contextlib.closing(CacheFolder.open(str(cache), memory.identity.hex())) as folder:
            for sealed in sealed_in(memory):
                if sealed.slot.rank == 1:
                    folder.copy(sealed, lambda: True).close()
        for name in (name for name in regions_of(memory) if rank_of(name) == 1):
            memory.remove(name)
    files_before = whole_tree(tmp_path, runtime)
    said = recovered(tmp_path / "run", dry_run=True, cache=str(cache))
    assert whole_tree(tmp_path, runtime) == files_before
    assert (said.resume.step, said.resume.tier, said.resume.of_all) == (5, "cache", True)
    assert said.unseen == ()
    assert {each.outcome.value for each in said.findings if each.step == 5} == {"sound"}
    report = recovered(tmp_path / "run", cache=str(cache))
    assert {each.outcome.value for each in report.findings if each.step == 5} == {"committed"}
    assert is_whole(store, 5, node.attempt, 2)
    assert not list(cache.rglob("slot-*"))
