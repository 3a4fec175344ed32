"""`flashckpt copy` in the shell."""

from pathlib import Path

import pytest
from made_runs import MadeRun, Shell

import flashckpt

pytestmark = pytest.mark.process


def test_a_run_is_copied_and_is_one_there(run: MadeRun, shell: Shell, tmp_path: Path) -> None:
    attempt = run.attempt()
    shards = [run.commit(attempt, step) for step in (10, 20, 30)]
    there = tmp_path / "there"

    newest = shell("copy", run.folder, there, "--json")
    assert newest.code == 0, newest.err
    size = shards[2].stat().st_size
    row = {"step": 30, "attempt": str(attempt), "boundary": 30, "outcome": "copied"}
    row |= {"num_bytes": size, "sent_bytes": size, "visible": True, "problem": None}
    assert newest.json["steps"] == [row]
    assert newest.json["target"] == str(there)

    damaged = shards[1].read_bytes()
    shards[1].write_bytes(damaged[:-1] + b"\xff")
    rest = shell("copy", run.folder, there, "--all", "--json")
    assert rest.code == 1
    outcomes = {each["step"]: each["outcome"] for each in rest.json["steps"]}
    assert outcomes == {30: "there already", 20: None, 10: "copied"}
    assert not rest.json["ok"]
    alone = shell("copy", run.folder, tmp_path / "another", "--step", 20, "--json")
    assert alone.json["error"]["path"] == str(shards[1].relative_to(run.folder))
    assert "Step 20 was not copied" in alone.json["error"]["message"]

    shards[1].write_bytes(damaged)
    told = shell("copy", run.folder, there, "--step", 20)
    assert told.code == 0
    assert f"to {there}" in told.out
    again = shell("copy", run.folder, there)
    assert "lengths" in again.err
    assert f"flashckpt verify {there}" in " ".join(again.err.split())
    assert flashckpt.verify(there).ok
    assert flashckpt.steps(there) == [10, 20, 30]

    none = shell("copy", run.folder, there, "--step", 40, "--json")
    assert (none.code, none.json["error"]["kind"]) == (3, "NoSuchStepError")
