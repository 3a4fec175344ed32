"""A node's memory has what its ranks hold alike once: each rank gets its bits back out of all their slots, or
is told that it cannot."""

from functools import partial

import pytest
import torch

from flashckpt.commit.view import View
from flashckpt.errors import DamagedError
from flashckpt.memory.slot import SlotState
from flashckpt.persist.audit import audit
from flashckpt.persist.job import SealedSnapshot
from flashckpt.ranks.joint_coordination import NodeTable
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.node_state import NodeState, Table
from flashckpt.restore.memory_tier import Held, load
from flashckpt.restore.step_choice import StepChoice
from tests.persist.node import MakeNode, Node
from tests.persist.sharing import SharingRank
from tests.restore.snapshots import AnyLayout, content

NODE = (0, 1, 2)
STEP = 3


@pytest.fixture
def node(nodes: MakeNode) -> Node:
    return nodes(NODE, len(NODE), make=partial(SharingRank, world=len(NODE), node=NODE))


@pytest.fixture
def ranks(node: Node) -> list[SharingRank]:
    node.seal(STEP, persist=False)
    found = [node.ranks[rank] for rank in NODE]
    assert all(isinstance(rank, SharingRank) for rank in found)
    return found  # type: ignore[return-value]


def others(ranks: list[SharingRank], rank: int) -> list[SharingRank]:
    return [each for each in ranks if each.rank != rank]


def loaded(held: Held) -> dict[str, bytes]:
    try:
        return content(load(held, 1))
    finally:
        held.unpin()


def in_slot(rank: SharingRank) -> dict[str, int]:
    """Leaves whose bytes stand in a rank's own slot, with their sizes."""
    slot, sealed = rank.newest()
    return {leaf.name: leaf.num_bytes for leaf in slot.metadata(sealed).image.own}


def tables(ranks: list[SharingRank]) -> list[Table]:
    return [NodeTable().table(rank.newest()[1]) for rank in ranks]


def test_each_leaf_that_is_alike_stands_in_one_slot_and_every_rank_has_all_of_its_bits(
    ranks: list[SharingRank],
) -> None:
    slots = [in_slot(rank) for rank in ranks]
    alike = {live.name for live in ranks[0].tree.walk(ranks[0].capture.hooks.used_up).leaves if live.replicas}
    odd = {name for name in alike if sum(name in slot for slot in slots) > 1}
    # Rows in another order than they are stored in are made so on their way into a slot, on each rank.
    assert odd == {name for name in alike if "conv.weight" in name and not name.endswith(".step")}
    for name in alike - odd:
        assert sum(name in slot for slot in slots) == 1, name
    sizes = [sum(size for name, size in slot.items() if name in alike - odd) for slot in slots]
    assert max(sizes) < sum(sizes) / 2
    for rank in ranks:
        assert loaded(rank.held(others(ranks, rank.rank))) == rank.live()


def test_what_a_rank_writes_stands_in_its_own_slot(node: Node, ranks: list[SharingRank]) -> None:
    """A part needs no other rank's memory."""
    for rank in ranks:
        slot, sealed = rank.newest()
        metadata = slot.metadata(sealed)
        left = metadata.image.leaves[metadata.image.first_left : metadata.image.first_constant]
        assert left
        assert not {leaf.name for leaf in metadata.image.shard.leaves} & {leaf.name for leaf in left}
        snapshot = SealedSnapshot(slot, sealed.generation, rank.owners[slot.name])
        assert audit(snapshot) is True
        slot.image_view[metadata.image.starts()[metadata.image.first_left - 1]] ^= 1
        assert getattr(audit(snapshot), "leaves", ()), "what it holds for others is audited, too"


@pytest.mark.parametrize("what", ["gone", "flipped", "another boundary", "freed", "digest"])
def test_a_slot_of_another_rank_that_is_not_what_it_was_makes_it_unreadable(
    ranks: list[SharingRank], what: str
) -> None:
    rank, other = ranks[0], ranks[1]
    held = rank.held(others(ranks, 0))
    slot, sealed = other.newest()
    if what == "gone":
        held = rank.held(ranks[2:])
        assert held.lacks() == (1,)
    elif what == "flipped":
        image = slot.metadata(sealed).image
        left = {leaf.name for leaf in rank.newest()[0].metadata(rank.newest()[1]).image.left.leaves}
        rows = zip(image.own, image.starts(), strict=False)
        slot.image_view[next(start for leaf, start in rows if leaf.name in left and leaf.num_bytes)] ^= 1
    elif what == "another boundary":
        for step in range(STEP + 1, STEP + 4):  # each of its slots is written again
            other.snapshot(step)
    elif what == "freed":
        assert slot.free(slot.state())
    else:
        with torch.no_grad():
            for parameter in other.net.parameters():
                parameter += 1
        other.boundary = STEP
        again, _ = other.again(STEP)
        held = Held(held.slot, held.owner, held.sealed, others={**held.others, 1: [again]})
    before = rank.live()
    with pytest.raises(DamagedError, match="passed over"):
        loaded(held)
    assert held.slot.state().state is SlotState.SEALED, "its own stays for whoever needs it"
    assert rank.live() == before


