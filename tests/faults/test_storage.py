"""Storage that fails, stops, or is slow: training continues, wait() says so, and the next save works."""

import errno
import subprocess
from pathlib import Path

import pytest

from flashckpt.errors import PersistError
from flashckpt.format.manifest import PART
from tests.faults.conftest import LINK, SYNC, WRITE, Faults
from tests.faults.training import training
from tests.memory.mounts import fill
from tests.waiting import until


def shards_without_a_part(run: Path) -> list[Path]:
    folders = {path.parent for path in (run / "data").glob("*/*/rank-*")}
    return [folder for folder in folders if not any(PART.fullmatch(path.name) for path in folder.iterdir())]


@pytest.mark.parametrize("calls", [WRITE, SYNC, LINK], ids=["write", "sync", "link"])
def test_an_io_error(calls: int, tmp_path: Path, faults: Faults) -> None:
    with training(tmp_path / "run") as trained:
        faults.become("fail", calls)
        trained.save()
        with pytest.raises(PersistError, match="Input/output error"):
            trained.checkpointer.wait()
        assert faults.hits > 0
        trained.goes_on()
        # It tries again and again: between two tries nothing lies about.
        until(lambda: not shards_without_a_part(tmp_path / "run"), "what was begun to be removed")
        faults.become("well")
        trained.recovers()


def test_a_file_system_that_cannot_sync_folders(tmp_path: Path, faults: Faults) -> None:
    """As some on a network: it is used all the same."""
    with training(tmp_path / "run") as trained:
        for code in (errno.EINVAL, errno.ENOTSUP):
            before = faults.hits
            faults.become("refuse", SYNC, code)
            trained.recovers()
            assert faults.hits > before + 3
        faults.become("refuse", SYNC, errno.EIO)
        trained.save()
        with pytest.raises(PersistError, match="Input/output error"):
            trained.checkpointer.wait()
        faults.become("well")
        trained.recovers()


@pytest.mark.parametrize("calls", [WRITE, SYNC, LINK], ids=["write", "sync", "link"])
def test_storage_that_hangs(calls: int, tmp_path: Path, faults: Faults) -> None:
    with training(tmp_path / "run", grace="1s") as trained:
        faults.become("hang", calls)
        trained.save()
        until(lambda: faults.hits > 0, "the keeper to hang in storage")
        trained.goes_on()
        with pytest.raises(PersistError, match="no progress"):
            trained.checkpointer.wait()
        faults.become("well")
        trained.recovers()


def test_short_writes_are_written_to_their_end(tmp_path: Path, faults: Faults) -> None:
    with training(tmp_path / "run") as trained:
        faults.become("short", WRITE)
        trained.recovers()
        assert faults.hits > 3


def test_a_slow_disk(tmp_path: Path, faults: Faults) -> None:
    """Each write and sync takes 50 ms more: training passes boundaries meanwhile."""
    with training(tmp_path / "run") as trained:
        faults.become("slow", WRITE | SYNC, micros=50_000)
        before = faults.hits
        trained.save()
        until(lambda: faults.hits > before, "the keeper to write")
        trained.goes_on()
        trained.recovers()
        assert trained.checkpointer.report()["newest_committed_step"] == trained.checkpointer.completed


def test_a_disk_that_becomes_read_only(small_disk: Path, runtime: Path) -> None:
    with training(small_disk / "run") as trained:
        _remount(small_disk, "ro")
        trained.save()
        with pytest.raises(PersistError, match="Read-only"):
            trained.checkpointer.wait()
        trained.goes_on()
        _remount(small_disk, "rw")
        trained.recovers()


def test_a_disk_that_is_full(small_disk: Path, runtime: Path) -> None:
    with training(small_disk / "run") as trained:
        filler = fill(small_disk, left=100_000)
        trained.save()
        with pytest.raises(PersistError, match="No space"):
            trained.checkpointer.wait()
        trained.goes_on()
        assert shards_without_a_part(small_disk / "run") == []
        filler.unlink()
        trained.recovers()


def _remount(folder: Path, how: str) -> None:
    command = ["mount", "-o", f"remount,{how}", str(folder)]
    # Busy while the keeper has a file of it open for writing.
    until(lambda: subprocess.run(command, check=False, capture_output=True).returncode == 0, "the remount")
