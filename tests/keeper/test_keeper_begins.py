"""A keeper that was started and does not come: the next one is started at once, not after a pause."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt.keeper import client, start
from flashckpt.keeper.protocol import ELECTION_LOCK
from flashckpt.memory.runtime import RuntimeFolder
from tests.conftest import keepers_of
from tests.keeper.driver import eventually
from tests.keeper.fake import FakeTrainer

# Takes a lock of a runtime folder, says so, and stands until its input ends.
_HOLDS = """
import sys
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
lock = LifeLock.acquire(RuntimeFolder.at(sys.argv[1]), sys.argv[2])
print(lock is not None, flush=True)
sys.stdin.read()
"""


def held(folder: RuntimeFolder, name: str) -> subprocess.Popen[str]:
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", _HOLDS, folder.path, name], **given)  # type: ignore[call-overload]
    assert process.stdout.readline() == "True\n"
    return process  # type: ignore[no-any-return]


def dies_as_it_begins(begin: Callable[[], int], folder: RuntimeFolder, runtime: Path) -> int:
    os.environ["FLASHCKPT_CRASH_AT"] = "adopt.taken"
    try:
        return begin()
    finally:
        del os.environ["FLASHCKPT_CRASH_AT"]


def finds_another_that_dies(begin: Callable[[], int], folder: RuntimeFolder, runtime: Path) -> int:
    other = held(folder, ELECTION_LOCK)
    begun = begin()
    eventually(lambda: keepers_of(runtime) == [])
    other.kill()
    other.communicate()
    return begun


@pytest.mark.parametrize("how", [dies_as_it_begins, finds_another_that_dies])
def test_one_that_does_not_come_is_replaced_at_once(
    how: Callable[..., int], run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, starts = start.start, list[str]()

    def started(run: str, folder: RuntimeFolder) -> int:
        starts.append(run)
        if len(starts) == 1:
            return how(lambda: begin(run, folder), folder, runtime)
        return begin(run, folder)

    monkeypatch.setattr(start, "start", started)
    monkeypatch.setattr(client, "_START_AGAIN_S", 600.0)  # the pause would be longer than anybody waits
    trainer = FakeTrainer(run, runtime)
    assert len(starts) == 2
    trainer.end()
    eventually(lambda: keepers_of(runtime) == [])


@pytest.mark.long
def test_those_that_die_at_each_start_are_not_started_without_end(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor at the end of a run, when no pause is asked for."""
    begin, starts = start.start, list[str]()

    def started(run: str, folder: RuntimeFolder) -> int:
        starts.append(run)
        return dies_as_it_begins(lambda: begin(run, folder), folder, runtime)

    trainer = FakeTrainer(run, runtime)
    monkeypatch.setattr(start, "start", started)
    monkeypatch.setattr(client, "_START_AGAIN_S", 600.0)
    monkeypatch.setattr(client, "_START_TIMEOUT_S", 15.0)
    trainer.client.longest_pause_s = start.NO_PAUSE_S
    for pid in keepers_of(runtime):
        os.kill(pid, 9)
    with pytest.raises(client.KeeperError):
        trainer.client.tend()
    assert 1 <= len(starts) <= 2 * start._STARTS_AT_ONCE
