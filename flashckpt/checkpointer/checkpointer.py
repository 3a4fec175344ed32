"""The Checkpointer and its iterators over batches and epochs: what a training script holds.

The `__next__` of the iterators is the boundary. They are no generators: such a one is closed by `break` and
by garbage collection as if its body were done, and nobody knows whether it was.

At a boundary the training thread counts the step and hands the capture a way to encode what is not a
tensor; it does no I/O, waits for no storage and takes no lock that another thread keeps. Everything
slow is the attendant's (its own thread) and the keeper's (its own process). Only `.wait()`, `.close()`,
the normal end of a loop and a `.save()` outside of one wait for storage, because they say so.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from flashckpt.checkpointer.attached_run import AttachedRun, Call
from flashckpt.errors import BoundaryError, FlashckptError
from flashckpt.state import rng
from flashckpt.state.loader.base import reference_to

log = logging.getLogger(__name__)

# Loaders that are remembered as looped over: what has no weak references (a list of batches) is held by it.
_LOOPED_KEPT = 8
# In the place of a batch: the loader's workers are gone while the loop is to end anyway.
_WORKERS_LOST = object()


class Checkpointer(AttachedRun):
    """One run, attached to the live state. Made by `flashckpt.attach` and `flashckpt.loop`.

    `resumed` is None on a fresh run. All methods are called from the training thread.
    """

    _in_epoch = _left_is_said = False
    _looped: tuple[Callable[[], object], ...] = ()

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
            self._looped = (*self._looped[1 - _LOOPED_KEPT :], reference_to(loader))
        self._left_is_said = True
        return Batches(self, loader)

    def enumerate(self, loader: Iterable[Any]) -> Batches:
        """`.batches(loader)` as pairs of position and batch. Positions count an epoch's batches from 0, and
        go on over restarts: those of Python's `enumerate` begin at 0 again."""
        batches = self.batches(loader)
        batches._with_positions = True
        return batches

    def epochs(self, epochs: int) -> Epochs:
        """Epoch numbers from the one the run stands in. What follows the batches of an epoch runs once."""
        self._check_open()
        return Epochs(self, epochs)

    def step(self) -> None:
        """Mark a boundary: all of this iteration is done. Inside `.batches` it marks the end of this
        iteration early, and is not counted again when the next batch is drawn."""
        with Call(self):
            self._check_open()
            if self._marked:
                return
            self._marked = self._in_iteration
            self._boundaries.begin()
            self._say_what_is_left_to_the_program()
            self._boundary()
            self._by_hand, self._put_off = True, False
            if not self._in_iteration:
                self._stop_at_marked()
                self._boundaries.settle()
            self._capture.heartbeat.expect()

    def save(self) -> None:
        """Take a snapshot that is persisted: of the next boundary when called in an iteration, at once
        anywhere else. There it is a boundary of its own, with a step of its own, unless the state is bit for
        bit what was captured last.

        In the code after an epoch's batches (of `.epochs`) the next boundary is the epoch's end: a snapshot
        of the midst of that code could not be gone on from. `wait()` and `close()` do not wait for that: they
        take it where they are called, and the epoch's end is a step of its own then. After a stop in the
        middle of an epoch it does nothing: the boundary of the stop is saved, and what follows it is done
        again.

        A signal handler may call it. Where the handler has interrupted another call of the Checkpointer or of
        its iterators, this is done when that call returns."""
        if self._calls:
            self._save_is_due = True
            return
        with Call(self):
            self._save()

    def _save_late(self) -> None:
        # One of its own would shift the count of steps in a loop, and other ranks would not have it.
        if (self._in_iteration or self._in_epoch or self._by_hand) and not self.stopping:
            self._boundaries.order()
            self._put_off = not self._in_iteration
        else:
            self.save()

    def _save(self) -> None:
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
        trained = self._use.trained_since_boundary
        if self._in_epoch and (self._progress.is_after_batches or trained) or self._by_hand and trained:
            self._boundaries.order()
            self._put_off = True
            return
        self._boundaries.capture_outside()

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
        """The iterator of `loop`, which names at least one of `epochs` and `steps`."""
        return Batches(self, loader, epochs, steps)

    def _restore_rng(self) -> None:
        due, self._due_rng = self._due_rng, None
        if due is not None:
            rng.restore(due)

    def _begin_iteration(self) -> None:
        self._in_iteration, self._marked, self._by_hand = True, False, False
        self._boundaries.begin()
        self._use.batch_given()
        self._capture.heartbeat.expect()

    def _end_of_iteration(self, *, ends_epoch: bool) -> None:
        """`ends_epoch`: no batch follows in this epoch, as far as is known, and code of its own may."""
        marked, self._in_iteration, self._marked = self._marked, False, False
        if not marked:
            self._boundary(ends_epoch=ends_epoch)

    def _end_of_epoch(self, *, last: bool) -> None:
        """The code after an epoch's batches is done: what it has made is captured, and committed where no
        epoch follows."""
        stops = self._enter_boundary(self.completed)
        self._put_off = False
        self._boundaries.end_epoch(last=stops or last)

    def _abandon_iteration(self) -> None:
        """An iteration was left by `break` or an exception: what follows is in none."""
        if self._is_forked:
            return
        if self._in_iteration and not self._marked and self._progress.manages_epochs:
            self._boundaries.leave_iteration()
        self._in_iteration = self._marked = False
        self._capture.heartbeat.rest()

    def _boundary(self, *, ends_epoch: bool = False) -> None:
        stops = self._enter_boundary(self._progress.step + 1)
        self._boundaries.pass_one(held=ends_epoch and not stops)

    def _enter_boundary(self, step: int) -> bool:
        """Before the boundary of this step. Gives whether the loop ends at it; then it is captured."""
        if self._closed or self._process != os.getpid():
            self._check_open()  # which says why there is no boundary
        try:
            self._boundaries.check()
        except FlashckptError:
            self._release()
            raise
        ordinal = self._boundaries.enter(step)
        if self._stop.begins_at(ordinal):
            self._capture.order()
        return self._stop.stops_at(ordinal)

    def _stops_here(self) -> bool:
        """Whether the loop ends at the boundary that was entered last."""
        return self._stop.stops_at(self._capture.ordinal)


