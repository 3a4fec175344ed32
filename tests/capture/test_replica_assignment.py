"""Replica assignment: one writer for each leaf, one holder for each leaf and node, balanced, and the same on
all ranks."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.capture.plan import LEAST_BYTES, ReplicaAssignment, divide

SIZES = st.dictionaries(st.text("abc.", min_size=1, max_size=6), st.integers(0, 64 << 20), max_size=40)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Ranks by node, in any order and number, and some of these ranks."""
    world = draw(st.integers(1, 24))
    ranks = draw(st.permutations(range(world)))
    nodes: list[list[int]] = []
    while ranks:
        size = draw(st.integers(1, len(ranks)))
        nodes, ranks = [*nodes, sorted(ranks[:size])], ranks[size:]
    members = draw(st.sets(st.integers(0, world - 1), min_size=1))
    return nodes, sorted(members)


def loads(of: dict[str, int], sizes: dict[str, int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for name, rank in of.items():
        found[rank] += sizes[name]
    return found


@settings(max_examples=30, deadline=None)
@given(SIZES, jobs(), st.randoms())
def test_every_leaf_has_one_writer_and_a_holder_on_each_node(
    sizes: dict[str, int], job: tuple[list[list[int]], list[int]], luck: random.Random
) -> None:
    nodes, members = job

    def on_a_rank(node: list[int]) -> ReplicaAssignment:
        """Each rank finds its leaves and the ranks in its own order."""
        leaves = luck.sample(list(sizes.items()), len(sizes))
        return divide(dict(leaves), luck.sample(members, len(members)), luck.sample(node, len(node)))

    writers = divide(sizes, members, members).writers
    assert writers.keys() == sizes.keys()
    assert set(writers.values()) <= set(members)
    for node in (node for node in nodes if set(node) & set(members)):
        first, *others = [on_a_rank(node) for _ in node]
        assert first.writers == writers
        assert all(each == first for each in others)
        assert first.owners.keys() == sizes.keys()
        assert all(rank in node and rank in members for rank in first.owners.values())
        assert all(first.owners[name] == rank or rank not in node for name, rank in writers.items())


@settings(max_examples=30, deadline=None)
@given(SIZES, jobs())
def test_no_rank_has_more_than_a_leaf_beyond_its_share(
    sizes: dict[str, int], job: tuple[list[list[int]], list[int]]
) -> None:
    nodes, members = job
    largest, total = max(sizes.values(), default=0), sum(sizes.values())
    for node in nodes:
        here = set(node) & set(members)
        if here:
            division = divide(sizes, members, node, least_bytes=1)
            count = min(len(members), max(1, total))
            assert max(loads(division.writers, sizes).values(), default=0) <= total / count + largest
            written = loads({n: r for n, r in division.writers.items() if r in here}, sizes)
            most = max(written.values(), default=0)
            held = loads(division.owners, sizes)
            assert max(held.values(), default=0) <= max(most, total / len(here) + largest)


def test_small_sets_are_not_divided() -> None:
    sizes = {f"leaf {i}": LEAST_BYTES // 8 for i in range(8)}
    assert set(divide(sizes, range(16), range(16)).writers.values()) == {0}
    sizes = {f"leaf {i}": LEAST_BYTES // 8 for i in range(16)}
    assert Counter(divide(sizes, range(16), range(16)).writers.values()) == {0: 8, 8: 8}


def test_writers_are_spread_over_the_nodes() -> None:
    sizes = {f"leaf {i}": LEAST_BYTES for i in range(16)}
    writers = set(divide(sizes, range(128), range(8)).writers.values())
    assert {rank // 8 for rank in writers} == set(range(16))


def test_a_node_that_writes_little_holds_all_in_equal_parts() -> None:
    sizes = {f"leaf {i}": LEAST_BYTES for i in range(64)}
    division = divide(sizes, range(128), range(8, 16))
    assert sum(rank in range(8, 16) for rank in division.writers.values()) == 4
    assert Counter(division.owners.values()) == dict.fromkeys(range(8, 16), 8)
