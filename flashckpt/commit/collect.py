"""What may be deleted from a run, and the one order in which it is deleted.

`collect` is pure: it decides from a catalogue and from what its caller knows. `execute` deletes. The newest
started attempt's keeper of rank 0's node calls both after its commits. A claimant calls them without `keep`,
so that only uncommitted data of dead attempts goes.

A snapshot that has all its parts and no record may have lost the record. It is not deleted as uncommitted: in
the lineage it goes when retention would delete its commit; elsewhere it stays, as steps of other branches do.

Order for a snapshot: tombstone; claims again; shards and parts; record; tombstone. A tombstone is never
removed before the data: another process may have passed its check of the claims and be deleting. After a
newer claim the tombstone stays; it does not count for an attempt that has resumed from the snapshot
(`needed_parent`).
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from flashckpt import crashpoints
from flashckpt.commit.attempts import attempt_folders, has_started, newest_claimed
from flashckpt.commit.catalogue import ALWAYS_KEPT, Catalogue, snapshots_with_data
from flashckpt.commit.commit_step import record_at_rest
from flashckpt.commit.steps import heads_at_rest, is_whole, part_entries, read_head, read_record
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.names import (
    ATTEMPT,
    ATTEMPTS,
    CLAIM,
    COMMITS,
    EVENTS,
    FROZEN,
    FROZEN_FOLDER,
    FROZEN_TOMBSTONE,
    RUN,
    AttemptName,
    CommitName,
    SnapshotId,
    attempt_folder,
    claim_path,
    frozen_path,
    frozen_tombstone_path,
    frozen_writer,
    shard_writer,
)
from flashckpt.format.records import CommitRecord, Tombstone
from flashckpt.options import Keep
from flashckpt.store.base import Entry, Store

log = logging.getLogger(__name__)

LAST_UNSTARTED = 8
"""How many claims of attempts that never started stay: one of them may only be slow."""


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What the caller of `collect` knows in addition to the catalogue.

    broken: listed steps with missing files (see `broken_steps`).
    at_rest: snapshots that have a data folder (`snapshots_at_rest`); None if they were not listed.
    whole: returns the record that a snapshot would get, None unless all its files are there. Called for
    snapshots without a record before they go; a snapshot for which it raises OSError stays.
    pinned: snapshots that this process is copying or reading.
    frozen: instances in frozen/, each with whether a step or a part names it (`frozen_instances`); None if
    they were not listed. dead_writers: nonces of keepers whose life lock is free. own: the nonce of this
    keeper; in_hand: returns the instances that it may still name; called once `frozen` is listed.
    """

    broken: Collection[CommitName] = ()
    at_rest: Collection[SnapshotId] | None = None
    whole: Callable[[SnapshotId], CommitRecord | None] = lambda _: None
    pinned: Collection[SnapshotId] = ()
    frozen: dict[str, bool] | None = None
    dead_writers: Collection[str] = ()
    own: str = ""
    in_hand: Callable[[], Collection[str]] = frozenset


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Snapshots, frozen instances and attempts to delete, in this order. `expired`: the committed steps among
    the snapshots. `floor`: the oldest of the newest steps that are kept. `later`: the oldest uncommitted
    snapshot, which goes once it is older than `floor`. `without_record`: uncommitted snapshots that stay
    because all their files are there."""

    snapshots: tuple[SnapshotId, ...] = ()
    expired: tuple[CommitName, ...] = ()
    frozen: tuple[str, ...] = ()
    attempts: tuple[AttemptName, ...] = ()
    floor: CommitName | None = None
    later: SnapshotId | None = None
    without_record: tuple[CommitName, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.snapshots or self.frozen or self.attempts)


@dataclass(kw_only=True)
class Done:
    """What `execute` deleted. `released`: the frozen instances that deleted records named. `errors`: of files
    that could not be deleted."""

    snapshots: list[SnapshotId] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    frozen: list[str] = field(default_factory=list)
    attempts: list[AttemptName] = field(default_factory=list)
    errors: list[OSError] = field(default_factory=list)


# ---- what goes


def collect(catalogue: Catalogue, keep: Keep | None, knowledge: Knowledge) -> Plan:
    """Decide what may be deleted. `keep` None: a claimant's sweep, which deletes no committed step and
    finishes no interrupted deletion. If the newest start.json is damaged, nothing may: its attempt may need
    any step."""
    if catalogue.problem is not None:
        return Plan()
    expired: tuple[CommitName, ...] = ()
    interrupted: tuple[SnapshotId, ...] = ()
    floor = None
    if keep is not None:
        kept = kept_steps(catalogue, keep, knowledge.broken)
        floor = _floor(catalogue, keep, knowledge.broken)
        is_expired = lambda each: each not in kept and floor is not None and each < floor  # noqa: E731
        expired = tuple(filter(is_expired, catalogue.visible()))
        interrupted = tuple(sorted(catalogue.tombstones))
    uncommitted, orphans = _uncommitted(catalogue, knowledge.at_rest or ()), list[SnapshotId]()
    without_record = list[CommitName]()
    for each in (each for each in uncommitted if _is_orphan(catalogue, each, floor)):
        try:
            record = knowledge.whole(each)
        except OSError as error:
            log.warning("%s cannot be read and stays: %s", each.data_folder, error)
            continue
        if record is None or _is_outlived(catalogue, record.name, keep, floor):
            orphans.append(each)
        else:
            without_record.append(record.name)
    snapshots = [*interrupted, *(each.id for each in expired), *orphans]
    pinned = set(knowledge.pinned)
    return Plan(
        snapshots=tuple(each for each in snapshots if each not in pinned),
        expired=tuple(each for each in expired if each.id not in pinned),
        frozen=tuple(_frozen(catalogue, knowledge)),
        attempts=tuple(_attempts(catalogue, knowledge)),
        floor=floor,
        later=min(set(uncommitted).difference(orphans, (each.id for each in without_record)), default=None),
        without_record=tuple(without_record),
    )


def kept_steps(catalogue: Catalogue, keep: Keep, broken: Collection[CommitName] = ()) -> set[CommitName]:
    """The visible steps that stay. Distinct step numbers count, of whole steps alone."""
    whole = [each for each in catalogue.visible() if each not in broken]
    sound = [each for each in whole if each not in catalogue.quarantined]
    numbers = {
        *_newest_numbers(whole, max(keep.last, ALWAYS_KEPT)),
        *_newest_numbers(sound, ALWAYS_KEPT),
        *(each.step for each in whole if is_multiple(keep, each.step)),
    }
    return {each for each in catalogue.visible() if each.step in numbers}


def is_multiple(keep: Keep, step: int) -> bool:
    """Whether a step stays for its number."""
    return bool(keep.every_steps) and step % (keep.every_steps or 1) == 0


def broken_steps(store: Store, catalogue: Catalogue, whole: Collection[CommitName] = ()) -> set[CommitName]:
    """The newest steps with missing files, back to where ALWAYS_KEPT step numbers are whole. `whole`: steps
    that the caller has checked before."""
    broken, numbers = set(), set[int]()
    for each in catalogue.visible()[::-1]:
        if each in whole or is_whole(store, each):
            numbers.add(each.step)
        else:
            broken.add(each)
        if len(numbers) == ALWAYS_KEPT:
            break
    return broken


def has_lost_records(store: Store, catalogue: Catalogue) -> bool:
    """Whether the commit records seem to be lost: there is none, and data/ holds what no crash leaves.

    That is a shard of an attempt without start.json, which is older than the attempt's data and deleted after
    it; several snapshots with all their parts, since a crash leaves one between its last part and its record;
    or several shards of one keeper in folders without its part, since a keeper writes one part at a time. A
    part that cannot be read counts as whole."""
    if catalogue.commits or catalogue.dying or catalogue.tombstones:
        return False
    is_lost = any(_cannot_be_of_a_crash(store, snapshots_with_data(store)))
    return is_lost and not Catalogue.of(store).commits


def _cannot_be_of_a_crash(store: Store, snapshots: Iterable[SnapshotId]) -> Iterator[bool]:
    """For each snapshot, whether a crash before the first commit cannot have left it and those before it."""
    num_whole, without_part = 0, set[str]()
    for each in snapshots:
        names = (entry.name for entry in store.list(each.data_folder))
        shards = {name for name in names if shard_writer(name) is not None}
        if shards and not has_started(store, each.attempt):
            yield True
            continue
        try:
            num_whole += record_at_rest(store, each) is not None
            named = {rank.shard.file for head in heads_at_rest(store, each) for rank in head.ranks}
        except (OSError, DamagedError, FormatError) as error:
            log.warning("%s cannot be read: %s", each.data_folder, error)
            num_whole, named = num_whole + isinstance(error, OSError), shards
        writers = {shard_writer(file) or "" for file in shards - named}
        yield num_whole >= ALWAYS_KEPT or bool(without_part & writers)
        without_part |= writers


def snapshots_at_rest(store: Store, catalogue: Catalogue) -> list[SnapshotId] | None:
    """The snapshots that have a data folder, for `Knowledge.at_rest`. None if the commit records seem to be
    lost: then every committed step would look uncommitted."""
    return None if has_lost_records(store, catalogue) else list(snapshots_with_data(store))


def frozen_instances(store: Store, catalogue: Catalogue) -> dict[str, bool]:
    """Every frozen instance, with whether a record, or a part of an uncommitted snapshot, names it. If a
    record or part is damaged, it may name any, and all count as named. Empty if the records seem to be
    lost."""
    listed = store.at_once().list(FROZEN_FOLDER)
    names = [entry.name for entry in listed if not entry.is_folder]
    files = {name for name in names if FROZEN.fullmatch(name)}
    files |= {match[1] for match in map(FROZEN_TOMBSTONE.fullmatch, names) if match}
    if not files or has_lost_records(store, catalogue):
        return {}
    try:
        named = set(named_instances(store, catalogue))
    except (DamagedError, FormatError):
        return dict.fromkeys(files, True)
    return {file: file in named for file in files}


def named_instances(store: Store, catalogue: Catalogue) -> Iterator[str]:
    """The frozen instances that records and uncommitted parts name. The catalogue is listed before the data
    folders, so the parts of a snapshot that is not in it are read. DamagedError, FormatError."""
    committed = set[SnapshotId]()
    for name in (*catalogue.commits, *catalogue.dying):
        if (record := read_record(catalogue.store, name)) is not None:
            committed.add(name.id)
            yield from (each.file for each in record.frozen)
    # Folder by folder: all files of all ranks may be many pages.
    for snapshot in snapshots_with_data(store):
        if snapshot in committed:
            continue
        for entry in part_entries(store, snapshot.data_folder):
            with suppress(FileNotFoundError):
                path = f"{snapshot.data_folder}/{entry.name}"
                head, _ = read_head(store, path, entry.num_bytes, whole=False)
                yield from (rank.constants.file for rank in head.ranks if rank.constants is not None)


def without_record(store: Store) -> list[CommitRecord]:
    """The records for snapshots that have all their files and no record, oldest first, except those that the
    next start commits (see `is_next`)."""
    catalogue = Catalogue.of(store)
    found = _uncommitted(catalogue, snapshots_with_data(store))
    records = [record_at_rest(store, each) for each in found if not is_next(catalogue, each)]
    return [each for each in records if each is not None]


def is_next(catalogue: Catalogue, snapshot: SnapshotId) -> bool:
    """Whether a snapshot is in the lineage, newer than all its commits, and without a tombstone."""
    is_newer = all(each.id < snapshot for each in catalogue.visible())
    return is_newer and snapshot not in catalogue.tombstones and catalogue.is_in_lineage(snapshot)


def _uncommitted(catalogue: Catalogue, at_rest: Iterable[SnapshotId]) -> list[SnapshotId]:
    """The snapshots that have neither a record nor a tombstone, oldest first."""
    committed = {each.id for each in (*catalogue.commits, *catalogue.dying)}
    return sorted(set(at_rest) - committed - catalogue.tombstones)


def _newest_numbers(steps: Sequence[CommitName], count: int) -> list[int]:
    return sorted({each.step for each in steps}, reverse=True)[:count]


def _floor(catalogue: Catalogue, keep: Keep, broken: Collection[CommitName]) -> CommitName | None:
    """The oldest of the newest steps that are kept; None while there are fewer. Older snapshots of the
    lineage will never be kept as one of the newest."""
    whole = [each for each in catalogue.visible() if each not in broken]
    count = max(keep.last, ALWAYS_KEPT)
    numbers = _newest_numbers(whole, count)
    return min(each for each in whole if each.step == numbers[-1]) if len(numbers) == count else None


def _is_orphan(catalogue: Catalogue, snapshot: SnapshotId, floor: CommitName | None) -> bool:
    """Whether a snapshot without a record can never be committed, or never be kept."""
    started = catalogue.newest_started
    if started is None or snapshot.attempt.number > started.number:
        return False
    parent = catalogue.start.parent if catalogue.start is not None else None
    if snapshot.attempt not in (started, parent.attempt if parent is not None else None):
        return True
    if floor is None:
        return False
    return (snapshot.attempt.number, snapshot.boundary) < (floor.attempt.number, floor.boundary)


def _is_outlived(catalogue: Catalogue, name: CommitName, keep: Keep | None, floor: CommitName | None) -> bool:
    """Whether retention would delete a snapshot if it had its record."""
    if keep is None or floor is None or not catalogue.is_in_lineage(name.id):
        return False
    return name < floor and not is_multiple(keep, name.step)


def _frozen(catalogue: Catalogue, knowledge: Knowledge) -> Iterator[str]:
    in_hand = knowledge.in_hand()
    for file, is_named in sorted((knowledge.frozen or {}).items()):
        writer = frozen_writer(file)
        if is_named or writer is None or catalogue.newest_started is None:
            continue
        attempt, nonce = writer
        is_own = nonce == knowledge.own and file not in in_hand
        if attempt.number < catalogue.newest_started.number or nonce in knowledge.dead_writers or is_own:
            yield file


def _attempts(catalogue: Catalogue, knowledge: Knowledge) -> Iterator[AttemptName]:
    """Attempts that have only their records, are older than the newest started one and not its parent; and of
    the newer ones, which never started, all but the last."""
    if knowledge.at_rest is None:
        return
    started, start = catalogue.newest_started, catalogue.start
    parent, number = start.parent if start else None, started.number if started else 0
    present = {each.attempt for each in (*catalogue.commits, *catalogue.dying)}
    present |= {each.attempt for each in (*knowledge.at_rest, *catalogue.tombstones)}
    if parent is not None:
        present.add(parent.attempt)
    unstarted = [each for each in catalogue.attempts if each.number > number]
    older = {each for each in (*catalogue.attempts, *catalogue.folders) if each.number < number}
    yield from sorted((older | set(unstarted[:-LAST_UNSTARTED])) - present)


# ---- deleting


def execute(store: Store, plan: Plan, catalogue: Catalogue, me: AttemptName) -> Done:
    """Execute a plan, as attempt `me`, which must be the newest that claimed. `catalogue`: the one that the
    plan was made from. Deletes nothing once a newer attempt has claimed the run."""
    done = Done()
    if not plan or catalogue.newest_claimed != me:
        return done

    def is_newest() -> bool:
        return newest_claimed(store.at_once()) == me

    crashpoints.point("prune.begun")
    begun: list[SnapshotId] = []
    for snapshot in plan.snapshots:
        with _noted(done.errors):
            _put_tombstone(store, snapshot)
            begun.append(snapshot)
    crashpoints.point("prune.buried")
    if begun and not is_newest():
        return done
    for snapshot in begun:
        with _noted(done.errors):
            done.released |= _delete_snapshot(store, snapshot, catalogue)
            done.snapshots.append(snapshot)
    for file in plan.frozen:
        with _noted(done.errors):
            if _delete_frozen(store, file, is_newest):
                done.frozen.append(file)
    for name in plan.attempts:
        with _noted(done.errors):
            _delete_attempt(store, name, catalogue)
            done.attempts.append(name)
    return done


@contextmanager
def _noted(errors: list[OSError]) -> Iterator[None]:
    """Note an error, so that the rest is deleted."""
    try:
        yield
    except OSError as error:
        errors.append(error)


def _put_tombstone(store: Store, snapshot: SnapshotId) -> None:
    """Create the tombstone, as a second name of run.json if the store has links: a link fits on a full
    disk."""
    path = snapshot.tombstone_path
    if not store.copy(RUN, path):
        store.create(path, Tombstone(id=snapshot).to_bytes())


def _delete_snapshot(store: Store, snapshot: SnapshotId, catalogue: Catalogue) -> set[str]:
    """Delete a snapshot that has a tombstone: data, record, tombstone. A committer that creates the record
    after this has removed it finds no data and removes its record. Returns the frozen instances that the
    record named."""
    name = catalogue.named(snapshot)
    folder, has_folders = snapshot.data_folder, store.capabilities.rename
    paths, frozen = list[str](), set[str]()
    with suppress(DamagedError, FormatError):
        record = None if name is None else read_record(catalogue.store, name)
        if record is not None:
            paths, frozen = record.data_paths(), {each.file for each in record.frozen}
    if has_folders or not paths:
        # Includes files that no record names: shards of dead writers, temporary files.
        paths = [f"{folder}/{entry.name}" for entry in store.list(folder)]
    store.remove_files(paths)
    crashpoints.point("prune.removed")
    records = {name.path} if name is not None else _records_of(store, snapshot)
    gone = [*sorted(records), *(path for each, path in catalogue.quarantines if each.id == snapshot)]
    if has_folders:
        # Each removal is durable before the next one: a power loss must not undo one and keep a later one.
        store.sync_removed(folder)
        store.remove(folder)
        store.remove(folder.rpartition("/")[0])
        store.remove_files(gone)
        store.sync_removed(COMMITS)
        gone = []
    store.remove_files([*gone, snapshot.tombstone_path])
    return frozen


def _records_of(store: Store, snapshot: SnapshotId) -> set[str]:
    """Records of a snapshot that were created after the listing."""
    catalogue = Catalogue.of(store)
    return {each.path for each in (*catalogue.commits, *catalogue.dying) if each.id == snapshot}


def _delete_frozen(store: Store, file: str, is_newest: Callable[[], bool]) -> bool:
    """Delete a frozen instance that nothing names. Return False, and keep it, if it is named meanwhile."""
    tombstone = frozen_tombstone_path(file, secrets.token_hex(4))
    store.create(tombstone, b"\n")
    is_unnamed = is_newest() and not frozen_instances(store, Catalogue.of(store)).get(file, True)
    if is_unnamed:
        store.remove(frozen_path(file))
    # Tombstones of dead processes go with the instance: no name of an instance is used twice.
    names = [entry.name for entry in store.list(FROZEN_FOLDER)] if is_unnamed else []
    tombstones = [f"{FROZEN_FOLDER}/{name}" for name in names if name.startswith(f"{file}.tombstone-")]
    store.remove_files(tombstones or [tombstone])
    return is_unnamed


def _delete_attempt(store: Store, name: AttemptName, catalogue: Catalogue) -> None:
    folder = attempt_folder(name)
    store.remove_files([f"{folder}/{entry.name}" for entry in store.list(folder)])
    store.remove(folder)
    crashpoints.point("prune.swept")
    if name in catalogue.attempts:
        store.remove(claim_path(name.number))


def prune(
    store: Store,
    me: AttemptName,
    keep: Keep,
    knowledge: Knowledge | None = None,
    *,
    catalogue: Catalogue | None = None,
    whole: Collection[CommitName] = (),
    with_uncommitted: bool = True,
) -> tuple[Plan, Done]:
    """Delete what `keep` does not keep, as attempt `me`. `catalogue`: one that was listed just now. `whole`:
    steps whose files the caller has checked. `with_uncommitted`: list data/ and frozen/ too, and delete what
    can never be committed or named."""
    catalogue = Catalogue.of(store) if catalogue is None else catalogue
    if catalogue.newest_claimed != me or catalogue.newest_started is None:
        return Plan(), Done()
    known = replace(
        knowledge or Knowledge(),
        broken=broken_steps(store, catalogue, whole),
        at_rest=snapshots_at_rest(store, catalogue) if with_uncommitted else None,
        whole=partial(record_at_rest, store),
        frozen=frozen_instances(store, catalogue) if with_uncommitted else None,
    )
    plan = collect(catalogue, keep, known)
    return plan, execute(store, plan, catalogue, me)


# ---- small files whose writer was killed before they had their names, and ledgers of attempts that are gone

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")
# `attach` creates it to check for the right to write, and whether the store overwrites.
_PROBE = re.compile(r"\.?probe-[0-9a-f]{16}")
_SAFE_AGE_S = 86400.0
"""No file is written for longer."""
# Foreign folders in attempts/ are not scanned.
_OURS = re.compile("|".join(each.pattern for each in (ATTEMPT, CLAIM, _TEMPORARY)))
# How many ledgers of deleted attempts stay for people to read. They are counted once in so many starts: on an
# object store the listing is a request.
_LEDGERS_KEPT = 64
_LEDGERS_COUNTED_EVERY = 16
# Objects of keepers' own ledgers: each keeper writes others.
_KEEPER_OBJECTS_KEPT = 256


def tidy(store: Store, me: AttemptName, catalogue: Catalogue) -> None:
    """Remove files that no command reads, for an attempt that has claimed, with the catalogue that its sweep
    returned. Logs failures."""
    try:
        # In data folders they go with their snapshot: a listing there has names for all ranks.
        remove_temporary_files(store, with_data=False)
        if me.number % _LEDGERS_COUNTED_EVERY == 0:
            remove_ledgers(store, catalogue)
    except OSError as error:
        log.warning("old temporary files and ledgers could not be removed: %s", error)


def final_name(entry: Entry) -> str:
    """The final name of a temporary file, empty for any other file."""
    match = None if entry.is_folder else _TEMPORARY.fullmatch(entry.name)
    return match["name"] if match else ""


def temporary_files(store: Store, *, with_data: bool = True) -> Iterator[tuple[str, Entry]]:
    """Temporary files that are a day old, in any folder of a run, with their paths; `with_data`: also in data
    folders. A store without renames leaves only probes."""
    found, newest_s = dict[str, Entry](), 0.0
    for folder in _folders(store, with_data=with_data):
        for entry in store.list(folder, _OURS if folder == ATTEMPTS else None):
            newest_s = max(newest_s, entry.since_s)
            if final_name(entry) or (not folder and _PROBE.fullmatch(entry.name)):
                found[f"{folder}/{entry.name}" if folder else entry.name] = entry
    # The store's clock may be days behind this one: then a new file seems old.
    now_s = min(time.time(), newest_s)
    for path, entry in found.items():
        if entry.since_s and now_s - entry.since_s > _SAFE_AGE_S:
            yield path, entry


def remove_temporary_files(store: Store, *, with_data: bool = True) -> None:
    """Remove the `temporary_files`. Raises OSError once all that can be removed are."""
    store.remove_files([path for path, _ in temporary_files(store, with_data=with_data)])


def _folders(store: Store, *, with_data: bool) -> Iterator[str]:
    yield ""
    yield ATTEMPTS  # without renames: for the claims' times
    if store.capabilities.rename:
        yield from (f"{ATTEMPTS}/{name}" for name in attempt_folders(store, ATTEMPTS))
        yield from (COMMITS, FROZEN_FOLDER)
        yield from (each.data_folder for each in snapshots_with_data(store) if with_data)


def remove_ledgers(store: Store, catalogue: Catalogue) -> None:
    """Remove the oldest ledgers of attempts that are deleted; no command reads them."""
    gone: dict[AttemptName, list[str]] = {}
    keepers: list[tuple[float, str]] = []
    for entry in store.list(EVENTS):
        owner = entry.name.partition(".")[0]
        name = AttemptName.parse(owner)
        if name is not None and name not in catalogue.attempts:
            gone.setdefault(name, []).append(entry.name)
        elif owner == "keeper":
            keepers.append((entry.modified_s, entry.name))
    expired = [file for name in sorted(gone)[:-_LEDGERS_KEPT] for file in gone[name]]
    expired += [file for _, file in sorted(keepers)[:-_KEEPER_OBJECTS_KEPT]]
    store.remove_files(f"{EVENTS}/{file}" for file in expired)


# ---- snapshots in memory that are still needed


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A sealed snapshot in a slot of this node. `complete` is the newest boundary, with the number of its
    attempt, that its slot says all ranks of the job have sealed."""

    slot: str
    rank: int
    attempt: AttemptName
    step: int
    boundary: int
    is_committed: bool = False
    complete: tuple[int, int] = (0, 0)

    @property
    def id(self) -> SnapshotId:
        return SnapshotId(self.attempt, self.boundary)


