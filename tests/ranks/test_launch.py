"""The harness itself: what it starts meets, is found, and is gone when it closes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import Launcher

pytestmark = pytest.mark.dist
PROGRAM = "tests.ranks.standing"


def lives(pid: int) -> bool:
    """Whether it runs: who forked its launcher may not have reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nodes_are_runtime_folders_and_all_goes_when_it_closes(launcher: Launcher) -> None:
    job = launcher.fork(PROGRAM, "stand", ranks=1, nodes=2)
    job.until_said("all here")
    runtimes = [launcher.runtime(node) for node in range(2)]
    for rank in range(2):
        assert all(str(each) in job.said(rank)[0] for each in runtimes)
    pids = [job.pid_of(rank) for rank in range(2)]
    assert all(map(lives, pids))
    launcher.close()
    assert not any(map(lives, pids))
    assert not any(map(Path.exists, runtimes))


def test_how_each_rank_ended_is_told(launcher: Launcher) -> None:
    assert [each.status for each in launcher.fork(PROGRAM, "0").finished()] == [0, 0]
    assert [each.status for each in launcher.fork(PROGRAM, "3").ended()] == [3, 3]


@pytest.mark.long  # tests/ranks/test_kills.py has one launcher in the ordinary run
def test_one_rank_of_two_launchers_is_killed_and_the_group_is_started_again(launcher: Launcher) -> None:
    job = launcher.torchrun(PROGRAM, "stand", ranks=1, nodes=2, max_restarts=1)
    job.until_said("all here")
    job.kill_rank(1)
    job.until_said("all here", restart=1)
    pids = [job.pid_of(rank) for rank in range(2)]
    launcher.close()
    assert not any(map(lives, pids))
