"""Sharded state dicts of FSDP2 on several ranks, saved on one number of ranks and loaded on others."""

import json
from pathlib import Path

import pytest

from tests.ranks.launch import Launcher

pytestmark = [pytest.mark.dist, pytest.mark.process]
PROGRAM = "tests.dcp.sharded"


def orders(**given: object) -> str:
    return json.dumps(given)


def check_ranks(launcher: Launcher, tmp_path: Path, hows: list[str], *worlds: int) -> None:
    """Save by each way on the first number of ranks; load, and save again, on each of the others in turn."""
    saved = ""
    for world, ranks in enumerate(worlds):
        before = [[how, str(tmp_path / f"{how}-{world - 1}")] for how in hows] if world else []
        now = [[how, str(tmp_path / f"{how}-{world}")] for how in hows]
        ended = launcher.fork(PROGRAM, orders(loads=before, saves=now), ranks=ranks).finished()
        saved = saved or ended[0].out[-1].split()[1]
        for rank in ended:
            assert rank.out == [*(f"loaded {how} {saved}" for how in hows if world), f"saved {saved}"]


def test_three_ranks_then_two(launcher: Launcher, tmp_path: Path) -> None:
    check_ranks(launcher, tmp_path, ["writer", "thread", "functions", "run"], 3, 2)


@pytest.mark.long
def test_a_process_of_torch_writes(launcher: Launcher, tmp_path: Path) -> None:
    check_ranks(launcher, tmp_path, ["process"], 2, 3)


def test_a_rank_that_fails_fails_all_and_the_next_save_works(launcher: Launcher, tmp_path: Path) -> None:
    for rank in launcher.fork(PROGRAM, orders(fails=str(tmp_path / "it")), ranks=2).finished():
        assert rank.out[:2] == [
            "refused CheckpointException OSError",
            "refused CheckpointException StateError",
        ]
        assert rank.out[2:4] == ["still older", "then newer"]
        assert rank.out[4:7] == ["refused alone PersistError", "refused OptionError", "refused OptionError"]
