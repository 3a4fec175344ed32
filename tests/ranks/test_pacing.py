"""Several processes with the library's own threads: what they capture, where they end, what becomes of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import flashckpt
from tests.ranks.launch import Ended, Launch, Launcher
from tests.waiting import until

pytestmark = pytest.mark.dist
PROGRAM = "tests.ranks.paced"


def start(launcher: Launcher, run: Path, ranks: int = 2, nodes: int = 1, **orders: object) -> Launch:
    return launcher.fork(PROGRAM, run, json.dumps(orders), ranks=ranks, nodes=nodes)


def last_step(ended: Ended) -> int:
    return max(int(line.split()[1]) for line in ended.out if line.startswith("step "))


def word(ended: Ended, kind: str) -> str:
    """What a rank has said under this word."""
    found = [line for line in ended.out if line.startswith(kind)]
    assert found, f"{kind}: {ended.out[-5:]} {ended.err[-3000:]}"
    return found[-1].removeprefix(kind).strip()


def until_step(launch: Launch, rank: int, step: int) -> None:
    until(
        lambda: any(line.startswith(f"step {step} ") for line in launch.said(rank)),
        f"step {step} of rank {rank}: {launch.told()}",
        120,
    )


def test_sigterm_on_one_of_four_ranks_ends_all_at_one_boundary(launcher: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch = start(launcher, run, ranks=2, nodes=2, steps=5000)
    launch.until_said("began")
    until_step(launch, 2, 30)
    os.kill(launch.pid_of(2), signal.SIGTERM)
    ended = launch.ended()
    ends = {last_step(each) for each in ended}
    assert len(ends) == 1, launch.told()
    assert flashckpt.steps(run)[-1] == ends.pop(), "what they ended with is committed"
    for each in ended:
        if each.rank != 2:
            assert word(each, "ended").endswith("SIGTERM (rank 2)")


def test_ranks_that_are_slow_that_skip_and_that_learn_late_commit_steps_and_go_on_bit_for_bit(
    launcher: Launcher, tmp_path: Path
) -> None:
    run, orders = tmp_path / "run", {"steps": 300, "options": {"every": 1, "persist_every": 20}}
    troubles = {"step_s": [0.01, 0.03, 0.01, 0.01], "skips": {1: 0.1}, "late": {3: 40}}
    launch = start(launcher, run, ranks=4, **orders, **troubles)
    launch.until_said("began")
    until(lambda: len(flashckpt.steps(run)) > 1, f"two commits: {launch.told()}", 120)
    launch.kill()
    before = [launch.said(rank) for rank in range(4)]
    again = start(launcher, run, ranks=4, **orders).finished()
    whole = start(launcher, tmp_path / "whole", ranks=4, **orders).finished()
    assert len({each.out[0] for each in again}) == 1, "all go on from one step"
    assert again[0].out[0].startswith("resumed ")
    for rank in range(4):
        expected = {line for line in whole[rank].out if line.startswith("step ")}
        done = {line for line in [*before[rank], *again[rank].out] if line.startswith("step ")}
        assert done == expected
    assert flashckpt.steps(run)[-1] == 300


def test_save_on_all_ranks_is_persisted_and_on_one_alone_is_refused_by_name(
    launcher: Launcher, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    orders = {"steps": 90, "save_at": {0: [30], 1: [30, 60]}, "save_outside": [0], "call_patience_s": 3.0}
    alone, other = start(launcher, run, options={"every": None}, **orders).finished()
    assert "not by rank 1" in word(alone, "not saved BoundaryError save() was called by rank 0")
    assert "not by rank 0" in word(other, "waited BoundaryError save() was called by rank 1")
    assert word(other, "committed") == "[31, 90]"
    both = start(launcher, tmp_path / "both", steps=3, save_outside=[0, 1]).finished()
    assert [word(each, "committed") for each in both] == ["[0, 3]", "[0, 3]"]


def test_a_rank_that_died_costs_a_stop_no_more_than_the_grace_period(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Its node does not answer: who has promised ends there, and not later, and never goes on alone."""
    orders = {"steps": 100_000, "apart": True, "more": {"grace": "2s"}, "die_at": [1, 40], "stop_at": [0, 80]}
    alone, dead = start(
        launcher, tmp_path / "run", ranks=1, nodes=2, options={"every": None}, **orders
    ).ended()
    assert dead.status is None
    assert word(alone, "ended").endswith("stop")
    assert "never goes on alone" in alone.err
