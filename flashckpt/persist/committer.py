"""Commits the steps whose part of this node is stored, and finds out what became of those that it does not
commit itself.

Owns which keeper gathers the parts of all nodes. Runs in a thread of its own: no commit waits until the next
step is written.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from flashckpt import crashpoints
from flashckpt.catalogue.changes import Committed
from flashckpt.commit import commit_step
from flashckpt.commit.commit_step import KEEP_ALL, Outcome
from flashckpt.commit.steps import heads_at_rest, is_whole
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, DivergedError, FlashckptError, RunError, SupersededError
from flashckpt.format.catalogue import EMPTY, Folder
from flashckpt.format.names import CommitName
from flashckpt.options import Keep
from flashckpt.persist.audit import Torn, UnreadableError, discard
from flashckpt.persist.job import JobState, RegionGone, StepJob, StepOutcome, unlike_steps
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

# All keepers of a few nodes gather the parts of a step: the one that writes the last part commits. Of many
# nodes only the keeper of rank 0's node does. If it is dead, the others do after so many polls.
_FEW_NODES = 4
_POLLS_OF_OTHERS = 12
_MANY_NODES = 8


class KnownRun:
    """A run in a store, and the version of its catalogue that this process has seen last, as `known`. stands:
    whether the run still exists in the store."""

    def __init__(self, store: Store, stands: Callable[[], bool] = lambda: True) -> None:
        self.store, self.known, self._stands = store, EMPTY, stands

    @property
    def view(self) -> View:
        """The run as of that version."""
        return View(self.known, self.store)

    def check_stands(self) -> None:
        """FileNotFoundError if the run does not exist: also if another one is in its place."""
        if not self._stands():
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self.store.url)

    def newest(self) -> View:
        """The newest version of the catalogue. RunError if another run, or an older catalogue, has replaced
        the one that is known; the next try begins with what is there then."""
        self.check_stands()
        try:
            view = View.of(self.store, self.known)
        except RunError:
            self.known = EMPTY
            raise
        self.known = view.catalogue
        if not view.catalogue.version:
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self.store.url)
        return view

    def tried(
        self, operation: Callable[[], StepOutcome], job: StepJob, *, is_again: bool = False
    ) -> StepOutcome:
        """The outcome of an operation on a job, also if it raises."""
        try:
            return operation()
        except Torn as found:
            snapshot = found.snapshot
            assert snapshot is not None
            assert snapshot.pin is not None
            pin, snapshot.pin = snapshot.pin, None
            return discard(snapshot.slot, pin, found)
        except SupersededError as error:
            was_resumed = self._was_resumed(job)
            if was_resumed and not is_again:
                return self.tried(operation, job, is_again=True)
            state = JobState.FAILED if was_resumed else JobState.SUPERSEDED
            return StepOutcome(state, message=str(error))
        except DivergedError as error:
            return StepOutcome(JobState.DIVERGED, message=str(error), diverged=error.leaves)
        except (OSError, FlashckptError, ValueError) as error:
            log.debug("persisting failed", exc_info=True)
            unreadable = str(error.filename) if isinstance(error, UnreadableError) else ""
            return StepOutcome(
                JobState.FAILED,
                message=str(error) or type(error).__name__,
                errno=error.errno or 0 if isinstance(error, OSError) else 0,
                lacks_region=isinstance(error, RegionGone),
                slot=unreadable,
            )

    def _was_resumed(self, job: StepJob) -> bool:
        """Whether a newer attempt has resumed from this snapshot, and so it must be written into its
        folder."""
        with contextlib.suppress(OSError, FlashckptError):
            view = self.newest()
            is_due = not (view.catalogue.has(job.id) or commit_step.is_overtaken(view, job.id))
            return view.parent == job.id and is_due and not job.lacks
        return False


class Committer:
    """Commits steps of a run. gathers: gather the parts of other nodes at each poll. guard: called before
    anything is published; raises if this process may not publish any more. pinned: the step that is being
    copied to the mirror, which retention spares."""

    def __init__(
        self,
        run: KnownRun,
        *,
        gathers: bool = False,
        guard: Callable[[], None] = lambda: None,
        pinned: Callable[[], CommitName | None] = lambda: None,
    ) -> None:
        self._run, self._store, self._guard = run, run.store, guard
        self._gathers, self._pinned = gathers, pinned

    def commit(self, job: StepJob) -> StepOutcome:
        """Commit a step if the parts of all nodes are stored, and mark its slots. Never raises: failure is an
        outcome; GATHERING if this node must write its part again."""
        began = time.monotonic()
        outcome = self._run.tried(lambda: self._commit(job), job)
        if outcome.state is JobState.COMMITTED:
            # Before the pins go: a trainer that sees the slot sealed must see the word, too.
            for each in [each for each in job.members() if each.take()]:
                each.slot.set_persisted(each.generation)
            crashpoints.point("commit.marked")
        job.release()  # also after a failure: a step that this node lacks was pinned while it was gathered
        return replace(outcome, seconds=time.monotonic() - began)

    def _commit(self, job: StepJob) -> StepOutcome:
        # Just after the part was written the version that showed its folder is new enough.
        view = self._run.view if job.outcome is None and job.has_part else self._run.newest()
        if view.catalogue.has(job.id):
            return self._reported(job, self._committed(job, view))
        if job.lacks and not job.has_part:
            raise SupersededError(job.lacks, step=job.step)
        if commit_step.is_overtaken(view, job.id):
            return self._reported(job, Outcome(Committed.OVERTAKEN, view))
        folder = commit_step.folder_of(view, job.id)
        if folder != job.folder and not job.missing:
            return StepOutcome(JobState.GATHERING)
        if folder != job.folder:
            raise SupersededError(
                f"step {job.step} of attempt {job.attempt} has a part in the folder of an older attempt.",
                step=job.step,
            )
        if not self._gathers and job.polls < polls_before(job.node.ranks, job.world(view)):
            return StepOutcome(JobState.PART_WRITTEN)
        return self._gathered(job, folder, view)

    def _gathered(self, job: StepJob, folder: Folder, view: View) -> StepOutcome:
        pinned = self._pinned()
        try:
            found = commit_step.commit(
                view,
                folder,
                self._keep(job),
                known=job.known,
                in_use=frozenset() if pinned is None else frozenset([pinned.id]),
                is_of_many=job.world(view) > _MANY_NODES * len(job.node.ranks),
                guard=self._guard,
            )
        except DamagedError as error:
            self._check_may_be_whole(job, folder, error)
            raise
        self._run.known = found.view.catalogue
        if found.state is Committed.WAITING and not self._store.exists(f"{folder.path}/{job.part}"):
            job.has_part = False
            raise FileNotFoundError(errno.ENOENT, "its part is gone", f"{folder.path}/{job.part}")
        return self._reported(job, found, is_ours=True)

    def _keep(self, job: StepJob) -> Keep:
        """What retention keeps with this commit. Only the keeper of rank 0's node drops steps: it knows which
        one is being copied to the mirror."""
        return job.node.keep if job.node.keep is not None and 0 in job.node.ranks else KEEP_ALL

    def _committed(self, job: StepJob, view: View) -> Outcome:
        """The outcome of a step that the catalogue has. SupersededError if its files are gone."""
        self._guard()
        if not is_whole(view, job.name):
            raise SupersededError(
                f"step {job.step} of attempt {job.attempt} was committed, and has lost files since.",
                step=job.step,
            )
        return Outcome(Committed.YES, view)

    def _check_may_be_whole(self, job: StepJob, folder: Folder, error: DamagedError) -> None:
        """Raise SupersededError if the parts of a step, which never change, make no step."""
        heads = heads_at_rest(self._store, folder).values()
        counted = {rank.rank: head.step for head in heads for rank in head.ranks}
        if len({*counted.values()}) > 1:
            raise SupersededError(unlike_steps(counted), step=job.step) from error

    def _reported(self, job: StepJob, found: Outcome, *, is_ours: bool = False) -> StepOutcome:
        """The outcome of a commit. `is_ours`: retention was applied with it."""
        match found.state:
            case Committed.WAITING:
                return StepOutcome(JobState.PART_WRITTEN)
            case Committed.OVERTAKEN:
                raise SupersededError(
                    f"a newer step was committed before step {job.step} of attempt {job.attempt} was whole.",
                    step=job.step,
                )
            case Committed.BASE_GONE:
                raise SupersededError(
                    f"step {job.step} names frozen leaves that are not there any more, and is not committed. "
                    "The next step writes them again.",
                    step=job.step,
                )
        is_applied = is_ours and self._keep(job) is not KEEP_ALL
        dropped = found.dropped if is_applied else None
        return StepOutcome(JobState.COMMITTED, view=found.view, dropped=dropped)


def polls_before(ranks: Collection[int], world: int) -> int:
    """How often the keeper of these ranks polls for the record of a step before it gathers the parts."""
    return 0 if 0 in ranks or world <= _FEW_NODES * len(ranks) else _POLLS_OF_OTHERS
