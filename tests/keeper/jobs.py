"""The job of one snapshot, as a keeper would make it; pinned in its trainer's name, whom keepers respect."""

import errno
from collections.abc import Callable

from flashckpt.memory.slot import Slot
from flashckpt.persist.job import SealedSnapshot, StepJob, job_of_one
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
