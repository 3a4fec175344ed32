"""A node's memory has what its ranks hold alike once: each rank gets its bits back out of all their slots, or
is told that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from flashckpt.capture.division import ALL_GROUPS, GROUPS, group_of
from flashckpt.errors import DamagedError
from flashckpt.memory.slot import SlotState
from flashckpt.persist.audit import audit
from flashckpt.persist.job import SealedSnapshot
from flashckpt.ranks import leader as leader_module
from flashckpt.ranks.board import Board, Table
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.node_table import NodeTable
from flashckpt.restore.filling import audit as unlike
from flashckpt.restore.memory_tier import Held, load
from flashckpt.restore.step_choice import StepChoice
from tests.commit.runs import new_run
from tests.persist.node import Node, begun
from tests.persist.sharing import SharingRank, bytes_of

NODE = (0, 1, 2)
STEP = 3


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    store, world = new_run(tmp_path / "run"), len(NODE)
    make = partial(SharingRank, world=world, node=NODE)
    node = Node(store, tmp_path / "memory", begun(store, world), NODE, world, make=make)
    yield node
    node.close()


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
        snapshot = load(held, 1)
        assert unlike(snapshot, 1) == []
        return {name: bytes_of(snapshot.tensor(name)) for name in snapshot.digests_by_name}
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
        assert not {leaf.name for leaf in metadata.layout.leaves} & {leaf.name for leaf in left}
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
        left = {leaf.name for leaf in rank.newest()[0].metadata(rank.newest()[1]).left.leaves}  # type: ignore[union-attr]
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
        held = Held(held.slot, held.owner, held.sealed, others={**held.others, 1: again})
    before = rank.live()
    with pytest.raises(DamagedError, match="passed over"):
        loaded(held)
    assert held.slot.state().state is SlotState.SEALED, "its own stays for whoever needs it"
    assert rank.live() == before


def test_what_cannot_be_put_together_is_no_candidate(node: Node, ranks: list[SharingRank]) -> None:
    def candidates(held: Held) -> list[int]:
        choice = StepChoice(node.store, [held], 0, lambda snapshot: None, 1)
        return [each.step for each in choice.candidates()]

    assert candidates(ranks[0].held(others(ranks, 0))) == [STEP]
    assert candidates(ranks[0].held(ranks[2:])) == []


def test_what_cannot_be_put_together_is_told_though_no_rank_lists_it(
    node: Node, ranks: list[SharingRank]
) -> None:
    choice = StepChoice(node.store, [ranks[0].held(ranks[2:])], 0, lambda snapshot: None, 1)
    assert choice.choose() is None, "there is nothing else"
    [reason] = choice.refused
    assert f"step {STEP} " in reason
    assert "ranks 1 of this node" in reason


def test_ranks_that_have_the_same_table_say_so_by_few_numbers(ranks: list[SharingRank]) -> None:
    [table] = {*tables(ranks)}
    assert table.ground
    for rank in ranks:
        rank.snapshot(STEP + 1)
    assert len({*tables(ranks)} | {table}) == 2
    with torch.no_grad():
        ranks[1].net.first.bias[0] += 1  # whoever holds it
    for rank in ranks:
        rank.again(STEP + 2)
    first, second, third = tables(ranks)
    assert first == third
    assert first.ground == second.ground
    pairs = enumerate(zip(first.groups, second.groups, strict=True))
    assert [group for group, (one, other) in pairs if one != other] == [group_of("model.first.bias")]


def test_a_rank_that_divides_otherwise_has_another_number(node: Node, ranks: list[SharingRank]) -> None:
    ranks[2].sharing.keep_by_rank(["model.second.weight"])
    ranks[2].have_slots(node.regions, range(3, 6))
    for rank in ranks:
        rank.snapshot(STEP + 1)
    first, second, third = tables(ranks)
    assert first == second
    assert first.ground != third.ground


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
    for learn in (
        partial(rank.capture.hold_whole, 1 << group_of("model.second.weight")),
        partial(rank.capture.keep_by_rank, ["model.first.weight"]),
        rank.capture.hold_whole,
    ):
        learn()
        step += 1
        rank.have_slots(node.regions, range(3 * step, 3 * step + 3))
        rank.snapshot(step)
        after = compared()
        assert after.ground != before.ground
        step, before = step + 1, after
        rank.snapshot(step)
        assert compared()._replace(step=before.step, groups=before.groups) == before
    assert before.ground == 0


def test_ranks_that_hold_whole_copies_need_no_other(node: Node, ranks: list[SharingRank]) -> None:
    for rank in ranks:
        rank.capture.hold_whole()
        size = rank.capture.room_needed(ordered=True)
        assert size is not None
        assert size.image_bytes > rank.slots[0].size.image_bytes, "slots grow with it"
        rank.have_slots(node.regions, range(3, 6))
        rank.snapshot(STEP + 1)
        assert in_slot(rank).keys() == rank.live().keys()
        assert loaded(rank.held()) == rank.live()
    assert tables(ranks) == [Table(step=STEP + 1)] * 3


def board_of_the_node() -> Board:
    board = Board(bytearray(Board.num_bytes(3)), NODE)
    board.format()
    for row in board.rows:
        row.enter(9, 9)
        row.settle(9)
    return board


def sealed_as(board: Board, ordinal: int, *numbers: Table) -> None:
    for row, table in zip(board.rows, numbers, strict=True):
        row.publish(ordinal, {**row.sealed, ordinal: table})


def test_a_boundary_of_which_tables_differ_is_missed_and_what_differs_is_divided_no_more() -> None:
    board = board_of_the_node()
    leader, seven, eight = Leader(board), table_of(7), table_of(8)
    sealed_as(board, 1, seven, seven, seven)
    assert (leader.say().sealed, board.held_whole) == ((1,), 0)
    sealed_as(board, 2, eight, eight, table_of(8, {5: 1, 63: 2}))
    said = leader.say()
    assert (said.sealed, said.missed) == ((1,), (2, 2))
    assert board.held_whole == 1 << 5 | 1 << 63
    leader.say()
    assert board.held_whole == 1 << 5 | 1 << 63, "each boundary is compared once"


def test_ranks_that_hear_what_is_divided_no_more_one_after_the_other_divide_all_else_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each boundary until all have heard is void, however many pass. Where that does not end, nothing is
    divided."""
    board = board_of_the_node()
    leader, old, new = Leader(board), table_of(7), table_of(8)
    for ordinal, row in enumerate([(old, new, old), (old, new, new), (new, old, new)], 1):
        sealed_as(board, ordinal, *row)
        assert (leader.say().sealed, board.held_whole) == ((), 0)
    sealed_as(board, 4, new, new, new)
    assert (leader.say().sealed, board.held_whole) == ((4,), 0)
    for ordinal in range(5, 9):
        sealed_as(board, ordinal, old, new, new)
        assert (leader.say().sealed, board.held_whole) == ((4,), 0)
    monkeypatch.setattr(leader_module, "_MOST_UNLIKE_S", 0.0)
    sealed_as(board, 9, old, new, new)
    assert leader.say().sealed == (4,)
    assert board.held_whole == ALL_GROUPS


