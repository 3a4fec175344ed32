"""One rank after another is killed, at any point of its way, and the group is started again: the run goes on
from the newest step that all ranks have, and ends with the bits of one that nobody has killed.

`make rank-kills KILLS=50` says how often under torchrun.
"""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

import flashckpt
from tests.ranks.launch import Ended, Launcher
from tests.ranks.test_ddp import PROGRAM, steps_of, undisturbed

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("FLASHCKPT_TEST_KILLS", "1"))
STEPS_PER_EPOCH = 6

# Points that a trainer passes, how often it may have passed them before, and whether it has trained by then.
_IN_TRAINING = ("capture.begun", "capture.copied")
_IN_ATTACH = ("attempt.reserved", "resume.verified", "resume.filled", "start.written")


def deaths(times: int, ranks: int) -> list[tuple[int, str]]:
    """Who dies in each incarnation, and where. Each goes on for a few steps at least, but for those that die
    in `attach`: only rank 0 passes the first of its points."""
    chosen, source = [], random.Random(5)
    for number in range(times):
        rank = source.randrange(ranks)
        if number % 3 == 2:
            point = source.choice(_IN_ATTACH if rank == 0 else _IN_ATTACH[1:])
        else:
            point = f"{source.choice(_IN_TRAINING)}:{source.randint(2, 6)}"
        chosen.append((rank, point))
    return chosen


def assert_goes_on(before: list[list[str]], after: list[list[str]]) -> None:
    """What all had sealed is not lost: at most the step in flight and the one that was being copied."""
    resumed = {out[0].split()[1] for out in after if out and out[0].startswith("resumed")}
    assert len(resumed) <= 1, f"the ranks went on from different steps: {resumed}"
    done = [max(steps_of(out), default=0) for out in before]
    if resumed and all(done):
        assert int(resumed.pop()) >= min(done) - 1, (before, after)


def assert_whole(
    launches: Sequence[list[list[str]]], whole: Sequence[Ended], last: Sequence[Ended], run: Path
) -> None:
    """Each incarnation's steps are those of the run that nobody killed, bit for bit."""
    for before, after in zip(launches, launches[1:], strict=False):
        assert_goes_on(before, after)
    for rank, expected in enumerate(whole):
        steps = steps_of(expected.out)
        for said in launches:
            done = steps_of(said[rank])
            assert done == {step: steps[step] for step in done}
        assert last[rank].out[-1] == expected.out[-1], "the state at the end"
    assert flashckpt.steps(run)[-1] == max(steps_of(whole[0].out))


def test_ranks_are_killed_at_any_point_and_go_on(launcher: Launcher, tmp_path: Path) -> None:
    run, ranks, times = tmp_path / "run", 2, 3
    orders = {"epochs": times, "save_at": "each", "deaths": deaths(times, ranks)}
    whole = undisturbed(launcher, tmp_path / "whole", ranks, epochs=times)
    said = []
    for restart in range(times + 1):
        job = launcher.fork(PROGRAM, run, json.dumps(orders), ranks=ranks, restart=restart)
        if restart < times:
            job.until_died(orders["deaths"][restart][0])
            job.kill()
        else:
            last = job.finished()
        said.append([job.said(rank) for rank in range(ranks)])
    assert_whole(said, whole, last, run)


def test_torchrun_starts_the_group_again(launcher: Launcher, tmp_path: Path) -> None:
    run, ranks = tmp_path / "run", 2
    orders = {"epochs": KILLS + 2, "save_at": "each", "deaths": deaths(KILLS, ranks)}
    whole = undisturbed(launcher, tmp_path / "whole", ranks, epochs=KILLS + 2)
    job = launcher.torchrun(PROGRAM, run, json.dumps(orders), ranks=ranks, max_restarts=KILLS)
    last = job.finished(restart=KILLS, limit_s=60.0 * (KILLS + 4))
    said = [[job.said(rank, restart) for rank in range(ranks)] for restart in range(KILLS + 1)]
    assert_whole(said, whole, last, run)
