"""The mirror of a run: a second store that gets committed steps of the home.

Owns the mirror while a keeper lives: its run.json, the check that no other job trains it, retention. Sends
each request once and raises errors; the keeper decides when to try again. At a start it is compared with the
home: commit/choice.py decides which of the two is ahead, and a resume reads a step where it is.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from flashckpt import _native
from flashckpt.commit import attempts, collect, lineage
from flashckpt.commit.assets import copy_assets
from flashckpt.commit.attempts import open_run
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.choice import Choice, History, RankOffers, choose
from flashckpt.commit.steps import is_whole
from flashckpt.errors import FlashckptError, NoSuchStepError, RunError, UnusableRunError
from flashckpt.format.names import AttemptName, CommitName, SnapshotId, claim_path, start_path
from flashckpt.options import Remote
from flashckpt.persist.ledger import Event, lines_of
from flashckpt.replication.run_copy import AttemptRecords, Copied, Outcome, StepCopier, bring
from flashckpt.store import open_store
from flashckpt.store.base import Store

# ---- at a start: what is refused before the claim, and what is copied to the home

# Of a URL in the ledger, and of the attempts whose ledger is read.
_MOST_CHARS, _MOST_ATTEMPTS = 4096, 4


@dataclass(frozen=True, kw_only=True)
class RemoteRun:
    """The mirror of a run. `problem` says why it does not answer, empty if it does. `claimed`: the attempt
    that has claimed the home and is about to start there; None for a process that changes nothing."""

    store: Store
    problem: str = ""
    claimed: AttemptName | None = None


def prepare(local: Store, remote: Store, run_id: str) -> tuple[str, int]:
    """Make the run in the remote if it has none. Returns the run's id and the highest attempt number there.
    `run_id`: that of the local store, empty if it has no run.

    Raises, and changes nothing: OSError if the remote does not answer (see `check_unanswered`), RunError if
    it cannot be used or holds another run.
    """
    with suppress(NoSuchStepError):
        # A read fails soon if no server answers: writes are retried more often.
        open_run(remote, create=False)
    found = open_run(remote, create=True, run_id=run_id).run_id
    if run_id not in ("", found):
        raise UnusableRunError(
            f"{local.url} and the mirror (remote={remote.url}) hold different runs ({run_id} and {found}). "
            "Nothing was loaded or changed. To resume the mirror's run, name a home that is empty; to "
            "resume the run that is here, name a mirror of its own.",
            path=local.url,
        )
    return found, Catalogue.of(remote).highest_number()


def check_unanswered(local: Store, remote: Store, run_id: str, problem: str) -> None:
    """RunError if the remote does not answer and there is no run here: a new run would have another id, and
    the remote could never be used with it."""
    refusal = choose((), History(url=local.url), History(url=remote.url, problem=problem)).refusal
    if not run_id and refusal is not None:
        raise refusal


def next_start(
    local: Store,
    remote: RemoteRun | None,
    rows: Sequence[RankOffers] | None = None,
    *,
    is_saved: bool = True,
    damaged: Collection[SnapshotId] = (),
) -> Choice:
    """`lineage.next_start` for a run with this remote, or none. If the remote is ahead and `remote.claimed`
    is given, copy the records of the remote's newest attempt to the local store; after a kill the next start
    does so. RunError if the remote has lost those records."""
    choice = lineage.next_start(
        local,
        rows,
        None if remote is None else remote.store,
        mirror_problem="" if remote is None else remote.problem,
        is_saved=is_saved,
        read_from=partial(read_from, local),
        damaged=damaged,
    )
    is_final = choice.refusal is None and not choice.needs_save
    if choice.mirror_is_ahead and is_final and remote is not None and remote.claimed is not None:
        newest = choice.lineage[0].attempt
        _take_over(local, remote.store, newest, remote.claimed)
        if not is_saved and any(each.id.attempt == newest for row in rows or () for each in row.offers):
            # The ranks offered without its start record, which gives the number of its ranks.
            return replace(choice, candidates=(), needs_save=True)
    return choice


def _take_over(local: Store, remote: Store, newest: AttemptName, ours: AttemptName) -> None:
    """Copy the records of the remote's newest attempt to the local store, as its newest started attempt."""
    records = AttemptRecords.of(remote, newest)
    if records is None or not records.start:
        raise RunError(
            f"{remote.url}: attempt {newest} was deleted while its records were read. Nothing was loaded. "
            "Start again.",
            path=remote.url,
        )
    attempts.check_newest(local, ours)
    for number, name in attempts.names(local, least=newest.number).items():
        # These have committed nothing; with their start records one of them would be the newest.
        if name != newest and number < ours.number:
            local.remove(start_path(name))
            if number == newest.number:
                local.remove(claim_path(number))
    bring(local, [records])


