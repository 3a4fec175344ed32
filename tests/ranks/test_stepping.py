"""Two ranks in a loop of `step()`: the call is the boundary. What is counted and what is committed is exact,
where the loop ends and where a signal ends it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import flashckpt
from tests.ranks.launch import Ended, Launch, Launcher
from tests.ranks.test_coordination import last_step, until_step, word
from tests.waiting import until

pytestmark = pytest.mark.dist
PROGRAM = "tests.ranks.stepping"


def start(launcher: Launcher, run: Path, **orders: object) -> Launch:
    return launcher.fork(PROGRAM, run, json.dumps(orders))


def done(ended: Ended) -> list[str]:
    return [line for line in ended.out if line.startswith("step ")]


@pytest.mark.long
@pytest.mark.parametrize(
    "orders",
    [
        {},
        {"options": {"every": None, "persist_every": None}},
        {"options": {"every": 1}},
    ],
    ids=["auto", "none", "every"],
)
def test_a_loop_that_ends_counts_its_iterations(
    orders: dict[str, object], launcher: Launcher, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    parts = [start(launcher, run, steps=40, **orders).finished()]
    assert [word(each, "closed") for each in parts[0]] == ["40", "40"]
    assert flashckpt.steps(run)[-1] == 40
    # A step that was resumed from, where nothing is done, is the same step.
    parts.append(start(launcher, run, steps=40, **orders).finished())
    assert [word(each, "closed") for each in parts[1]] == ["40", "40"]
    parts.append(start(launcher, run, steps=60, **orders).finished())
    assert [each.out[0] for each in parts[2]] == ["resumed 40", "resumed 40"]
    assert [word(each, "closed") for each in parts[2]] == ["60", "60"]
    whole = start(launcher, tmp_path / "whole", steps=60).finished()
    for rank in range(2):
        assert [line for part in parts for line in done(part[rank])] == done(whole[rank])


def test_a_last_boundary_that_not_all_ranks_have_is_counted_once(launcher: Launcher, tmp_path: Path) -> None:
    run, options = tmp_path / "run", {"every": 1}
    first = start(launcher, run, steps=5000, misses_last=1, options=options).finished()
    [at] = {last_step(each) for each in first}
    assert at < 5000
    assert [word(each, "closed") for each in first] == [str(at)] * 2
    assert flashckpt.steps(run)[-1] == at
    again = start(launcher, run, steps=at + 5).finished()
    assert [each.out[0] for each in again] == [f"resumed {at}"] * 2
    assert [word(each, "closed") for each in again] == [str(at + 5)] * 2


def test_a_job_that_was_killed_counts_on(launcher: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch = start(launcher, run, steps=3000, options={"every": 1, "persist_every": 5})
    # Of 40 short iterations on a busy machine all may pass before the keeper gives slots.
    until_step(launch, 0, 40)
    until(lambda: flashckpt.steps(run), "a committed step")
    launch.kill()
    killed = launch.ended()
    end = max(map(last_step, killed)) + 20
    again = start(launcher, run, steps=end).finished()
    assert [word(each, "closed") for each in again] == [str(end)] * 2
    assert flashckpt.steps(run)[-1] == end
    whole = start(launcher, tmp_path / "whole", steps=end).finished()
    for rank in range(2):
        from_step = int(again[rank].out[0].removeprefix("resumed "))
        assert 0 < from_step <= last_step(killed[rank])
        assert done(killed[rank])[:from_step] + done(again[rank]) == done(whole[rank])


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
    again = start(launcher, run, steps=at + 20).finished()
    assert [each.out[0] for each in again] == [f"resumed {at}"] * 2
    assert [word(each, "closed") for each in again] == [str(at + 20)] * 2
    whole = start(launcher, tmp_path / "whole", steps=at + 20).finished()
    for rank in range(2):
        assert done(ended[rank]) + done(again[rank]) == done(whole[rank])
