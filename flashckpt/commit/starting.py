"""How an attempt takes its number, and where it resumes: claim, sweep, candidates, start.json, check after.

The order: claim; commit what lacks only its record, and delete what dead attempts never committed; list the
steps; read one; start.json; check that the step is still there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from flashckpt.commit import attempts, collect, commit_step
from flashckpt.commit.attempts import read_start
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.collect import Knowledge
from flashckpt.commit.steps import is_whole, read_record
from flashckpt.errors import DamagedError, NoSuchStepError, SupersededError
from flashckpt.format.names import AttemptName, CommitName, SnapshotId, start_path
from flashckpt.format.records import Owner, Start, newest_of
from flashckpt.options import Keep
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

REPORTED_STARTS = 4
"""At one step, in a row: a machine may fail a few times; a bad step or batch ends each start."""
_SHOWN = 8


def claim(
    store: Store,
    owner: Owner,
    check: Callable[[], None] | None = None,
    above: int = 0,
    keep: Keep | None = None,
) -> tuple[AttemptName, Catalogue]:
    """Take the next number, and `sweep`. Returns the attempt, and the catalogue, listed after the claim, of
    the steps that it may resume from."""
    highest = max(above, Catalogue.of(store).highest_number())
    name = attempts.claim(store, owner, check, above=highest)
    return name, sweep(store, name, keep)


def sweep(store: Store, me: AttemptName, keep: Keep | None = None) -> Catalogue:
    """For an attempt that has claimed and not started: commit the snapshots that lack only their record and
    are newer than every commit of the lineage; delete uncommitted data of dead attempts. Returns the
    catalogue after that.

    `keep`: for each step that is committed here, delete an older one that `keep` does not keep. So a job
    that dies before each record does not fill the storage, and a wrong `keep` costs no other step.
    """
    catalogue = Catalogue.of(store)
    at_rest = collect.snapshots_at_rest(store, catalogue)
    if _finish(store, catalogue, at_rest or ()):
        keep = None if keep is None else _at_least(keep, catalogue)
        catalogue = Catalogue.of(store)
        if keep is not None:
            knowledge = Knowledge(broken=collect.broken_steps(store, catalogue))
            # Without interrupted deletions: the previous attempt may be about to resume from their steps.
            expired = [each.id for each in collect.collect(catalogue, keep, knowledge).expired]
            collect.execute(store, collect.Plan(snapshots=tuple(expired)), catalogue, me)
            catalogue = Catalogue.of(store)
    plan = collect.collect(
        catalogue,
        None,
        Knowledge(
            at_rest=at_rest,
            whole=partial(commit_step.record_at_rest, store),
            frozen=collect.frozen_instances(store, catalogue),
        ),
    )
    if plan.without_record:
        log.warning(
            "%s: snapshots without a commit record have all their files and stay: steps %s. If their records "
            "were lost, restore them. `flashckpt prune --without-record` deletes the snapshots",
            store.url, ", ".join(map(str, plan.without_record[:_SHOWN])),
        )  # fmt: skip
    if not plan:
        return catalogue
    done = collect.execute(store, plan, catalogue, me)
    if done.errors:
        log.warning("files of dead attempts could not be removed, and fill the storage: %s", done.errors[0])
    return Catalogue.of(store)


def _finish(store: Store, catalogue: Catalogue, at_rest: Collection[SnapshotId]) -> bool:
    """Create missing records: a keeper was killed before it did, or they were lost. Returns whether there
    were any. Skips snapshots older than a commit, whose deletion may have begun."""
    found, committed = False, {each.id for each in catalogue.commits}
    for each in sorted(at_rest):
        if each in committed or not collect.is_next(catalogue, each):
            continue
        try:
            record = commit_step.record_at_rest(store, each)
        except OSError as error:
            log.warning("%s cannot be read and is not committed: %s", each.data_folder, error)
            continue
        if record is not None:
            with suppress(SupersededError, DamagedError, FileNotFoundError):
                commit_step.commit(store, each, record.world)
                found = True
    return found


def _at_least(keep: Keep, before: Catalogue) -> Keep:
    """`keep` with a `last` that keeps at least as many newest steps as there were before."""
    numbers = {each.step for each in before.visible()}
    oldest = min((each for each in numbers if not collect.is_multiple(keep, each)), default=None)
    newest = 0 if oldest is None else sum(each >= oldest for each in numbers)
    return replace(keep, last=max(keep.last, newest))


def start(
    store: Store,
    name: AttemptName,
    parent: SnapshotId | None,
    step: int,
    world: int,
    catalogue: Catalogue,
    *,
    near: int = attempts.NEAR,
) -> Start:
    """Record where the attempt resumes, on all its ranks. From here on older attempts commit nothing.
    `catalogue`: listed after the attempt's claim. `near`: how many attempts of the lineage are named even
    without commits here.

    SupersededError if a newer attempt has claimed the run.
    """
    attempts.check_newest(store, name)
    before = () if parent is None else tuple(_behind(store, parent, catalogue, near))
    again = _starts_before(store, parent, catalogue)
    record = Start(parent=parent, step=step, world=world, before=before, again=again)
    if not store.create(start_path(name), record.to_bytes()):
        raise SupersededError(
            f"attempt {name} has already started; this process must end. Nothing was changed.",
            path=start_path(name),
        )
    return record


def _starts_before(store: Store, parent: SnapshotId | None, catalogue: Catalogue) -> int:
    """How many attempts in a row, up to the newest started one, resumed from this parent and were not closed.
    The sweep deletes older ones, so each counts on."""
    last, newest = catalogue.start, catalogue.newest_started
    if parent is None or last is None or newest is None or last.parent != parent:
        return 0
    alive = attempts.alive(store, newest)
    return 0 if alive is not None and alive.ended == "closed" else last.again + 1


def report_repeated(store: Store, record: Start, catalogue: Catalogue) -> None:
    """Warn of a start that is one of several at the same step: the state or the data there may end each."""
    if record.again + 1 < REPORTED_STARTS:
        return
    older = max((each.step for each in catalogue.visible() if each.step < record.step), default=None)
    log.warning(
        "%d starts in a row have resumed from step %d, and none of those before this one has saved a newer "
        "step. If the state of step %d or the data after it ends the job each time, examine both, or resume "
        "from an older step: `flashckpt branch %s %s` (`flashckpt ls` lists the steps)",
        record.again + 1, record.step, record.step, store.url, "STEP" if older is None else older,
    )  # fmt: skip


def check_started(store: Store, name: AttemptName, parent: CommitName) -> None:
    """Check, after the start record, that the committed step that the attempt resumed from is still whole, as
    it was after the claim. A tombstone does not count from here on. NoSuchStepError."""
    catalogue = Catalogue.of(store)
    if catalogue.newest_started != name:
        return  # the newer attempt checks this when it claims
    # A deletion writes the tombstone first and removes the record last: with a record and no tombstone, no
    # file is gone.
    is_begun = catalogue.store.exists(parent.id.tombstone_path)
    if parent not in catalogue.commits or (is_begun and not is_whole(store, parent)):
        raise NoSuchStepError(
            f"step {parent.step} of attempt {parent.attempt} was removed while attempt {name} started from "
            "it. Start again, or name another step with `flashckpt branch`.",
            step=parent.step,
            path=store.url,
        )


def branch(
    store: Store, name: CommitName, owner: Owner, check: Callable[[], None] | None = None
) -> AttemptName:
    """Claim and start an attempt at a committed step, visible or not. NoSuchStepError."""
    _resolve(store, name, Catalogue.of(store))
    attempt, catalogue = claim(store, owner, check)
    world = _resolve(store, name, catalogue)
    try:
        start(store, attempt, name.id, name.step, world, catalogue)
        check_started(store, attempt, name)
    finally:
        attempts.mark_ended(store, attempt, "closed")
    return attempt


def _resolve(store: Store, name: CommitName, catalogue: Catalogue) -> int:
    """The number of ranks of a step that is committed and whole."""
    with suppress(DamagedError):
        record = read_record(store, name)
        if record is not None and name in catalogue.commits and is_whole(store, name):
            return record.world
    raise NoSuchStepError(
        f"{store.url} has no committed step {name}, or retention is deleting it. Nothing was changed. "
        "`flashckpt ls --all` lists the steps.",
        step=name.step,
        path=store.url,
    )


def _behind(store: Store, parent: SnapshotId, catalogue: Catalogue, near: int) -> Iterator[SnapshotId]:
    """The lineage before a parent: attempts with commits, and the newest few of the others."""
    lineage: tuple[SnapshotId, ...] = ()
    with suppress(DamagedError):
        found = read_start(store, parent.attempt)
        lineage = (newest_of(parent.attempt), *found.ancestors) if found is not None else ()
    if not lineage:
        lineage = catalogue.lineage
    of = [each.attempt for each in lineage]
    behind = lineage[of.index(parent.attempt) + 1 :] if parent.attempt in of else ()
    present = {each.attempt for each in (*catalogue.commits, *catalogue.dying)}
    for position, each in enumerate(behind):
        if position < near or each.attempt in present:
            yield each
