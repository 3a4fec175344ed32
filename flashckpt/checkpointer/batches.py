"""The iterators over batches and epochs: their `__next__` is the boundary.

Iterator objects, not generators: a generator is closed by `break` and by garbage collection as if its
body were done, and nobody knows whether it was. Owns when a boundary is; never what is done at one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from flashckpt.checkpointer.ending import end_loop
from flashckpt.errors import BoundaryError
from flashckpt.events import log

if TYPE_CHECKING:
    from flashckpt.checkpointer.facade import Checkpointer


class _WorkersLost(Exception):
    """The loader's workers are gone while the loop is to end anyway."""


class Batches(Iterator[Any]):
    """Batches of one phase, or of a whole run (`epochs`, `steps`), with a boundary after each.

    `.completed` is the step, the counter to use for `% k`: it goes on over restarts. Attributes that are not
    its own are the loader's.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        loader: object,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        whole_run: bool = False,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.checkpointer = checkpointer
        self._loader = loader
        self._epochs, self._steps, self._whole_run = epochs, steps, whole_run
        self._at_end = at_end
        self._thread = threading.get_ident()
        self._source: Any = None
        self._begun = self._ended = self._in_body = self._entered = self._gave = False
        if whole_run:
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
            taken = progress.batches_taken
            epochs_left = self._epochs - progress.epoch if self._epochs is not None else 1
            by_epochs = max(0, epochs_left * length - taken)
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
        try:
            return self._next()
        except StopIteration:
            raise
        except BaseException:
            # A notebook keeps the traceback, and with it this frame: the run must not be held by it.
            self._leave()
            raise

    def _next(self) -> Any:
        checkpointer, holds_one = self.checkpointer, self._in_body
        if not self._entered:
            self._entered = True
            checkpointer._signals.enter()
        checkpointer._before_boundary(holds_one=holds_one)
        if holds_one:
            self._in_body = False
            checkpointer._end_of_iteration(ends_epoch=self._ends_epoch())
        if checkpointer._stops_here() or (self._steps is not None and self.completed >= self._steps):
            self._end(exhausted=False)
        try:
            batch, lost = self._draw(), False
        except _WorkersLost:
            batch, lost = None, True  # and its traceback is no part of what the signal raises
        if lost:
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
            if self._finished_epochs():
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
        except Exception as error:
            # The signal that ends the loop has ended the workers too: this is the boundary it ends at.
            if self.checkpointer._stops_here() and source.has_lost_workers():
                raise _WorkersLost from error
            raise

    def _next_phase(self) -> None:
        """The loader is exhausted: end this phase, and go to the next epoch if the run has one."""
        progress = self.checkpointer._progress
        empty = self._source is not None and self._source.batches_taken == 0
        if not self._whole_run:
            self._end(exhausted=True)
        if empty and self.checkpointer.resumed is not None and not (self._gave or self._source.was_over):
            raise self._gives_nothing()
        if empty:
            self._end(exhausted=True)  # an empty loader repeated until `steps` would never end
        if self._last_epoch():
            self._end(exhausted=True)
        if self._source is not None:
            progress.close_phase()
        progress.next_epoch()
        self._begun = False

    def _gives_nothing(self) -> BoundaryError:
        return BoundaryError(
            f"The loader gave no batch right after the run was taken up at step {self.completed}, and the "
            "run had not ended there: taken as its end, each start would end so. Nothing was captured, and "
            "what is saved is whole. Pass the data that the run was begun with.",
            step=self.completed,
        )

    def _finished_epochs(self) -> bool:
        """A whole run taken up after its last epoch has nothing more to give."""
        return (
            self._whole_run and self._epochs is not None and self.checkpointer._progress.epoch >= self._epochs
        )

    def _last_epoch(self) -> bool:
        return self._epochs is not None and self.checkpointer._progress.epoch + 1 >= self._epochs

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
        at_boundary = self._whole_run or not exhausted or self.checkpointer._signals.is_outermost
        end_loop(self.checkpointer, lambda: self._close(exhausted), at_boundary=at_boundary)
        if self._at_end is not None:
            self._at_end()
        raise StopIteration

    def _close(self, exhausted: bool) -> None:
        checkpointer = self.checkpointer
        checkpointer._capture.pulse.rest()
        if self._whole_run:
            checkpointer._finish()
        elif exhausted and self._source is not None:
            checkpointer._end_of_batches()
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
        signals = self.checkpointer._signals
        signals.hold()
        if self._entered:
            signals.leave()
        try:
            self.checkpointer._abandon_iteration()
            if self._whole_run:
                self.checkpointer._release()
            elif self._source is not None:
                self.checkpointer._progress.abandon_phase()
        finally:
            signals.left()


class Enumerated(Iterator[tuple[int, Any]]):
    """The batches with their positions in the epoch, counted from 0; a run that is taken up goes on at its
    own. Otherwise as `Batches`, which it holds."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Enumerated:
        iter(self._batches)
        return self

    def __next__(self) -> tuple[int, Any]:
        batch = next(self._batches)
        return self._batches.checkpointer._progress.batches_taken - 1, batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._batches, name)


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
                checkpointer._end_of_epoch(self._epochs)
        if checkpointer._stops_here() or progress.epoch >= self._epochs:
            self._end()
            raise StopIteration
        self._in_body = checkpointer._in_epoch = True
        return progress.epoch

    def _end(self) -> None:
        if not self._left:
            self._left = True
            end_loop(self._checkpointer, lambda: None)

    def __del__(self) -> None:
        # break or an exception: from here on no boundary is to come.
        if getattr(self, "_entered", False) and not self._left and not sys.is_finalizing():
            self._checkpointer._in_epoch = False
            signals = self._checkpointer._signals
            signals.hold()
            signals.leave()
            signals.left()
