"""Publish a part, commit a step, check the commit. Owns the order of these writes. Never deletes data.

Any number of keepers may commit one step at once: the record's bytes follow from the parts alone. The order
and its reasons are numbered in docs/commit.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from flashckpt import crashpoints
from flashckpt.commit.attempts import read_start, started_after
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.steps import (
    KnownHeads,
    are_few,
    check_alike,
    damaged,
    file_rows,
    missing_data,
    missing_files,
    missing_frozen,
    part_entries,
    read_head,
    read_named_bytes,
    read_record,
    unlike,
)
from flashckpt.errors import DamagedError, FormatError, SupersededError
from flashckpt.format.checked_json import checksum_in
from flashckpt.format.names import PART, AttemptName, CommitName, SnapshotId, shard_writer
from flashckpt.format.records import CommitRecord, Part, PartHead, PartRecord, Start
from flashckpt.store.base import Store

_IS_MISSING = "it is missing, has another length than was written, or is being deleted"


class Committed(Enum):
    """True only if the step is committed and every later start finds it."""

    YES = "committed"
    WAITING = "not all parts are there"
    CLAIMED = "committed, but a newer attempt has claimed the run and may resume without it"
    DELETED = "retention has deleted it, or is deleting it"

    def __bool__(self) -> bool:
        return self is Committed.YES


@dataclass(frozen=True)
class Outcome:
    """`catalogue`: the one by which the commit was checked, None if the check was not reached."""

    state: Committed
    catalogue: Catalogue | None = None
    name: CommitName | None = None

    def __bool__(self) -> bool:
        return bool(self.state)


def publish_part(store: Store, part: Part, *, is_written: bool = False) -> PartRecord | None:
    """Create a part, whose shards are written. Return None if this keeper's part exists already.
    `is_written`: this process has just written every shard, so they are listed by `check_committed` alone.

    DamagedError if a file that the part names is missing or has another length.
    """
    folder = SnapshotId(part.attempt, part.boundary).data_folder
    shards, frozen = file_rows([part.head()])
    there = shards if is_written else {(entry.name, entry.num_bytes) for entry in store.list(folder)}
    if lost := [each.file for each in shards if (each.file, each.num_bytes) not in there]:
        raise damaged(f"{folder}/{lost[0]}", _IS_MISSING, part.step)
    if gone := missing_frozen(store, frozen, is_final=False):
        raise damaged(gone[0], _IS_MISSING, part.step)
    crashpoints.point("part.checked")
    data = part.to_bytes()
    created = store.create(f"{folder}/{part.file}", data)
    crashpoints.point("part.linked")
    return PartRecord(part.file, len(data), checksum_in(data, what=part.file)) if created else None


def commit(
    store: Store,
    snapshot: SnapshotId,
    world: int,
    *,
    known: KnownHeads | None = None,
    own: tuple[PartRecord, PartHead] | None = None,
    guard: Callable[[], None] = lambda: None,
) -> Outcome:
    """Create the record once the parts cover every rank, then check the commit.

    `known`: heads read in an earlier call. `own`: the part that this process has just created; if it covers
    every rank, no other is listed. `guard`: raises if this process may not commit any more; called before
    the record is created, and again before the commit is reported.

    SupersededError if a newer attempt has started; DivergedError if replicas differ; DamagedError if parts
    contradict each other or a file is missing.
    """
    listed = store.at_once()
    if own is not None and len(own[1].ranks) == world:
        rows, heads = [own[0]], [own[1]]
    else:
        rows, heads = read_parts(listed, snapshot, world, known)
    if sum(len(head.ranks) for head in heads) < world:
        return Outcome(Committed.WAITING)
    record = record_of(snapshot, world, rows, heads)
    check_alike(listed, snapshot.data_folder, heads)
    for row in rows if own is None and not are_few(rows) else ():
        read_named_bytes(listed, snapshot.data_folder, row, record.name.step)
    guard()
    publish_record(store, record)
    guard()
    return check_committed(store, record)


def check_due(store: Store, name: CommitName) -> None:
    """SupersededError if an attempt has started that did not resume from this snapshot or a later one of its
    attempt."""
    newer = started_after(store, name.attempt)
    if newer is not None and not _has_resumed(read_start(store, newer), name.id):
        raise _superseded(newer, name)


def publish_record(store: Store, record: CommitRecord) -> None:
    """The last checks before a record, and the record. SupersededError, DamagedError."""
    name = record.name
    check_due(store.at_once(), name)
    # All parts are there: a deletion of an instance whose tombstone is not listed yet finds them.
    if gone := missing_frozen(store, record.frozen):
        raise damaged(gone[0], _IS_MISSING, name.step)
    create_record(store, record)


def create_record(store: Store, record: CommitRecord) -> None:
    """Create a record whose parts and files the caller has checked. An existing record stays."""
    crashpoints.point("manifest.checked")
    store.create(record.name.path, record.to_bytes())
    crashpoints.point("manifest.linked")


def check_committed(store: Store, record: CommitRecord) -> Outcome:
    """Check a commit after its record was created, before it is reported.

    Lists attempts, commits and the step's files again: an attempt that claims later finds the record, and a
    deletion that began earlier shows its tombstone or missing files. If all files are missing, the record was
    created after a deletion had removed everything, and is removed.

    SupersededError if a newer attempt has started without this step. DamagedError if the record differs.
    """
    name, catalogue = record.name, Catalogue.of(store)
    try:
        found = read_record(catalogue.store, name)
    except DamagedError:
        raise damaged(name.path, "it does not list the parts that are there", name.step) from None
    if found is None:
        return Outcome(Committed.DELETED, catalogue, name)
    if found != record:
        raise damaged(name.path, "it does not list the parts that are there", name.step)
    # Frozen instances were listed before the record, and the parts that name them are older than that
    # listing.
    if lost := missing_data(store.at_once(), record):
        if set(lost) >= set(record.data_paths()):
            store.remove(name.path)
        return Outcome(Committed.DELETED, catalogue, name)
    if name.id in catalogue.tombstones:
        return Outcome(Committed.DELETED, catalogue, name)
    last = name.attempt
    started, claimed = catalogue.newest_started, catalogue.newest_claimed
    if started is not None and started.number > last.number:
        if catalogue.problem is not None:
            raise catalogue.problem
        if not _has_resumed(catalogue.start, name.id):
            raise _superseded(started, name)
        last = started
    if claimed is not None and claimed.number > last.number:
        return Outcome(Committed.CLAIMED, catalogue, name)
    return Outcome(Committed.YES, catalogue, name)


def read_parts(
    store: Store, snapshot: SnapshotId, world: int, known: KnownHeads | None = None
) -> tuple[list[PartRecord], list[PartHead]]:
    """The rows and heads of a snapshot's parts at rest. DamagedError if they contradict each other."""
    rows, heads, known = [], [], known or KnownHeads()
    folder = snapshot.data_folder
    entries = part_entries(store, folder)
    whole = are_few(entries)
    for entry in entries:
        head, checksum = known.of(store, folder, entry, whole=whole)
        if (head.attempt, head.boundary, head.world, head.file) != (
            snapshot.attempt,
            snapshot.boundary,
            world,
            entry.name,
        ):
            path = f"{folder}/{entry.name}"
            raise damaged(path, "it is a part of another attempt, boundary, world or keeper", head.step)
        rows.append(PartRecord(file=entry.name, num_bytes=entry.num_bytes, checksum=checksum))
        heads.append(head)
    steps = {head.step: head.file for head in heads}
    if len(steps) > 1:
        words = ", ".join(f"{step} in {file}" for step, file in sorted(steps.items()))
        raise damaged(folder, f"its ranks count this boundary as different steps ({words})", max(steps))
    ranks = [rank.rank for head in heads for rank in head.ranks]
    if len(set(ranks)) != len(ranks):
        raise damaged(folder, "two parts hold the same rank", heads[0].step)
    return rows, heads