def read_from(store: Store) -> str:
    """The remote from which the newest attempt read its first step, by its ledger; empty if it read none."""
    newest = attempts.newest_started(store)
    lines = () if newest is None else lines_of(store, str(newest))
    resumes = (line for line in lines if line["event"] == Event.RESUME.value)
    if not any(line.get("tier") == "remote" for line in resumes):
        return ""
    return known_remote(store) or "another store"


def known_remote(store: Store) -> str:
    """The URL of the newest attempt's remote by its ledger; empty if it had none, or the ledger is gone. For
    display: a resume gets the remote from its caller."""
    for _, name in sorted(attempts.names(store).items(), reverse=True)[:_MOST_ATTEMPTS]:
        for line in lines_of(store, str(name)):
            if line["event"] == Event.ATTACH.value:
                url = line.get("remote")
                return url if isinstance(url, str) and url.isprintable() and len(url) <= _MOST_CHARS else ""
    return ""


# ---- while the run is trained

log = logging.getLogger(__name__)

_TRIES = 4

IsDue = Callable[[int | None, int], bool]
"""Whether a step is to be copied, given the newest step number of the remote (None: no step) and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """The result of one request. `of`: the newest started attempt here; `newest`: the newest step of the
    remote; `copied`: None if nothing was due; `pruned`: the steps that the remote's retention deleted;
    `problem`: why it could not."""

    of: AttemptName | None
    newest: CommitName | None = None
    copied: Copied | None = None
    pruned: tuple[int, ...] = ()
    problem: str = ""


class Mirror:
    """Copies steps to the remote. For one thread, except `copying`, the step that is being copied, and
    `progress_bytes`."""

    def __init__(self, source: Store, remote: Remote) -> None:
        self._source, self._remote = source, remote
        self.copying: CommitName | None = None
        self._progress = array("Q", [0])
        self._target: Store | None = None
        self._copier: StepCopier | None = None
        self._newest: CommitName | None = None
        # The newest attempt of the source whose records are in the target.
        self._settled: AttemptName | None = None
        # Whether uncommitted data in the target was listed, for this attempt; and the oldest snapshot of it
        # that may go once newer steps are kept.
        self._has_swept = False
        self._later: SnapshotId | None = None
        self._has_assets = False

    @property
    def progress_bytes(self) -> int:
        return int(_native.load(_native.address_of(self._progress)))

    def bring(self, wanted: CommitName | None, is_due: IsDue) -> Mirrored:
        """Copy `wanted`, or the newest step if that is not visible any more or None, if `is_due`; then delete
        the steps that the remote keeps no longer.

        OSError if a store fails; RunError if the remote holds another run, or another job trains it;
        DamagedError if the step is damaged here. Then the remote has whole steps only.
        """
        target, copier = self._opened()
        here, there = Catalogue.of(self._source), Catalogue.of(target)
        if wanted is None and self._begins(here, there):
            return Mirrored(of=self._settled, newest=self._newest)
        self._settle(target, copier, here, there)
        if self._settled is None:
            return Mirrored(of=None)
        try:
            copied = self._copied(copier, wanted, is_due)
        finally:
            self.copying = None
        if copied is None:
            return Mirrored(of=self._settled, newest=self._newest)
        pruned, problem = self._prune(target, self._settled, copied)
        return Mirrored(of=self._settled, newest=self._newest, copied=copied, pruned=pruned, problem=problem)

    def _prune(self, target: Store, settled: AttemptName, copied: Copied) -> tuple[tuple[int, ...], str]:
        """The steps that the target's retention deleted, and what went wrong."""
        try:
            keep, is_first = self._remote.keep, not self._has_swept
            plan, done = collect.prune(
                target,
                settled,
                keep,
                catalogue=copied.catalogue,
                whole=[] if copied.outcome is Outcome.DELETED else [copied.name],
                with_uncommitted=is_first,
            )
        except OSError as error:
            return (), str(error)
        self._later = plan.later if is_first else self._later
        self._has_swept = self._later is None or plan.floor is None or self._later > plan.floor.id
        gone = set(done.snapshots)
        steps = tuple(each.step for each in plan.expired if each.id in gone)
        return steps, str(done.errors[0]) if done.errors else ""

    def _opened(self) -> tuple[Store, StepCopier]:
        if self._target is None:
            self._target = open_store(self._remote.url, self._remote.options)
        run_id, target = open_run(self._source, create=False).run_id, self._target
        found = None
        if self._copier is not None:
            try:
                found = open_run(target, create=False)
            except NoSuchStepError:
                # Another process has deleted it all.
                self._copier, target = None, open_store(self._remote.url, self._remote.options)
                self._target = target
        if found is None or self._copier is None:
            found = open_run(target, create=True, run_id=run_id)
            self._settled, self._has_assets = None, False
        if found.run_id != run_id:
            raise RunError(
                f"{target.url} holds another run ({found.run_id}) than {self._source.url} ({run_id}). Nothing"
                " was changed there, and nothing is copied to it. Name a remote of this run's own.",
                path=target.url,
            )
        if self._copier is None:
            self._copier = StepCopier(
                self._source,
                target,
                progress=_native.address_of(self._progress),
                compress=self._remote.compress,
                may_supersede=lambda: attempts.check_not_held(target, attempts.local_owner()),
            )
        return target, self._copier

    def _begins(self, here: Catalogue, there: Catalogue) -> bool:
        """Whether an attempt here has claimed and not started: it may resume from a step of the target."""
        newest, claimed = there.newest_claimed, here.newest_claimed
        if newest is None or claimed is None or claimed.number <= newest.number:
            return False
        return newest not in here.attempts and claimed != here.newest_started

    def _settle(self, target: Store, copier: StepCopier, here: Catalogue, there: Catalogue) -> None:
        """Copy the records of the newest attempt that started here. RunError if another job trains there."""
        newest, other = here.newest_started, there.newest_claimed
        is_known = (
            other is None or other in here.attempts or (newest is not None and other.number < newest.number)
        )
        if not is_known:
            raise RunError(
                f"{target.url} is trained by another job: attempt {other} there is not of "
                f"{self._source.url}. Nothing was changed there, and no more steps are copied to it. Stop "
                "one of the two jobs, or give this one a remote of its own.",
                path=target.url,
            )
        if newest is not None and newest != self._settled:
            copier.bring_lineage()
            collect.tidy(target, newest, Catalogue.of(target))
            self._newest = _newest_whole(target)
            self._settled, self._has_swept = newest, False

    def _copied(self, copier: StepCopier, wanted: CommitName | None, is_due: IsDue) -> Copied | None:
        for _ in range(_TRIES):
            each = self._chosen(wanted, is_due)
            if each is None:
                return None
            # From here on retention keeps it. If retention was faster, there is a newer step.
            self.copying = each
            self._copy_assets()
            try:
                copied = copier.copy(each)
            except NoSuchStepError:
                self.copying = wanted = None
                continue
            if copied.outcome is Outcome.COPIED:
                self._check_seen(each, copied.catalogue)
            before = self._newest
            if copied.outcome is not Outcome.DELETED and (before is None or before <= each):
                self._newest = each
            return copied
        return None

    def _copy_assets(self) -> None:
        """Copy the assets before a step: the trainer writes them after its attempt has started."""
        if self._has_assets or self._target is None:
            return
        try:
            self._has_assets = copy_assets(self._source, self._target)
        except (FlashckptError, OSError) as error:
            # Steps matter more than a config. After a failure of storage, retry with the next step.
            log.warning("the assets of the run are not copied to the remote: %s", error)
            self._has_assets = not isinstance(error, OSError)

    def _check_seen(self, each: CommitName, there: Catalogue) -> None:
        """RunError if another job has started there without the step while it was copied. The step stays: it
        may become the only copy, and other processes may have read it."""
        assert self._target is not None
        target, newest = self._target, there.newest_started
        if newest in (None, *Catalogue.of(self._source).attempts) or there.is_in_lineage(each.id):
            return
        raise RunError(
            f"Step {each.step} of attempt {each.attempt} came too late to {target.url}: attempt {newest} of "
            "another job has started there without it. It stays there as another branch, and `flashckpt "
            f"branch {target.url} {each}` resumes from it. {self._source.url} is unchanged, and no more "
            "steps are copied. Stop one of the two jobs, or give this one a remote of its own.",
            step=each.step,
            path=target.url,
        )

    def _chosen(self, wanted: CommitName | None, is_due: IsDue) -> CommitName | None:
        if wanted is not None and wanted in Catalogue.of(self._source).visible():
            return wanted
        newest, last = _newest_whole(self._source), self._newest
        if newest is None or (last is not None and newest.step <= last.step):
            return None  # the remote may be ahead of all steps here
        return newest if is_due(None if last is None else last.step, newest.step) else None


def _newest_whole(store: Store) -> CommitName | None:
    catalogue = Catalogue.of(store)
    return next((each for each in catalogue.newest_first() if is_whole(catalogue.store, each)), None)
