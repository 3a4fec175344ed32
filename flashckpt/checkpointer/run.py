"""A run that is attached to live state: the Checkpointer and its iterators over batches and epochs, from the
first batch to the end. docs/architecture.md draws its states.

The `__next__` of the iterators is the boundary. They are not generators: `break` and garbage collection close
a generator as if its body were done, and whether it was is unknown.

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
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from flashckpt.checkpointer.capture_loop import CaptureLoop, SaveOrder
from flashckpt.checkpointer.run_state import RUN_TRANSITIONS, LoopIterator, Resumed, RunState
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
# In the place of a batch: the loader's workers are gone while the loop is to end anyway.
_WORKERS_LOST = object()
_attached: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
# Whole runs that have ended in this process, by run, epochs and steps, with the modules that they trained.
_finished: dict[tuple[str, int | None, int | None], weakref.WeakSet[Any]] = {}


class RunCall:
    """A call of a run that changes it. A signal handler may interrupt one, while the state is half changed
    and cannot be captured. So a `save()` of that handler is made when the call returns."""

    def __init__(self, run: Checkpointer) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run._calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._run
        run._calls -= 1
        is_due = run._calls == 0 and run._saves_after_call and kind in (None, StopIteration)
        if is_due and not run._is_closed:
            run._saves_after_call = False
            # A boundary of its own would shift the count of steps in a loop, and other ranks would not have
            # it.
            in_loop = run._in_iteration or run._epoch_is_open or run._state is RunState.STEPPING
            if in_loop and not run.stopping:
                run._loop.order_next(put_off=not run._in_iteration)
            else:
                run.save()


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
        self._progress, self._capture, self._session = progress, capture, session
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
            "boundaries_waited": self._loop.waited,
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
            return self._loop.enter(step)
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


class Batches(LoopIterator):
    """Batches of one epoch, or of a whole run (`epochs`, `steps`), with a boundary after each; with their
    positions in the epoch where `.enumerate` made it.

    `.completed` is the step, over all restarts: the counter to use for `% k`. Other attributes are the
    loader's.
    """

    _with_positions = False

    def __init__(
        self, checkpointer: Checkpointer, loader: object, epochs: int | None = None, steps: int | None = None
    ) -> None:
        self.checkpointer: Checkpointer = checkpointer
        self._loader, self._epochs, self._steps = loader, epochs, steps
        self._whole_run = epochs is not None or steps is not None
        self._thread = threading.get_ident()
        self._source: Any = None
        # The signals are watched; the epoch is open; a batch was given, and is being trained on; the end.
        self._entered = self._begun = self._gave = self._in_body = self._ended = False
        if self._whole_run:
            checkpointer._progress.manages_epochs = True

    def __len__(self) -> int:
        """Batches still to come. TypeError where the loader does not know its length."""
        progress = self.checkpointer._progress
        remaining: int | None = None
        if self._ended:
            return 0
        if self._steps is not None:
            remaining = max(0, self._steps - progress.step)
        if self._epochs is not None or remaining is None:
            length = len(self._loader)  # type: ignore[arg-type]
            here = progress.epoch_length(self._loader) - progress.batches_taken
            later = self._epochs - progress.epoch - 1 if self._epochs is not None else 0
            by_epochs = max(0, here) + later * length if later >= 0 else 0
            remaining = by_epochs if remaining is None else min(remaining, by_epochs)
        return remaining

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is the loader's: `.dataset`, `.batch_size`, `.sampler`, …"""
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Batches:
        if self._ended:
            raise BoundaryError(
                "This iterator has given its last batch. Nothing was lost. To go over the loader more "
                "than once say loop(…, epochs=n), or wrap the epochs in Checkpointer.epochs(n) and call "
                ".batches(loader) in each."
            )
        return self

    def __next__(self) -> Any:
        if threading.get_ident() != self._thread:
            raise BoundaryError(
                "Another thread than the one that began the loop asked for a batch: something reads ahead "
                "around the loop, so its boundaries are unknown. Nothing was captured. Put the prefetching "
                "inside, into the loader."
            )
        if self._ended:
            raise StopIteration
        with RunCall(self.checkpointer):
            try:
                batch = self._next()
            except StopIteration:
                raise
            except BaseException:
                # A notebook keeps the traceback, and with it this frame, which must not hold the run.
                self._leave(raised=True)
                raise
            finally:
                self.checkpointer._settle()
        return (self.checkpointer._progress.batches_taken - 1, batch) if self._with_positions else batch

    def _next(self) -> Any:
        checkpointer, holds_one = self.checkpointer, self._in_body
        if not self._entered:
            self._entered = True
            checkpointer._signals.enter()
        # Before the boundary: a false one must not be captured.
        checkpointer._use.before_batch(holds_one=holds_one)
        checkpointer._restore_rng()
        if holds_one:
            self._in_body = False
            checkpointer._end_of_iteration()
        if checkpointer._stops_here() or (self._steps is not None and self.completed >= self._steps):
            self._end(exhausted=holds_one and self._may_be_last and not self._batch_follows())
        batch = self._draw()
        if batch is _WORKERS_LOST:
            self._end(exhausted=False)
        self._in_body = self._gave = True
        checkpointer._begin_iteration(provisional=self._may_be_last)
        return batch

    @property
    def _may_be_last(self) -> bool:
        """Whether code of the epoch, and no batch, may follow the newest batch, as far as the loader says."""
        if self._whole_run or not self.checkpointer._progress.manages_epochs:
            return False
        try:
            return bool(self._source.batches_taken >= len(self._source))
        except TypeError:
            return True

    def _batch_follows(self) -> bool:
        """Whether a batch follows the boundary at which the loop is to end. It is drawn and dropped, so the
        boundary is captured before."""
        loop, capture = self.checkpointer._loop, self.checkpointer._capture
        if self.checkpointer._stop.is_unconfirmed:
            return True  # another rank may be dead, and the draw may wait for it
        try:
            loop.capture_now(persist=False)
            self.checkpointer._progress.hold_place()  # for a later capture of this boundary
            self._next_of(self._source)
        except StopIteration:
            return False
        except Exception as error:
            # The capture fails again at the loop's end, and is reported there.
            log.debug("whether a batch follows step %d is unknown: %r", self.completed, error)
        capture.confirm()
        return True

    def _draw(self) -> Any:
        """Return the next batch, of the next epoch if this iterator is a whole run's."""
        progress = self.checkpointer._progress
        while True:
            # A whole run that is resumed after its last epoch has no more batches.
            if self._whole_run and self._epochs_left() <= 0:
                self._end(exhausted=True)
            if not self._begun:
                self._begun = True
                self._source = progress.open_batches(self._loader)
                if self._source is None:
                    log.warning(
                        "this .batches() had given its last batch before the restart and gives none; the "
                        "code after it runs again (Checkpointer.epochs is for code that must run once)"
                    )
            if self._source is not None:
                # Only the drawing: the end of the run below raises a StopIteration of its own.
                with contextlib.suppress(StopIteration):
                    return self._next_of(self._source)
            self._next_epoch()

    def _next_of(self, source: Any) -> Any:
        try:
            return source.next()
        except Exception:
            # The signal that ends the loop has also ended the workers: this is the boundary it ends at. Not
            # raised, so that the error's traceback is no part of what the signal raises.
            if self.checkpointer._stops_here() and source.has_lost_workers():
                return _WORKERS_LOST
            raise

    def _next_epoch(self) -> None:
        """The loader is exhausted: go to the next epoch if the run has one."""
        progress = self.checkpointer._progress
        empty = self._source is not None and self._source.batches_taken == 0
        if not self._whole_run:
            self._end(exhausted=True)
        if empty and self.checkpointer.resumed is not None and not (self._gave or self._source.was_over):
            raise BoundaryError(
                f"The loader gave no batch right after the run was taken up at step {self.completed}, and "
                "the run had not ended there: taken as its end, each start would end so. Nothing was "
                "captured, and what is saved is whole. Pass the data that the run was begun with.",
                step=self.completed,
            )
        if empty or self._epochs_left() <= 1:  # an empty loader repeated until `steps` would never end
            self._end(exhausted=True)
        if self._source is not None:
            progress.close_batches()
        progress.next_epoch()
        self._begun = False

    def _epochs_left(self) -> float:  # the present one included
        return math.inf if self._epochs is None else self._epochs - self.checkpointer._progress.epoch

    def _end(self, *, exhausted: bool) -> NoReturn:
        """End the loop. The last boundary of a whole run is captured and committed first."""
        self._ended = True
        checkpointer = self.checkpointer
        if exhausted:
            checkpointer._loop.withdraw()
        repeated = None if checkpointer._stops_here() or not self._whole_run else self._end_of_run()
        # The code after an epoch's last batch is still to come.
        at_boundary = self._whole_run or not exhausted or checkpointer._signals.loops <= 1
        checkpointer._end_loop(lambda: self._close(exhausted), at_boundary=at_boundary)
        raise repeated or StopIteration

    def _end_of_run(self) -> BoundaryError | None:
        """Note the end of a whole run, or warn of one that had ended before. Return an error if it has ended
        in this process, with the same modules: a loop over epochs around this one would train one epoch."""
        checkpointer, modules = self.checkpointer, weakref.WeakSet(self.checkpointer._loop.modules)
        key = (checkpointer._session.identity, self._epochs, self._steps)
        if self._gave or not self.completed:
            _finished[key] = modules
        elif modules & _finished.get(key, set()):
            return BoundaryError(
                f"This loop gives no batch: a loop of this process ended the run at step {self.completed}, "
                "with the same epochs= and steps=. That step is committed; nothing was changed. For several "
                "epochs, write one loop, loop(…, epochs=3), without a `for epoch in …` around it.",
                step=self.completed,
            )
        else:
            log.warning(
                "the run had ended before, at step %d, and gives no more batches: more epochs= or steps= "
                "continue it, another folder begins anew",
                self.completed,
            )
        return None

    def _close(self, exhausted: bool) -> None:
        checkpointer = self.checkpointer
        loop, progress = checkpointer._loop, checkpointer._progress
        checkpointer._capture.heartbeat.rest()
        if self._whole_run:
            checkpointer._end(lambda: loop.capture_now(persist=True) if self.completed else None)
        elif exhausted and self._source is not None:
            # Inside `.epochs` the epoch's own end is captured. Elsewhere this may be the last boundary, and
            # what follows is no part of it.
            if not progress.manages_epochs and self.completed > 0:
                try:
                    loop.capture_now(persist=False)
                except FlashckptError as error:
                    loop.not_saved(error)
            progress.close_batches()
        elif not exhausted:  # at a stop: nothing else ends the loop early
            progress.is_cut = True
            loop.capture_now(persist=True)

    def __del__(self) -> None:
        # break, an exception, garbage collection: no capture, since whether the body was done is unknown. At
        # the interpreter's end nothing can be asked any more: to the keeper it is a death like any other.
        # Then the names of this module may be None already, also in the other two `__del__`.
        if not getattr(self, "_ended", True) and sys is not None and not sys.is_finalizing():
            self._leave()

    def _leave(self, *, raised: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        with RunCall(self.checkpointer), self.checkpointer._signals.ending() as signals:
            if self._entered:
                signals.leave()
            progress = self.checkpointer._progress
            # One that outlives its epoch must not end the loop of another.
            is_open = self._source is not None and progress.gives_from(self._source)
            if is_open or self._whole_run:
                self.checkpointer._abandon_iteration(raised=raised)
            if self._whole_run:
                self.checkpointer._release(raised=raised)
            elif is_open:
                progress.close_batches()


class Epochs(Iterator[int]):
    """Epoch numbers from the one the run is in; the code after an epoch's batches runs exactly once.

    Its `__next__` is the boundary of the epoch's end: it captures what that code has made, under the step of
    the epoch's last batch. in_body: an epoch's body is running.
    """

    def __init__(self, checkpointer: Checkpointer, epochs: int) -> None:
        self._checkpointer, self._epochs = checkpointer, epochs
        self.in_body = self._entered = self._left = False
        checkpointer._progress.manages_epochs = True

    def __iter__(self) -> Epochs:
        return self

    def __len__(self) -> int:
        return max(0, self._epochs - self._checkpointer._progress.epoch - self.in_body)

    def __next__(self) -> int:
        with RunCall(self._checkpointer):
            try:
                return self._next()
            finally:
                self._checkpointer._settle()

    def _next(self) -> int:
        checkpointer, progress = self._checkpointer, self._checkpointer._progress
        if not self._entered:
            self._entered = True
            checkpointer._epochs = weakref.ref(self)
            checkpointer._signals.enter()
        checkpointer._restore_rng()
        if self.in_body:
            self.in_body = False
            # An epoch whose loop was stopped in the middle is not over.
            if not checkpointer._stops_here() or progress.is_over:
                checkpointer._end_of_epoch(last=progress.epoch + 1 >= self._epochs)
        if checkpointer._stops_here() or progress.epoch >= self._epochs:
            if not self._left:
                self._left = True
                checkpointer._end_loop(lambda: None)
            raise StopIteration
        self.in_body = True
        return progress.epoch

    def __del__(self) -> None:
        # break or an exception: no boundary follows.
        is_open = getattr(self, "_entered", False) and not self._left
        if is_open and sys is not None and not sys.is_finalizing():
            with self._checkpointer._signals.ending() as signals:
                signals.leave()


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
