"""Ranks and their run's remote: each reads from there what it has not here, however many made the step."""

import json
from pathlib import Path

import pytest

import flashckpt
from flashckpt.store import open_store
from tests import run_view
from tests.commit.runs import newest_of
from tests.folders import flip
from tests.ranks.launch import Launch, Launcher
from tests.ranks.test_ddp import PROGRAM, steps_of
from tests.waiting import until

pytestmark = pytest.mark.dist

OLDER, SAVED, HELD = 4, 8, 10


def start(launcher: Launcher, run: Path, remote: Path, ranks: int, **orders: object) -> Launch:
    orders["options"] = {"remote": str(remote)}
    return launcher.fork(PROGRAM, run, json.dumps(orders), ranks=ranks)


def test_a_damaged_step_and_a_new_node(launcher: Launcher, tmp_path: Path) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    killed = start(launcher, run, remote, 2, hold_at=HELD, save_at=[OLDER, SAVED])
    killed.until_said(f"held {HELD}")
    until(lambda: remote.exists() and SAVED in flashckpt.steps(remote), "the copy")
    launcher.freeze_keepers(0)
    killed.kill()
    before = [steps_of(killed.said(rank)) for rank in range(2)]
    launcher.kill_keepers(remove_regions=True)
    # Both ranks need this file.
    name = newest_of(open_store(run), SAVED)
    record = run_view.read(open_store(run), name)
    path = run / record.shard_path(0)
    flip(path, path.stat().st_size // 2)

    ended = start(launcher, run, remote, 2).finished()
    began = [each.out[0] for each in ended]
    assert f"resumed {SAVED} remote" in began, "and not step 4"
    assert {line.rpartition(" ")[0] for line in began} == {f"resumed {SAVED}"}
    for rank in range(2):
        done = steps_of(ended[rank].out)
        assert [done[step] for step in (SAVED + 1, HELD)] == [
            before[rank][step] for step in (SAVED + 1, HELD)
        ]
    last = flashckpt.steps(run)[-1]
    until(lambda: flashckpt.steps(remote)[-1] == last, "what came last")

    launcher.kill_keepers(remove_regions=True)
    # On another node, with another number of ranks: one epoch more.
    [alone] = start(launcher, tmp_path / "new", remote, 1, epochs=4).finished()
    assert alone.out[0] == f"resumed {last} remote"
    assert min(steps_of(alone.out)) == last + 1
