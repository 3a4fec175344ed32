"""The shell and a run's remote: it is named and verified, and a start takes its steps."""

from pathlib import Path

import pytest
from made_runs import MadeRun, Shell

import flashckpt
from flashckpt.format.names import AttemptName
from flashckpt.replication.run_copy import copy_run
from flashckpt.store.local import LocalStore

pytestmark = pytest.mark.process


def trained_with(run: MadeRun, attempt: AttemptName, remote: Path) -> None:
    """What the ledger of an attempt with a remote says."""
    run.tell(attempt, {"time": 1.0, "event": "attach", "step": 0, "world": 1, "remote": str(remote)})


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def test_the_remote_is_named_and_verified(run: MadeRun, shell: Shell, remote: Path) -> None:
    attempt = run.attempt()
    run.commit(attempt, 10)
    assert shell("ls", run.folder, "--json").json["remote"] is None
    wrong = shell("verify", run.folder, "--remote", "auto")
    assert (wrong.code, "--remote auto" in wrong.err) == (2, True)
    trained_with(run, attempt, remote)
    copy_run(run.store, LocalStore(str(remote)))

    assert shell("ls", run.folder, "--json").json["remote"] == str(remote)
    assert str(remote) in shell("ls", run.folder).err
    assert str(remote) in shell("show", run.folder).out
    assert shell("show", run.folder, "--json").json["remote"] == str(remote)
    assert shell("verify", run.folder, "--json").json["remote"] is None
    both = shell("verify", run.folder, "--remote", "auto", "--json")
    assert (both.code, both.json["ok"], both.json["remote"]["ok"]) == (0, True, True)
    assert both.json["remote"]["run"] == str(remote)

    [shard] = remote.glob("data/*/*/rank-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    told = shell("verify", run.folder, "--remote", remote)
    mended = f"`flashckpt copy {run.folder} {remote} --step 10@{attempt}:10 --repair`"
    assert (told.code, mended in told.err) == (1, True), told.err
    done = shell(*mended.strip("`").split()[1:], "--json")
    assert (done.code, done.json["steps"][0]["outcome"]) == (0, "repaired"), done.err
    assert flashckpt.verify(remote).ok


def test_a_recovery_says_what_a_start_takes_from_the_remote(run: MadeRun, shell: Shell, remote: Path) -> None:
    attempt = run.attempt()
    shards = [run.commit(attempt, step) for step in (10, 20)]
    copy_run(run.store, LocalStore(str(remote)))
    shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"\xff")
    assert shell("recover", run.folder, "--dry-run", "--json").json["resume"]["step"] == 10
    resume = shell("recover", run.folder, "--remote", remote, "--dry-run", "--json").json["resume"]
    assert (resume["step"], resume["tier"]) == (20, "remote")

    # A remote that is away: what is here is saved all the same.
    (run.folder.parent / "file").touch()
    away = shell("recover", run.folder, "--remote", run.folder.parent / "file" / "run", "--json")
    assert (away.code, away.json["resume"]["step"]) == (1, 10), away.err
