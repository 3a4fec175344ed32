"""A few of the kills of `make torture ARGS="--nodes 2 --ranks 2"`."""

from __future__ import annotations

from pathlib import Path

from tests.crash.job import none
from tests.crash.ranks_torture import RanksTorture


def test_nothing_is_lost_on_two_nodes(tmp_path: Path) -> None:
    tally = RanksTorture(tmp_path, seed=20261122, nodes=2, each=2).kill(12)
    none(tally.faults)
    assert tally.killed >= 12
    assert tally.tiers["memory"] > 0
