"""A loop that is to end at a boundary ahead, as ranks agree on one: it ends there and nowhere else."""

from pathlib import Path

import pytest

import flashckpt
from flashckpt.checkpointer.resume import attach_to
from flashckpt.checkpointer.session import open_session
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.options import Environment, Options
from flashckpt.ranks.coordination import (
    Asked,
    Coordination,
    Group,
    SnapshotPolicy,
    StopPolicy,
)
from flashckpt.state.tree import Tree
from tests.checkpointer.test_loop import Job, loader
from tests.checkpointer.voting import saving_by_hand
from tests.waiting import until_slots

pytestmark = pytest.mark.usefixtures("runtime")
STOP_AT = 4


class StopAhead(StopPolicy):
    """Whenever it is asked for, all ranks end at the same boundary."""

    def stops_at(self, boundary_index: int) -> bool:
        return self.is_asked and boundary_index >= STOP_AT


class PaceAhead(Coordination):
    def stop_policy(self, signals: Asked) -> StopPolicy:
        return StopAhead(signals)


class AloneAhead(Group):
    def begin(
        self, runtime: RuntimeFolder, attempt: AttemptName, snapshot_policy: SnapshotPolicy
    ) -> Coordination:
        return PaceAhead(snapshot_policy)


def attached(run: Path, job: Job) -> flashckpt.Checkpointer:
    options, environment = Options(), Environment.read()
    session = open_session(run, flashckpt.Keep(), options, environment, group=AloneAhead(environment))
    return attach_to(session, Tree(job.named), saving_by_hand(run), began=0.0)


def test_the_boundary_of_a_stop_is_captured_once(tmp_path: Path) -> None:
    """A loop of step() ends by its program: one that goes on after a stop is not captured at each step."""
    job, run = Job(), tmp_path / "run"
    with attached(run, job) as checkpointer:
        checkpointer.stop()
        for x in loader(8):
            job.train(x)
            checkpointer.step()
            until_slots(checkpointer)
        checkpointer.wait()
        assert checkpointer.report()["snapshots"] == 1
        assert checkpointer.stop_reason == "stop"


def test_an_epochs_end_before_the_boundary_of_the_policy_is_no_stop(tmp_path: Path) -> None:
    job, run, ends = Job(), tmp_path / "run", []
    with attached(run, job) as checkpointer:
        checkpointer.stop()
        for epoch in checkpointer.epochs(4):
            for x in checkpointer.batches(loader(2)):
                job.train(x)
            ends.append((epoch, checkpointer.completed))
    assert ends == [(0, 2), (1, 3)], "the end of an epoch is a boundary as well"
    assert flashckpt.steps(run) == [3]
