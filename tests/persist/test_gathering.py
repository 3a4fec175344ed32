"""Which nodes gather the parts of a step."""

from __future__ import annotations

import pytest

from flashckpt.persist.writer import polls_before


def nodes_of(world: int, each: int) -> list[range]:
    return [range(first, first + each) for first in range(0, world, each)]


@pytest.mark.parametrize(("world", "each"), [(1, 1), (16, 4)])
def test_of_a_few_nodes_all_gather_at_once(world: int, each: int) -> None:
    assert {polls_before(ranks, world) for ranks in nodes_of(world, each)} == {0}


def test_of_many_nodes_that_of_rank_0_gathers_and_in_the_end_all() -> None:
    first, *others = [polls_before(ranks, 1024) for ranks in nodes_of(1024, 8)]
    assert first == 0
    assert {*others} == {12}
