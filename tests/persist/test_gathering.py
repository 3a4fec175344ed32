"""Who gathers the parts of a step."""

from __future__ import annotations

from collections import Counter

import pytest

from flashckpt.persist.writer import polls_before

STEPS = range(0, 4_000, 100)


def nodes_of(world: int, each: int) -> list[range]:
    return [range(first, first + each) for first in range(0, world, each)]


@pytest.mark.parametrize(("world", "each"), [(1, 1), (16, 4)])
def test_of_a_few_nodes_all_gather_at_once(world: int, each: int) -> None:
    assert {polls_before(step, ranks, world) for step in STEPS for ranks in nodes_of(world, each)} == {0}


@pytest.mark.parametrize(("world", "each"), [(1024, 8), (1000, 10)])
def test_of_many_four_take_turns_and_then_all(world: int, each: int) -> None:
    nodes, first = nodes_of(world, each), Counter[int]()
    for step in STEPS:
        looks = [polls_before(step, ranks, world) for ranks in nodes]
        assert looks.count(0) == 1, "one at once, and all agree who"
        assert 1 <= sum(each < max(looks) for each in looks) <= 4
        assert max(looks) == 12, "in the end everybody"
        first[looks.index(0)] += 1
    assert len(first) > 30, "not always the same"
