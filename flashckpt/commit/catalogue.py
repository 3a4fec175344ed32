"""The committed steps and the attempts of a run, from one listing of attempts/ and one of commits/.

A Catalogue is immutable and answers without requests. The record defines *listed*; `is_whole` checks the
files of a step and costs a listing of its data folder: call it for the steps that are about to be used.
Never writes. See docs/commit.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from flashckpt.commit import attempts
from flashckpt.errors import DamagedError
from flashckpt.format.names import (
    ATTEMPT,
    ATTEMPTS,
    COMMITS,
    DATA,
    AttemptName,
    CommitName,
    SnapshotId,
    start_path,
)
from flashckpt.format.records import Start, newest_of
from flashckpt.store.base import Store

ALWAYS_KEPT = 2
"""How many step numbers are never deleted, so that a damaged newest step has an alternative."""


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """`attempts`: the claimed ones, oldest first. `folders`: attempts with a folder in attempts/. `lineage`:
    the attempts from the newest started one back to the first, each with its last visible boundary.
    `commits`: all records without a tombstone, oldest first; `dying`: the records of snapshots with a
    tombstone. `problem`: the newest start.json is damaged; then `start` is None, and `lineage` is that
    attempt alone. A tombstone of `needed_parent`, the snapshot that the newest started attempt resumed from,
    does not count. `store` reads what the listings found."""

    attempts: tuple[AttemptName, ...]
    folders: frozenset[AttemptName]
    newest_claimed: AttemptName | None
    newest_started: AttemptName | None
    start: Start | None
    problem: DamagedError | None
    lineage: tuple[SnapshotId, ...]
    commits: tuple[CommitName, ...]
    dying: tuple[CommitName, ...]
    tombstones: frozenset[SnapshotId]
    quarantines: tuple[tuple[CommitName, str], ...]
    needed_parent: SnapshotId | None
    store: Store = field(repr=False, compare=False)

    @classmethod
    def of(cls, store: Store) -> Catalogue:
        """List attempts, then commits."""
        listed = store.at_once()
        claims = attempts.names(listed)
        claimed = tuple(claims[number] for number in sorted(claims))
        folders = frozenset(attempts.attempt_folders(listed, ATTEMPTS))
        started = next((name for name in claimed[::-1] if listed.exists(start_path(name))), None)
        start, problem = None, None
        try:
            start = None if started is None else attempts.read_start(listed, started)
        except DamagedError as error:
            problem = error
        commits, quarantines = list[CommitName](), list[tuple[CommitName, str]]()
        tombstones = set[SnapshotId | None]()
        for entry in listed.list(COMMITS):
            if (found := CommitName.parse(entry.name)) is not None:
                name, is_record = found
                if is_record:
                    commits.append(name)
                else:
                    quarantines.append((name, f"{COMMITS}/{entry.name}"))
            elif (dead := SnapshotId.of_tombstone(entry.name)) is not None:
                tombstones.add(dead)
        commits.sort()
        own = {each.step for each in commits if each.attempt == started and each.id not in tombstones}
        parent = _needed_parent(start, own)
        # A deletion that began after the resuming attempt had claimed, and stops at its check of the claims.
        tombstones.discard(parent)
        return cls(
            attempts=claimed,
            folders=folders,
            newest_claimed=claimed[-1] if claimed else None,
            newest_started=started,
            start=start,
            problem=problem,
            lineage=() if started is None else (newest_of(started), *(start.ancestors if start else ())),
            commits=tuple(each for each in commits if each.id not in tombstones),
            dying=tuple(each for each in commits if each.id in tombstones),
            tombstones=frozenset(each for each in tombstones if each is not None),
            quarantines=tuple(quarantines),
            needed_parent=parent,
            store=listed,
        )

    @property
    def quarantined(self) -> frozenset[CommitName]:
        return frozenset(name for name, _ in self.quarantines)

    def is_in_lineage(self, snapshot: SnapshotId) -> bool:
        """Whether the newest started attempt descends from this snapshot."""
        return any(
            snapshot.attempt == each.attempt and snapshot.boundary <= each.boundary for each in self.lineage
        )

    def visible(self) -> tuple[CommitName, ...]:
        """The committed steps of the lineage, oldest first."""
        return tuple(each for each in self.commits if self.is_in_lineage(each.id))

    def newest_first(self, last: Collection[CommitName] = ()) -> list[CommitName]:
        """The visible steps in the order in which a resume tries them. `last`: steps that this host has
        quarantined; they come last."""
        newest = self.visible()[::-1]
        return [e for e in newest if e not in last] + [e for e in newest if e in last]

    def named(self, snapshot: SnapshotId) -> CommitName | None:
        """The commit of a snapshot, visible or not, with a tombstone or not."""
        return next((each for each in (*self.commits, *self.dying) if each.id == snapshot), None)

    def highest_number(self) -> int:
        """The highest attempt number that any record or folder has."""
        names = [*self.attempts, *self.folders, *(each.attempt for each in (*self.commits, *self.dying))]
        return max((name.number for name in names), default=0)


def _needed_parent(start: Start | None, own: Collection[int]) -> SnapshotId | None:
    """The snapshot that an attempt resumed from, until the attempt has committed ALWAYS_KEPT other step
    numbers: before that its own collector does not delete the parent. `own`: its committed step numbers."""
    if start is None or start.parent is None or len(set(own) - {start.step}) >= ALWAYS_KEPT:
        return None
    return start.parent


def snapshots_with_data(store: Store) -> Iterator[SnapshotId]:
    """Every snapshot that has a data folder, committed or not."""
    for folder in store.list(DATA, ATTEMPT):
        if folder.is_folder:
            found = (
                SnapshotId.of_folders(folder.name, each.name) for each in store.list(f"{DATA}/{folder.name}")
            )
            yield from (each for each in found if each is not None)
