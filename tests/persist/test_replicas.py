"""What ranks hold alike is written once, and each rank gets all of its state back, from memory and disk."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flashckpt.commit import attempts
from flashckpt.commit.steps import StepRecord, read_step
from flashckpt.commit.verification import verify
from flashckpt.commit.view import open_run
from flashckpt.errors import DamagedError
from flashckpt.memory.runtime import identity_of
from flashckpt.persist.audit import differing
from flashckpt.persist.job import JobState, SealedSnapshot
from flashckpt.restore.memory_tier import load
from flashckpt.store.local import LocalStore
from tests.folders import flip
from tests.persist.node import MakeNode, Node, begun, is_committed, name_of
from tests.persist.sharing import SharingRank
from tests.recovery.scene import recovered
from tests.restore.snapshots import content, read

WORLD = 4
STEP = 5
NODES = ((0, 1), (2, 3))


Make = Callable[..., list[Node]]


@pytest.fixture
def make_nodes(nodes: MakeNode) -> Make:
    def make(
        of: tuple[tuple[int, ...], ...] = NODES, *, is_divided: bool = True, is_whole: bool = False
    ) -> list[Node]:
        world = sum(map(len, of))
        rank = partial(SharingRank, world=world, is_divided=is_divided)
        return [nodes(ranks, world, make=partial(rank, node=() if is_whole else ranks)) for ranks in of]

    return make


def ranks_of(nodes: list[Node]) -> list[SharingRank]:
    found = [rank for node in nodes for rank in node.ranks.values()]
    assert all(isinstance(rank, SharingRank) for rank in found)
    return found  # type: ignore[return-value]


def persist(nodes: list[Node], step: int = STEP) -> None:
    for node in nodes:
        node.seal(step)
    for node in nodes:
        node.run()


def record_of(nodes: list[Node], step: int = STEP) -> StepRecord:
    return read_step(nodes[0].store, name_of(step, nodes[0].attempt))


@pytest.mark.parametrize("of", [NODES, ((0, 1, 2, 3),), ((0,), (1,), (2,)), ((0, 2), (1, 3))])
def test_each_rank_gets_all_of_its_state_back(make_nodes: Make, of: tuple[tuple[int, ...], ...]) -> None:
    nodes = make_nodes(of)
    persist(nodes)
    record, ranks = record_of(nodes), ranks_of(nodes)
    for rank in ranks:
        assert read(record, rank.rank) == rank.live()
        assert read(read_step(record.store, record.name), rank.rank) == rank.live()
    assert verify(nodes[0].store).ok
    # Memory: the slots of a node have all of each of its ranks, however little that rank wrote.
    for node in nodes:
        for rank in ranks_of([node]):
            held = rank.held(each for each in ranks_of([node]) if each is not rank)
            assert content(load(held, 1)) == rank.live()
            held.unpin()


def test_what_is_alike_is_written_once(make_nodes: Make) -> None:
    nodes = make_nodes()
    persist(nodes)
    record, ranks = record_of(nodes), ranks_of(nodes)
    written = Counter(leaf.name for rank in range(WORLD) for _, leaf, _ in record.rank(rank).counted())
    buffers = {f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert written.keys() == ranks[0].live().keys()
    assert {name: count for name, count in written.items() if count != 1} == dict.fromkeys(buffers, WORLD)
    sizes = [sum(leaf.num_bytes for leaf in record.rank(rank).shard.leaves) for rank in range(WORLD)]
    largest = max(leaf.num_bytes for rank in range(WORLD) for leaf in record.rank(rank).shard.leaves)
    assert max(sizes) - min(sizes) <= 2 * largest
    [table] = {rank.replicas for part in record.parts for rank in part.ranks}
    assert len(table[0].leaves) == len(written) - len(buffers)


def test_undivided_each_writes_its_own_and_they_are_compared_all_the_same(make_nodes: Make) -> None:
    nodes = make_nodes(is_divided=False)
    persist(nodes)
    record = record_of(nodes)
    for rank in ranks_of(nodes):
        assert record.rank(rank.rank).elsewhere() == []
        assert read(record, rank.rank) == rank.live()
    with torch.no_grad():
        ranks_of(nodes)[2].net.first.bias[0] += 1
    persist(nodes, STEP + 1)
    assert not is_committed(nodes[0].store, STEP + 1, nodes[0].attempt)


def test_a_replica_that_diverged_is_named_and_kept_by_rank_from_then_on(make_nodes: Make) -> None:
    nodes = make_nodes(is_whole=True)
    persist(nodes)
    harmed = ranks_of(nodes)[3]
    with torch.no_grad():
        harmed.net.first.bias[0] += 1
    persist(nodes, STEP + 1)
    store, attempt = nodes[0].store, nodes[0].attempt
    assert not is_committed(store, STEP + 1, attempt)
    # The moments are alike: the gradients were. Whose part came first could not know it yet.
    nodes[0].queue.try_again()
    nodes[0].run()
    outcomes = [node.outcomes[-1] for node in nodes]
    assert [outcome.diverged for outcome in outcomes] == [("model.first.bias",)] * 2
    assert all("rank 3: model.first.bias" in outcome.message for outcome in outcomes)
    assert [state for step, state in nodes[1].told if step == STEP + 1] == [JobState.DIVERGED]
    # One node learns of it before the other: until both know, no step is one.
    for rank in ranks_of(nodes)[:2]:
        rank.capture.keep_by_rank(outcomes[0].diverged)
    persist(nodes, STEP + 2)
    assert not is_committed(store, STEP + 2, attempt)
    for rank in ranks_of(nodes)[2:]:
        rank.capture.keep_by_rank(outcomes[1].diverged)
    persist(nodes, STEP + 3)
    record = record_of(nodes, STEP + 3)
    for rank in ranks_of(nodes):
        assert read(record, rank.rank) == rank.live()
    assert read(record, 3)["model.first.bias"] != read(record, 0)["model.first.bias"]
    assert read(record_of(nodes), 0).keys() == read(record, 0).keys()


def test_what_is_learned_while_a_plan_is_made_is_not_missed(
    make_nodes: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread hears of it: a rank that overheard it would make every further step void."""
    rank, _ = ranks_of(make_nodes(((0,), (1,))))
    sets = rank.sharing.sets

    def learned(*how: Any) -> Any:
        found = sets(*how)
        rank.capture.keep_by_rank(["model.first.bias"])
        return found

    monkeypatch.setattr(rank.sharing, "sets", learned)
    for step in (STEP, STEP + 1):
        slot, _ = rank.snapshot(step)
    sealed = slot.sealed()
    assert sealed is not None
    [table] = slot.metadata(sealed).replicas()
    assert "model.first.bias" not in {leaf.name for leaf in table.leaves}


