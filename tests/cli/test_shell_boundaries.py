"""Of two boundaries with one step number the shell takes the newest, or that of STEP@ATTEMPT:BOUNDARY."""

from pathlib import Path

import pytest
from made_runs import MadeRun, Shell

from flashckpt.store import open_store
from tests import run_view
from tests.commit.runs import commit, name_of

pytestmark = pytest.mark.process


def test_a_command_takes_the_newest_or_the_named_boundary(run: MadeRun, shell: Shell, tmp_path: Path) -> None:
    attempt = run.attempt()
    for step, boundary in ((10, 10), (20, 20), (20, 21)):
        assert commit(run.store, step, attempt, boundary=boundary)
    lines = [line.split() for line in shell("ls", run.folder, "--all").out.splitlines()]
    found = [line[:2] for line in lines if line[:1] in (["10"], ["20"])]
    assert found == [["10", str(attempt)], ["20", f"{attempt}:20"], ["20", f"{attempt}:21"]]
    rows = shell("ls", run.folder, "--json").json["steps"]
    assert [(row["step"], row["boundary"]) for row in rows] == [(10, 10), (20, 20), (20, 21)]

    for step, boundary in (("20", 21), (f"20@{attempt}", 21), (f"20@{attempt}:20", 20)):
        assert shell("show", run.folder, step, "--json").json["boundary"] == boundary
    copied = shell("copy", run.folder, tmp_path / "copy", "--step", step, "--json").json["steps"]
    assert [row["boundary"] for row in copied] == [boundary]
    there = run_view.checkpoints(open_store(tmp_path / "copy"))
    assert there == (name_of(20, attempt, boundary),)
    assert shell("branch", run.folder, step, "--json").json["boundary"] == boundary
    newest = run_view.newest_attempt(run.store)
    assert newest is not None
    assert run_view.parent_of(run.store, newest) == name_of(20, attempt, boundary).id
    assert run_view.visible(run.store)[-1] == name_of(20, attempt, boundary)
    for name in ("20@{}:", "20@{}:x", "20@{}:-1", "20@:20", "20@{}:99999999999"):
        assert shell("show", run.folder, name.format(attempt)).code == 2, name

    [shard] = run.of(attempt, 20).glob("rank-*")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert shell("verify", run.folder, f"20@{attempt}:21").code == 0
    ended = shell("verify", run.folder, f"20@{attempt}:20", "--json")
    assert ended.code == 1
    assert {file["boundary"] for file in ended.json["files"]} == {20}
