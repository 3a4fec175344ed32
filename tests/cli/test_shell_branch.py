"""`branch`: what it makes the next start go on from, and when it is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import MadeRun, Shell

from flashckpt.format.names import CommitName
from flashckpt.memory.runtime import identity_of
from tests import run_view

pytestmark = pytest.mark.process

HOLD_LOCK = """
import sys
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
folder = RuntimeFolder.open(sys.argv[1], sys.argv[2])
assert LifeLock.acquire(folder, "trainer.lock")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_branch_at_an_older_step_and_back(run: MadeRun, shell: Shell, tmp_path: Path) -> None:
    """Nothing is deleted, and no runtime folder is made by asking for its locks."""
    first = run.attempt()
    for step in (10, 20, 30):
        run.commit(first, step)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    beside = sorted(tmp_path.iterdir())
    ended = shell("branch", run.folder, 20, "--json")
    assert ended.code == 0
    assert (ended.json["step"], ended.json["parent"]) == (20, str(first))
    assert run_view.steps(run.store) == [10, 20]
    newest = run_view.attempts(run.store)[-1]
    assert (str(newest), run_view.ending(run.store, newest)) == (ended.json["attempt"], "closed")

    back = shell("branch", run.folder, f"30@{first}")
    assert back.code == 0
    assert "resumes from step 30" in back.out
    assert run_view.steps(run.store) == [10, 20, 30]
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(tmp_path.iterdir()) == beside


def test_branch_is_refused_while_a_trainer_lives_here(run: MadeRun, shell: Shell, tmp_path: Path) -> None:
    identity = identity_of(run_view.run_id(run.store), run.store.place())
    trainer = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(tmp_path), identity],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    with trainer:
        runtime = trainer.stdout.readline().strip()
        first = run.attempt(owner=run_view.local_owner(runtime, "trainer.lock"), ended=False)
        run.commit(first, 10)
        held = shell("branch", run.folder, 10, "--json")
        assert (held.code, held.json["error"]["kind"]) == (3, "RunHeldError")
        assert str(run_view.local_owner().pid) in held.err, "the message names the process that began it"
        assert len(run_view.attempts(run.store)) == 1
        trainer.kill()
    # The same attempt; its lock is free.
    assert shell("branch", run.folder, 10).code == 0
    assert len(run_view.attempts(run.store)) == 2


def test_branch_at_a_step_that_failed_verification_is_told(run: MadeRun, shell: Shell) -> None:
    first = run.attempt()
    for step in (10, 20):
        run.commit(first, step)
    run_view.mark_damaged(run.store, CommitName(20, first, 20), why="a digest differs")
    ended = shell("branch", run.folder, 20)
    assert ended.code == 0
    assert f"failed verification on {run_view.this_host()}: a digest differs" in ended.err
    assert run_view.resumed(run.store).step == 20, "a start verifies it"
    assert shell("branch", run.folder, 20, "--json").json["damage"] == "a digest differs"
    ended = shell("branch", run.folder, 10, "--json")
    assert (ended.json["damage"], ended.err) == (None, "")
