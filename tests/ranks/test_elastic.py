"""A node is lost for good in the middle of a run, and comes again: torchrun goes on with the ranks that there
are, each time from the newest step that is left of all ranks."""

import json
import shutil
from pathlib import Path

import pytest

import flashckpt
from tests.ranks.launch import Launch, Launcher
from tests.ranks.test_ddp import PROGRAM, steps_of, undisturbed
from tests.waiting import until

pytestmark = pytest.mark.dist

SAVED, LOST, STOPPED = 4, 6, 10
LIMIT_S = 600.0
"""Torchrun starts processes again and again, each of which imports torch."""


def until_said(job: Launch, line: str, *ranks: int) -> list[str]:
    """Wait until an incarnation of one of these ranks has printed a line; all that this one has."""
    found: list[list[str]] = []

    def look() -> bool:
        said = [job.said(rank, number) for rank in ranks for number in range(8)]
        found[:] = [each for each in said if line in each]
        return bool(found) or not job.is_running()

    until(look, line, LIMIT_S)
    assert found, job.told()
    return found[0]


def gone_on(launcher: Launcher, run: Path, step: int, ranks: int) -> list[list[str]]:
    """What ranks do that go on from this step of a copy of the run, in a job of its own."""
    copy = run.with_name(f"{run.name}-{step}")
    shutil.copytree(run, copy)
    flashckpt.branch(copy, step)
    job = launcher.fork(PROGRAM, copy, json.dumps({"options": {"every": None}}), ranks=ranks)
    return [each.out for each in job.finished(limit_s=LIMIT_S)]


@pytest.mark.timeout(6 * LIMIT_S)
def test_a_node_is_lost_and_comes_again(launcher: Launcher, tmp_path: Path) -> None:
    """With two agents of torchrun: what is gone on from is on storage and the newest there, on one rank and
    on two again, and every step is that of a job that does so by itself."""
    whole = undisturbed(launcher, tmp_path / "whole", 2)
    run, second = tmp_path / "run", str(launcher.runtime(1))
    orders = {
        "save_at": SAVED,
        "begins_on": 2,
        "holds": {"2": [LOST, [second]], "1": [STOPPED - 1, None]},
        "options": {"every": None},
        "keep_last": 100,
    }
    job = launcher.torchrun(PROGRAM, run, json.dumps(orders), ranks=1, nodes=2, least_nodes=1, max_restarts=3)
    # Torchrun gives the ranks by process ids, where nodes have one address.
    until_said(job, f"held {LOST}", 0, 1)
    until(lambda: flashckpt.steps(run) == [SAVED], "a commit")
    job.kill_launcher(1)
    launcher.kill_keepers(1, remove_regions=True)
    until_said(job, f"held {STOPPED - 1}", 0)
    launcher.start_launcher(job, 1)
    job.until_over(LIMIT_S)
    first = [until_said(job, steps_of(whole[rank].out)[LOST], rank) for rank in range(2)]
    small = until_said(job, f"resumed {SAVED} local", 0)
    last = [until_said(job, f"resumed {STOPPED} local", rank) for rank in range(2)]
    for rank in range(2):
        assert steps_of(first[rank]).items() <= steps_of(whole[rank].out).items()
    [alone] = gone_on(launcher, run, SAVED, 1)
    assert max(steps_of(small)) == STOPPED
    assert steps_of(small).items() <= steps_of(alone).items()
    assert last == gone_on(launcher, run, STOPPED, 2)
    assert min(steps_of(last[0])) == STOPPED + 1
