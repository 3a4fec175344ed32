"""Which rank is far from the others."""

import random

import pytest

from flashckpt.cli.history import far_above


@pytest.mark.parametrize("world", [4, 1000])
def test_a_slow_rank_is_far_from_the_others_whatever_their_noise(world: int) -> None:
    noise = random.Random(world)
    values = {rank: 1.0 + noise.gauss(0, 0.02) for rank in range(world)}
    assert far_above(values) == set()
    assert far_above(values | {2: 1.8}) == {2}
    # Not by a mean, which slow ranks would move with them.
    slow = set(range(0, world, 3)) if world > 4 else {1}
    assert far_above(values | dict.fromkeys(slow, 40.0)) == slow


def test_who_is_faster_or_a_little_slower_is_not_pointed_at() -> None:
    values = dict.fromkeys(range(8), 1.0)
    assert far_above(values | {3: 0.01}) == far_above(values | {3: 1.4}) == set()
    assert far_above(values | {3: 1.6}) == {3}
    # Differences below a millisecond are ignored, and no rank stands out among three or fewer.
    assert far_above(dict.fromkeys(range(8), 1e-4) | {3: 9e-4}) == set()
    assert far_above({0: 1.0, 1: 1.0, 2: 9.0}) == far_above({}) == set()
