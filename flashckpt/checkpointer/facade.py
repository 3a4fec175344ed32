"""The Checkpointer: what a training script holds. Owns the order of things at a boundary.

At a boundary the training thread counts the step and hands the capture a way to encode what is not a
tensor; it does no I/O, waits for no storage and takes no lock that another thread keeps. Everything
slow is the attendant's (its own thread) and the keeper's (its own process). Only `.wait()`, `.close()`,
the normal end of a loop and a `.save()` outside of one wait for storage, because they say so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flashckpt.checkpointer.batches import Batches, Enumerated, Epochs
from flashckpt.checkpointer.boundaries import Boundaries
from flashckpt.checkpointer.ending import stop_at_marked, watch_exit
from flashckpt.checkpointer.resumed import Resumed as Resumed
from flashckpt.errors import BoundaryError, FlashckptError
from flashckpt.events import Event, log
from flashckpt.state import rng
from flashckpt.state.loader.identity import reference_to

if TYPE_CHECKING:
    from flashckpt.capture import Capture
    from flashckpt.checkpointer.attendant import Attendant
    from flashckpt.checkpointer.progress import Progress
    from flashckpt.checkpointer.read_ahead import Use
    from flashckpt.checkpointer.session import Session
    from flashckpt.checkpointer.signals import Signals
    from flashckpt.checkpointer.stop_policy import StopPolicy
    from flashckpt.state.tree import Tree

# Loaders that are remembered as looped over: what has no weak references (a list of batches) is held by it.
_LOOPED_KEPT = 8


class Checkpointer:
    """One run, attached to the live state. Made by `flashckpt.attach` and `flashckpt.loop`.

    `resumed` is None on a fresh run. All methods are called from the training thread.
    """

    resumed: Resumed | None

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
        stop: StopPolicy,
        resumed: Resumed | None,
    ) -> None:
        self._progress, self._capture, self._session = progress, capture, session
        self._attendant, self._use, self._signals = attendant, use, signals
        self._stop = stop
        self._boundaries = Boundaries(tree, progress, capture, attendant, use, session.environment, stop)
        self.resumed = resumed
        self._in_iteration = self._marked = self._closed = self._left_is_said = False
        # The newest boundary was marked by `step()`; save() was put off to a boundary outside of `.batches`.
        self._by_hand = self._put_off = self._in_epoch = False
        # What is drawn between here and the loop is no part of the run: put back once more there.
        self._due_rng = rng.capture() if resumed is not None else None
        self._looped: deque[Callable[[], object]] = deque(maxlen=_LOOPED_KEPT)
        self._process = os.getpid()
        self._began_s = time.perf_counter()
        self._last_report: dict[str, float] | None = None
        watch_exit(self)

    # ---- what a training script calls

    @property
    def completed(self) -> int:
        """The step: iterations done since the run began. It goes on over restarts; counters of one's own
        do not."""
        return self._progress.step

    def batches(self, loader: Iterable[Any]) -> Batches:
        """An iterator over the loader's batches, from where the run stands, with a boundary after each.

        Going over one loader again and again is what `.epochs` is for: outside of it a second call with
        the same loader raises BoundaryError.
        """
        self._check_open()
        if not self._progress.manages_epochs:
            if any(each() is loader for each in self._looped):
                raise BoundaryError(
                    "This loader was looped over before, and not inside Checkpointer.epochs: a resumed run "
                    "could not tell which of the code between the loops has run. Nothing was captured since "
                    "the last boundary. Write `for epoch in checkpointer.epochs(n):` around "
                    "`for batch in checkpointer.batches(loader):`.",
                    step=self.completed,
                )
            self._looped.append(reference_to(loader))
        self._left_is_said = True
        return Batches(self, loader)

    def enumerate(self, loader: Iterable[Any]) -> Enumerated:
        """`.batches(loader)` as pairs of position and batch. Positions count an epoch's batches from 0, and
        go on over restarts: those of Python's `enumerate` begin at 0 again."""
        return Enumerated(self.batches(loader))

    def epochs(self, epochs: int) -> Epochs:
        """Epoch numbers from the one the run stands in. What follows the batches of an epoch runs once."""
        self._check_open()
        return Epochs(self, epochs)

    def step(self) -> None:
        """Mark a boundary: all of this iteration is done. Inside `.batches` it marks the end of this
        iteration early, and is not counted again when the next batch is drawn."""
        self._check_open()
        if self._marked:
            return
        self._marked = self._in_iteration
        self._say_what_is_left_to_the_program()
        self._boundary()
        self._by_hand, self._put_off = True, False
        if not self._in_iteration:
            stop_at_marked(self)
        self._capture.pulse.expect()

    def save(self) -> None:
        """Take a snapshot that is persisted: of the next boundary when called in an iteration, at once
        anywhere else. There it is a boundary of its own, with a step of its own, unless the state is bit for
        bit what was captured last.

        In the code after an epoch's batches (of `.epochs`) the next boundary is the epoch's end: a snapshot
        of the midst of that code could not be gone on from. `wait()` and `close()` do not wait for that: they
        take it where they are called, and the epoch's end is a step of its own then. After a stop in the
        middle of an epoch it does nothing: the boundary of the stop is saved, and what follows it is done
        again."""
        self._check_open()
        if self._in_iteration and not self._marked:
            self._boundaries.order()
            return
        between = not self._in_iteration and self._progress.manages_epochs
        if self.stopping and between and not self._progress.is_over:
            log.warning(
                "save() after a stop in the middle of epoch %d: step %d, at which it stopped, is saved and "
                "the run goes on from there; code for the end of an epoch asks .stopping first",
                self._progress.epoch, self.completed,
            )  # fmt: skip
            return
        trained = self._use.trained_since_boundary()
        if self._in_epoch and (self._progress.is_after_batches or trained) or self._by_hand and trained:
            self._boundaries.order()
            self._put_off = True
            return
        self._save_now()

    def _save_now(self) -> None:
        with self._capture.pulse.resting():
            self._boundaries.capture_outside()

    def wait(self) -> None:
        """Wait until what is captured is committed. Raises PersistError if it could not be, and whatever
        kept a boundary that was due from being captured (StateError, OutOfRoomError)."""
        self._check_open()
        may_take = (self._put_off or self._progress.is_after_batches) and not self._in_iteration
        if may_take and self._boundaries.ordered_at is not None:
            self._put_off = False
            self._or_commit(self._save_now)
        self._wait_committed()
        unsaved, ordered_at = self._boundaries.unsaved, self._boundaries.ordered_at
        if unsaved is not None:
            raise unsaved
        lost = self._capture.lost_step
        if lost is not None and not (self._in_iteration and (self.stopping or self._capture.is_ordered)):
            raise self._attendant.not_captured(lost, "its bytes are not those of its boundary")
        if ordered_at is not None and not self._in_iteration:
            raise self._attendant.not_captured(
                ordered_at + 1, "the iteration in which save() was called was left before its boundary"
            )

    def _or_commit(self, capture: Callable[[], None]) -> None:
        """Capture. Where that fails, what was captured before is committed before it is raised."""
        try:
            capture()
        except Exception:
            self._wait_committed()
            raise

    def _wait_committed(self) -> None:
        with self._capture.pulse.resting():
            self._capture.wait()
            self._attendant.wait_committed()

    def stop(self) -> None:
        """End the loop at the next boundary; that boundary is captured and committed."""
        self._stop.ask()

    @property
    def stopping(self) -> bool:
        """Whether the loop ends at its next boundary: code between epochs asks it after a stop."""
        return self._stop.is_asked

    @property
    def stop_reason(self) -> str | None:
        """Why the loop ends at its next boundary, or has: a signal's name, "notice file", "stop"; or None."""
        return self._stop.reason

    def close(self) -> None:
        """Wait until what is captured is committed, then let the run go. A boundary that was marked by
        `step()` is captured first, if it is not and nothing was trained since. Raises PersistError if it
        could not be; the run is let go all the same. A second call does nothing."""
        if self._closed or self._is_forked:
            return
        self._end(self._capture_marked)

    def _capture_marked(self) -> None:
        """The end of a loop whose boundaries are marked by hand: only here is it known to be one."""
        if not self._by_hand or self._in_iteration or self.completed == self._attendant.newest_sealed_step():
            return
        if self._use.trained_since_boundary():
            log.warning(
                "the state was trained on after step %d, the last that step() marked: nobody knows whether "
                "that iteration was done, and neither is saved. Call step() at the end of each iteration",
                self.completed,
            )
            return
        with self._capture.pulse.resting():
            self._boundaries.capture_now(persist=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

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

    def _say_what_is_left_to_the_program(self) -> None:
        """In a loop that only marks its steps, nobody here knows its loader. Said once."""
        if self.resumed is None or self._in_iteration or self._left_is_said:
            return
        self._left_is_said = True
        log.warning(
            "resumed in a loop of step(): its loader and its own counters begin anew, and are the program's "
            "to put back; .completed goes on at %d. Checkpointer.batches(loader) puts a loader back.",
            self.completed,
        )

    # ---- what the iterators call

    def _whole_run(self, loader: Iterable[Any], epochs: int | None, steps: int | None) -> Batches:
        """The iterator of `loop`."""
        try:
            return Batches(self, loader, epochs=epochs, steps=steps, whole_run=True)
        except BaseException:
            self._release()
            raise

    def _before_boundary(self, *, holds_one: bool) -> None:
        """Before the boundary, not after it: one that is a lie must not have been captured."""
        self._use.before_batch(holds_one=holds_one)
        self._restore_rng()

    def _restore_rng(self) -> None:
        due, self._due_rng = self._due_rng, None
        if due is not None:
            rng.restore(due)

    def _begin_iteration(self) -> None:
        self._in_iteration, self._marked, self._by_hand = True, False, False
        self._use.batch_given()
        self._capture.pulse.expect()

    def _end_of_iteration(self, *, ends_epoch: bool) -> None:
        """`ends_epoch`: no batch follows in this epoch, as far as is known, and code of its own may."""
        self._in_iteration = False
        if self._marked:
            self._marked = False
            return
        self._boundary(ends_epoch=ends_epoch)

    def _end_of_epoch(self, epochs: int) -> None:
        """The code after an epoch's batches is done: what it has made is captured, and what is last is
        committed."""
        stops = self._enter_boundary(self.completed)
        self._put_off = False
        self._boundaries.end_epoch(last=stops or self._progress.epoch + 1 >= epochs)

    def _abandon_iteration(self) -> None:
        """An iteration was left by `break` or an exception: what follows is in none."""
        if self._is_forked:
            return
        if self._in_iteration and not self._marked and self._progress.manages_epochs:
            self._boundaries.leave_iteration()
        self._in_iteration = self._marked = False
        self._capture.pulse.rest()

    def _end_of_batches(self) -> None:
        """A loader has given its last batch. Inside `.epochs` the epoch's own end is captured; elsewhere
        nobody may come after, and what follows is no part of this boundary."""
        if self._progress.manages_epochs or self.completed == 0:
            return
        try:
            self._boundaries.capture_now(persist=False)
        except FlashckptError as error:
            self._boundaries.not_saved(error)

    def _finish(self) -> None:
        """The normal end of a whole run: its last boundary is captured and committed, then the run is
        let go."""
        if not self._closed:
            self._end(self._capture_last)

    def _capture_last(self) -> None:
        if self._progress.step > 0:
            self._boundaries.capture_now(persist=True)

    def _end(self, capture: Callable[[], None]) -> None:
        """Capture what is last, see it committed, let the run go. To the keeper an end that failed is a death
        like any other: it saves the newest that is whole, and waits for the next attempt."""
        in_order = False
        try:
            self._or_commit(capture)
            self.wait()
            in_order = True
        finally:
            self._release(closed=in_order)

    # ---- boundaries

    def _boundary(self, *, ends_epoch: bool = False) -> None:
        stops = self._enter_boundary(self.completed + 1)
        if ends_epoch and not stops:
            self._boundaries.hold_one()
        else:
            self._boundaries.pass_one()

    def _enter_boundary(self, step: int) -> bool:
        """Before the boundary of this step. Gives whether the loop ends at it; then it is captured."""
        self._check_open()
        try:
            self._boundaries.check()
        except FlashckptError:
            self._release()
            raise
        if self._stop.begins_at(step):
            self._capture.order()
        return self._stop.stops_at(step)

    def _stops_here(self) -> bool:
        """Whether the loop ends at the boundary that was entered last."""
        return self._stop.stops_at(self.completed)

    # ---- the end

    def _release(self, *, closed: bool = False) -> None:
        """Let the run go. What is sealed stays with the keeper, which persists it."""
        if self._closed:
            return
        self._closed = True
        if not self._is_forked and self._boundaries.ordered_at is not None:
            log.warning(
                "the snapshot that save() ordered after step %d was not taken: no boundary followed it",
                self._boundaries.ordered_at,
            )
        if self._is_forked:
            return  # a forked child unwinds: the run, its lock and its slots are the parent's
        with contextlib.ExitStack() as ends:  # each of them, whatever the others raise; last in, first out
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

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise BoundaryError(
                "This checkpointer has let its run go (its loop ended, or it was closed). Nothing was "
                "changed. Call flashckpt.attach or flashckpt.loop again to go on with the run."
            )

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self._release()
