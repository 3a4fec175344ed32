"""The job of one snapshot, as a keeper would make it; pinned in its trainer's name, whom keepers respect."""

import errno
from collections.abc import Callable

from flashckpt.memory.slot import Slot
from flashckpt.persist.committer import Committer, KnownRun
from flashckpt.persist.job import JobState, SealedSnapshot, StepJob, StepOutcome, job_of_one
from flashckpt.persist.writer import Writer
from flashckpt.store.base import Store
from tests.keeper.fake import FakeTrainer


def job_of(trainer: FakeTrainer, slot: Slot, *regions: Slot) -> StepJob:
    sealed = slot.sealed()
    assert sealed is not None
    return job_of_one(sealed, *regions, owner=trainer.owners[slot.name])


def snapshot_of(job: StepJob) -> SealedSnapshot:
    [snapshot] = job.members()
    return snapshot


def failing_for(name: str, create: Callable[[str, bytes], bool]) -> Callable[[str, bytes], bool]:
    """A store's `create` that fails for files whose path begins or ends so."""

    def failing(path: str, data: bytes) -> bool:
        if path.startswith(name) or path.endswith(name):
            raise OSError(errno.EIO, "the disk is gone")
        return create(path, data)

    return failing


class Persister:
    """Writes and commits one step after the other. stands: whether the run still exists."""

    def __init__(self, store: Store, nonce: str, stands: Callable[[], bool] = lambda: True) -> None:
        run = KnownRun(store, stands)
        self._writer, self._committer = Writer(run, nonce), Committer(run)

    def persist(self, job: StepJob) -> StepOutcome:
        outcome = self._writer.write(job)
        if outcome.state is JobState.COMMITTING:
            outcome = self._committer.commit(job)
        if outcome.state is JobState.SUPERSEDED:
            self._writer.forget_frozen(job.snapshots)
        return outcome
