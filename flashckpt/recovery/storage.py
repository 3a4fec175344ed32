"""Commands' work on storage: commit whole snapshots, verify the visible steps, mark damaged ones, delete
garbage; and prune. A recovery deletes no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from flashckpt.catalogue import changes
from flashckpt.catalogue.changes import Spared, spared, visible
from flashckpt.catalogue.requests import Stores
from flashckpt.commit import lineage
from flashckpt.commit.attempts import settle
from flashckpt.commit.commit_step import collect, retain, retained
from flashckpt.commit.steps import StepRecord, is_whole, step_of, whole_or_why
from flashckpt.commit.tidying import temporary_files
from flashckpt.commit.verification import Row, verify, verify_file
from flashckpt.commit.view import HOME, View, check_writable, folders_in, name_of, open_run
from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import FROZEN_PREFIX
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import CommitName
from flashckpt.options import Keep
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.recovery.node import Hold
from flashckpt.recovery.report import Fate, Finding, Kind, Watcher
from flashckpt.store.base import Store

_SHOWN = 4
_MOST_NAMED = 100
_GARBAGE = "no step can name it any more"


@dataclass
class Examined:
    """The result of verifying the visible steps. `num_bytes`: bytes that were read."""

    findings: list[Finding] = field(default_factory=list)
    whole: set[CommitName] = field(default_factory=set)
    damaged: set[CommitName] = field(default_factory=set)
    num_bytes: int = 0

    def add(self, each: CommitName, outcome: Fate, why: str, *, damage: bool = False) -> None:
        found = Finding(Kind.STEP, outcome, str(each), each.id, each.step, detail=why, damage=damage)
        self.findings.append(found)


def commit_whole(store: Store, *, dry_run: bool, read: bool) -> list[Finding]:
    """Commit the whole snapshots that the newest attempt has left. A dry run verifies them instead if `read`.
    Returns a finding for each, newest first."""
    before = View.of(store)
    if dry_run:
        return [*_whole(before, read=read)][::-1]
    try:
        made = settle(before)[0].catalogue.checkpoints
    except OSError as error:
        left = before.pending()[::-1]
        return [Finding(Kind.PARTS, Fate.FAILED, each.path, each.id, detail=str(error)) for each in left]
    return [
        Finding(Kind.PARTS, Fate.COMMITTED, each.folder.path, each.id, each.step, each.num_bytes)
        for each in made[::-1]
        if not before.catalogue.has(each.id)
    ]


def _whole(view: View, *, read: bool) -> Iterator[Finding]:
    """The whole snapshots that the newest attempt has left. One that `verify` would find damaged would be
    committed, and marked."""
    for folder in view.pending():
        with suppress(DamagedError):
            manifest = Stores({HOME.store: view.store}).run(HOME.gather(folder))
            if isinstance(manifest, Manifest):
                about = folder.path, folder.id, manifest.step, manifest.num_bytes
                wrong = [*_wrong_files(step_of(view.store, manifest))] if read else []
                fate, why = Fate.QUARANTINED if wrong else Fate.SOUND, "; ".join(wrong[:_SHOWN])
                yield Finding(Kind.PARTS, fate, *about, why, damage=bool(wrong))


def _wrong_files(record: StepRecord) -> Iterator[str]:
    for rank in record.parts.ranks:
        for path, contents in record.files(rank):
            status, detail = verify_file(record.store, path, contents)
            if status not in ("ok", "unreadable"):
                yield f"{path.rpartition('/')[2]} is {status}: {detail}"


def examine(store: Store, watcher: Watcher, *, read: bool) -> Examined:
    """Verify the visible steps; with `read` every byte of them. Changes nothing."""
    if not read:
        return _listed(store)
    report = verify(store, progress=watcher.progress)
    examined = Examined(num_bytes=report.num_bytes)
    by_step: dict[CommitName, list[Row]] = {}
    for row in report.rows:
        by_step.setdefault(row.name, []).append(row)
    found = View.of(store)
    for each, rows in by_step.items():
        _judge(found, each, [row for row in rows if row.status != "ok"], examined)
    return examined


def quarantine(store: Store, examined: Examined, ledger: Ledger) -> None:
    """Mark the damaged steps, and clear those that are whole again. If that fails, their findings change:
    without the mark a resume finds the damage itself, and passes over the step."""
    with suppress(OSError):
        view = View.of(store)
        for each in view.catalogue.checkpoints:
            if each.id in view.damaged and name_of(each) in examined.whole:
                change = partial(changes.quarantine, checkpoint=each)
                Stores({HOME.store: store}).run(HOME.update(change, view.catalogue))
    for index, found in enumerate(examined.findings):
        if found.outcome is not Fate.QUARANTINED or found.step is None or found.id is None:
            continue
        name = CommitName(found.step, found.id.attempt, found.id.boundary)
        try:
            lineage.quarantine(store, name, lineage.this_host(), found.detail)
        except OSError as error:
            why = f"{found.detail}; it could not be marked: {error}"
            examined.findings[index] = replace(found, outcome=Fate.FAILED, detail=why)
            continue
        ledger.add(
            str(found.attempt), Event.ERROR,
            what="damaged", step=found.step, message=found.detail, by="recover",
        )  # fmt: skip


def _judge(found: View, each: CommitName, wrong: list[Row], examined: Examined) -> None:
    there = lineage.damage(found, each.id)
    if not wrong:
        examined.whole.add(each)
        if there is not None:
            why = f"it is whole now, and counts again: {there[0]} had failed to verify it"
            examined.add(each, Fate.WAS_QUARANTINED, why)
        return
    examined.damaged.add(each)
    reason = "; ".join(
        f"{row.file.rpartition('/')[2]} is {row.status}: {row.detail}" for row in wrong[:_SHOWN]
    )
    if not is_whole(found, each):
        # No resume takes it now. Once its files are restored, it counts again.
        outcome = Fate.KEPT
    elif all(row.status == "unreadable" for row in wrong):
        outcome, reason = Fate.FAILED, f"{reason}; not marked: the storage failed, it may be whole"
    else:
        outcome = Fate.QUARANTINED if there is None else Fate.WAS_QUARANTINED
    examined.add(each, outcome, reason, damage=outcome is not Fate.FAILED)


def _listed(store: Store) -> Examined:
    """The visible steps by names and lengths of their files alone."""
    view, examined = View.of(store), Examined()
    for checkpoint in visible(view.catalogue)[::-1]:
        each, found = name_of(checkpoint), whole_or_why(store, checkpoint)
        if isinstance(found, str):
            examined.damaged.add(each)
            examined.add(each, Fate.KEPT, found, damage=True)
        elif (there := lineage.damage(view, each.id)) is not None:
            examined.add(each, Fate.WAS_QUARANTINED, there[1], damage=True)
        else:
            examined.whole.add(each)
    return examined


# ---- garbage


def clear_garbage(hold: Hold, ledger: Ledger) -> list[Finding]:
    """Delete files that no step can name any more, and temporary files; a dry run only finds them. Returns a
    finding for each. RunHeldError once a job has begun."""
    store = hold.store
    found = {each.place: each for each in _garbage(store)}
    if hold.is_view:
        return [*found.values()]
    hold.guard()
    failure = ""
    try:
        collect(store, View.of(store).catalogue)
        store.remove_files(path for path, _ in temporary_files(store))
    except (OSError, DamagedError) as error:
        failure = str(error)
    failed = {path for path in found if failure and store.exists(path)}
    if found:
        paths = [*found][:_MOST_NAMED]
        ledger.add(None, Event.PRUNE, what="orphans", paths=paths, count=len(found), by="recover")
    return [
        replace(each, outcome=Fate.FAILED, detail=failure) if path in failed else each
        for path, each in found.items()
    ]


def _garbage(store: Store) -> Iterator[Finding]:
    for path, entry in temporary_files(store):
        why = "its write was interrupted"
        yield Finding(Kind.ORPHANS, Fate.REMOVED, path, num_bytes=entry.num_bytes, detail=why)
    newest = View.of(store)
    for folder, kept in spared(newest.catalogue, folders_in(store)).items():
        if kept is Spared.ALL:
            continue
        for entry in store.list(folder.path):
            if entry.is_folder or (kept is Spared.FROZEN and entry.name.startswith(FROZEN_PREFIX)):
                continue
            path, size = f"{folder.path}/{entry.name}", entry.num_bytes
            yield Finding(Kind.ORPHANS, Fate.REMOVED, path, folder.id, None, size, _GARBAGE)


# ---- retention by hand


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """One step that was deleted, or would be. `num_bytes`: the length of its files."""

    name: CommitName
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """The steps that were deleted, oldest first, and the numbers of the visible steps that stay."""

    run: str
    dry_run: bool
    gone: tuple[Pruned, ...]
    kept: tuple[int, ...]


def prune(store: Store, keep: Keep, *, dry_run: bool = False) -> Pruning:
    """Delete the visible steps that `keep` does not keep: never the newest two that are whole.

    It may run beside a job. NoSuchStepError if there is no run. OSError if a file could not be deleted.
    """
    if not dry_run:
        check_writable(store)
    before = open_run(store, create=False)
    if dry_run:
        after = retained(before, keep)
    else:
        after = retain(before, keep)[0]
        collect(store, after.catalogue)
        store.remove_files(path for path, _ in temporary_files(store))
    sizes = {each.id: each.num_bytes for each in before.catalogue.checkpoints}
    gone = [each for each in before.checkpoints if not after.has(each)]
    return Pruning(
        run=store.url,
        dry_run=dry_run,
        gone=tuple(Pruned(name=each, num_bytes=sizes[each.id]) for each in gone),
        kept=tuple(sorted({each.step for each in after.visible()})),
    )
