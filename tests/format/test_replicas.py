"""Replicas in parts: sets of ranks, tables that ranks share, and those that contradict a rank's files."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.errors import DamagedError
from flashckpt.format.layout import RANKS, Leaf, Replicas, count_of, has_rank, ranks_of
from flashckpt.format.manifest import PartHead
from flashckpt.format.records import Part
from tests.format.replicated import SHARED, part_of, rank_of, table
from tests.hostile.test_hostile_records import changed, put

WRITERS = {"model.weight": 0, "model.tied": 1, "optimizer.step": 2, "model.rows": 1}
TABLE = table((0, 1, 2), WRITERS)


def two_ranks(of: Replicas = TABLE) -> Part:
    return part_of(rank_of(0, of), rank_of(1, of), world=4)


@settings(deadline=None)
@given(st.sets(st.integers(0, 40), min_size=2))
def test_a_set_of_ranks_there_and_back(members: set[int]) -> None:
    ranks = ranks_of(members)
    assert [rank for run in ranks for rank in run] == sorted(members)
    assert ranks_of(reversed(sorted(members))) == ranks
    assert count_of(ranks) == len(members)
    assert {rank for rank in range(42) if has_rank(ranks, rank)} == members
    assert RANKS.load(RANKS.dump(ranks)) == ranks


@pytest.mark.parametrize(
    "rows",
    [
        [], [[0, 1, 1]], [[0, 2, 1], [1, 3, 1]], [[2, 4, 1], [0, 2, 1]], [[0, 3, 2], [1, 4, 2]],
        [[0, 4, 2]], [[0, 1, 2], [2, 3, 1]], [[0, 2, 0]], [[0, 2, -1]], [[-1, 1, 1]], [[0, 2]], [0, 2], "x",
        [[0, True, 1]], [[0, 2.0, 1]], [[0, 0, 1]], [[2, 0, 1]],
    ],
)  # fmt: skip
def test_invalid_sets_of_ranks(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"rank|row|list|number"):
        RANKS.load(rows)


def test_ranks_with_equal_replicas_share_one_table() -> None:
    other = table((0, 3), {"only": 3}, leaves=[Leaf(name="only", dtype="int8", shape=(2,))])
    part = part_of(rank_of(0, TABLE, other), rank_of(1, TABLE), rank_of(2, TABLE), world=4)
    found = Part.from_bytes(part.to_bytes(), "file")
    assert found == part
    assert found.to_bytes() == part.to_bytes()
    assert len({id(rank.replicas[0]) for rank in found.ranks}) == 1
    data = part.to_bytes()
    end = data.index(b',"head":"') + 42
    assert PartHead.from_prefix(data[:end], "file") == PartHead.from_bytes(data, "file") == part.head()
    assert PartHead.from_prefix(data[: end - 1], "file") is None
    assert found.head().tables == ((TABLE.ranks, TABLE.checksum()), (other.ranks, other.checksum()))
    assert [rank.tables for rank in found.head().ranks] == [(0, 1), (0,), (0,)]


def test_a_ranks_leaves_are_those_it_and_others_write() -> None:
    part = Part.from_bytes(two_ranks().to_bytes(), "file")
    for rank in part.ranks:
        own = {leaf.name: digest for _, leaf, digest in rank.counted()}
        others = {leaf.name: (by, digest) for by, leaf, digest in rank.elsewhere()}
        assert own.keys() | others.keys() == {*WRITERS, "model.buffer"}
        assert own.keys().isdisjoint(others)
        assert {name: by for name, (by, _) in others.items()} == {
            name: by for name, by in WRITERS.items() if by != rank.rank
        }


def test_a_replica_may_be_a_constant_and_may_be_written_by_each() -> None:
    each = table((0, 1), {"model.weight": 0})
    part = part_of(rank_of(0, each, frozen=["model.weight"]), rank_of(1, each), world=2)
    found = Part.from_bytes(part.to_bytes(), "file")
    assert found == part
    assert [name for _, leaf, _ in found.ranks[1].elsewhere() for name in [leaf.name]] == ["model.weight"]
    assert len(found.ranks[1].counted()) == len(SHARED)


def test_a_constant_that_changed_may_be_written_by_another_rank() -> None:
    """Its file has the old bytes, which are outdated although the rank's own shard lacks the leaf."""
    changed_since = table((0, 1), {"model.weight": 1}, {"model.weight": 99})
    before = rank_of(0, table((0, 1), {}), frozen=["model.weight", "model.rows"])
    now = rank_of(0, changed_since, frozen=["model.rows"])
    part = part_of(replace(now, constants=before.constants, base=before.base), world=2)
    found = Part.from_bytes(part.to_bytes(), "file").ranks[0]
    digests = {leaf.name: digest for _, leaf, digest in found.counted()}
    assert digests.keys() == {"model.buffer", "model.tied", "optimizer.step", "model.rows"}
    assert [(by, leaf.name, digest) for by, leaf, digest in found.elsewhere()] == [(1, "model.weight", 99)]


