"""The job of one snapshot, as a keeper would make it; pinned in its trainer's name, whom keepers respect."""

from __future__ import annotations

import errno
from collections.abc import Callable

from flashckpt.memory.slot import Slot
from flashckpt.persist.job import SealedSnapshot, StepJob, alone
from tests.keeper.fake import FakeTrainer


def job_of(trainer: FakeTrainer, slot: Slot, *regions: Slot, is_alone: bool = False) -> StepJob:
    """`is_alone`: no other keeper lives that could write for its attempt."""
    sealed = slot.sealed()
    assert sealed is not None
    job = alone(sealed, trainer.owners[slot.name], *regions)
    job.has_others = not is_alone
    return job


def snapshot_of(job: StepJob) -> SealedSnapshot:
    [snapshot] = job.members()
    return snapshot


def failing_for(name: str, create: Callable[[str, bytes], bool]) -> Callable[[str, bytes], bool]:
    """A store's `create` that fails for files whose name ends so."""

    def failing(path: str, data: bytes) -> bool:
        if path.endswith(name):
            raise OSError(errno.EIO, "the disk is gone")
        return create(path, data)

    return failing