def test_what_cannot_be_put_together_is_passed_over(node: Node, ranks: list[SharingRank]) -> None:
    def choice_of(held: Held) -> StepChoice:
        return StepChoice(View.of(node.store), [held], 0, lambda snapshot: None, AnyLayout(), 1)

    loaded = choice_of(ranks[0].held(others(ranks, 0))).choose()
    assert loaded.snapshot.step == STEP
    loaded.drop()
    choice = choice_of(ranks[0].held(ranks[2:]))
    assert choice.choose() is None, "there is nothing else"
    [reason] = choice.refused
    assert f"step {STEP} " in reason
    assert "ranks 1 of this node" in reason


def test_ranks_with_the_same_divided_leaves_have_the_same_table(ranks: list[SharingRank]) -> None:
    [table] = {*tables(ranks)}
    assert table.digest
    for rank in ranks:
        rank.snapshot(STEP + 1)
    assert len({*tables(ranks)} | {table}) == 2
    with torch.no_grad():
        ranks[1].net.first.bias[0] += 1  # on a rank that may not hold it for the others
    for rank in ranks:
        rank.again(STEP + 2)
    first, second, third = tables(ranks)
    assert first == third
    assert first.digest != second.digest


def test_a_rank_with_another_assignment_has_another_table(node: Node, ranks: list[SharingRank]) -> None:
    ranks[2].sharing.keep_by_rank(["model.second.weight"])
    ranks[2].have_slots(node.regions, range(3, 6))
    for rank in ranks:
        rank.snapshot(STEP + 1)
    first, second, third = tables(ranks)
    assert first == second
    assert first.digest != third.digest


def test_what_is_compared_follows_each_new_plan_and_each_new_boundary(
    node: Node, ranks: list[SharingRank]
) -> None:
    """What was read of one plan says nothing of the next, which may have as many leaves."""
    known, rank, step = NodeTable(), ranks[0], STEP

    def compared() -> Table:
        found = known.table(rank.newest()[1])
        assert found == NodeTable().table(rank.newest()[1])
        return found

    before = compared()
    for learn in (partial(rank.capture.keep_by_rank, ["model.first.weight"]), rank.capture.hold_whole):
        learn()
        step += 1
        rank.have_slots(node.regions, range(3 * step, 3 * step + 3))
        rank.snapshot(step)
        after = compared()
        assert after.digest != before.digest
        step, before = step + 1, after
        rank.snapshot(step)
        assert compared().step == step
    assert before.digest == 0


def board_of_the_node() -> NodeState:
    node_state = NodeState(bytearray(NodeState.num_bytes(3)), NODE)
    node_state.format()
    for row in node_state.rows:
        row.enter(9)
        row.settled = 9
    return node_state


def sealed_as(node_state: NodeState, boundary_index: int, *numbers: Table) -> None:
    for row, table in zip(node_state.rows, numbers, strict=True):
        row.publish(boundary_index, {**row.sealed, boundary_index: table})


def test_ranks_with_different_tables_miss_the_boundary_and_each_keep_all_leaves_from_then_on() -> None:
    node_state = board_of_the_node()
    leader, seven, eight, other = Leader(node_state), Table(7), Table(8), Table(9)
    sealed_as(node_state, 1, seven, seven, seven)
    assert (leader.message().sealed, node_state.holds_whole) == ((1,), False)
    sealed_as(node_state, 2, eight, eight, other)
    said = leader.message()
    assert (said.sealed, said.missed) == ((1,), (2, 2))
    assert node_state.holds_whole
    # Ranks learn of it in different rounds: until all have, their tables differ.
    sealed_as(node_state, 3, Table(), eight, Table())
    assert leader.message().sealed == (1,)
    sealed_as(node_state, 4, Table(), Table(), Table())
    assert leader.message().sealed == (1, 4)
    assert node_state.holds_whole


def test_after_leaves_have_diverged_each_rank_has_its_own_copy(node: Node, ranks: list[SharingRank]) -> None:
    with torch.no_grad():
        ranks[1].net.first.bias[0] += 1
    node_state = board_of_the_node()
    leader = Leader(node_state)

    def counts(boundary_index: int) -> bool:
        sealed_as(node_state, boundary_index, *tables(ranks))
        return boundary_index in leader.message().sealed

    for rank in ranks:
        rank.again(STEP + 1)
    assert not counts(1)
    assert node_state.holds_whole
    for rank in ranks:
        rank.capture.hold_whole()
        rank.have_slots(node.regions, range(3, 6))
        rank.again(STEP + 2)
        assert in_slot(rank).keys() == rank.live().keys()
    assert tables(ranks) == [Table(step=STEP + 2)] * 3, "nothing is compared any more"
    assert counts(2)
    for rank in ranks:
        assert loaded(rank.held()) == rank.live(), "each has its own bits"
