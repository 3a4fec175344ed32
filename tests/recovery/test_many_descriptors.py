"""A process with more descriptors than `select` can take, as a training with many files open is."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.keeper.node_keepers import end_process
from tests.keeper.driver import committed
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.recovery.scene import Crash, recovered, regions_of, rows

MANY = 1100


@pytest.fixture
def crowded() -> Iterator[None]:
    """Every number below 1024 is taken, and some above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4 * MANY, hard)), hard))
    taken = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(MANY)]
    assert max(taken) > 1023
    yield
    for each in taken:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("crowded")
def test_a_recovery_and_a_trainer_work_as_ever(tmp_path: Path, runtime: Path) -> None:
    """What lies in memory is saved, a keeper that lives is asked to go; what a trainer saves is committed."""
    crash = Crash(tmp_path / "run", runtime).slots()
    crash.seal(1, 2)
    crash.both_killed()
    assert ("snapshot", "committed", 2) in rows(recovered(crash.run))
    again = Crash(crash.run, runtime, parent=crash.attempt, step=2, linger_s=600).slots().commit(3)
    again.trainer.kill()
    end_process(again.folder)
    assert recovered(crash.run).keeper is None
    assert keeper_pid(again.folder) is None
    assert regions_of(again.folder) == []
    assert committed(crash.run) == [2, 3]

    trainer = FakeTrainer(tmp_path / "other", runtime)
    trainer.start()
    trainer.take_slots(3)
    trainer.snapshot(1, persist=True)
    trainer.wait_committed(1)
    assert committed(trainer.run) == [1]
    trainer.end()
