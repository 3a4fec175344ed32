"""An attached run: waited for, stopped, let go. Owns the order of things at the end of a loop and of a run.

A signal that ends the process does so only here, after the run was closed. What could not be persisted
does not keep it from its course: it is said, and what is sealed is the keeper's.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from flashckpt.checkpointer.boundaries import Boundaries
from flashckpt.errors import BoundaryError, FlashckptError, PersistError
from flashckpt.persist.ledger import Event
from flashckpt.state import rng

if TYPE_CHECKING:
    from typing_extensions import Self

    from flashckpt.capture import Capture
    from flashckpt.checkpointer.attendant import Attendant
    from flashckpt.checkpointer.progress import Progress, Use
    from flashckpt.checkpointer.session import Session
    from flashckpt.checkpointer.signals import Signals
    from flashckpt.ranks.pacing import Pacing
    from flashckpt.state.tree import Tree

log = logging.getLogger(__name__)

# How long the interpreter's end may wait for a keeper that is silent, in seconds.
_EXIT_PATIENCE_S = 5.0
_held: weakref.WeakSet[AttachedRun] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run went on from: the step, where it was read ("memory" or "local"), the attempt that made
    it, and the seconds from the call of `attach` until the live state was whole and verified."""

    step: int
    tier: str
    attempt: str
    seconds: float


