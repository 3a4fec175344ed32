"""Deletions of a real keeper: beside persisting, without a trace that grows, and never of another's file."""

import os
import signal
import time
from pathlib import Path

from tests import run_view
from tests.events import ledger
from tests.keeper.driver import begun, committed, ended, eventually, saved
from tests.keeper.fake import FakeTrainer, keeper_pid


def beginning(tmp_path: Path, runtime: Path, **options: float) -> FakeTrainer:
    return begun(tmp_path / "run", runtime, keep=2, **options)


def shards(run: Path) -> set[str]:
    return {path.name for path in run.glob("data/*/*/rank-*")}


def unfinished(run: Path) -> list[Path]:
    """Shards that are being written, or whose writer was killed."""
    return [*run.glob("data/*/*/.rank-*.tmp")]


def test_a_slow_deletion_does_not_delay_the_next_commit(
    tmp_path: Path, runtime: Path, faults: Path, keeper: int
) -> None:
    trainer = beginning(tmp_path, runtime)
    (faults / "remove.pause").touch()
    saved(trainer, 1, 2, 3)
    eventually(lambda: (faults / "remove.paused").exists())
    saved(trainer, 4, 5, 6)
    assert keeper_pid(trainer.folder) == keeper
    assert committed(trainer.run) == [5, 6]
    assert len(shards(trainer.run)) > 2
    (faults / "remove.pause").unlink()
    eventually(lambda: len(shards(trainer.run)) == 2)
    assert [line["steps"] for line in ledger(trainer.run) if line["event"] == "prune"] == [[1], [2], [3], [4]]
    ended(trainer)


def test_a_keeper_does_not_leave_in_the_middle_of_a_deletion(
    tmp_path: Path, runtime: Path, faults: Path, keeper: int
) -> None:
    trainer = beginning(tmp_path, runtime)
    (faults / "remove.pause").touch()
    saved(trainer, 1, 2, 3)
    eventually(lambda: (faults / "remove.paused").exists())
    trainer.end()
    eventually(lambda: run_view.has_ended(trainer.store, trainer.attempt))
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert keeper_pid(trainer.folder) == keeper
    (faults / "remove.pause").unlink()
    eventually(lambda: keeper_pid(trainer.folder) is None)
    assert committed(trainer.run) == [2, 3]
    assert len(shards(trainer.run)) == 2, "the deletion came to its end"


def test_what_a_stopped_keeper_writes_is_never_committed(
    tmp_path: Path, runtime: Path, faults: Path, keeper: int
) -> None:
    """It lives and may go on at any time: its file has no name then."""
    trainer = beginning(tmp_path, runtime, timeout_s=5.0)
    (faults / "write.pause").touch()
    trainer.snapshot(1, persist=True)
    eventually(lambda: (faults / "write.paused").exists())
    [paused] = unfinished(trainer.run)
    os.kill(keeper, signal.SIGSTOP)
    trainer.client.tend()
    assert keeper_pid(trainer.folder) != keeper
    trainer.wait_committed(1)
    assert not paused.exists()
    (faults / "write.pause").unlink()
    os.kill(keeper, signal.SIGCONT)
    eventually(lambda: " (zombie)" in Path(f"/proc/{keeper}/status").read_text())
    assert committed(trainer.run) == [1]
    saved(trainer, 2, 3)
    eventually(lambda: len(shards(trainer.run)) == 2)
    assert not unfinished(trainer.run)
    assert committed(trainer.run) == [2, 3]
    ended(trainer)