def record_at_rest(store: Store, snapshot: SnapshotId) -> CommitRecord | None:
    """The record that a snapshot would get, if all its parts and every file that they name are there; else
    None."""
    listed, folder = store.at_once(), snapshot.data_folder
    entries = listed.list(folder)
    part = next((each for each in entries if not each.is_folder and PART.fullmatch(each.name)), None)
    if part is None:
        return None
    try:
        world = read_head(listed, f"{folder}/{part.name}", part.num_bytes, whole=False)[0].world
        written = {each.name.split("-")[1] for each in entries if shard_writer(each.name) is not None}
        if len(written) < world:  # an interrupted write: the other parts need not be read
            return None
        rows, heads = read_parts(listed, snapshot, world)
    except (DamagedError, FormatError, FileNotFoundError):
        return None
    if sum(len(head.ranks) for head in heads) < world or unlike(heads):
        return None
    record = record_of(snapshot, world, rows, heads)
    # A snapshot that names an instance with a tombstone is never committed.
    return None if missing_files(listed, record) or missing_frozen(store, record.frozen) else record


def record_of(
    snapshot: SnapshotId, world: int, rows: Sequence[PartRecord], heads: Sequence[PartHead]
) -> CommitRecord:
    """The record of a snapshot with these parts."""
    shards, frozen = file_rows(heads)
    return CommitRecord(
        name=CommitName(heads[0].step, snapshot.attempt, snapshot.boundary),
        world=world,
        parts=tuple(sorted(rows, key=lambda row: row.file)),
        shards=shards,
        frozen=frozen,
    )


def _has_resumed(start: Start | None, snapshot: SnapshotId) -> bool:
    """Whether the newest started attempt resumed from this snapshot or a later one of its attempt: it may
    resume from the memory of nodes before the step is committed. Uncommitted data of older ancestors is
    cleared by the next claimant."""
    parent = None if start is None else start.parent
    return parent is not None and parent.attempt == snapshot.attempt and snapshot.boundary <= parent.boundary


def _superseded(newer: AttemptName, name: CommitName) -> SupersededError:
    return SupersededError(
        f"attempt {newer} has started before step {name.step} of attempt {name.attempt} was committed, and "
        "resumed without it: no resume finds it. Other steps are untouched. End this process.",
        step=name.step,
        path=name.path,
    )