class Call:
    """Around each call of a run that changes it. A signal handler may interrupt one; what stands half-changed
    then cannot be captured. So a `save()` of that handler is made when the call returns."""

    def __init__(self, run: AttachedRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run._calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._run
        run._calls -= 1
        if run._calls == 0 and run._save_is_due and kind in (None, StopIteration) and not run._closed:
            run._save_is_due = False
            run._save_late()


class AttachedRun:
    """`resumed` is None on a fresh run. All methods are called from the training thread."""

    resumed: Resumed | None
    _calls = 0  # those in progress, in one another
    _save_is_due = False  # a signal handler has called save() in one of them

    def __init__(
        self,
        *,
        tree: Tree,
        progress: Progress,
        capture: Capture,
        session: Session,
        attendant: Attendant,
        use: Use,
        signals: Signals,
        pacing: Pacing,
        resumed: Resumed | None,
    ) -> None:
        self._progress, self._capture, self._session = progress, capture, session
        self._attendant, self._use, self._signals = attendant, use, signals
        self._pacing, self._stop = pacing, pacing.stop_policy(signals)
        surroundings = session.surroundings
        self._boundaries = Boundaries(
            tree, progress, capture, attendant, use, surroundings, self._stop, pacing
        )
        self.resumed = resumed
        self._in_iteration = self._marked = self._stop_told = self._closed = False
        # The newest boundary was marked by `step()`; save() was put off to a boundary outside of `.batches`.
        self._by_hand = self._put_off = False
        # What is drawn between here and the loop is no part of the run: put back once more there.
        self._due_rng = rng.capture() if resumed is not None else None
        self._process = os.getpid()
        self._began_s = time.perf_counter()
        self._last_report: dict[str, float] | None = None
        # Let go before the interpreter is taken down, if it is still held then: a thread that is in native
        # code at that moment would abort the process, and with it the exit status.
        _held.add(self)

    @property
    def completed(self) -> int:
        """The step: iterations done since the run began. It goes on over restarts; counters of one's own
        do not."""
        return self._progress.step

    def report(self) -> dict[str, float]:
        """What checkpoints cost so far: seconds of the loop and of the captures in it, snapshots taken
        and skipped, age in seconds of the newest sealed and of the newest committed snapshot. After the
        run was let go: as it stood then."""
        if self._last_report is not None:
            return dict(self._last_report)
        self._check_process()
        return {
            "loop_seconds": time.perf_counter() - self._began_s,
            "boundaries_waited": self._boundaries.waited,
            **self._capture.report(),
            **self._attendant.report(),
        }

    # ---- waiting

    def wait(self) -> None:
        """Wait until what is captured is committed. Raises PersistError if it could not be, and whatever
        kept a boundary that was due from being captured (StateError, OutOfRoomError).

        Raises BoundaryError in a signal handler that has interrupted another call of the Checkpointer or of
        its iterators."""
        self._check_not_in_a_call("wait()")
        with Call(self):
            self._wait()

    def _wait(self) -> None:
        self._check_open()
        may_take = (self._put_off or self._progress.is_after_batches) and not self._in_iteration
        if may_take and self._boundaries.ordered_at is not None:
            self._put_off = False
            self._or_commit(self._boundaries.capture_outside)
        self._wait_committed()
        refusal = self._pacing.refusal()
        if refusal is not None:
            raise refusal
        unsaved, ordered_at = self._boundaries.unsaved, self._boundaries.ordered_at
        if unsaved is not None:
            raise unsaved
        lost = self._capture.lost_step
        if lost is not None and not (self._in_iteration and self.stopping):
            raise self._attendant.not_captured(lost, self._capture.lost_reason)
        if ordered_at is not None and not self._in_iteration:
            raise self._attendant.not_captured(
                ordered_at + 1, "the iteration in which save() was called was left before its boundary"
            )
        if ordered_at is not None and ordered_at < self._progress.step:
            raise self._attendant.not_captured(
                ordered_at + 1, "no slot was free at its boundary, and the order stands for the next one"
            )

    def _or_commit(self, capture: Callable[[], object]) -> None:
        """Capture. Where that fails, what was captured before is committed before it is raised."""
        try:
            capture()
        except Exception:
            self._wait_committed()
            raise

    def _wait_committed(self) -> None:
        with self._capture.heartbeat.resting():
            self._capture.wait()
            self._attendant.wait_committed()

    def _wait_at_end(self) -> None:
        """The same where no step follows. One whose replicas have diverged is never committed, and all ranks
        learn of it while they wait: they capture it once more, as a step that keeps those by rank."""
        try:
            self._wait()
        except PersistError as error:
            if not self._attendant.has_diverged(error.step):
                raise
            try:
                self._boundaries.capture_outside()
            except BoundaryError:  # not all ranks are at their end
                raise error from None
            self._wait()

    # ---- stopping

    def stop(self) -> None:
        """End the loop at the next boundary; that boundary is captured and committed. On several ranks, all
        of which it ends, at one a few boundaries ahead."""
        self._stop.ask()

    @property
    def stopping(self) -> bool:
        """Whether the loop ends at its next boundary: code between epochs asks it after a stop. On several
        ranks it becomes so on all at one boundary."""
        return self._stop.is_near

    @property
    def stop_reason(self) -> str | None:
        """Why the loop ends at its next boundary, or has: a signal's name, "notice file", "stop"; or None."""
        return self._stop.reason

    def _save_late(self) -> None:
        """Do the `save()` that a signal handler called during a call that has now returned: in a loop, of its
        next boundary."""
        raise NotImplementedError

    # ---- the end of a loop

    def _end_loop(self, close: Callable[[], None], *, at_boundary: bool = True, leaves: bool = True) -> None:
        """End a loop by `close`, which raises what it could not do. `at_boundary`: nothing that belongs to an
        iteration or an epoch is still to come, so that a signal may take its course here. Not `leaves`: the
        loop may go on where the signal ends nothing."""
        with self._signals.ending():
            try:
                in_order = self._close_loop(close, at_boundary)
            finally:
                if leaves:
                    self._signals.leave()
            if at_boundary:
                self._signals.deliver(partial(self._release, closed=in_order))

    def _stop_at_marked(self) -> None:
        """After a boundary that was marked by hand outside of `.batches`: the loop's end is the user's, so
        only a signal does anything here. Several ranks end at one boundary, which may still be to come."""
        self._signals.enter_steps()
        if self._signals.pending and self._stop.stops_at(self._capture.ordinal):
            self._end_loop(lambda: None, leaves=False)

    def _close_loop(self, close: Callable[[], None], at_boundary: bool) -> bool:
        """Whether the loop could be closed in order. Raises what kept it from it if there is no signal."""
        signals = self._signals
        if at_boundary and signals.reason is not None and not self._stop_told:
            self._stop_told = True
            self._attendant.event(Event.STOP, step=self.completed, reason=signals.reason)
        try:
            close()
            is_end = at_boundary and signals.pending and self._stop.stops_at(self._capture.ordinal)
            if is_end and not self._closed and self.completed > 0:
                with self._capture.heartbeat.resting():  # it may have to wait for a slot, or for storage
                    self._boundaries.capture_now(persist=True)
                    self._wait_at_end()
        except FlashckptError as error:
            if not signals.heard:
                raise
            log.error("%s takes its course, and not everything is persisted: %s", signals.reason, error)
            return False
        return True

    # ---- the end of the run

    def close(self) -> None:
        """Wait until what is captured is committed, then let the run go. A boundary that was marked by
        `step()` is captured first, if it is not and nothing was trained since. Raises PersistError if it
        could not be; the run is let go all the same. A second call does nothing. Raises BoundaryError, and
        does nothing, in a signal handler that has interrupted another call of the Checkpointer or of its
        iterators."""
        if not self._is_forked and not self._closed:
            self._check_not_in_a_call("close()")
            with Call(self):
                self._end(self._capture_marked)

    def _capture_marked(self) -> None:
        """The end of a loop whose boundaries are marked by hand: only here is it known to be one."""
        if not self._by_hand or self._in_iteration:
            return
        if self._pacing.is_alone and self.completed == self._attendant.newest_sealed_step():
            return
        if self._use.trained_since_boundary:
            log.warning(
                "the state was trained on after step %d, the last that step() marked: nobody knows whether "
                "that iteration was done, and neither is saved. Call step() at the end of each iteration",
                self.completed,
            )
            return
        with self._capture.heartbeat.resting():
            self._boundaries.capture_now(persist=True)

    def _end(self, capture: Callable[[], object]) -> None:
        """Capture what is last, see it committed, let the run go. To the keeper an end that failed is a death
        like any other: it saves the newest that is whole, and waits for the next attempt."""
        if self._closed:
            return
        try:
            self._or_commit(capture)
            self._wait_at_end()
        except BaseException:
            self._release()
            raise
        self._release(closed=True)

    def _release(self, *, closed: bool = False) -> None:
        """Let the run go. What is sealed stays with the keeper, which persists it."""
        if self._closed:
            return
        self._closed = True
        if self._is_forked:
            return  # a forked child unwinds: the run, its lock and its slots are the parent's
        # An orderly end has captured what was last.
        ordered_at = self.completed if self._save_is_due and not closed else self._boundaries.ordered_at
        if ordered_at is not None:
            log.warning(
                "the snapshot that save() ordered after step %d was not taken: no boundary followed it",
                ordered_at,
            )
        # Each of them, whatever the others raise; last in, first out.
        with Call(self), contextlib.ExitStack() as ends:
            ends.callback(self._session.close)
            ends.callback(self._attendant.close, closed=closed)
            ends.callback(self._attendant.event, Event.CLOSE, step=self.completed, normal=closed)
            ends.callback(self._capture.close)
            ends.callback(self._use.close)
            ends.callback(self._signals.close)
            # Before that: a loader's workers, which the same signal may have reached, are spared until then.
            ends.callback(self._progress.close)
            # Slots are unmapped by these: nothing may look into them afterwards.
            self._last_report = self.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self._release()

    # ---- what keeps a call from being done

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child of the process that attached: it has neither slots nor threads."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._is_forked:
            raise BoundaryError(
                "This is a forked child of the process that trains. Nothing was captured or changed: the run "
                "and its snapshots are the parent's. Let the child end without the Checkpointer."
            )

    def _check_not_in_a_call(self, what: str) -> None:
        """In the middle of a capture nothing new can be captured, so `wait()` would not wait for what save()
        has ordered there; and `close()` would unmap the slots that the capture writes to."""
        if self._calls:
            raise BoundaryError(
                f"A signal handler called {what} and has interrupted another call of this run. Nothing was "
                "waited for or closed, and a snapshot that the handler's save() ordered is taken after that "
                "call. What was committed stands. Call stop() in the handler, or set a flag there and call "
                f"save() and {what} in the loop.",
                step=self.completed,
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise BoundaryError(
                "This checkpointer has let its run go (its loop ended, or it was closed). Nothing was "
                "changed. Call flashckpt.attach or flashckpt.loop again to go on with the run."
            )


def saved_now(run: AttachedRun) -> Callable[[], None]:
    """Take a snapshot outside of a loop. Returns the wait for its commit, which any thread may do, once; the
    run must not be closed meanwhile. Raises what `save()` and `wait()` do."""
    with Call(run):
        run._check_open()
        run._boundaries.capture_outside()
        return run._attendant.commit_of_newest()


def _at_exit() -> None:
    for run in list(_held):
        if run._process != os.getpid():
            continue  # a forked child ends: the run and its signals are the parent's
        run._signals.hurry(_EXIT_PATIENCE_S)
        run._signals.hold()  # and delivered here: no thread's signal would be heard any more
        # The process ends already, as its program or an exception would have it.
        with contextlib.suppress(BaseException):
            run._release()
        with contextlib.suppress(BaseException):
            run._signals.deliver(lambda: None)


atexit.register(_at_exit)
