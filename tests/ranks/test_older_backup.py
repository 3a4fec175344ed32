"""An older copy of the run's folder is put back while one node's memory has snapshots of later attempts."""

import json
import shutil
from pathlib import Path

import pytest

import flashckpt
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.ranks.launch import Launcher
from tests.ranks.test_ddp import PROGRAM, steps_of
from tests.waiting import until

pytestmark = pytest.mark.dist

SAVED, HELD = 4, 6


def test_the_next_attempt_is_newer_than_those_in_any_nodes_memory(launcher: Launcher, tmp_path: Path) -> None:
    run, backup = tmp_path / "run", tmp_path / "backup"
    for number, held in enumerate((SAVED, HELD)):
        orders = {"save_at": SAVED if number == 0 else "each", "hold_at": held, "keep_last": 100}
        job = launcher.fork(PROGRAM, run, json.dumps(orders), ranks=1, nodes=2, restart=number)
        job.until_said(f"held {held}")
        if number == 0:
            until(lambda: flashckpt.steps(run) == [SAVED], "a commit")
        launcher.freeze_keepers(0, 1)
        job.kill()
        for node in range(2):
            launcher.kill_keepers(node, remove_regions=number == 0)
        if number == 0:
            shutil.copytree(run, backup)
    for each in ("data", "catalogue", "alive"):
        shutil.rmtree(run / each)
    shutil.copytree(backup, run, dirs_exist_ok=True)
    launcher.kill_keepers(0, remove_regions=True)
    # Attempt 2 is in the memory of rank 1's node alone.
    job = launcher.fork(PROGRAM, run, json.dumps({"save_at": "each"}), ranks=1, nodes=2, restart=2)
    ended = job.finished()
    for rank in range(2):
        assert ended[rank].out[0] == f"resumed {SAVED} local"
        assert min(steps_of(ended[rank].out)) == SAVED + 1
    assert run_view.attempts(LocalStore(str(run)))[-1].number == 3
    assert flashckpt.steps(run)[-1] == max(steps_of(ended[0].out))
