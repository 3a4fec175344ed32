"""The second store of a run that is trained: which step it gets next, and what stays there.

Owns the remote while a keeper lives: its run.json, whether it is this run's and nobody else goes on with it,
its retention. Does what it is told once, and raises what went wrong; when that is tried again is the keeper's
to say.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from flashckpt import _native
from flashckpt.commit import attempts, holder, retention
from flashckpt.commit.attempts import newest_claimed, newest_started, open_run
from flashckpt.commit.cut_off import remove_cut_off
from flashckpt.commit.lineage import VisibleStep, newest_first
from flashckpt.errors import NoSuchStepError, RunError
from flashckpt.format.names import AttemptName
from flashckpt.options import Remote
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.tiers.step_copy import Copied, Outcome, StepCopier

_TRIES = 4

# Whether a step is to be copied: takes the newest that the remote has, None for none, and this one.
IsDue = Callable[[int | None, int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """What was done. `of` is the newest attempt that has started here, `newest` the newest step that the
    remote has; `copied` is None where nothing was due; `pruned` went there by its retention, and `problem`
    says why something could not."""

    of: AttemptName | None
    newest: VisibleStep | None = None
    copied: Copied | None = None
    pruned: tuple[int, ...] = ()
    problem: str = ""


class Mirror:
    """For one thread, but for `copying`, the step that is being copied, and `progress_bytes`."""

    def __init__(self, source: Store, remote: Remote) -> None:
        self._source, self._remote = source, remote
        self.copying: VisibleStep | None = None
        self._progress = array("Q", [0])
        self._target: Store | None = None
        self._copier: StepCopier | None = None
        self._newest: VisibleStep | None = None
        # The newest attempt of the source whose records are in the target.
        self._settled: AttemptName | None = None

    @property
    def progress_bytes(self) -> int:
        return int(_native.load(_native.address_of(self._progress)))

    def bring(self, wanted: VisibleStep | None, is_due: IsDue) -> Mirrored:
        """Copy a step, or, where it is none that a resume sees or None, the newest, if `is_due`; then delete
        what is kept no longer in the remote.

        OSError where a store fails; RunError where the remote holds another run, or another job has gone on
        with it; DamagedError where the step is damaged here. Then the remote has whole steps alone.
        """
        target, copier = self._opened()
        if wanted is None and self._begins(target):
            return Mirrored(of=self._settled, newest=self._newest)
        self._settle(target, copier)
        if self._settled is None:
            return Mirrored(of=None)
        try:
            copied = self._copied(copier, wanted, is_due)
        finally:
            self.copying = None
        if copied is None:
            return Mirrored(of=self._settled, newest=self._newest)
        pruned, problem = list[VisibleStep](), ""
        try:
            # Nobody else commits steps of this attempt there.
            pruned = retention.prune(target, self._settled, self._remote.keep, in_hand=())
        except OSError as error:
            problem = str(error)
        return Mirrored(
            of=self._settled,
            newest=self._newest,
            copied=copied,
            pruned=tuple(each.step for each in pruned),
            problem=problem,
        )

    def _opened(self) -> tuple[Store, StepCopier]:
        if self._target is None:
            self._target = open_store(self._remote.url, self._remote.options)
        run_id, target = open_run(self._source, create=False).run_id, self._target
        found = None
        if self._copier is not None:
            try:
                found = open_run(target, create=False)
            except NoSuchStepError:
                # Somebody has deleted all of it, and what was known of it is no more.
                self._copier, target = None, open_store(self._remote.url, self._remote.options)
                self._target = target
        if found is None or self._copier is None:
            found = open_run(target, create=True, run_id=run_id)
            self._settled = None
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
                may_supersede=lambda: holder.check(target, holder.here()),
            )
        return target, self._copier

    def _begins(self, target: Store) -> bool:
        """Whether an attempt of the source is about to go on from what the target has, and does not say so
        yet."""
        there, claimed = newest_claimed(target.at_once()), newest_claimed(self._source)
        if there is None or claimed is None or claimed.number <= there.number:
            return False
        is_foreign = there not in attempts.names(self._source).values()
        return is_foreign and attempts.read_start(self._source, claimed) is None

    def _settle(self, target: Store, copier: StepCopier) -> None:
        """The target knows the newest attempt that started here, and no other has gone on there."""
        newest = newest_started(self._source)
        self._check_ours(target, newest)
        if newest is not None and newest != self._settled:
            copier.bring_lineage()
            remove_cut_off(target)
            self._newest = next(newest_first(target.at_once()), None)
            self._settled = newest

    def _check_ours(self, target: Store, newest: AttemptName | None) -> None:
        there = newest_claimed(target.at_once())
        if there is None or there == newest or (newest is not None and there.number < newest.number):
            return
        if there not in attempts.names(self._source).values():
            raise RunError(
                f"{target.url} was gone on with by another job: attempt {there} there is none of "
                f"{self._source.url}. Nothing of it was changed, and nothing more is copied to it. Stop one "
                "of the two jobs, or give this one a remote of its own.",
                path=target.url,
            )

    def _copied(self, copier: StepCopier, wanted: VisibleStep | None, is_due: IsDue) -> Copied | None:
        for _ in range(_TRIES):
            each = self._chosen(wanted, is_due)
            if each is None:
                return None
            # From here on retention leaves it. Where it was faster there is a newer one.
            self.copying = each
            try:
                copied = copier.copy(each.step, each.attempt)
            except NoSuchStepError:
                self.copying = wanted = None
                continue
            if copied.outcome is Outcome.COPIED:
                self._check_seen(each)
            before = self._newest
            if copied.outcome is not Outcome.BURIED and (before is None or before.step <= each.step):
                self._newest = each
            return copied
        return None

    def _check_seen(self, each: VisibleStep) -> None:
        """RunError where another job has gone on there while the step was copied, and without it: no resume
        would ever see it, and it goes again. It stays where somebody has claimed the run there since, who may
        have read it, as `flashckpt branch` does."""
        assert self._target is not None
        target = self._target
        look = target.at_once()
        newest = newest_started(look)
        if newest is None or newest in attempts.names(self._source).values():
            return
        last = {bound.attempt: bound.last_step for bound in attempts.bounds(look)}
        if each.step <= last.get(each.attempt, -1):
            return

        def may_go() -> bool:
            return newest_claimed(target.at_once()) == newest

        has_gone = may_go() and retention.bury(target, each.step, each.attempt, may_go)
        there = "was removed there" if has_gone else "stays there, as another branch"
        raise RunError(
            f"Step {each.step} of attempt {each.attempt} came too late to {target.url}: attempt "
            f"{newest} of another job went on there without it. It {there}, is as it was in "
            f"{self._source.url}, and nothing more is copied. Stop one of the two jobs, or give this one a "
            "remote of its own.",
            step=each.step,
            path=target.url,
        )

    def _chosen(self, wanted: VisibleStep | None, is_due: IsDue) -> VisibleStep | None:
        newest = None
        for each in newest_first(self._source.at_once()):
            newest = newest or each
            if wanted is None or each == wanted:
                break
            if each.step < wanted.step:
                wanted = None
                break
        else:
            wanted = None
        if wanted is not None:
            return wanted
        if newest is None or (self._newest is not None and newest.step <= self._newest.step):
            return None  # what was read there may be newer than all that is here
        return newest if is_due(None if self._newest is None else self._newest.step, newest.step) else None
