"""What tests see of a run on storage, and how they make one. Black-box tests import this module, and nothing
of flashckpt/commit/: only this module knows how a run is stored.

An id is a SnapshotId; a checkpoint is named by step and id (`CommitName`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

from flashckpt.commit import assets as _assets
from flashckpt.commit import attempts as _attempts
from flashckpt.commit import collect as _collect
from flashckpt.commit import commit_step, lineage, starting
from flashckpt.commit import verification as _verification
from flashckpt.commit.attempts import local_owner
from flashckpt.commit.catalogue import Catalogue, snapshots_with_data
from flashckpt.commit.steps import StepRecord, read_step
from flashckpt.format.names import COMMITS, AttemptName, CommitName, SnapshotId
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


def read(store: Store, name: CommitName, ranks: Collection[int] | None = None) -> Record:
    """The record of a checkpoint, of all ranks or of some."""
    return read_step(store, name, ranks)


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
    return ending(store, attempt) == "closed"


class AttemptStart(NamedTuple):
    """Where an attempt began: the snapshot that it has resumed (None: afresh), its step number, its ranks."""

    parent: SnapshotId | None
    step: int
    world: int


def start_of(store: Store, attempt: AttemptName) -> AttemptStart:
    """Where an attempt began. AssertionError if it has not begun."""
    start = _attempts.read_start(store, attempt)
    assert start is not None, f"{attempt} has not begun"
    return AttemptStart(start.parent, start.step, start.world)


def ending(store: Store, attempt: AttemptName) -> str:
    """How an attempt has ended, "closed" or "dead"; empty if no end is recorded."""
    alive = _attempts.alive(store, attempt)
    return "" if alive is None else alive.ended


def endings(store: Store) -> dict[AttemptName, str]:
    """How each attempt has ended, oldest first: "closed", "dead", or empty where nothing is recorded."""
    return {each: ending(store, each) for each in attempts(store)}


def signs_of_life(store: Store, attempt: AttemptName) -> int | None:
    """How many signs of life an attempt has given, None if that cannot be read."""
    alive = _attempts.alive(store, attempt)
    return None if alive is None else alive.count


def steps(store: Store) -> list[int]:
    """The step numbers of the visible checkpoints, oldest first, each once."""
    return lineage.steps(store)


def passed_over(store: Store) -> list[str]:
    """What a start would say of each newer snapshot that it does not resume."""
    return [str(each) for each in lineage.next_start(store).passed_over]


def this_host() -> str:
    """The name of this machine in the records of verifications that failed."""
    return lineage.this_host()


def assets(store: Store) -> dict[str, bytes]:
    """The assets of a run, by name."""
    return _assets.read_assets(store)


def committed_next(store: Store) -> list[CommitName]:
    """The snapshots with all their files that the next start commits."""
    catalogue = Catalogue.of(store)
    found = [each for each in snapshots_with_data(store) if _collect.is_next(catalogue, each)]
    records = [commit_step.record_at_rest(store, each) for each in found]
    return [each.name for each in records if each is not None]


def files(store: Store) -> list[tuple[str, str, int]]:
    """The records and data files of the run with their sizes, to see whether anything came or went."""
    folders = [COMMITS, *(each.data_folder for each in snapshots_with_data(store))]
    return [
        (folder, entry.name, entry.num_bytes) for folder in sorted(folders) for entry in store.list(folder)
    ]


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


def delete(store: Store, name: CommitName) -> None:
    """Delete a checkpoint, as the newest attempt does."""
    catalogue = Catalogue.of(store)
    assert catalogue.newest_claimed is not None
    _collect.execute(store, _collect.Plan(snapshots=(name.id,)), catalogue, catalogue.newest_claimed)


def keep_assets(store: Store, files: Mapping[str, bytes]) -> None:
    """Give a run that has no assets these."""
    assert _assets.write_assets(store, files)


def watch_for(seconds: float, put: Callable[[object, str, object], None] = setattr) -> None:
    """How long this process watches an attempt on another node before it takes the run over. `put`: sets it,
    a monkeypatch's `setattr` for one test."""
    put(_attempts, "WATCH_S", seconds)
