"""The second store of a run that is trained: which step it gets next, and what stays there.

Owns the remote while a keeper lives: its run.json, whether it is this run's and nobody else goes on with it,
its retention. Does what it is told once, and raises what went wrong; when that is tried again is the keeper's
to say.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flashckpt import _native
from flashckpt.commit import attempts, holder, retention
from flashckpt.commit.assets import copy_assets
from flashckpt.commit.attempts import newest_claimed, newest_started, open_run, ranks_here
from flashckpt.commit.cut_off import remove_cut_off
from flashckpt.commit.lineage import VisibleStep, newest_first
from flashckpt.errors import FlashckptError, NoSuchStepError, RunError, RunHeldError
from flashckpt.format.names import AttemptName
from flashckpt.options import Remote
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.tiers.node_parts import Begun, NodeParts
from flashckpt.tiers.step_copy import Copied, Outcome, StepCopier

log = logging.getLogger(__name__)

_TRIES = 4
# So long retention here leaves a step that others have begun, while the remote takes nothing of its part.
_SPARED_S = 600.0

# Whether a step is to be copied: takes the newest that the remote has, None for none, and this one.
IsDue = Callable[[int | None, int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """What was done. `of` is the newest attempt that has started here, `newest` the newest step that the
    remote has; `copied` is None where nothing was due; `pruned` went there by its retention, and `problem`
    says why something could not. Where nodes have folders of their own: `waits` for what is begun there and
    is here; `files` are those of what is begun; `is_put_off`: what was wanted is to be begun later."""

    of: AttemptName | None
    newest: VisibleStep | None = None
    copied: Copied | None = None
    pruned: tuple[int, ...] = ()
    problem: str = ""
    waits: bool = False
    files: int = 0
    is_put_off: bool = False


class Mirror:
    """For one thread, but for `copying`, the step that is being copied, `spared` and `progress_bytes`.
    `ranks` are those of this node. `is_ours`: this node copies from its folder, which it may share; None
    while that is not known. `is_joint`: other nodes, with folders of their own, send parts of the same
    steps."""

    def __init__(self, source: Store, remote: Remote, ranks: Sequence[int] = (0,)) -> None:
        self._source, self._remote, self._ranks = source, remote, ranks
        self.is_ours: bool | None = None
        self.is_joint = False
        self._parts: NodeParts | None = None
        self._pruned_at: VisibleStep | None = None
        # What other nodes may have sent, and this one could not, with when it last took something.
        self._failed: tuple[VisibleStep, float] | None = None
        self.copying: VisibleStep | None = None
        self._progress = array("Q", [0])
        self._target: Store | None = None
        self._copier: StepCopier | None = None
        self._newest: VisibleStep | None = None
        # The newest attempt of the source whose records are in the target.
        self._settled: AttemptName | None = None
        self._has_assets = False

    @property
    def progress_bytes(self) -> int:
        return int(_native.load(_native.address_of(self._progress)))

    @property
    def spared(self) -> VisibleStep | None:
        """The step that retention here leaves."""
        copying, failed = self.copying, self._failed
        if copying is None and failed is not None and time.monotonic() - failed[1] < _SPARED_S:
            return failed[0]
        return copying

    def bring(
        self, wanted: VisibleStep | None, is_due: IsDue, *, begins: bool = True, is_last: bool = False
    ) -> Mirrored:
        """Copy a step, or, where it is none that a resume sees or None, the newest, if `is_due`; then delete
        what is kept no longer in the remote. Where nodes have folders of their own: send this node's part of
        what is begun there, or of this one, where it `begins` some; `is_last`: nobody trains any more.

        OSError where a store fails; RunError where the remote holds another run, or another job has gone on
        with it; DamagedError where the step is damaged here. Then the remote has whole steps alone.
        """
        newest = self._look_whose()
        if not (self.is_ours or (self.is_ours is None and 0 in self._ranks)):
            return Mirrored(of=newest)
        target, copier = self._opened()
        look = target.at_once()
        if wanted is None and self._begins(look):
            return Mirrored(of=self._settled, newest=self._newest)
        look = self._settle(target, copier, look)
        if self._settled is None:
            return Mirrored(of=None)
        if self.is_joint:
            return self._join(target, copier, look, wanted, is_due if begins else None, is_last=is_last)
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

    def _look_whose(self) -> AttemptName | None:
        """Of the nodes that share a folder that of its lowest rank copies from it. The newest attempt that
        has started tells."""
        newest = newest_started(self._source)
        here = None if newest is None else ranks_here(self._source, newest)
        self.is_joint = here is not None
        if newest is not None:
            self.is_ours = (0 if here is None else here[0][0]) in self._ranks
        return newest

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
                may_supersede=lambda: holder.check(target, holder.here()),
                joins=True,
            )
            self._parts = NodeParts(self._source, target, partial(self._meet, self._copier))
        return target, self._copier

    def _meet(self, copier: StepCopier, each: VisibleStep, seen: Store) -> Outcome:
        outcome = copier.meet(each.step, each.attempt, seen)
        if outcome is Outcome.COPIED:
            self._check_seen(each)
        return outcome

    def _begins(self, look: Store) -> bool:
        """Whether an attempt of the source is about to go on from what the target has, and does not say so
        yet."""
        there, claimed = newest_claimed(look), newest_claimed(self._source)
        if there is None or claimed is None or claimed.number <= there.number:
            return False
        is_foreign = there not in attempts.names(self._source).values()
        return is_foreign and attempts.read_start(self._source, claimed) is None

    def _settle(self, target: Store, copier: StepCopier, look: Store) -> Store:
        """The target knows the newest attempt that started here, and no other has gone on there. Returns the
        look that shows so."""
        newest = newest_started(self._source)
        self._check_ours(look, newest)
        if newest is not None and newest != self._settled:
            copier.bring_lineage()
            remove_cut_off(target)
            look = target.at_once()
            self._newest = next(newest_first(look), None)
            self._settled = newest
        return look

    def _check_ours(self, look: Store, newest: AttemptName | None) -> None:
        there = newest_claimed(look)
        if there is None or there == newest or (newest is not None and there.number < newest.number):
            return
        if there not in attempts.names(self._source).values():
            raise RunError(
                f"{look.url} was gone on with by another job: attempt {there} there is none of "
                f"{self._source.url}. Nothing of it was changed, and nothing more is copied to it. Stop one "
                "of the two jobs, or give this one a remote of its own.",
                path=look.url,
            )

    def _join(
        self,
        target: Store,
        copier: StepCopier,
        look: Store,
        wanted: VisibleStep | None,
        is_due: IsDue | None,
        *,
        is_last: bool,
    ) -> Mirrored:
        """`is_due` is None where this node begins nothing."""
        parts = self._parts
        assert parts is not None
        assert self._settled is not None
        begun, copied, is_put_off = parts.look(look), None, False
        self._newest = parts.newest
        stays = self._remove_stale(parts, begun)
        if (each := parts.to_follow(begun, is_last=is_last)) is not None:
            copied = self._sent(copier, parts, each)
        elif is_due is not None:
            here = (each.at for each in begun if each.parts)
            last = max((each for each in (self._newest, next(here, None)) if each), default=None)
            each = self._chosen(wanted, is_due, last)
            if each is not None and (last is None or each > last):
                is_put_off = not parts.may_begin(begun, is_last=is_last)
                if not is_put_off:
                    parts.begin(each)
                    copied = self._sent(copier, parts, each)
        pruned, problem = self._prune_joint(target)
        waits = any(each.parts for each in begun) or copied is not None
        return Mirrored(
            of=self._settled, newest=self._newest, copied=copied, pruned=pruned, problem=stays or problem,
            waits=waits, files=sum(len(each.files) for each in begun), is_put_off=is_put_off,
        )  # fmt: skip

    def _sent(self, copier: StepCopier, parts: NodeParts, each: VisibleStep) -> Copied | None:
        """None where the step was deleted here."""
        began, before = time.monotonic(), self.progress_bytes
        self.copying = each
        self._copy_assets()
        if self._failed is None or self._failed[0] != each:
            self._failed = each, began
        try:
            copied = copier.copy(each.step, each.attempt)
        except NoSuchStepError:
            return None
        except RunHeldError:
            raise  # who holds the remote may go
        except FlashckptError:
            parts.give_up(each)
            raise
        finally:
            if self.progress_bytes != before:
                self._failed = each, time.monotonic()
            self.copying = None
        self._failed = None
        if copied.outcome is Outcome.COPIED:
            self._check_seen(each)
        parts.sent(copied, time.monotonic() - began)
        if copied.outcome not in (Outcome.PART, Outcome.BURIED):
            self._newest = max(each, self._newest or each)
        return copied

    # Where nodes have folders of their own the keeper of rank 0's alone deletes in the remote. What goes of
    # the unfinished is of no use to who may be at it: nobody has added to it for long, or two whole steps
    # have overtaken it. What could not be deleted is said in words.

    def _remove_stale(self, parts: NodeParts, begun: Sequence[Begun]) -> str:
        assert self._settled is not None
        try:
            if 0 in self._ranks:
                parts.remove_stale(begun, self._settled)
        except OSError as error:
            return str(error)
        return ""

    def _prune_joint(self, target: Store) -> tuple[tuple[int, ...], str]:
        assert self._settled is not None
        if 0 not in self._ranks or self._newest == self._pruned_at:
            return (), ""
        try:
            # Other nodes commit there, too. Each has sent its part of the newest after those of older ones.
            gone = retention.prune(target, self._settled, self._remote.keep, all_are_past=True)
        except OSError as error:
            return (), str(error)
        self._pruned_at = self._newest
        return tuple(each.step for each in gone), ""

    def _copied(self, copier: StepCopier, wanted: VisibleStep | None, is_due: IsDue) -> Copied | None:
        for _ in range(_TRIES):
            each = self._chosen(wanted, is_due, self._newest)
            if each is None:
                return None
            # From here on retention leaves it. Where it was faster there is a newer one.
            self.copying = each
            self._copy_assets()
            try:
                copied = copier.copy(each.step, each.attempt)
            except NoSuchStepError:
                self.copying = wanted = None
                continue
            if copied.outcome is Outcome.COPIED:
                self._check_seen(each)
            before = self._newest
            is_there = copied.outcome not in (Outcome.PART, Outcome.BURIED)
            if is_there and (before is None or before.step <= each.step):
                self._newest = each
            return copied
        return None

    def _copy_assets(self) -> None:
        """Before a step, since the trainer writes them after its attempt has started."""
        if self._has_assets or self._target is None:
            return
        try:
            self._has_assets = copy_assets(self._source, self._target)
        except (FlashckptError, OSError) as error:
            # Steps are worth more than a config. Storage that fails is tried again with the next step.
            log.warning("the assets of the run are not copied to the remote: %s", error)
            self._has_assets = not isinstance(error, OSError)

    def _check_seen(self, each: VisibleStep) -> None:
        """RunError where another job has gone on there while the step was copied, and without it. It stays:
        it may soon be all that is left of a node that was given up, and somebody may have read it."""
        assert self._target is not None
        target = self._target
        look = target.at_once()
        newest = newest_started(look)
        if newest is None or newest in attempts.names(self._source).values():
            return
        last = {bound.attempt: bound.last_step for bound in attempts.bounds(look)}
        if each.step <= last.get(each.attempt, -1):
            return
        raise RunError(
            f"Step {each.step} of attempt {each.attempt} came too late to {target.url}: attempt {newest} of "
            "another job went on there without it. It stays there as another branch, and `flashckpt branch "
            f"{target.url} {each.step}@{each.attempt}` gets it back; it is as it was in {self._source.url}, "
            "and nothing more is copied. Stop one of the two jobs, or give this one a remote of its own.",
            step=each.step,
            path=target.url,
        )

    def _chosen(
        self, wanted: VisibleStep | None, is_due: IsDue, last: VisibleStep | None
    ) -> VisibleStep | None:
        """`last`: the newest there."""
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
        if newest is None or (last is not None and newest.step <= last.step):
            return None  # what was read there may be newer than all that is here
        return newest if is_due(None if last is None else last.step, newest.step) else None
