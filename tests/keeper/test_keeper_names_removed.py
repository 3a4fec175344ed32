"""Names go from under a run that lives: an operator's `rm`, a cleaner of temporary files, a logout."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.commit import attempts
from flashckpt.commit.attempts import check_not_held, local_owner
from flashckpt.errors import RunHeldError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.liveness import TrainerRegistry
from flashckpt.memory.runtime import RuntimeFolder, TrainerLocks, is_alive
from flashckpt.persist.job import Trainer
from flashckpt.store import open_store
from tests import run_view
from tests.events import ledger
from tests.keeper.driver import begun, begun_process, committed, ended, eventually, runtime_of, saved
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.keeper.faulty import faulty_keeper

# A round of the keeper is a second or more, and it sweeps several times between two. The first count after a
# moment may be of a round before it, so the sweep between the second and the third is the first that is not.
_ROUNDS = 3


class Job:
    """A run with a keeper and one trainer in a process of its own, which does nothing unless it is told to:
    it does not look after its lock meanwhile."""

    def __init__(self, run: Path, runtime: Path) -> None:
        self.run = run
        self.trainer = begun_process(run, runtime)
        attempt = AttemptName.parse(self.trainer.attempt)
        assert attempt is not None
        self.attempt = attempt
        self.folder = runtime_of(run, runtime)

    def lock(self) -> str:
        [name] = [name for name in self.folder.names() if name.startswith("trainer-")]
        return name

    def deaths(self) -> list[int]:
        return [line["pid"] for line in ledger(self.run) if line["event"] == "death"]

    def beats(self) -> int:
        found = attempts.alive(open_store(str(self.run)), self.attempt)
        return 0 if found is None else found.count

    def judged(self) -> None:
        """Wait until the keeper has looked at who lives, and has either told of a death or let the counter of
        the attempt go on."""
        before = self.beats()
        eventually(lambda: self.deaths() or self.beats() >= before + _ROUNDS)


@pytest.fixture
def job(run: Path, runtime: Path) -> Iterator[Job]:
    made = Job(run, runtime)
    yield made
    made.trainer.kill()
    made.folder.close()


def test_it_is_not_dead_and_what_it_writes_is_its_own_until_it_dies(job: Job) -> None:
    job.trainer.do("snapshot", 7, False)
    job.trainer.do("write", 8)
    job.folder.remove(job.lock())
    job.judged()
    assert job.deaths() == []
    store = open_store(str(job.run))
    assert run_view.ending(store, job.attempt) == ""
    with pytest.raises(RunHeldError, match=job.trainer.attempt):
        check_not_held(store, local_owner(job.folder.path), lambda _, name: is_alive(job.folder, name))
    assert committed(job.run) == [], "nothing is rescued from who lives"
    # A slot that was taken from it while it wrote could not be sealed any more.
    job.trainer.do("seal")
    job.trainer.kill()
    eventually(lambda: committed(job.run) == [8])
    assert job.deaths() == [job.trainer.pid]
    eventually(lambda: run_view.ending(store, job.attempt))


def test_it_takes_its_lock_again_and_loses_it_again(job: Job) -> None:
    for step in (1, 2):
        lock = job.lock()
        job.folder.remove(lock)
        job.trainer.do("tend")
        assert is_alive(job.folder, lock), "at its next look"
        job.trainer.do("snapshot", step, True)
        job.trainer.do("committed", step)
    job.folder.remove(job.lock())
    job.judged()
    assert job.deaths() == []
    job.trainer.end()
    eventually(lambda: keeper_pid(job.folder) is None)
    assert not os.path.exists(job.folder.path), "nothing stays behind"


class LateRenewal(RuntimeFolder):
    """A trainer takes its lock again between a keeper's look at it and the removal of its names."""

    trainer: FakeTrainer

    def remove(self, name: str) -> None:
        if not self.trainer.life.stands(self.trainer.folder):
            self.trainer.life.renew(self.trainer.folder)
        super().remove(name)


def test_a_lock_that_was_taken_again_meanwhile_stays(run: Path, runtime: Path) -> None:
    trainer = FakeTrainer(run, runtime)
    trainer.folder.remove(trainer.life.name)
    folder = LateRenewal(trainer.folder.path, os.dup(trainer.folder.descriptor))
    folder.trainer = trainer
    registry = TrainerRegistry(TrainerLocks(folder))
    registry.watch(Trainer(lock=trainer.life.name, rank=0))
    assert [each.lock for each in registry.remove_dead()] == [trainer.life.name], "it had no lock then"
    assert trainer.life.stands(trainer.folder)
    folder.close()


# The whole folder: a logout that removes what its user has in shared memory


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
            assert keeper.poll() is None, "the keeper ended because its folder is gone"
        (faults / "write.pause").unlink()
        eventually(lambda: committed(run) == [7])
        keeper.wait(240)
        assert keeper.returncode != -signal.SIGKILL
        assert not folder.exists()