@pytest.mark.parametrize(
    "change",
    [
        put("replicas", []),
        put("replicas", 0, None),
        put("replicas", 0, "ranks", [[0, 2, 1]]),
        put("replicas", 0, "ranks", [[0, 9, 1]]),
        put("replicas", 0, "writers", []),
        put("replicas", 0, "writers", 0, 3),
        put("replicas", 0, "writers", 0, True),
        put("replicas", 0, "writers", 0, "1"),
        put("replicas", 0, "digests", "0" * 64),
        put("replicas", 0, "leaves", "names", 0, "other"),
        put("tables", []),
        put("tables", 0, 0, [[0, 2, 1]]),
        put("tables", 0, 1, "0" * 32),
        put("ranks", 0, 3, [1]),
        put("ranks", 0, 3, [0, 0]),
        put("ranks", 0, 3, [True]),
        put("ranks", 0, 0, 3),
    ],
)
def test_bad_tables(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(DamagedError):
        Part.from_bytes(changed(two_ranks(), change), "file")


def refusal(part: Part) -> str:
    """The reason of the refusal, although head and tables are right."""
    with pytest.raises(DamagedError) as raised:
        Part.from_bytes(part.to_bytes(), "file")
    return str(raised.value)


def test_files_that_contradict_the_tables() -> None:
    first, second = rank_of(0, TABLE), rank_of(1, TABLE)
    theirs = table((0, 1, 2), {**WRITERS, "model.weight": 1})
    assert "which rank 1 writes" in refusal(part_of(replace(first, replicas=(theirs,)), second, world=4))
    assert "files do not have it" in refusal(part_of(replace(second, replicas=(theirs,)), world=4))
    each = table((0, 1, 2), {})
    assert "files do not have it" in refusal(part_of(replace(first, replicas=(each,)), world=4))
    changed_since = table((0, 1, 2), WRITERS, {"model.weight": 99})
    assert "files do not have it" in refusal(part_of(replace(first, replicas=(changed_since,)), world=4))
    alias = Leaf(name="model.head", dtype="float32", shape=(3,))
    twice = table((0, 3), {"model.head": 3}, leaves=[alias])
    assert "twice" in refusal(part_of(replace(first, replicas=(TABLE, twice)), world=4))
    other_box = [replace(leaf, shape=(2, 2)) if leaf.name == "model.weight" else leaf for leaf in SHARED]
    elsewhere = table((0, 1, 2), WRITERS, leaves=other_box)
    assert "files do not have it" in refusal(part_of(replace(first, replicas=(elsewhere,)), world=4))
    one = table((0, 1), {"model.weight": 1}, leaves=SHARED[:1])
    two = table((0, 1), {"optimizer.step": 1}, leaves=SHARED[2:3])
    assert "two tables" in refusal(part_of(rank_of(0, one, two), world=2))
    assert "names rank 1" in refusal(part_of(rank_of(0, table((0, 1), {})), world=1))


def test_a_table_may_have_further_keys() -> None:
    data = changed(two_ranks(), lambda obj: obj["replicas"][0].update(further=1))
    assert Part.from_bytes(data, "file") == two_ranks()