class Batches(Iterator[Any]):
    """Batches of one phase, or of a whole run (`epochs`, `steps`), with a boundary after each; with their
    positions in the epoch where `.enumerate` made it.

    `.completed` is the step, the counter to use for `% k`: it goes on over restarts. Attributes that are not
    its own are the loader's.
    """

    _with_positions = False

    def __init__(
        self, checkpointer: Checkpointer, loader: object, epochs: int | None = None, steps: int | None = None
    ) -> None:
        self.checkpointer, self._loader = checkpointer, loader
        self._epochs, self._steps = epochs, steps
        self._whole_run = epochs is not None or steps is not None
        self._thread = threading.get_ident()
        self._source: Any = None
        self._begun = self._ended = self._in_body = self._entered = self._gave = False
        if self._whole_run:
            checkpointer._progress.manages_epochs = True

    @property
    def completed(self) -> int:
        return self.checkpointer.completed

    def stop(self) -> None:
        """End the loop at the next boundary, which is captured and committed."""
        self.checkpointer.stop()

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
        """Whatever else is asked for is the loader's: `.dataset`, `.batch_size`, `.sampler`, …"""
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
                "A batch was asked for by another thread than the one that began the loop: something "
                "reads ahead around it, and no boundary could be told. Nothing was captured. Put the "
                "prefetching inside, into the loader."
            )
        if self._ended:
            raise StopIteration
        with Call(self.checkpointer):
            try:
                batch = self._next()
            except StopIteration:
                raise
            except BaseException:
                # A notebook keeps the traceback, and with it this frame: the run must not be held by it.
                self._leave()
                raise
            finally:
                self.checkpointer._boundaries.settle()
        return (self.checkpointer._progress.batches_taken - 1, batch) if self._with_positions else batch

    def _next(self) -> Any:
        checkpointer, holds_one = self.checkpointer, self._in_body
        if not self._entered:
            self._entered = True
            checkpointer._signals.enter()
        # Before the boundary, not after it: one that is a lie must not have been captured.
        checkpointer._use.before_batch(holds_one=holds_one)
        checkpointer._restore_rng()
        if holds_one:
            self._in_body = False
            checkpointer._end_of_iteration(ends_epoch=self._ends_epoch())
        if checkpointer._stops_here() or (self._steps is not None and self.completed >= self._steps):
            self._end(exhausted=False)
        batch = self._draw()
        if batch is _WORKERS_LOST:
            self._end(exhausted=False)
        self._in_body = self._gave = True
        checkpointer._begin_iteration()
        return batch

    def _ends_epoch(self) -> bool:
        """Whether the loader says that it has given its last batch, where code after it is to be awaited."""
        progress, source = self.checkpointer._progress, self._source
        if self._whole_run or not progress.manages_epochs or source is None:
            return False
        try:
            return bool(source.batches_taken == len(source))
        except TypeError:
            return False

    def _draw(self) -> Any:
        """The next batch, of the next epoch where this iterator is a whole run's."""
        progress = self.checkpointer._progress
        while True:
            # A whole run taken up after its last epoch has nothing more to give.
            if self._whole_run and self._epochs_left() <= 0:
                self._end(exhausted=True)
            if not self._begun:
                self._begun = True
                self._source = progress.open_phase(self._loader)
                if self._source is None:
                    log.warning(
                        "this .batches() had given its last batch before the restart and gives none; the "
                        "code after it runs again (Checkpointer.epochs is for code that must run once)"
                    )
            if self._source is not None:
                # Only the drawing is tried: the end of the run below ends with a StopIteration of its own.
                with contextlib.suppress(StopIteration):
                    return self._next_of(self._source)
            self._next_phase()

    def _next_of(self, source: Any) -> Any:
        try:
            return source.next()
        except Exception:
            # The signal that ends the loop has ended the workers too: this is the boundary it ends at. It is
            # not raised: its traceback is no part of what the signal raises.
            if self.checkpointer._stops_here() and source.has_lost_workers():
                return _WORKERS_LOST
            raise

    def _next_phase(self) -> None:
        """The loader is exhausted: end this phase, and go to the next epoch if the run has one."""
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
            progress.close_phase()
        progress.next_epoch()
        self._begun = False

    def _epochs_left(self) -> float:
        """The present one among them."""
        return math.inf if self._epochs is None else self._epochs - self.checkpointer._progress.epoch

    def _end(self, *, exhausted: bool) -> NoReturn:
        """End the iteration. The last boundary of a whole run is captured and committed first."""
        self._ended = True
        if self._whole_run and not self._gave and self.completed and not self.checkpointer._stops_here():
            log.warning(
                "the run had ended before, at step %d, and gives no more batches: more epochs= or steps= let "
                "it go on, another folder begins anew",
                self.completed,
            )
        # The code after an epoch's last batch is still to come.
        at_boundary = self._whole_run or not exhausted or self.checkpointer._signals.loops <= 1
        self.checkpointer._end_loop(lambda: self._close(exhausted), at_boundary=at_boundary)
        raise StopIteration

    def _close(self, exhausted: bool) -> None:
        checkpointer = self.checkpointer
        checkpointer._capture.heartbeat.rest()
        if self._whole_run:
            boundaries = checkpointer._boundaries
            checkpointer._end(lambda: self.completed > 0 and boundaries.capture_now(persist=True))
        elif exhausted and self._source is not None:
            # Inside `.epochs` the epoch's own end is captured; elsewhere nobody may come after, and what
            # follows is no part of this boundary.
            if not checkpointer._progress.manages_epochs and self.completed > 0:
                try:
                    checkpointer._boundaries.capture_now(persist=False)
                except FlashckptError as error:
                    checkpointer._boundaries.not_saved(error)
            checkpointer._progress.close_phase()
        elif not exhausted:  # at a stop: nothing else ends it early
            checkpointer._progress.is_cut = True
            checkpointer._boundaries.capture_now(persist=True)

    def __del__(self) -> None:
        # break, an exception, garbage collection: no capture, nobody knows whether the body was done. At
        # the interpreter's end nothing can be asked any more: to the keeper it is a death like any other.
        if not getattr(self, "_ended", True) and not sys.is_finalizing():
            self._leave()

    def _leave(self) -> None:
        if self._ended:
            return
        self._ended = True
        with Call(self.checkpointer), self.checkpointer._signals.ending() as signals:
            if self._entered:
                signals.leave()
            self.checkpointer._abandon_iteration()
            if self._whole_run:
                self.checkpointer._release()
            elif self._source is not None:
                self.checkpointer._progress.close_phase()


