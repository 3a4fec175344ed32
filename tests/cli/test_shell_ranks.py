"""The shell on runs of several ranks and nodes: what it lists, shows and verifies, and whom it points at."""

import pytest
from made_runs import MadeRun, Shell, slices_of

from flashckpt.format.names import AttemptName

pytestmark = pytest.mark.process

NODES = ((0, 1), (2, 3))
WORLD = 4


@pytest.fixture
def made(run: MadeRun) -> tuple[MadeRun, AttemptName]:
    """Step 100 of four ranks on two nodes."""
    name = run.attempt(world=WORLD)
    run.commit_nodes(name, 100, *NODES)
    return run, name


def test_a_step_of_several_ranks_is_listed_and_shown(made: tuple[MadeRun, AttemptName], shell: Shell) -> None:
    run, _ = made
    [row] = shell("ls", run.folder, "--json").json["steps"]
    assert (row["step"], row["world"]) == (100, WORLD)
    shown = shell("show", run.folder, "--json").json
    assert (shown["world"], len(shown["files"]), shown["waiting"]) == (WORLD, WORLD, [])
    assert [(each["rank"], each["node"]) for each in shown["ranks"]] == [(0, 0), (1, 0), (2, 2), (3, 2)]
    found = {(each["name"], each["rank"]): each for each in shown["leaves"]}
    for rank in range(WORLD):
        for each in slices_of(100, rank, WORLD):
            row = found[each.name, rank]
            assert row["shape"] == list(each.region.shape)
            assert row["global_shape"] == list(each.whole.shape)
            assert row["file"].startswith(f"rank-{rank:05d}-")
    assert found["model.weight", 3]["box"] == [[9, 10], [0, 3]]
    assert found["model.bias", 3]["box"] is None
    text = shell("show", run.folder)
    assert text.code == 0
    assert "4, on 2 nodes" in text.out
    for name, shape, where in (
        ("model.weight", "10 × 3", "4 boxes on ranks 0–3"),
        ("model.bias", "3", "whole on ranks 0–3"),
        ("model.seen", "2", "each its own, on ranks 0–3"),
    ):
        [line] = [line for line in text.out.splitlines() if line.strip().startswith(name)]
        assert shape in line
        assert where in line

    text = shell("show", run.folder, "--rank", 1)
    assert text.code == 0
    [line] = [line for line in text.out.splitlines() if line.strip().startswith("model.weight")]
    assert "[3:6, :]" in line
    one = shell("show", run.folder, "--rank", 1, "--json").json
    assert {each["rank"] for each in one["leaves"]} == {1}
    ended = shell("show", run.folder, "--rank", 4)
    assert ended.code == 3
    assert "made by 4 ranks and has no rank 4" in ended.err


def test_a_slow_rank_is_named(made: tuple[MadeRun, AttemptName], shell: Shell) -> None:
    run, attempt = made
    times = {"event": "times", "steps": 9, "captures": 3, "capture_seconds": 0.01, "step_seconds": 0.5}
    lines = [times | {"rank": rank, "host": f"node{rank // 2}"} for rank in range(WORLD)]
    lines[1] |= {"capture_seconds": 0.2}
    # An older line of rank 3 counts no more; what is no number is nothing.
    lines.insert(0, times | {"rank": 3, "step_seconds": 99.0, "host": "node1"})
    lines.append({"event": "times", "rank": 2, "step_seconds": "fast", "capture_seconds": -1})
    written = [[0, 1.0, 10], [1, 1.1, 10]], [[2, 0.9, 10], [3, 7.0, 10]], [[3, "x", 1]], 5
    lines += [{"event": "persist", "step": 100, "written": rows} for rows in written]
    lines.append({"event": "persist", "step": 90, "written": [[0, 99.0, 1]]})
    run.tell(attempt, *lines)
    ranks = {each["rank"]: each for each in shell("show", run.folder, "--json").json["ranks"]}
    assert [ranks[rank]["far"] for rank in range(WORLD)] == [[], ["capture_s"], [], ["write_s"]]
    assert (ranks[3]["write_s"], ranks[3]["step_s"], ranks[3]["host"]) == (7.0, 0.5, "node1")
    said = shell("show", run.folder).err
    slow = "rank 1 on node0 is slower than the others: the call of a snapshot took 0.2 s, theirs 0.01 s"
    assert slow in said
    assert "rank 3 on node1 is slower" in said
    assert said.count("slower") == 2


def test_the_ranks_that_a_step_waits_for_are_named(made: tuple[MadeRun, AttemptName], shell: Shell) -> None:
    run, attempt = made
    run.publish_node(attempt, 200, NODES[0], WORLD)
    words = f"step 200 of attempt {attempt} is not committed: it waits for ranks 2–3"
    for command in ("ls", "show"):
        ended = shell(command, run.folder)
        assert ended.code == 0
        assert words in ended.err
        [waits] = shell(command, run.folder, "--json").json["waiting"]
        assert (waits["step"], waits["missing"], waits["world"]) == (200, [2, 3], WORLD)
    # What an older step waits for is nobody's trouble any more.
    run.publish_node(attempt, 90, NODES[1], WORLD)
    run.commit_nodes(attempt, 300, *NODES)
    assert shell("ls", run.folder, "--json").json["waiting"] == []