def test_a_tear_in_what_another_rank_writes_is_seen_in_memory(make_nodes: Make) -> None:
    nodes = make_nodes(is_whole=True)
    rank = ranks_of(nodes)[0]
    slot, generation = rank.snapshot(STEP)
    sealed = slot.sealed()
    assert sealed is not None
    metadata = slot.metadata(sealed)
    snapshot = SealedSnapshot(slot, generation, rank.owners[slot.name])
    assert differing(metadata, snapshot.sources(metadata)) == []
    kept = metadata.image.first_left - 1
    assert kept >= len(metadata.image.shard.leaves), "a leaf that another rank writes"
    slot.image_view[metadata.image.starts()[kept]] ^= 1
    assert differing(metadata, snapshot.sources(metadata)) == [kept]
    with pytest.raises(DamagedError, match="not what was captured"):
        load(rank.held(), 1)


def test_damage_in_the_shard_of_another_rank_is_damage_of_the_step(
    make_nodes: Make, store: LocalStore
) -> None:
    nodes = make_nodes()
    persist(nodes)
    record = record_of(nodes)
    [writer, *_] = [by for by, _, _ in record.rank(0).elsewhere()]
    path = Path(store.url, record.shard_path(writer))
    flip(path, record.rank(writer).shard.data_start)
    with pytest.raises(DamagedError, match=path.name):
        read(record, 0)


def test_what_a_dead_job_left_in_memory_is_recovered(
    store: LocalStore, tmp_path: Path, runtime: Path
) -> None:
    attempt = begun(store, 2)
    attempts.mark_ended(store, attempt, "dead")
    identity = identity_of(open_run(store, create=False).run_id, store.place())
    node = Node(store, runtime, attempt, (0, 1), 2, identity, make=partial(SharingRank, world=2, node=(0, 1)))
    node.seal(STEP, persist=False)
    live = {rank.rank: rank.live() for rank in ranks_of([node])}
    node.close(leaves_memory=True)
    report = recovered(tmp_path / "run")
    assert {each.outcome.value for each in report.findings} == {"committed"}
    record = read_step(store, name_of(STEP, attempt))
    assert {rank: read(record, rank) for rank in live} == live
    assert any(record.rank(rank).elsewhere() for rank in live)