def test_what_diverges_later_in_a_group_that_is_divided_again_is_held_by_all() -> None:
    """Where it differs at some boundaries only, no others in between keep it from that."""
    board, now_s = board_of_the_node(), 0.0
    leader, seven, other = Leader(board, lambda: now_s), table_of(7), table_of(7, {5: 1})
    for ordinal, minute in enumerate((0, 0, 0, 2, 2), 1):
        now_s = 60.0 * minute
        assert board.held_whole == (1 << 5 if ordinal > 1 else 0), "those that have not heard count as one"
        sealed_as(board, ordinal, seven, seven, other if ordinal % 2 else seven)
        said = leader.say()
        assert (ordinal in said.sealed) is (ordinal % 2 == 0)
    assert board.held_whole == ALL_GROUPS


def table_of(ground: int, groups: dict[int, int] | None = None) -> Table:
    return Table(ground, tuple((groups or {}).get(group, ground) for group in range(GROUPS)))


def test_all_but_what_has_diverged_stays_divided(node: Node, ranks: list[SharingRank]) -> None:
    """A node that has no room for whole copies has snapshots on: first with each rank's own of a group of
    leaves, and of the leaf that has diverged alone once the committer has named it."""
    leaf, undivided = "model.first.bias", sum(map(len, ranks[0].live().values()))
    with torch.no_grad():
        ranks[1].net.first.bias[0] += 1
    board = board_of_the_node()
    leader, divided = Leader(board), [in_slot(rank).keys() for rank in ranks]

    def compared(ordinal: int) -> bool:
        """Whether the boundary counts."""
        sealed_as(board, ordinal, *tables(ranks))
        return ordinal in leader.say().sealed

    def learned(*names: str) -> None:
        for rank in ranks:
            rank.capture.hold_whole(board.held_whole)
            rank.capture.keep_by_rank(names)
            rank.have_slots(node.regions, range(3, 6) if not names else range(6, 9))

    for rank in ranks:
        rank.again(STEP + 1)
    assert not compared(1)
    learned()
    for rank in ranks:
        rank.again(STEP + 2)
        group = {name for name in rank.live() if group_of(name) == group_of(leaf)}
        assert in_slot(rank).keys() == divided[rank.rank] | group
        assert sum(in_slot(rank).values()) < undivided
    assert compared(2)
    learned(leaf)
    for rank in ranks:
        rank.again(STEP + 3)
        assert leaf in in_slot(rank)
    assert compared(3)
    left = [name for rank in ranks for name in in_slot(rank)]
    assert left.count(leaf) == 3
    for rank in ranks:
        assert loaded(rank.held(others(ranks, rank.rank))) == rank.live(), "each has its own"
