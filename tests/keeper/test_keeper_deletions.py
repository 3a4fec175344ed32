"""Deletions of a real keeper: beside persisting, without a trace that grows, and never of another's file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from flashckpt.commit import attempts
from tests.events import ledger
from tests.keeper.driver import committed, eventually, kill_keeper
from tests.keeper.fake import FakeTrainer, keeper_pid


def begun(tmp_path: Path, runtime: Path, **options: float) -> FakeTrainer:
    trainer = FakeTrainer(tmp_path / "run", runtime, keep=2, **options)  # type: ignore[arg-type]
    trainer.start()
    trainer.take_slots()
    return trainer


def shards(run: Path) -> set[str]:
    return {path.name for path in run.glob("data/*/*/shard-*")}


def end(trainer: FakeTrainer) -> None:
    trainer.end()
    eventually(lambda: keeper_pid(trainer.folder) is None)
    eventually(lambda: not Path(trainer.folder.path).exists())  # nothing stays behind


def test_a_slow_deletion_does_not_delay_the_next_commit(
    tmp_path: Path, runtime: Path, faults: Path, keeper: int
) -> None:
    trainer = begun(tmp_path, runtime)
    (faults / "remove.pause").touch()
    for step in (1, 2, 3):
        trainer.snapshot(step, persist=True)
        trainer.wait_committed(step)
    eventually(lambda: (faults / "remove.paused").exists())
    for step in (4, 5, 6):
        trainer.snapshot(step, persist=True)
        trainer.wait_committed(step)
    assert keeper_pid(trainer.folder) == keeper
    assert not [line for line in ledger(trainer.run) if line["event"] == "prune"]
    (faults / "remove.pause").unlink()
    eventually(lambda: committed(trainer.run) == [5, 6])
    end(trainer)


def test_a_keeper_does_not_leave_in_the_middle_of_a_deletion(
    tmp_path: Path, runtime: Path, faults: Path, keeper: int
) -> None:
    trainer = begun(tmp_path, runtime)
    (faults / "remove.pause").touch()
    for step in (1, 2, 3):
        trainer.snapshot(step, persist=True)
        trainer.wait_committed(step)
    eventually(lambda: (faults / "remove.paused").exists())
    trainer.end()
    eventually(lambda: attempts.attempts(trainer.store)[0].closed)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert keeper_pid(trainer.folder) == keeper
    (faults / "remove.pause").unlink()
    eventually(lambda: keeper_pid(trainer.folder) is None)
    assert committed(trainer.run) == [2, 3]
    assert len(shards(trainer.run)) == 2, "the deletion came to its end"


def test_commits_leave_nothing_that_grows(tmp_path: Path, runtime: Path) -> None:
    trainer = begun(tmp_path, runtime)
    for step in range(1, 21):
        trainer.snapshot(step, persist=True)
        trainer.wait_committed(step)
    eventually(lambda: len(list((trainer.run / "data" / str(trainer.attempt)).iterdir())) == 2)
    eventually(lambda: len(list((trainer.run / "commits").iterdir())) == 2)
    assert committed(trainer.run) == [19, 20]
    end(trainer)


def test_what_a_killed_keeper_left_half_written_goes(
    tmp_path: Path, runtime: Path, faults: Path, keeper: int
) -> None:
    trainer = begun(tmp_path, runtime)
    trainer.snapshot(1, persist=True)
    trainer.wait_committed(1)
    [first] = shards(trainer.run)
    (faults / "write.pause").touch()
    trainer.snapshot(2, persist=True)
    eventually(lambda: (faults / "write.paused").exists())
    [orphans] = shards(trainer.run) - {first}
    assert kill_keeper(trainer.folder) == keeper
    trainer.wait_committed(2)
    eventually(lambda: orphans not in shards(trainer.run))
    assert committed(trainer.run) == [1, 2], "what the dead keeper had published stays"
    assert first in shards(trainer.run)
    assert len(shards(trainer.run)) == 2
    eventually(lambda: any(orphans in str(line.get("unfinished")) for line in ledger(trainer.run)))
    end(trainer)


def test_what_a_stopped_keeper_writes_stays_until_it_is_dead(
    tmp_path: Path, runtime: Path, faults: Path, keeper: int
) -> None:
    """It lives and may go on at any time; its file goes when it cannot."""
    trainer = begun(tmp_path, runtime, timeout_s=5.0)
    (faults / "write.pause").touch()
    trainer.snapshot(1, persist=True)
    eventually(lambda: (faults / "write.paused").exists())
    [paused] = shards(trainer.run)
    os.kill(keeper, signal.SIGSTOP)
    trainer.client.tend()
    assert keeper_pid(trainer.folder) != keeper
    trainer.wait_committed(1)

    def beats() -> int:
        found = attempts.alive(trainer.store, trainer.attempt)
        return found.count if found is not None else 0

    before = beats()
    eventually(lambda: beats() >= before + 4)
    assert paused in shards(trainer.run)
    os.kill(keeper, signal.SIGKILL)
    eventually(lambda: shards(trainer.run) and paused not in shards(trainer.run))
    assert committed(trainer.run) == [1]
    end(trainer)