class Epochs(Iterator[int]):
    """Epoch numbers from the one the run is in; the code after an epoch's batches runs exactly once.

    Its `__next__` captures what that code has made, under the step of the epoch's last batch.
    """

    def __init__(self, checkpointer: Checkpointer, epochs: int) -> None:
        self._checkpointer, self._epochs = checkpointer, epochs
        self._in_body = self._entered = self._left = False
        checkpointer._progress.manages_epochs = True

    def __iter__(self) -> Epochs:
        return self

    def __len__(self) -> int:
        return max(0, self._epochs - self._checkpointer._progress.epoch - self._in_body)

    def __next__(self) -> int:
        with Call(self._checkpointer):
            try:
                return self._next()
            finally:
                self._checkpointer._boundaries.settle()

    def _next(self) -> int:
        checkpointer, progress = self._checkpointer, self._checkpointer._progress
        if not self._entered:
            self._entered = True
            checkpointer._signals.enter()
        checkpointer._restore_rng()
        if self._in_body:
            self._in_body = False
            # A loop that was stopped in the middle of the epoch: it is not over.
            checkpointer._in_epoch = False
            if not checkpointer._stops_here() or progress.is_over:
                checkpointer._end_of_epoch(last=progress.epoch + 1 >= self._epochs)
        if checkpointer._stops_here() or progress.epoch >= self._epochs:
            self._end()
            raise StopIteration
        self._in_body = checkpointer._in_epoch = True
        return progress.epoch

    def _end(self) -> None:
        if not self._left:
            self._left = True
            self._checkpointer._end_loop(lambda: None)

    def __del__(self) -> None:
        # break or an exception: from here on no boundary is to come.
        if getattr(self, "_entered", False) and not self._left and not sys.is_finalizing():
            self._checkpointer._in_epoch = False
            with self._checkpointer._signals.ending() as signals:
                signals.leave()
