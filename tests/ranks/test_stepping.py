"""Two ranks in a loop of `step()`: the call is the boundary. What is counted and what is committed is exact,
where the loop ends and where a signal ends it."""

import os
import signal
from pathlib import Path

import pytest

import flashckpt
from tests.ranks import test_coordination
from tests.ranks.launch import Ended, Launch, Launcher
from tests.ranks.test_coordination import last_step, until_step, word

pytestmark = pytest.mark.dist


def start(launcher: Launcher, run: Path, every: str | int | None = "auto", **orders: object) -> Launch:
    options = {"every": every, "persist_every": "5min"}
    return test_coordination.start(launcher, run, by_hand=True, options=options, **orders)


def done(ended: Ended) -> list[str]:
    return [line for line in ended.out if line.startswith("step ")]


@pytest.mark.long
@pytest.mark.parametrize("every", ["auto", None])
def test_a_loop_that_ends_counts_its_iterations(
    every: str | None, launcher: Launcher, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    parts = [start(launcher, run, steps=40, every=every).finished()]
    assert [word(each, "closed") for each in parts[0]] == ["40", "40"]
    assert flashckpt.steps(run)[-1] == 40
    # A step that was resumed from, where nothing is done, is the same step.
    parts.append(start(launcher, run, steps=40, every=every).finished())
    assert [word(each, "closed") for each in parts[1]] == ["40", "40"]
    parts.append(start(launcher, run, steps=60, every=every).finished())
    assert [each.out[0] for each in parts[2]] == ["resumed 40", "resumed 40"]
    assert [word(each, "closed") for each in parts[2]] == ["60", "60"]
    whole = start(launcher, tmp_path / "whole", steps=60).finished()
    for rank in range(2):
        assert [line for part in parts for line in done(part[rank])] == done(whole[rank])


def test_a_last_boundary_that_not_all_ranks_have_is_counted_once(launcher: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(launcher, run, steps=5000, misses_last=1, every=1).finished()
    [at] = {last_step(each) for each in first}
    assert at < 5000
    assert [word(each, "closed") for each in first] == [str(at)] * 2
    assert flashckpt.steps(run)[-1] == at
    again = start(launcher, run, steps=at + 5).finished()
    assert [each.out[0] for each in again] == [f"resumed {at}"] * 2
    assert [word(each, "closed") for each in again] == [str(at + 5)] * 2


@pytest.mark.parametrize(("name", "ranks"), [("SIGTERM", [1]), ("SIGTERM", [0, 1]), ("SIGINT", [0, 1])])
def test_a_signal_commits_the_boundary_at_which_all_have_stopped(
    name: str, ranks: list[int], launcher: Launcher, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launch = start(launcher, run, steps=3000)
    until_step(launch, 0, 20)
    for rank in ranks:
        os.kill(launch.pid_of(rank), getattr(signal, name))
    ended = launch.ended()
    [at] = {last_step(each) for each in ended}
    assert flashckpt.steps(run)[-1] == at, launch.told()
    for rank in {0, 1} - {*ranks}:
        assert (ended[rank].status, word(ended[rank], "closed")) == (0, str(at)), ended[rank].err
    again = start(launcher, run, steps=at + 20).finished()
    assert [each.out[0] for each in again] == [f"resumed {at}"] * 2
    assert [word(each, "closed") for each in again] == [str(at + 20)] * 2
    whole = start(launcher, tmp_path / "whole", steps=at + 20).finished()
    for rank in range(2):
        assert done(ended[rank]) + done(again[rank]) == done(whole[rank])


def test_a_stop_that_one_rank_has_no_snapshot_of_is_captured_again(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The rank with the signal waits for no commit that cannot come: both take one more snapshot."""
    run = tmp_path / "run"
    launch = start(launcher, run, steps=3000, misses_stop=1)
    until_step(launch, 0, 20)
    os.kill(launch.pid_of(0), signal.SIGTERM)
    ended = launch.ended()
    assert "missed" in ended[1].out, launch.told()
    [at] = {last_step(each) for each in ended}
    assert flashckpt.steps(run)[-1] == at, launch.told()
    assert (ended[1].status, word(ended[1], "closed")) == (0, str(at)), ended[1].err
