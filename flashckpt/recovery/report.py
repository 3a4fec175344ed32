"""What a recovery found, and what became of each thing. Owns the words and the shape of its JSON.

The words are a promise to scripts: pinned by tests/contracts/test_recover_contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flashckpt.format.names import AttemptName


class Kind(str, Enum):
    """What was found."""

    SNAPSHOT = "snapshot"
    """A sealed snapshot in a slot of this node's memory."""
    PARTS = "parts"
    """A step at rest without a manifest."""
    STEP = "step"
    """A step with a manifest, of which something is wrong or was."""
    DEBRIS = "debris"
    """What dead processes left and nobody can use."""


class Fate(str, Enum):
    """What became of it; in a dry run, what is there, and what would go."""

    COMMITTED = "committed"
    SOUND = "sound"
    """In a dry run: whole in memory and not at rest. Whether storage will take it nobody can say."""
    WAS_COMMITTED = "was committed"
    TORN = "torn"
    """Its bytes were not those of its boundary: let go, never persisted."""
    FAILED = "failed"
    """It could not be saved; it is still where it was."""
    KEPT = "kept"
    """Left where it is, for the reason given."""
    DROPPED = "dropped"
    """A snapshot that is older than what is committed, or of a branch that was left: let go."""
    DISCARDED = "discarded"
    """Let go because `--discard` said so, though it is committed nowhere."""
    MARKED = "marked"
    WAS_MARKED = "was marked"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing. `place` is a slot's name or a path in the run; `detail` says why, empty where that is
    plain. `damage` is whether bytes are not those that were written, `boundary` that of a snapshot."""

    kind: Kind
    outcome: Fate
    place: str
    step: int | None = None
    attempt: AttemptName | None = None
    num_bytes: int = 0
    detail: str = ""
    damage: bool = False
    boundary: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "outcome": self.outcome.value,
            "step": self.step,
            "attempt": None if self.attempt is None else str(self.attempt),
            "place": self.place,
            "num_bytes": self.num_bytes,
            "damage": self.damage,
            "detail": self.detail or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where training goes on from: a step in "memory", in the store ("local") or in its "remote". `of_all`:
    as far as this node can tell, every rank can read it; else training goes on from the newest step that all
    of them can."""

    step: int
    attempt: AttemptName
    tier: str
    of_all: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step, "attempt": str(self.attempt), "tier": self.tier, "of_all": self.of_all,
        }  # fmt: skip


class RemoteFate(str, Enum):
    """What became of the newest step in the remote."""

    COPIED = "copied"
    THERE = "there already"
    PART = "waits for the other nodes"
    """What this node's own disk has of it is there; those of other nodes have the rest."""
    BURIED = "deleted there"
    """Its retention has deleted the step, and it stays deleted."""
    MISSING = "missing"
    """In a dry run: it would be copied."""
    NOTHING = "no step"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReport:
    """The run's newest step at rest, and its remote. `problem` says why it could not be copied, `note` what
    is to be known of it there; both are empty where there is nothing to say."""

    url: str
    outcome: RemoteFate
    step: int | None = None
    attempt: AttemptName | None = None
    sent_bytes: int = 0
    problem: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "outcome": self.outcome.value,
            "step": self.step,
            "attempt": None if self.attempt is None else str(self.attempt),
            "sent_bytes": self.sent_bytes,
            "problem": self.problem or None,
            "note": self.note or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """All of a recovery. `keeper` is the pid of a keeper that still lives, 0 where it has none here;
    `resume_problem` says why there is no `resume` though the run has steps. `num_bytes` were read of the
    `whole` steps at rest and of damaged ones; 0 where nothing was verified. `unseen` are ranks of the newest
    attempt that have nothing in this node's memory: what they have in another's was not looked at. `remote`
    is None where none was named."""

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
    remote: RemoteReport | None = None

    @property
    def failed(self) -> bool:
        """Whether something that is to be saved could not be."""
        if self.remote is not None and self.remote.outcome is RemoteFate.FAILED:
            return True
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
            "resume": None if self.resume is None else self.resume.to_dict(),
            "resume_problem": self.resume_problem or None,
            "unseen_ranks": [list(row) for row in ranges_of(self.unseen)],
            "remote": None if self.remote is None else self.remote.to_dict(),
        }


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
    """Who is told how far a recovery is, from its thread, between its steps. This one tells nobody."""

    def stage(self, name: str) -> None:
        """What begins now: "looking", "draining", "committing", "verifying", "marking", "clearing",
        "letting go", "resume", "copying"."""

    def progress(self, done: int, total: int) -> None:
        """Bytes of this stage."""

    def say(self, text: str) -> None:
        """What must be said before it is done."""
