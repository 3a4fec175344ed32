"""Several processes with the library's own threads: what they capture, where they end, what becomes of it."""

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


@pytest.mark.parametrize(("nodes", "caller"), [(1, 0), (2, 3)])
def test_save_on_one_rank_is_taken_by_all(
    nodes: int, caller: int, launcher: Launcher, tmp_path: Path
) -> None:
    """`if rank == 0: checkpointer.save()`; the call of all ranks is of the very next boundary. A wait() that
    comes before the boundary says that it is to come."""
    run, every = tmp_path / "run", range(2 * nodes)
    orders = {"steps": 220, "save_at": {rank: [20] for rank in every} | {caller: [20, 60]}}
    orders["wait_at"] = {caller: [61]}
    ended = start(launcher, run, 2, nodes, options={"every": None}, **orders).finished()
    steps = json.loads(word(ended[0], "committed"))
    assert steps[0] == 21
    assert len(steps) == 3
    assert 61 < steps[1] < steps[2] == 220
    assert "not taken yet" in word(ended[caller], "waited PersistError")
    assert len([line for each in ended for line in each.out if line.startswith("waited")]) == 1


def test_save_in_the_code_of_an_epoch_means_its_end(launcher: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    orders = {"steps": 10, "epochs": 3, "save_after": {0: [0], 1: [1]}, "options": {"every": None}}
    ended = start(launcher, run, **orders).finished()
    assert word(ended[0], "committed") == "[10, 20, 30]"
    assert not [line for each in ended for line in each.out if line.startswith("waited")]


@pytest.mark.long
def test_an_epochs_code_runs_with_its_last_batch(launcher: Launcher, tmp_path: Path) -> None:
    """Each epoch has one batch, so each boundary within one is its last. Nothing is done twice."""
    run, orders = tmp_path / "run", {"steps": 1, "epochs": 60}
    first = start(launcher, run, stop_at=[0, 20], **orders).finished()
    again = start(launcher, run, **orders).finished()
    whole = start(launcher, tmp_path / "whole", **orders).finished()
    for rank in range(2):
        kinds = ("step ", "epoch ")
        lines = [line for line in [*first[rank].out, *again[rank].out] if line.startswith(kinds)]
        expected = [line for line in whole[rank].out if line.startswith(kinds)]
        assert len(expected) == 120
        assert lines == expected


@pytest.mark.long
def test_save_outside_of_a_loop_on_one_rank_alone_is_an_error(launcher: Launcher, tmp_path: Path) -> None:
    run, orders = tmp_path / "run", {"steps": 3, "options": {"every": None}}
    alone, other = start(launcher, run, save_outside=[0], call_timeout_s=3.0, **orders).finished()
    said = word(alone, "not saved BoundaryError")
    assert "outside of an iteration by rank 0 and not by rank 1" in said
    assert word(other, "committed") == "[3]"
    both = start(launcher, tmp_path / "both", save_outside=[0, 1], **orders).finished()
    assert [word(each, "committed") for each in both] == ["[0, 3]", "[0, 3]"]