def needed_slots(store: Store, survivors: Sequence[Survivor]) -> set[str]:
    """Names of the slots with a snapshot that is committed nowhere and still needed: the newest one of an
    attempt that all its ranks here hold, until a later step, or a step of an attempt that did not resume from
    it, is committed; and the snapshot that the newest started attempt resumed from."""
    catalogue = Catalogue.of(store)
    if catalogue.problem is not None:
        raise catalogue.problem
    started, parent = catalogue.newest_started, catalogue.start.parent if catalogue.start else None
    visible = next(iter(catalogue.newest_first()), None)
    kept = set()
    for attempt in {each.attempt for each in survivors}:
        mine = [each for each in survivors if each.attempt == attempt]
        # The newest attempt needs it, whatever else is left of the attempt that captured it.
        loaded = [each for each in mine if each.id == parent]
        for each in [*_newest_whole(mine), *(e for e in loaded if not e.is_committed)]:
            if started is None or attempt == started or each in loaded:
                is_kept = visible is None or visible.id < each.id
            else:
                is_kept = visible is None or (visible.attempt != started and visible.id != each.id)
            if is_kept:
                kept.add(each.slot)
    return kept


def _newest_whole(survivors: Sequence[Survivor]) -> list[Survivor]:
    """The snapshots of one attempt that may be needed. A boundary that a rank has not sealed can never be
    whole."""
    left = [each for each in survivors if not each.is_committed]
    ranks = {each.rank for each in survivors}
    if len(ranks) < 2:
        newest = max((each.boundary for each in left), default=None)
        return [each for each in left if each.boundary == newest]
    owners: dict[int, set[int]] = {}
    for each in survivors:
        owners.setdefault(each.boundary, set()).add(each.rank)
    whole = sorted(boundary for boundary, held in owners.items() if held == ranks)
    number, boundary = max(each.complete for each in survivors)
    if number != survivors[0].attempt.number or (whole and boundary > whole[-1]):
        boundary = whole[-1] if whole else 0
    # Other nodes may have nothing newer than the complete one.
    stays = {each for each in whole if each >= boundary}
    return [each for each in left if not whole or each.boundary in stays]
