"""The runtime folder is swept away under a run (a logout that removes what its user has in shared memory)."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from flashckpt.memory.runtime import is_alive
from tests import run_view
from tests.events import ledger
from tests.keeper.driver import begun, begun_process, committed, ended, eventually, runtime_of, saved
from tests.keeper.faulty import faulty_keeper


def swept(runtime: Path) -> None:
    for entry in runtime.iterdir():
        shutil.rmtree(entry)


def test_a_run_goes_on_without_its_folder(run: Path, runtime: Path) -> None:
    trainer = begun(run, runtime)
    saved(trainer, 1)
    trainer.snapshot(2)
    slots = [slot.name for slot in trainer.slots]
    swept(runtime)
    # What only the trainer holds now is handed to the next keeper, the sealed step too.
    assert eventually(trainer.client.tend)
    assert [step for _, step in sorted(trainer.survivors(), key=lambda row: row[1])] == [1, 2]
    saved(trainer, 3, 4, 5)
    assert [slot.name for slot in trainer.slots] == slots
    assert is_alive(trainer.folder, trainer.life.name)
    # The first keeper may have taken the trainer for dead when its lock was swept away, and saved step 2.
    eventually(lambda: set(committed(trainer.run)) - {2} == {3, 4, 5})
    assert run_view.endings(trainer.store) == {trainer.attempt: ""}, "it lives"
    ended(trainer)
    assert run_view.has_ended(trainer.store, trainer.attempt)
    assert not Path(trainer.folder.path).exists(), "nothing stays behind"


def test_a_keeper_whose_trainer_is_dead_saves_what_it_holds(run: Path, tmp_path: Path, runtime: Path) -> None:
    faults = tmp_path / "faults"
    with faulty_keeper(run, runtime, faults) as keeper:
        trainer = begun_process(run, runtime)
        (faults / "write.pause").touch()
        trainer.do("snapshot", 7, True)
        eventually(lambda: (faults / "write.paused").exists())
        trainer.kill()
        eventually(lambda: any(line["event"] == "death" for line in ledger(run)))
        folder = runtime_of(run, runtime)
        swept(runtime)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert keeper.poll() is None, "it has looked at its folder several times by now"
        (faults / "write.pause").unlink()
        eventually(lambda: committed(run) == [7])
        keeper.wait(240)
        assert keeper.returncode != -signal.SIGKILL
        assert not folder.exists()
