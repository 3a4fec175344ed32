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


@pytest.mark.long
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


@pytest.mark.parametrize(("ranks", "nodes", "caller"), [(2, 1, 0), (2, 1, 1), (2, 2, 0), (2, 2, 3)])
def test_save_on_one_rank_is_taken_by_all(
    ranks: int, nodes: int, caller: int, launcher: Launcher, tmp_path: Path
) -> None:
    """`if rank == 0: checkpointer.save()`; the call of all ranks is of the very next boundary."""
    run, every = tmp_path / "run", list(range(ranks * nodes))
    orders = {"steps": 300, "save_at": {rank: [20] for rank in every} | {caller: [20, 120]}}
    ended = start(launcher, run, ranks, nodes, options={"every": None}, **orders).finished()
    steps = json.loads(word(ended[0], "committed"))
    assert steps[0] == 21
    assert len(steps) == 3
    assert 121 < steps[1] < steps[2] == 300
    assert not [line for each in ended for line in each.out if line.startswith("waited")]
    again = start(launcher, run, ranks, nodes, options={"every": None}, **orders).finished()
    assert {each.out[0].split()[1] for each in again} == {"300"}


def test_a_wait_before_the_announced_boundary_says_that_it_is_to_come(
    launcher: Launcher, tmp_path: Path
) -> None:
    orders = {"steps": 60, "save_at": {0: [20]}, "wait_at": {0: [21]}, "options": {"every": None}}
    first, _ = start(launcher, tmp_path / "run", **orders).finished()
    assert "not taken yet" in word(first, "waited PersistError")
    assert len(json.loads(word(first, "committed"))) == 2


def test_save_in_the_code_of_an_epoch_means_its_end(launcher: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    orders = {"steps": 10, "epochs": 3, "save_after": {0: [0], 1: [1]}, "options": {"every": None}}
    ended = start(launcher, run, **orders).finished()
    assert word(ended[0], "committed") == "[10, 20, 30]"
    assert not [line for each in ended for line in each.out if line.startswith("waited")]


@pytest.mark.long
@pytest.mark.parametrize("trouble", [{"stop_at": [0, 20]}, {"die_after": [1, 20]}], ids=["stop", "kill"])
def test_an_epochs_code_runs_with_its_last_batch(
    trouble: dict[str, object], launcher: Launcher, tmp_path: Path
) -> None:
    """Each epoch has one batch, so each boundary within one is its last."""
    run, orders = tmp_path / "run", {"steps": 1, "epochs": 60}
    first = start(launcher, run, **orders, **trouble)
    if "die_after" in trouble:
        until(lambda: first.forked[1].poll() is not None, "the death of rank 1", 120)
        first.kill()
    else:
        first.finished()
    before = [first.said(rank) for rank in range(2)]
    again = start(launcher, run, **orders).finished()
    whole = start(launcher, tmp_path / "whole", **orders).finished()
    for rank in range(2):
        kinds = ("step ", "epoch ")
        lines = [line for line in [*before[rank], *again[rank].out] if line.startswith(kinds)]
        expected = [line for line in whole[rank].out if line.startswith(kinds)]
        assert len(expected) == 120
        assert {*lines} == {*expected}
        if "stop_at" in trouble:
            assert lines == expected, "nothing is done twice"


@pytest.mark.long
def test_save_outside_of_a_loop_on_one_rank_alone_is_an_error(launcher: Launcher, tmp_path: Path) -> None:
    run, orders = tmp_path / "run", {"steps": 3, "options": {"every": None}}
    alone, other = start(launcher, run, save_outside=[0], call_timeout_s=3.0, **orders).finished()
    said = word(alone, "not saved BoundaryError")
    assert "outside of an iteration by rank 0 and not by rank 1" in said
    assert word(other, "committed") == "[3]"
    both = start(launcher, tmp_path / "both", save_outside=[0, 1], **orders).finished()
    assert [word(each, "committed") for each in both] == ["[0, 3]", "[0, 3]"]


@pytest.mark.long
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
    assert "never continues alone" in alone.err
