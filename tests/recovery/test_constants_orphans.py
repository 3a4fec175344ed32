"""A frozen file that no step names takes the room of no later attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.keeper.driver import committed, eventually
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.recovery.scene import Crash, recovered, rows, whole_tree


def constants_files(run: Path) -> list[Path]:
    return sorted(run.glob("data/*/*/frozen-*"))


def killed_before_its_part(run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, **how: int) -> Crash:
    """Trainer, keeper and memory are gone, the constants are whole, and no part names them."""
    with monkeypatch.context() as armed:
        armed.setenv("FLASHCKPT_CRASH_AT", "write.begun:1:kill")
        crash = Crash(run, runtime, **how).slots()
    crash.trainer.do("snapshot", 1, True)
    eventually(lambda: keeper_pid(crash.folder) is None)
    crash.trainer.kill()
    for name in crash.regions():
        crash.folder.remove(name)
    return crash


def test_they_take_the_room_of_no_later_attempt(
    small_disk: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_disk / "run"
    killed_before_its_part(run, runtime, monkeypatch, kib=16, constants_kib=5 << 10)
    [left] = constants_files(run)
    before = whole_tree(run)
    said = recovered(run, dry_run=True)
    assert whole_tree(run) == before
    done = recovered(run)
    assert rows(said) == rows(done) == []
    assert constants_files(run) == [left], "a keeper of this attempt may be about to name it"
    second = FakeTrainer(run, runtime, kib=16, constants_kib=5 << 10)
    second.start()
    second.take_slots()
    second.snapshot(1, persist=True)
    second.wait_committed(1, 60)
    assert committed(run) == [1]
    eventually(lambda: left not in constants_files(run))
    second.end()
