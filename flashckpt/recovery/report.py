"""The report of a recovery: each finding and its outcome. Owns the words and the shape of its JSON.

Scripts depend on the words, which docs/recovery.md explains: tests/contracts/test_recover_contract.py pins
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from flashckpt.format.names import AttemptName, SnapshotId


class Kind(str, Enum):
    """The kind of a finding."""

    SNAPSHOT = "snapshot"
    PARTS = "parts"
    STEP = "step"
    ORPHANS = "orphans"


class Fate(str, Enum):
    """The outcome of a finding; in a dry run, the outcome that a recovery would have."""

    COMMITTED = "committed"
    SOUND = "sound"
    WAS_COMMITTED = "was committed"
    TORN = "torn"
    FAILED = "failed"
    KEPT = "kept"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"
    WAS_QUARANTINED = "was quarantined"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `place`: a slot's name or a path in the run. `detail`: the reason, may be empty. `damage`:
    bytes differ from those that were written."""

    kind: Kind
    outcome: Fate
    place: str
    id: SnapshotId | None = None
    step: int | None = None
    num_bytes: int = 0
    detail: str = ""
    damage: bool = False

    @property
    def attempt(self) -> AttemptName | None:
        return None if self.id is None else self.id.attempt

    def to_dict(self) -> dict[str, Any]:
        names = "kind", "outcome", "step", "attempt", "place", "num_bytes", "damage", "detail"
        return _plain(self, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The step from which training resumes, in "memory", in the node's "cache", in the store ("local") or in
    its "remote". `of_all`: as far as this node knows, every rank can read it; if not, training resumes from
    the newest step that all ranks can read."""

    step: int
    attempt: AttemptName
    tier: str
    of_all: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """`keeper`: the pid of a living keeper, 0 in another pid namespace. `resume_problem`: why there is no
    `resume` although the run has steps. `num_bytes`: bytes read of steps at rest, 0 if none was verified;
    `whole`: the number of whole ones. `unseen`: ranks of the newest attempt with nothing in this node's
    memory; other nodes may have theirs."""

    run: str
    run_id: str
    dry_run: bool
    verified: bool
    keeper: int | None
    findings: tuple[Finding, ...]
    whole: int
    num_bytes: int
    resume: Resume | None
    resume_problem: str
    unseen: tuple[int, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a snapshot that should be saved could not be."""
        return any(each.outcome is Fate.FAILED for each in self.findings)

    @property
    def damaged(self) -> bool:
        return any(each.damage for each in self.findings)

    def to_dict(self) -> Mapping[str, Any]:
        return {
            "run": self.run,
            "run_id": self.run_id,
            "dry_run": self.dry_run,
            "verified": self.verified,
            "keeper": None if self.keeper is None else {"pid": self.keeper},
            "found": [each.to_dict() for each in self.findings],
            "whole_steps": self.whole,
            "num_bytes_read": self.num_bytes,
            "resume": None if self.resume is None else _plain(self.resume),
            "resume_problem": self.resume_problem or None,
            "unseen_ranks": [list(row) for row in ranges_of(self.unseen)],
        }


def _plain(record: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a record, by default all, as JSON. An empty text is null."""
    row = {name: getattr(record, name) for name in names or (each.name for each in fields(record))}
    row |= {name: str(value) for name, value in row.items() if isinstance(value, AttemptName)}
    return {name: None if value == "" else value for name, value in row.items()}


def ranges_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ranks as (first, last) of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1] = found[-1][0], rank
        else:
            found.append((rank, rank))
    return found


class Watcher:
    """Receives the progress of a recovery, in its thread. This class ignores it."""

    def stage(self, name: str) -> None:
        """A stage begins: "looking", "draining", "committing", "verifying", "clearing", "resume"."""

    def progress(self, done: int, total: int) -> None:
        """Bytes of this stage."""

    def say(self, text: str) -> None:
        """A message that the user needs before the next action."""
