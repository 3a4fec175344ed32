"""Commands' work on storage: verify the visible steps, quarantine damaged ones, remove orphans; and prune.

A quarantine puts a step last, on this host. A recovery deletes no committed step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from flashckpt.commit import collect, lineage
from flashckpt.commit.attempts import open_run
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.collect import Knowledge
from flashckpt.commit.commit_step import record_at_rest
from flashckpt.commit.steps import is_whole, read_record
from flashckpt.commit.verification import Row, verify
from flashckpt.errors import DamagedError
from flashckpt.format.names import (
    COMMITS,
    FROZEN_FOLDER,
    CommitName,
    SnapshotId,
    attempt_folder,
    frozen_path,
)
from flashckpt.options import Keep
from flashckpt.persist.deletions import half_written, remove, remove_frozen_of
from flashckpt.persist.job import StoredStep
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.recovery.node import Hold, dead_keepers, hold, view
from flashckpt.recovery.report import Fate, Finding, Kind, Watcher
from flashckpt.store.base import Store

_SHOWN = 4
_MOST_NAMED = 100
_KEEP_ALL = Keep(last=10**9)

_NEVER_COMMITTED = "its step can never be committed"
_INTERRUPTED = "its step was being deleted"
_UNNAMED = "no step names it"


@dataclass
class Examined:
    """The result of verifying the visible steps. `num_bytes`: bytes that were read."""

    findings: list[Finding] = field(default_factory=list)
    whole: set[CommitName] = field(default_factory=set)
    damaged: set[CommitName] = field(default_factory=set)
    num_bytes: int = 0

    def add(self, each: CommitName, outcome: Fate, why: str, *, damage: bool = False) -> None:
        about = each.path, each.step, each.attempt, 0
        self.findings.append(Finding(Kind.STEP, outcome, *about, why, damage, each.boundary))


def parts_found(stored: StoredStep, outcome: Fate, detail: str = "", *, damage: bool = False) -> Finding:
    """A finding about a step without a commit record."""
    num_bytes = sum(rank.shard.num_bytes for head in stored.heads for rank in head.ranks)
    step = stored.step if stored.step >= 0 else None
    about = stored.folder, step, stored.id.attempt, num_bytes
    return Finding(Kind.PARTS, outcome, *about, detail, damage, stored.id.boundary)


def examine(store: Store, watcher: Watcher, *, read: bool) -> Examined:
    """Verify the visible steps; with `read` every byte of them. Changes nothing."""
    if not read:
        return _listed(store)
    report = verify(store, progress=watcher.progress)
    examined = Examined(num_bytes=report.num_bytes)
    by_step: dict[CommitName, list[Row]] = {}
    for row in report.rows:
        by_step.setdefault(row.name, []).append(row)
    catalogue = Catalogue.of(store)
    for each, rows in by_step.items():
        _judge(catalogue, each, [row for row in rows if row.status != "ok"], examined)
    return examined


def quarantine(store: Store, examined: Examined, ledger: Ledger) -> None:
    """Put the damaged steps last, on this host. If that fails, their findings change: without a quarantine a
    resume finds the damage itself, and passes over the step."""
    for index, found in enumerate(examined.findings):
        if found.outcome is not Fate.QUARANTINED or found.step is None or found.attempt is None:
            continue
        name = CommitName(found.step, found.attempt, found.boundary)
        try:
            lineage.quarantine(store, name, lineage.this_host(), found.detail)
        except OSError as error:
            why = f"{found.detail}; it could not be quarantined: {error}"
            examined.findings[index] = replace(found, outcome=Fate.FAILED, detail=why)
            continue
        ledger.add(
            str(found.attempt), Event.ERROR,
            what="damaged", step=found.step, message=found.detail, by="recover",
        )  # fmt: skip


def _judge(catalogue: Catalogue, each: CommitName, wrong: list[Row], examined: Examined) -> None:
    there = lineage.quarantined_here(catalogue, each)
    if not wrong:
        examined.whole.add(each)
        if there is not None:
            files = f"its quarantine-*.json in {COMMITS}/"
            why = f"it is whole now, and last on {there.host} until {files} is deleted"
            examined.add(each, Fate.WAS_QUARANTINED, why)
        return
    examined.damaged.add(each)
    reason = "; ".join(
        f"{row.file.rpartition('/')[2]} is {row.status}: {row.detail}" for row in wrong[:_SHOWN]
    )
    if not is_whole(catalogue.store, each):
        # No resume takes it now. Once its files are restored, it counts again.
        outcome = Fate.KEPT
    elif all(row.status == "unreadable" for row in wrong):
        outcome, reason = Fate.FAILED, f"{reason}; not quarantined: the storage failed, it may be whole"
    else:
        outcome = Fate.QUARANTINED if there is None else Fate.WAS_QUARANTINED
    examined.add(each, outcome, reason, damage=outcome is not Fate.FAILED)


def _listed(store: Store) -> Examined:
    """The visible steps by names and lengths of their files alone."""
    catalogue, lost = Catalogue.of(store), dict(lineage.incomplete(store))
    examined = Examined(whole=set(catalogue.visible()) - lost.keys(), damaged=set(lost))
    for each in catalogue.newest_first():
        if each in lost:
            examined.add(each, Fate.KEPT, lost[each], damage=True)
        elif (there := lineage.quarantined_here(catalogue, each)) is not None:
            examined.add(each, Fate.WAS_QUARANTINED, there.reason, damage=True)
    return examined


# ---- orphans


def clear_frozen(store: Store, writers: Collection[str]) -> list[Finding]:
    """Remove unnamed frozen instances of dead keepers before memory is saved, which may need their space."""
    sizes = _frozen_sizes(store)
    return [_frozen(file, sizes) for file in remove_frozen_of(store, writers).frozen]


def clear(hold: Hold, writers: Collection[str], ledger: Ledger) -> list[Finding]:
    """Remove files that no start and no keeper can use: unnamed shards of dead keepers (`writers` are their
    nonces), uncommitted data of dead attempts, unnamed frozen instances, interrupted deletions, temporary
    files. Returns a finding for each. RunHeldError once a job has begun."""
    store, catalogue, plan = hold.store, Catalogue.of(hold.store), collect.Plan()
    begun = half_written(store, writers)
    found = {each.path: _unnamed(each.path, each.id, each.num_bytes, each.why) for each in begun}
    for path, entry in collect.temporary_files(store):
        found[path] = Finding(
            Kind.ORPHANS, Fate.REMOVED, path, num_bytes=entry.num_bytes, detail="its write was interrupted"
        )
    if catalogue.newest_started is not None:
        knowledge = Knowledge(
            at_rest=collect.snapshots_at_rest(store, catalogue),
            whole=partial(record_at_rest, store),
            frozen=collect.frozen_instances(store, catalogue),
            dead_writers=writers,
        )
        plan = collect.collect(catalogue, _KEEP_ALL, knowledge)
        found = {each.place: each for each in _planned(store, catalogue, plan)} | found
    failed = dict[str, str]()
    for each in begun:
        hold.guard()
        try:
            remove(store, each)
        except OSError as error:
            failed[each.path] = str(error)
    hold.guard()
    errors = list[OSError]()
    try:
        if hold.claimed is not None:
            errors = collect.execute(store, plan, catalogue, hold.claimed).errors
        collect.remove_temporary_files(store)
    except OSError as error:
        errors.append(error)
    failed |= {path: str(errors[0]) for path in found if errors and store.exists(path)}
    if found:
        paths = [*found][:_MOST_NAMED]
        ledger.add(None, Event.PRUNE, what="orphans", paths=paths, count=len(found), by="recover")
    return [
        replace(each, outcome=Fate.FAILED, detail=failed[path]) if path in failed else each
        for path, each in found.items()
    ]


def _planned(store: Store, catalogue: Catalogue, plan: collect.Plan) -> Iterator[Finding]:
    for snapshot in plan.snapshots:
        why = _INTERRUPTED if snapshot in catalogue.tombstones else _NEVER_COMMITTED
        files = [entry for entry in store.list(snapshot.data_folder) if not entry.is_folder]
        yield from (
            _unnamed(f"{snapshot.data_folder}/{entry.name}", snapshot, entry.num_bytes, why)
            for entry in files
        )
        if not files and snapshot in catalogue.tombstones:
            yield _unnamed(snapshot.tombstone_path, snapshot, 0, why)
    sizes = _frozen_sizes(store) if plan.frozen else {}
    yield from (_frozen(file, sizes) for file in plan.frozen)
    for name in plan.attempts:
        about = attempt_folder(name), None, name, 0
        yield Finding(Kind.ORPHANS, Fate.REMOVED, *about, "it has ended, and has no step")


def _frozen_sizes(store: Store) -> dict[str, int]:
    return {entry.name: entry.num_bytes for entry in store.list(FROZEN_FOLDER)}


def _frozen(file: str, sizes: Mapping[str, int]) -> Finding:
    num_bytes = sizes.get(file, 0)
    return Finding(Kind.ORPHANS, Fate.REMOVED, frozen_path(file), num_bytes=num_bytes, detail=_UNNAMED)


def _unnamed(path: str, snapshot: SnapshotId, num_bytes: int, why: str) -> Finding:
    about = path, None, snapshot.attempt, num_bytes
    return Finding(Kind.ORPHANS, Fate.REMOVED, *about, why, False, snapshot.boundary)


# ---- retention by hand: the rules of commit/collect.py, while no job trains the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """One step that was deleted, or would be. `num_bytes`: the length of its shards, 0 if its record is
    damaged."""

    name: CommitName
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """The steps that were deleted, oldest first, and the numbers of the visible steps that stay.
    `without_record` are snapshots that have all their files and no commit record, and stay. `refusal` says
    why nothing may be deleted."""

    run: str
    dry_run: bool
    gone: tuple[Pruned, ...]
    kept: tuple[int, ...]
    without_record: tuple[Pruned, ...] = ()
    refusal: str = ""


def prune(store: Store, keep: Keep, *, dry_run: bool = False, without_record: bool = False) -> Pruning:
    """Delete the visible steps that `keep` does not keep: never those with the newest two step numbers. With
    `without_record` delete, too, the snapshots that have all their files and no commit record.

    Raises RunHeldError while a job or a recovery has the run; NoSuchStepError if there is no run;
    UnusableRunError if records are lost, so that the order of the steps is unknown. OSError if a file could
    not be deleted.
    """
    run = open_run(store, create=False)
    with (view if dry_run else hold)(store, run) as held:
        store = held.store
        planned, refusal = _expired(store, keep)
        if not refusal and held.claimed is not None:
            held.guard()
            knowledge = Knowledge(dead_writers=dead_keepers(held.runtime))
            _, done = collect.prune(store, held.claimed, keep, knowledge)
            no_record = _without_record(store) if without_record else ()
            plan = collect.Plan(snapshots=tuple(each.name.id for each in no_record))
            also = collect.execute(store, plan, Catalogue.of(store), held.claimed)
            for error in (*done.errors, *also.errors):
                raise error
            collect.remove_temporary_files(store)
            gone = {*done.snapshots, *also.snapshots}
            planned = tuple(each for each in (*planned, *no_record) if each.name.id in gone)
        return Pruning(
            run=store.url,
            dry_run=dry_run,
            gone=planned,
            kept=tuple(sorted({each.step for each in Catalogue.of(store).visible()})),
            without_record=_without_record(store),
            refusal=refusal,
        )


def _expired(store: Store, keep: Keep) -> tuple[tuple[Pruned, ...], str]:
    """The committed steps that `keep` does not keep, or why none may be deleted. Raises UnusableRunError."""
    catalogue = Catalogue.of(store)
    lineage.check_records(store, catalogue)
    knowledge = Knowledge(broken=collect.broken_steps(store, catalogue))
    expired = collect.collect(catalogue, keep, knowledge).expired
    newest = catalogue.newest_started
    if expired and not any(each.attempt == newest for each in catalogue.visible()):
        return (), (
            f"attempt {newest}, the newest, has not committed a step of its own yet: until then nothing that "
            "it may resume from again is deleted. Train on to its first commit."
        )
    return tuple(Pruned(name=each, num_bytes=_num_bytes(store, each)) for each in expired), ""


def _without_record(store: Store) -> tuple[Pruned, ...]:
    records = collect.without_record(store)
    return tuple(Pruned(name=e.name, num_bytes=sum(file.num_bytes for file in e.shards)) for e in records)


def _num_bytes(store: Store, name: CommitName) -> int:
    try:
        record = read_record(store, name)
    except DamagedError:
        return 0
    return 0 if record is None else sum(shard.num_bytes for shard in record.shards)
