"""Ranks of a node that divide its memory: killed at any point they go on with their own bits, out of each
other's slots."""

import json
from pathlib import Path

import pytest

import flashckpt
from flashckpt.memory.region import is_region_name
from tests.ranks.launch import Ended, Launcher
from tests.ranks.test_ddp import PROGRAM, start, steps_of, undisturbed
from tests.ranks.test_kills import STEPS_PER_EPOCH, assert_whole

pytestmark = pytest.mark.dist
# So wide that it is worth dividing: parameters and two moments of each are all but a little of the state.
WIDTH = 1 << 16
STATE_BYTES = 12 * WIDTH * 4 * 3
# Of each incarnation the rank that dies, and where: before its own seal, with the other's done or not, and
# while it reads what the other holds for it.
DEATHS = [(1, "capture.copied:3"), (0, "seal.submitting:2"), (1, "resume.verified")]


def region_bytes(launcher: Launcher) -> list[int]:
    found = [each for each in launcher.runtime().rglob("*") if is_region_name(each.name)]
    return [each.stat().st_size for each in found]


def test_ranks_are_killed_and_go_on_out_of_each_others_slots(launcher: Launcher, tmp_path: Path) -> None:
    run, ranks, epochs = tmp_path / "run", 2, 3
    whole = undisturbed(launcher, tmp_path / "whole", ranks, epochs=epochs, width=WIDTH)
    orders = {"epochs": epochs, "save_at": "each", "deaths": DEATHS, "width": WIDTH}
    said, sizes = [], list[int]()
    for restart in range(len(DEATHS) + 1):
        job = launcher.fork(PROGRAM, run, json.dumps(orders), ranks=ranks, restart=restart)
        if restart < len(DEATHS):
            job.until_died(DEATHS[restart][0])
            sizes += region_bytes(launcher)
            job.kill()
        else:
            last = job.finished()
        said.append([job.said(rank) for rank in range(ranks)])
    assert sizes
    # The first captures of a run save gradients, too: a third of what the optimizer and the weights take.
    whole_bytes = STATE_BYTES + STATE_BYTES // 3
    assert max(sizes) < whole_bytes, "a slot of each rank, with room to grow, has less than all of it"
    assert_whole(said, whole, last, run)
    resumed = [out[0].split() for each in said[1:] for out in each if out]
    assert {tier for word, _, tier in resumed if word == "resumed"} == {"memory"}


def trained_after(step: int, ended: Ended) -> list[list[str]]:
    """The losses, and all else that is said, of the steps after this one."""
    return [line.split()[2:] for number, line in sorted(steps_of(ended.out).items()) if number > step]


@pytest.mark.long
def test_what_has_diverged_is_divided_no_more_and_each_rank_gets_its_own_back(
    launcher: Launcher, tmp_path: Path
) -> None:
    run, orders = tmp_path / "run", {"width": WIDTH, "harm_at": [1, 5]}
    whole = undisturbed(launcher, tmp_path / "whole", 2, epochs=5, **orders)
    job = start(launcher, run, 2, epochs=4, options={"persist_every": 1}, **orders)
    job.finished()
    assert "keeps its own copy of all leaves in memory" in job.told()
    assert "replicas have diverged" in job.told()
    # Where the end came before the ranks had heard of it, it was captured once more, as one more step.
    step, end = flashckpt.steps(run)[-1], 4 * STEPS_PER_EPOCH
    assert step in (end, end + 1)
    # Its one save finds anew what has diverged, and says so at the end.
    ended = start(launcher, run, 2, epochs=5, width=WIDTH).ended()
    for expected, each in zip(whole, ended, strict=True):
        assert each.out[0].startswith(f"resumed {step} ")
        assert trained_after(step, each) == trained_after(end, expected) != []
