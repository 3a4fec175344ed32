"""The runtime folder is swept away under a run (a logout that removes what its user has in shared memory)."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from flashckpt.memory.runtime import is_alive
from tests import run_view
from tests.events import ledger
from tests.keeper.driver import Process, committed, eventually, runtime_of
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.keeper.faulty import faulty_keeper


def swept(runtime: Path) -> None:
    for entry in runtime.iterdir():
        shutil.rmtree(entry)


def begun(run: Path, runtime: Path) -> FakeTrainer:
    trainer = FakeTrainer(run, runtime)
    trainer.start()
    trainer.take_slots()
    return trainer


def test_a_run_goes_on_without_its_folder(tmp_path: Path, runtime: Path) -> None:
    trainer = begun(tmp_path / "run", runtime)
    trainer.snapshot(1, persist=True)
    trainer.wait_committed(1)
    trainer.snapshot(2)
    slots = [slot.name for slot in trainer.slots]
    swept(runtime)
    # What only the trainer holds now is handed to the next keeper, the sealed step too.
    assert eventually(trainer.client.tend)
    assert [step for _, step in sorted(trainer.survivors(), key=lambda row: row[1])] == [1, 2]
    for step in (3, 4, 5):
        trainer.snapshot(step, persist=True)
        trainer.wait_committed(step)
    assert [slot.name for slot in trainer.slots] == slots
    assert is_alive(trainer.folder, trainer.life.name)
    # The first keeper may have taken the trainer for dead when its lock was swept away, and saved step 2.
    eventually(lambda: set(committed(trainer.run)) - {2} == {3, 4, 5})
    assert run_view.endings(trainer.store) == {trainer.attempt: ""}, "it lives"
    trainer.end()
    eventually(lambda: keeper_pid(trainer.folder) is None)
    assert run_view.has_ended(trainer.store, trainer.attempt)
    assert not Path(trainer.folder.path).exists(), "nothing stays behind"


def test_a_life_lock_that_was_removed_is_taken_again(tmp_path: Path, runtime: Path) -> None:
    trainer = begun(tmp_path / "run", runtime)
    pid = keeper_pid(trainer.folder)
    os.unlink(Path(trainer.folder.path) / trainer.life.name)
    assert trainer.client.tend() is False, "it is told all again, and is no new one"
    assert trainer.life.stands(trainer.folder)
    assert (keeper_pid(trainer.folder), trainer.client.restarts) == (pid, 0)
    trainer.snapshot(1, persist=True)
    trainer.wait_committed(1)
    trainer.end()
    eventually(lambda: keeper_pid(trainer.folder) is None)
    assert not Path(trainer.folder.path).exists()


def test_a_keeper_whose_trainer_is_dead_saves_what_it_holds(tmp_path: Path, runtime: Path) -> None:
    run, faults = tmp_path / "run", tmp_path / "faults"
    with faulty_keeper(run, runtime, faults) as keeper:
        trainer = Process(run, runtime)
        trainer.do("start", None, 0, None)
        trainer.do("slots", 3)
        (faults / "write.pause").touch()
        trainer.do("snapshot", 7, True)
        eventually(lambda: (faults / "write.paused").exists())
        trainer.kill()
        eventually(lambda: any(line["event"] == "death" for line in ledger(run)))
        folder = runtime_of(run, runtime)
        swept(runtime)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert keeper.poll() is None, "it has looked at its folder several times by now"
        (faults / "write.pause").unlink()
        eventually(lambda: committed(run) == [7])
        keeper.wait(240)
        assert keeper.returncode != -signal.SIGKILL
        assert not folder.exists()
