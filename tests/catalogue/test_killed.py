"""Jobs in processes of their own, killed at any moment, some beside each other."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashckpt.catalogue.changes import parent_of
from flashckpt.store.local import LocalStore
from tests.catalogue.snapshots import HOME, Job, boundaries, faults

REPOSITORY = Path(__file__).parents[2]


def started(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.catalogue.killed_job", str(folder)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def said(job: subprocess.Popen[str]) -> list[list[str]]:
    return [line.split() for line in job.communicate()[0].splitlines()]


@pytest.mark.process
@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.long)])
def test_killed_at_any_moment(tmp_path: Path, rounds: int) -> None:
    """Each round: two jobs start, and both are killed. The second one supersedes the first, or is refused if
    the first one commits faster than it can begin."""
    luck, last = random.Random(5), 0
    for number in range(rounds):
        first = started(tmp_path)
        assert first.stdout is not None
        began = first.stdout.readline().split()
        assert began[0] == "started"
        assert int(began[1]) >= last, f"round {number}: {last} was committed"
        second = started(tmp_path)
        time.sleep(luck.uniform(0, 0.4))
        for job in (first, second):
            job.kill()
        for words in said(first) + said(second):
            if words[0] == "committed":
                last = max(last, int(words[1]))
            else:
                assert words[0] == "started" or words[1] in ("SupersededError", "RunHeldError"), words
        assert faults(LocalStore(str(tmp_path)), is_collected=False) == []
    after = Job(LocalStore(str(tmp_path)))
    parent = parent_of(after.catalogue)
    assert parent is not None
    assert parent.boundary >= last > 0
    after.save(parent.boundary + 1)
    after.save(parent.boundary + 2)
    after.run(HOME.collect(after.catalogue))
    assert boundaries(after.catalogue) == [parent.boundary + 1, parent.boundary + 2]
    assert faults(after.store) == []
