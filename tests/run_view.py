"""What tests see of a run on storage, and how they make one. Black-box tests import this module, and nothing
of flashckpt/commit/: only this module knows how a run is stored.

An id is a SnapshotId; a checkpoint is named by step and id (`CommitName`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from flashckpt.commit import attempts as _attempts
from flashckpt.commit import commit_step, lineage, starting
from flashckpt.commit import verification as _verification
from flashckpt.commit.attempts import local_owner
from flashckpt.commit.catalogue import Catalogue, snapshots_with_data
from flashckpt.commit.steps import StepRecord, read_step
from flashckpt.commit.steps import is_whole as _is_whole
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.records import Owner, Part
from flashckpt.store.base import Store

Record = StepRecord
Report = _verification.Report

# ---- what is there


def visible(store: Store) -> tuple[CommitName, ...]:
    """The checkpoints in the history of the newest attempt, oldest first."""
    return Catalogue.of(store).visible()


def checkpoints(store: Store) -> tuple[CommitName, ...]:
    """All checkpoints, of any branch, oldest first."""
    return Catalogue.of(store).commits


def resumed(store: Store) -> CommitName:
    """The checkpoint that a start would resume."""
    return lineage.next_start(store).candidates[0].name


def uncommitted(store: Store) -> set[SnapshotId]:
    """The snapshots that have a folder in data/ and are no checkpoints."""
    return set(snapshots_with_data(store)) - {each.id for each in checkpoints(store)}


def read(store: Store, name: CommitName, ranks: Collection[int] | None = None) -> Record:
    """The record of a checkpoint, of all ranks or of some."""
    return read_step(store, name, ranks)


def is_whole(store: Store, name: CommitName) -> bool:
    """Whether all files of a checkpoint are there, as long as they were written."""
    return _is_whole(store, name)


def verify(store: Store) -> Report:
    """Read all bytes of all checkpoints."""
    return _verification.verify(store)


def attempts(store: Store) -> list[AttemptName]:
    """The attempts that are known, oldest first."""
    return [each.name for each in _attempts.attempts(store)]


def newest_attempt(store: Store) -> AttemptName | None:
    """The newest attempt that has begun."""
    return _attempts.newest_started(store)


def parent_of(store: Store, attempt: AttemptName) -> SnapshotId | None:
    """The snapshot that an attempt has resumed, None for a fresh run. AssertionError if it has not begun."""
    start = _attempts.read_start(store, attempt)
    assert start is not None, f"{attempt} has not begun"
    return start.parent


def has_ended(store: Store, attempt: AttemptName) -> bool:
    """Whether an attempt has ended in order."""
    alive = _attempts.alive(store, attempt)
    return alive is not None and alive.ended == "closed"


# ---- how it comes there


def make(store: Store) -> None:
    """Make a run without an attempt."""
    _attempts.open_run(store, create=True)


def run_id(store: Store) -> str:
    return _attempts.open_run(store, create=False).run_id


def begin(
    store: Store,
    parent: SnapshotId | None = None,
    step: int = 0,
    *,
    world: int = 1,
    owner: Owner | None = None,
) -> AttemptName:
    """Begin an attempt that resumes `parent`, which has this step number."""
    name, catalogue = starting.claim(store, owner or local_owner())
    starting.start(store, name, parent, step, world, catalogue)
    return name


def end(store: Store, attempt: AttemptName, how: Literal["closed", "dead"] = "closed") -> None:
    """Record that an attempt has ended."""
    _attempts.mark_ended(store, attempt, how)


def supersede(store: Store) -> AttemptName:
    """Take the run over, as a start of another job does, without resuming anything."""
    return _attempts.claim(store, local_owner())


def publish(store: Store, part: Part) -> None:
    """Write a part whose shards are written."""
    assert commit_step.publish_part(store, part)


def commit(store: Store, id: SnapshotId, world: int = 1) -> None:
    """Commit a snapshot whose parts are published."""
    assert commit_step.commit(store, id, world)


def mark_damaged(store: Store, name: CommitName, host: str = "", why: str = "its bytes differ") -> None:
    """Record that a verification of a checkpoint failed on a host, this one unless another is named."""
    lineage.quarantine(store, name, host or lineage.this_host(), why)
