"""A run that is attached to live state, from the first batch to the end: docs/architecture.md draws its
states.

At a boundary the training thread counts the step, and lets the capture copy the state and encode what is not
a tensor. It does no I/O, waits for no storage, and takes no lock that another thread holds for long. The
keeper link (a thread) and the keeper (a process) do all that is slow. Only `.wait()`, `.close()`, the normal
end of a loop and a `.save()` outside of a loop wait for storage.

A signal that ends the process does so only here, after the run was closed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flashckpt.checkpointer.capture_loop import CaptureLoop, SaveOrder
from flashckpt.checkpointer.loops import Batches, Epochs, RunCall
from flashckpt.checkpointer.run_state import RUN_TRANSITIONS, Resumed, RunState
from flashckpt.errors import BoundaryError, FlashckptError, PersistError
from flashckpt.persist.ledger import Event
from flashckpt.state import rng

if TYPE_CHECKING:
    from typing_extensions import Self

    from flashckpt.capture import Capture
    from flashckpt.checkpointer.keeper_link import KeeperLink
    from flashckpt.checkpointer.progress import Progress, Use
    from flashckpt.checkpointer.session import Session
    from flashckpt.checkpointer.signals import Signals
    from flashckpt.checkpointer.unnamed import Unnamed
    from flashckpt.ranks.coordination import Coordination
    from flashckpt.state.tree import Tree

log = logging.getLogger(__name__)

# How long the interpreter's end may wait for a silent keeper, in seconds.
_EXIT_TIMEOUT_S = 5.0
_attached: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class Checkpointer:
    """One run, attached to the live state. Made by `flashckpt.attach` and `flashckpt.loop`.

    `resumed` is None on a fresh run. All methods are called from the training thread.
    """

    resumed: Resumed | None
    _calls = 0  # in progress, one inside another
    _saves_after_call = False  # a signal handler has called save() in one of them
    _epochs: Callable[[], Epochs | None] = staticmethod(lambda: None)  # those that were begun last
    _warns_of_loader = _reports_stop = True
    _is_provisional = False  # a boundary of the present iteration counts only if a batch follows it

    def __init__(
        self,
        *,
        tree: Tree,
        progress: Progress,
        capture: Capture,
        session: Session,
        keeper_link: KeeperLink,
        use: Use,
        signals: Signals,
        coordination: Coordination,
        unnamed: Unnamed,
        resumed: Resumed | None,
    ) -> None:
        self._tree, self._progress, self._capture, self._session = tree, progress, capture, session
        self._keeper_link, self._use, self._signals = keeper_link, use, signals
        self._coordination, self._stop = coordination, coordination.stop_policy(signals)
        self._unnamed = unnamed
        self._loop = CaptureLoop(
            tree, progress, capture, keeper_link, use, session.surroundings, self._stop, coordination
        )
        self.resumed = resumed
        self._state = RunState.READY
        # Random numbers that are drawn between here and the loop are no part of the run.
        self._due_rng = rng.capture() if resumed is not None else None
        self._process = os.getpid()
        self._began_s = time.perf_counter()
        self._last_report: dict[str, float] | None = None
        # Released before the interpreter is taken down: a thread that is in native code then would abort the
        # process, and change the exit status.
        _attached.add(self)

    @property
    def completed(self) -> int:
        """The step: iterations done since the run began, over all restarts. Counters of the program begin at
        zero again."""
        return self._progress.step

    def report(self) -> dict[str, float]:
        """Return the cost of checkpoints so far: seconds of the loop and of the captures in it, snapshots
        taken and skipped, age in seconds of the newest sealed and of the newest committed snapshot. After the
        run was released: as of then."""
        if self._last_report is not None:
            return dict(self._last_report)
        self._check_process()
        return {
            "loop_seconds": time.perf_counter() - self._began_s,
            **self._capture.report(),
            **self._keeper_link.report(),
        }

    # ---- loops

    def batches(self, loader: Iterable[Any]) -> Batches:
        """An iterator over the loader's batches, from where the run was saved, with a boundary after each.

        One in each epoch of `.epochs`, or one in the run. A second one raises BoundaryError: a resume in it
        would run the code between the two again.
        """
        self._check_open()
        self._progress.check_is_only()
        self._warns_of_loader = False
        return Batches(self, loader)

    def enumerate(self, loader: Iterable[Any]) -> Batches:
        """`.batches(loader)` as pairs of position and batch. Positions count an epoch's batches from 0, over
        all restarts: those of Python's `enumerate` begin at 0 again."""
        batches = self.batches(loader)
        batches._with_positions = True
        return batches

    def epochs(self, epochs: int) -> Epochs:
        """Epoch numbers from the present one. The code after the batches of an epoch runs once."""
        self._check_open()
        return Epochs(self, epochs)

    def step(self) -> None:
        """Mark a boundary: all of this iteration is done. Inside `.batches` it marks the end of this
        iteration early, and is not counted again when the next batch is drawn."""
        with RunCall(self):
            self._check_open()
            if self._state is RunState.MARKED:
                return
            in_iteration = self._in_iteration
            self._is_provisional = self._is_provisional and in_iteration
            self._move(RunState.MARKED if in_iteration else RunState.STEPPING)
            self._loop.begin()
            if self.resumed is not None and not in_iteration and self._warns_of_loader:
                self._warns_of_loader = False
                log.warning(
                    "resumed in a loop of step(): its loader and its own counters begin anew, and are the "
                    "program's to restore; .completed continues at %d. Checkpointer.batches(loader) "
                    "restores a loader.",
                    self.completed,
                )
            self._boundary()
            if not in_iteration:
                # The loop's end is the program's, so only a signal ends anything here. Several ranks end at
                # one boundary, which may be still to come.
                self._signals.enter_steps()
                if self._signals.pending and self._stops_here():
                    self._end_loop(lambda: None, leaves=False)
                self._loop.settle()
            self._capture.heartbeat.expect()

    # ---- saving and waiting

    def save(self) -> None:
        """Take a snapshot that is persisted: of the next boundary when called in an iteration, at once
        anywhere else. There it is a boundary of its own, with a step of its own, unless the state is bit for
        bit what was captured last.

        On several ranks one rank may call it in an iteration for all: if not all do, the snapshot is of a
        boundary a few iterations later. Anywhere else all ranks call it. Raises BoundaryError there, after at
        most five minutes, if some do not.

        In the code after an epoch's batches (of `.epochs`) the next boundary is the epoch's end: a run cannot
        resume in the middle of that code. `wait()` and `close()` do not wait for that boundary: they take the
        snapshot at once, and the epoch's end is then a step of its own. After a stop in the middle of an
        epoch this does nothing: the boundary of the stop is saved, and the code after it runs again.

        A signal handler may call it. If the handler has interrupted another call of the Checkpointer or of
        its iterators, the snapshot is taken when that call returns."""
        if self._calls:
            self._saves_after_call = True
            return
        with RunCall(self):
            self._check_open()
            progress = self._progress
            if self._state is RunState.ITERATION:
                self._loop.order_next()
                return
            is_between = self._state is not RunState.MARKED and progress.manages_epochs
            if self.stopping and is_between and not progress.is_over:
                log.warning(
                    "save() after a stop in the middle of epoch %d: step %d, at which it stopped, is saved "
                    "and the run resumes from there; code for the end of an epoch asks .stopping first",
                    progress.epoch, self.completed,
                )  # fmt: skip
                return
            is_marked = self._state in (RunState.MARKED, RunState.STEPPING)
            has_trained = self._use.trained_since_boundary
            in_epoch = self._epoch_is_open and (progress.is_after_batches or has_trained)
            may_be_last = self._state is RunState.MARKED and self._is_provisional
            if in_epoch or (is_marked and has_trained) or may_be_last:
                self._loop.order_next(put_off=True)
            else:
                self._unnamed.boundary(self.completed)
                self._loop.capture_outside()

    def wait(self) -> None:
        """Wait until all that is captured is committed. Raises PersistError if that fails, and the error that
        prevented the capture of a boundary that was due (StateError, OutOfSpaceError).

        Raises BoundaryError in a signal handler that has interrupted another call of the Checkpointer or of
        its iterators."""
        self._check_not_in_a_call("wait()")
        with RunCall(self):
            self._wait()

    def _wait(self, *, or_cached: bool = False) -> None:
        self._check_open()
        loop, in_iteration = self._loop, self._in_iteration
        is_put_off = loop.order is SaveOrder.PUT_OFF
        if (
            is_put_off or (loop.order is SaveOrder.NEXT and self._progress.is_after_batches)
        ) and not in_iteration:
            loop.order = SaveOrder.NEXT
            self._or_commit(loop.capture_outside, or_cached=or_cached)
        self._wait_committed(or_cached=or_cached)
        unanswered = self._coordination.unanswered_save()
        if unanswered is not None:
            raise unanswered
        if loop.unsaved is not None:
            raise loop.unsaved
        lost = self._capture.lost_step
        if lost is not None and not (in_iteration and self.stopping):
            raise self._keeper_link.not_captured(lost, self._capture.lost_reason)
        if loop.order is not SaveOrder.NONE and not in_iteration:
            raise self._keeper_link.not_captured(
                loop.ordered_at + 1, "the iteration in which save() was called was left before its boundary"
            )
        if loop.order is not SaveOrder.NONE and loop.ordered_at < self._progress.step:
            raise self._keeper_link.not_captured(
                loop.ordered_at + 1, "no slot was free at its boundary, and the order stands for the next one"
            )

    def _or_commit(self, capture: Callable[[], object], *, or_cached: bool) -> None:
        """Capture. If that fails, commit what was captured before, then raise."""
        try:
            capture()
        except Exception:
            self._wait_committed(or_cached=or_cached)
            raise

    def _wait_committed(self, *, or_cached: bool) -> None:
        with self._capture.heartbeat.resting():
            self._capture.confirm()
            self._capture.wait()
            self._keeper_link.wait_committed(or_cached=or_cached)

    def _wait_at_end(self) -> None:
        """Wait as `wait()` where no step follows. A step whose replicas have diverged is never committed,
        which all ranks learn while they wait: they capture it once more, with the replicas of each rank. If a
        signal is to end the process, the nodes' caches are enough where the home takes longer than the
        grace."""
        or_cached = self._signals.pending
        try:
            self._wait(or_cached=or_cached)
        except PersistError as error:
            if not self._keeper_link.has_diverged(error.step):
                raise
            try:
                self._loop.capture_outside()
            except BoundaryError:  # not all ranks are at their end
                raise error from None
            self._wait(or_cached=or_cached)

    # ---- stopping

    def stop(self) -> None:
        """End the loop at the next boundary, which is captured and committed. On several ranks, all end at
        the same boundary, a few ahead."""
        self._stop.ask()

    @property
    def stopping(self) -> bool:
        """Whether the loop ends at its next boundary. On several ranks it becomes true on all at the same
        boundary.

        In an epoch's own code: whether the loop over its batches was stopped before the last one, so that the
        code after them is the next start's. Otherwise the code runs, and the loop ends at the epoch's end."""
        if self._epoch_is_open and not self._in_iteration:
            return self._progress.is_cut
        return self._stop.is_near

    @property
    def stop_reason(self) -> str | None:
        """Why the loop ends at its next boundary or after the epoch's code, or has ended: a signal's name,
        "notice file", "stop"; or None."""
        return self._stop.reason

    def _stops_here(self) -> bool:
        return self._stop.stops_at(self._capture.boundary_index)

    # ---- the states of the run

    @property
    def _in_iteration(self) -> bool:
        return self._state in (RunState.ITERATION, RunState.MARKED)

    @property
    def _epoch_is_open(self) -> bool:
        """Whether the body of an `Epochs` is running."""
        epochs = self._epochs()
        return epochs is not None and epochs.in_body

    @property
    def _is_closed(self) -> bool:
        return self._state is RunState.CLOSED

    def _move(self, to: RunState) -> None:
        assert to is self._state or to in RUN_TRANSITIONS[self._state], f"{self._state} -> {to}"
        self._state = to

    def _whole_run(self, loader: Iterable[Any], epochs: int | None, steps: int | None) -> Batches:
        """The iterator of `loop`, which names at least one of `epochs` and `steps`."""
        return Batches(self, loader, epochs, steps)

    def _restore_rng(self) -> None:
        due, self._due_rng = self._due_rng, None
        if due is not None:
            rng.restore(due)

    def _settle(self) -> None:
        if not self._is_forked:  # the snapshot is the parent's
            self._loop.settle()

    def _begin_iteration(self, *, provisional: bool = False) -> None:
        if self._is_closed:
            self._check_open()  # raises
        self._is_provisional = provisional
        self._move(RunState.ITERATION)
        self._loop.begin()
        self._use.batch_given()
        self._capture.heartbeat.expect()

    def _end_of_iteration(self) -> None:
        """Pass the boundary of an iteration, if `step()` has not."""
        if not self._leave_iteration():
            self._boundary()

    def _end_of_epoch(self, *, last: bool) -> None:
        """Capture what the code after an epoch's batches has made; commit it if no epoch follows."""
        stops = self._enter_boundary(self.completed)
        self._loop.end_epoch(last=stops or last)

    def _abandon_iteration(self, *, raised: bool = True) -> None:
        """An iteration was left: by an exception if `raised`, else by `break` or an exception."""
        if self._is_forked:
            return
        if self._in_iteration and not raised:
            self._loop.note_left()
        if self._state is RunState.ITERATION and self._progress.manages_epochs:
            self._loop.leave_iteration()
        if self._state is RunState.MARKED:
            self._loop.withdraw()
        self._leave_iteration()
        self._capture.heartbeat.rest()

    def _leave_iteration(self) -> bool:
        """End the iteration; return whether step() has marked its boundary."""
        is_marked = self._state is RunState.MARKED
        if self._in_iteration:
            self._move(RunState.STEPPING if is_marked else RunState.READY)
        return is_marked

    def _boundary(self) -> None:
        self._enter_boundary(self._progress.step + 1)
        self._loop.pass_boundary(provisional=self._is_provisional)

    def _enter_boundary(self, step: int) -> bool:
        """Enter the boundary of this step; return whether the loop ends at it, in which case it is
        captured."""
        if self._is_closed or self._is_forked:
            self._check_open()  # raises
        try:
            self._unnamed.boundary(step)
            return self._loop.enter()
        except FlashckptError:
            self._release()
            raise

    # ---- the end of a loop

    def _end_loop(self, close: Callable[[], None], *, at_boundary: bool = True, leaves: bool = True) -> None:
        """End a loop by `close`, which raises what it could not do. at_boundary: nothing that belongs to an
        iteration or an epoch is still to come, so that a signal may take its course here. leaves: the loop
        ends even if the signal ends nothing."""
        with self._signals.ending():
            try:
                in_order = self._close_loop(close, at_boundary)
            finally:
                if leaves:
                    self._signals.leave()
            if at_boundary:
                self._signals.deliver(partial(self._release, closed=in_order))

    def _close_loop(self, close: Callable[[], None], at_boundary: bool) -> bool:
        """Return whether the loop was closed in order. Raises the reason unless a signal ends the process."""
        signals = self._signals
        if at_boundary and signals.reason is not None and self._reports_stop:
            self._reports_stop = False
            self._keeper_link.event(Event.STOP, step=self.completed, reason=signals.reason)
        try:
            close()
            is_end = at_boundary and signals.pending and self._stops_here()
            if is_end and not self._is_closed and self.completed > 0:
                with self._capture.heartbeat.resting():
                    self._loop.capture_now(persist=True)
                    if self._state is RunState.STEPPING:
                        # Ranks whose program ends the loop have settled this boundary: they wait for it.
                        self._loop.settle()
                        self._loop.capture_now(persist=True)  # anew, if another rank has none of it
                    self._wait_at_end()
        except FlashckptError as error:
            if not signals.heard:
                raise
            log.error("%s takes its course, and not everything is persisted: %s", signals.reason, error)
            return False
        return True

    # ---- the end of the run

    def close(self) -> None:
        """Wait until all that is captured is committed, then release the run. A boundary that `step()` has
        marked is captured first, if it is not and nothing was trained since. Raises PersistError if that
        fails, and releases the run nevertheless. A second call does nothing. Raises BoundaryError, and does
        nothing, in a signal handler that has interrupted another call of the Checkpointer or of its
        iterators."""
        if not self._is_forked and not self._is_closed:
            self._check_not_in_a_call("close()")
            with RunCall(self):
                self._end(self._capture_marked)

    def _capture_marked(self) -> None:
        """Capture the newest boundary that step() has marked: only here is it known to be the last."""
        if self._state is not RunState.STEPPING:
            return
        loop = self._loop
        if not self._use.trained_since_boundary:
            order, captured = loop.order, self._capture.boundary_index if loop.is_captured else None
            with self._capture.heartbeat.resting():
                loop.capture_now(persist=True)
            if self._capture.boundary_index == captured:
                loop.order = order  # given after this capture, for the state now: `_wait` captures it
        elif not loop.is_captured:
            log.warning(
                "the state was trained on after step %d, the last that step() marked: whether that iteration "
                "was done is unknown, and neither is saved. Call step() at the end of each iteration",
                self.completed,
            )

    def _end(self, capture: Callable[[], object]) -> None:
        """Capture what is last, wait until it is committed, release the run. An end that failed is a death to
        the keeper: it saves the newest whole snapshot, and waits for the next attempt."""
        if self._is_closed:
            return
        try:
            self._or_commit(capture, or_cached=self._signals.pending)
            self._wait_at_end()
        except BaseException as error:
            self._release(unsaved=isinstance(error, PersistError))
            raise
        self._release(closed=True)

    def _release(self, *, closed: bool = False, raised: bool = False, unsaved: bool = False) -> None:
        """Release the run. The keeper persists sealed snapshots. closed: in order. raised: because of an
        error, which is reported elsewhere. unsaved: storage fails."""
        if self._is_closed:
            return
        was_in_iteration = self._in_iteration
        self._move(RunState.CLOSED)
        if self._is_forked:
            return  # a forked child unwinds: the run, its lock and its slots are the parent's
        if was_in_iteration:
            self._loop.note_left()
        is_late = self._saves_after_call and not closed  # an orderly end has captured what was last
        self._loop.report_left(is_late=is_late, raised=raised)
        # All of them, even if one raises; last in, first out.
        with RunCall(self), contextlib.ExitStack() as ends:
            ends.callback(self._session.close)
            ends.callback(self._keeper_link.close, closed=closed, unsaved=unsaved)
            ends.callback(self._keeper_link.event, Event.CLOSE, step=self.completed, normal=closed)
            ends.callback(self._capture.close)
            ends.callback(self._unnamed.close)
            ends.callback(self._use.close)
            ends.callback(self._signals.close)
            # Before the signals: workers of a loader that the same signal has reached raise nothing until
            # then.
            ends.callback(self._progress.close)
            # First, since the others unmap the slots.
            self._last_report = self.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release(raised=True)

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        is_open = state is not None and state is not type(state).CLOSED
        if is_open and sys is not None and not sys.is_finalizing():
            self._release()

    # ---- checks

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child of the process that attached: it has neither slots nor threads."""
        return os.getpid() != self._process

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise BoundaryError(
                "This checkpointer has let its run go (its loop ended, or it was closed). Nothing was "
                "changed. Call flashckpt.attach or flashckpt.loop again to continue the run."
            )

    def _check_process(self) -> None:
        if self._is_forked:
            raise BoundaryError(
                "This is a forked child of the process that trains. Nothing was captured or changed: the run "
                "and its snapshots are the parent's. Let the child end without the Checkpointer."
            )

    def _check_not_in_a_call(self, what: str) -> None:
        """Refuse a call in the middle of another one: `wait()` could not wait for a snapshot that cannot be
        taken yet, and `close()` would unmap the slots that a capture writes to."""
        if self._calls:
            raise BoundaryError(
                f"A signal handler called {what} and has interrupted another call of this run. Nothing was "
                "waited for or closed, and a snapshot that the handler's save() ordered is taken after that "
                "call. What was committed stands. Call stop() in the handler, or set a flag there and call "
                f"save() and {what} in the loop.",
                step=self.completed,
            )


def saved_now(run: Checkpointer) -> Callable[[], None]:
    """Take a snapshot outside of a loop. Returns the wait for its commit, which any thread may call, once;
    the run must not be closed meanwhile. Raises as `save()` and `wait()`."""
    with RunCall(run):
        run._check_open()
        run._loop.capture_outside()
        return run._keeper_link.commit_of_newest()


def _at_exit() -> None:
    for run in list(_attached):
        if run._is_forked:
            continue
        run._signals.expedite(_EXIT_TIMEOUT_S)
        run._signals.hold()  # delivered here: the threads' signals would be ignored
        # The process ends already, as its program or an exception would have it.
        with contextlib.suppress(BaseException):
            run._release(raised=getattr(sys, "last_value", None) is not None)
        with contextlib.suppress(BaseException):
            run._signals.deliver(lambda: None)


atexit.register(_at_exit)
