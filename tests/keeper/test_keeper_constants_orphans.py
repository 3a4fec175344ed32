"""Frozen instances that dead keepers left: they take no space from those that are written after them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from flashckpt.commit.verification import verify
from flashckpt.errors import KeeperError
from flashckpt.keeper.protocol import LOG_NAME
from flashckpt.store import open_store
from tests.keeper.driver import committed, eventually
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.keeper.test_keeper_constants import attached, files, named, saved
from tests.memory.mounts import small_tmpfs
from tests.recovery.scene import Crash, recovered, rows

# Between the constants, which are whole then, and the part that is to name them.
BEFORE_ITS_PART = "write.begun:1:kill"


def test_what_a_killed_keeper_wrote_is_no_longer_in_the_way(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with room for the constants once, as one of a large base is."""
    with small_tmpfs(24 << 20) as disk:
        with monkeypatch.context() as armed:
            armed.setenv("FLASHCKPT_CRASH_AT", BEFORE_ITS_PART)
            trainer = attached(disk / "run", runtime, constants_kib=16 << 10, kib=16)
        trainer.snapshot(1, persist=True)
        trainer.wait_committed(1)
        assert trainer.client.restarts == 1
        assert committed(trainer.run) == [1]
        [file] = files(trainer)
        assert named(trainer.run, 1).shard.file == file.name
        saved(trainer, 2)
        assert files(trainer) == [file]
        assert verify(open_store(str(trainer.run))).ok
        trainer.end()


def tended(trainer: FakeTrainer) -> None:
    with contextlib.suppress(KeeperError):  # one that comes after many that died has to wait
        trainer.client.tend()


def test_of_keepers_that_are_killed_over_and_over_one_file_stays(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as armed:
        armed.setenv("FLASHCKPT_CRASH_AT", BEFORE_ITS_PART)
        trainer = attached(tmp_path / "run", runtime)
        trainer.snapshot(1, persist=True)

        log = Path(trainer.folder.path) / LOG_NAME

        def killed() -> bool:
            # Each keeper adds one line. Most die before the client is connected to them.
            tended(trainer)
            return log.read_text().count(" keeper ") >= 4

        eventually(killed)

    def is_committed() -> bool:
        tended(trainer)
        return committed(trainer.run) == [1]

    eventually(is_committed)
    eventually(lambda: len(files(trainer)) == 1)
    assert committed(trainer.run) == [1]
    trainer.end()


def test_nor_is_it_in_the_way_of_a_recovery(
    small_disk: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_disk / "run"
    with monkeypatch.context() as armed:
        armed.setenv("FLASHCKPT_CRASH_AT", BEFORE_ITS_PART)
        crash = Crash(run, runtime, kib=16, constants_kib=5 << 10).slots()
    crash.trainer.do("snapshot", 1, True)
    eventually(lambda: keeper_pid(crash.folder) is None)
    crash.trainer.kill()
    [left] = run.glob("frozen/*")
    assert rows(recovered(run), "snapshot") == [("snapshot", "committed", 1)]
    assert committed(run) == [1]
    assert len(list(run.glob("frozen/*"))) == 1
    assert not crash.regions()
