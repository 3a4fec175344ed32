"""The iterators of a run: over the batches of a loader, and over epochs.

The `__next__` of an iterator is the boundary. They are not generators: `break` and garbage collection close a
generator as if its body were done, and whether it was is unknown.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from flashckpt.checkpointer.run_state import LoopIterator, RunState
from flashckpt.errors import BoundaryError, FlashckptError

if TYPE_CHECKING:
    from flashckpt.checkpointer.run import Checkpointer

log = logging.getLogger(__name__)

# In the place of a batch: the loader's workers are gone while the loop is to end anyway.
_WORKERS_LOST = object()
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
                self._source = progress.open_batches(self._loader, sets_epoch=self._whole_run)
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
                f"The loader gave no batch right after the run was resumed at step {self.completed}, and "
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
        checkpointer, modules = self.checkpointer, weakref.WeakSet(self.checkpointer._tree.modules)
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
