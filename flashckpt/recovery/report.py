"""The report of a recovery: each finding and its outcome. Owns the words and the shape of its JSON.

Scripts depend on the words: tests/contracts/test_recover_contract.py pins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flashckpt.format.names import AttemptName


class Kind(str, Enum):
    """The kind of a finding."""

    SNAPSHOT = "snapshot"
    """A sealed snapshot in a slot of this node's memory."""
    PARTS = "parts"
    """A snapshot at rest, which was not committed."""
    STEP = "step"
    """A committed step that is or was damaged, or quarantined."""
    ORPHANS = "orphans"
    """Files of dead processes that cannot be used."""


class Fate(str, Enum):
    """The outcome of a finding; in a dry run, the outcome that a recovery would have."""

    COMMITTED = "committed"
    SOUND = "sound"
    """In a dry run: whole in memory, and a recovery would commit it, if storage takes it."""
    WAS_COMMITTED = "was committed"
    TORN = "torn"
    """Its bytes were not those of its boundary: freed, never persisted."""
    FAILED = "failed"
    """It could not be saved; it is still where it was."""
    KEPT = "kept"
    """Left where it is, for the reason given."""
    DROPPED = "dropped"
    """A snapshot that is older than a commit, or of an abandoned branch: freed."""
    DISCARDED = "discarded"
    """Committed nowhere, and freed because of `--discard`."""
    QUARANTINED = "quarantined"
    WAS_QUARANTINED = "was quarantined"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `place`: a slot's name or a path in the run. `detail`: the reason, may be empty. `damage`:
    bytes differ from those that were written. `boundary`: that of a snapshot."""

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
    """The step from which training resumes, in "memory", in the node's "cache", in the store ("local") or in
    its "remote". `of_all`: as far as this node knows, every rank can read it; if not, training resumes from
    the newest step that all ranks can read."""

    step: int
    attempt: AttemptName
    tier: str
    of_all: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step, "attempt": str(self.attempt), "tier": self.tier, "of_all": self.of_all,
        }  # fmt: skip


class RemoteFate(str, Enum):
    """The outcome of copying the newest step to the remote."""

    COPIED = "copied"
    THERE = "there already"
    DELETED = "deleted there"
    """Another copier has committed a newer step there."""
    MISSING = "missing"
    """In a dry run: it would be copied."""
    NOTHING = "no step"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReport:
    """The run's newest step at rest, and its remote. `problem`: why it could not be copied; `note`: a remark
    on the copy; both may be empty."""

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
    """`keeper`: the pid of a living keeper, 0 in another pid namespace. `resume_problem`: why there is no
    `resume` although the run has steps. `num_bytes`: bytes read of steps at rest, 0 if none was verified;
    `whole`: the number of whole ones. `unseen`: ranks of the newest attempt with nothing in this node's
    memory; other nodes may have theirs. `remote`: None if none was named."""

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
        """Whether a snapshot or copy that should be saved could not be."""
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
    """Receives the progress of a recovery, in its thread. This class ignores it."""

    def stage(self, name: str) -> None:
        """A stage begins: "looking", "draining", "committing", "verifying", "quarantining", "clearing",
        "letting go", "resume", "copying"."""

    def progress(self, done: int, total: int) -> None:
        """Bytes of this stage."""

    def say(self, text: str) -> None:
        """A message that the user needs before the next action."""
