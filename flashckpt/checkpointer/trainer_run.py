"""A run of a trainer whose loop is not the program's: draws and boundaries by calls. All integrations go
through this module, and use nothing else of the checkpointer or of loaders.

A trainer draws a batch earlier than it ends an iteration. So draws (taps) and boundaries (`end_iteration`,
`end_epoch`) are separate: at a boundary the integration says how many batches were trained on, and those that
were drawn beyond them are drawn again after a resume, each under its own random numbers.

Every method is called from the training thread, in this order: `attach_trainer` once the trainer has built
all that is saved; `tap` in the loader's place; `begin` and `end_iteration` or `end_epoch` around each
iteration; `close` or `abandon`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashckpt.checkpointer.attach import attach_for
from flashckpt.checkpointer.attached_run import Call, Resumed
from flashckpt.checkpointer.checkpointer import Checkpointer
from flashckpt.checkpointer.tap import Tap, inside, is_tap
from flashckpt.commit.assets import has_assets, write_assets
from flashckpt.errors import BoundaryError, OptionError, StateError
from flashckpt.options import Options
from flashckpt.state import rng
from flashckpt.state.deferred import Deferred as Deferred

if TYPE_CHECKING:
    from flashckpt.checkpointer.session import Session
    from flashckpt.state.loader.base import Source

log = logging.getLogger(__name__)


def attach_trainer(
    path: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    integration: str,
    on_stop: Callable[[], object],
    assets: Callable[[], Mapping[str, bytes]] | None = None,
    **options: Any,
) -> TrainerRun:
    """Attach a trainer's live state to the run in `path`, and restore it if there is something to restore.

    path, options: as `flashckpt.attach` has them, with its errors. state: what is saved, by name; an object
    that the trainer overwrites later is a `Deferred`. integration: the name of the module flashckpt.*, to
    which the run belongs from then on. on_stop: called at the boundary at which the loop has to end, once
    that is committed; it ends the loop in the trainer's way. Where a signal asks for the end and its default
    action ends the process, it does so before. assets: makes files that belong to the run (config, tokenizer)
    by name; called on rank 0 of a run that has none yet, and kept before this returns.
    """
    # A trainer that draws ahead is what taps are for: the check of plain loops would refuse it.
    own = options.get("options", Options())
    if isinstance(own, Options):
        options["options"] = replace(own, read_ahead_check=False)
    checkpointer = attach_for(integration, path, state, **options)
    if not isinstance(checkpointer, Checkpointer):
        return DisabledRun(checkpointer)
    if assets is not None:
        _keep_assets(checkpointer._session, assets)
    return TrainerRun(checkpointer, on_stop)


def _keep_assets(session: Session, assets: Callable[[], Mapping[str, bytes]]) -> None:
    """Log a failure and train: an export can take the files from elsewhere."""
    try:
        if session.environment.rank == 0 and not has_assets(session.store):
            write_assets(session.store, assets())
    except Exception as error:  # `assets` is code of the framework: a config that does not validate raises
        log.warning(
            "The config and tokenizer could not be kept in %s: %s. Steps are saved as always; `flashckpt "
            "export --format hf` of this run needs --config.",
            session.store.url,
            error,
        )


class TrainerRun:
    """checkpointer: its public methods may be called at any time. begun: whether an iteration has begun in
    this process. epoch: in which the run stands, 0 on a fresh one."""

    def __init__(self, checkpointer: Checkpointer, on_stop: Callable[[], object]) -> None:
        self.checkpointer, self._on_stop = checkpointer, on_stop
        self._progress, self._boundaries = checkpointer._progress, checkpointer._boundaries
        self._progress.manages_epochs = True
        self._draws = _Draws(self)
        self.begun = self._stopped = False
        # What the trainer may change between here and the place where its loop continues.
        self._due_rng = checkpointer._due_rng
        self._due_gradients = _gradients(checkpointer) if self.resumed else []
        checkpointer._due_rng = None

    @property
    def resumed(self) -> Resumed | None:
        return self.checkpointer.resumed

    @property
    def epoch(self) -> int:
        return self._progress.epoch

    @property
    def trained(self) -> int:
        """Batches of the present epoch that were trained on when the run was saved, of the first tap; 0
        between two epochs. Asked before the first draw."""
        return next((self._progress.drawn(name) for name in self._progress.taps), 0)

    @property
    def at_end(self) -> bool:
        """Whether the run was saved behind the last batch of an epoch whose end it has not passed. Asked
        before the first draw."""
        return self._progress.is_at_end_of(0)

    def tap(
        self,
        loader: Any,
        name: str = "train",
        on_first: Callable[[], object] | None = None,
        *,
        opens: bool = False,
    ) -> Tap:
        """A tap in the place of `loader`. name: one for each loader that is open at the same time. on_first:
        called right before the first draw of each pass. opens: `iter(tap)` makes an iterator of the loader,
        as the trainer would."""
        if is_tap(loader):
            loader = inside(loader)[1]
        self._progress.phase_of(name)
        return Tap(self._draws, loader, name, on_first, opens)

    def begin_at(self, step: int, epoch: int, batches: int) -> None:
        """Begin a run that has no step at this place: so many steps done, `batches` batches of `epoch`
        trained on. The first pass of the first tap skips those; random numbers are the caller's to
        restore after it. Raises BoundaryError on a run that has a step, or has begun."""
        if self.resumed is not None or self.begun or self.checkpointer.completed:
            raise BoundaryError(
                f"The run stands at step {self.checkpointer.completed} already, so it cannot begin at step "
                f"{step} of something else. Nothing was changed. Import into an empty run."
            )
        self._progress.step, self._progress.epoch = step, epoch
        self._progress.to_skip = batches

    def restore_again(self) -> None:
        """Called once, where the loop continues, before it draws a new batch: set the random numbers, and
        gradients that the trainer has dropped, as they were at the boundary. Does nothing on a fresh run, nor
        once an iteration has begun. Where it is not called, the first draw sets the random numbers."""
        due, gradients, self._due_rng, self._due_gradients = self._due_rng, self._due_gradients, None, []
        if due is not None and not self._draws.drew_new:
            rng.restore(due)
        for parameter, gradient, version in gradients:
            if gradient._version != version:
                raise StateError(
                    "The trainer has overwritten gradients that were restored, in place, before its loop "
                    "continued. Nothing was captured, and what is saved is whole. Drop gradients with "
                    "zero_grad(set_to_none=True)."
                )
            if parameter.grad is None:
                parameter.grad = gradient

    # ---- boundaries

    def begin(self) -> None:
        """An iteration begins: a batch is about to be trained on. Signals are watched from the first one
        on."""
        if self._stopped:
            return
        with self._call():
            if not self.begun:
                # Here, and not at attach: the trainer has installed handlers of its own since.
                self.begun = True
                self.checkpointer._signals.enter()
            self._due_rng = None
            self._due_gradients = []
            self.checkpointer._begin_iteration()

    def end_iteration(self, *, trained: int | Mapping[str, int], last: bool = False) -> None:
        """The boundary: all that belongs to the iteration is done. trained: batches of this epoch that were
        trained on, of each tap, or by the taps' names. last: no iteration follows; the step is committed."""
        if self._stopped:
            return
        with self._call():
            self._progress.count_trained(trained)
            self.checkpointer._end_of_iteration(ends_epoch=False)
            if last:
                self._boundaries.capture_now(persist=True)
        self._stop_here()

    def end_epoch(self, *, trained: int | Mapping[str, int] | None = None, last: bool = False) -> None:
        """The end of an epoch, after its own code. It ends the iteration that has begun, whose boundary it
        is. trained: None for all batches that were drawn. last: no epoch follows; the step is committed."""
        if self._stopped:
            return
        checkpointer = self.checkpointer
        with self._call():
            self._progress.count_trained(trained)
            if checkpointer._in_iteration:
                # One snapshot, of what the epoch's code has made, also where a stop arrives in between.
                checkpointer._in_iteration = checkpointer._marked = False
                checkpointer._enter_boundary(checkpointer.completed + 1)
                self._boundaries.pass_one(held=True)
            self._progress.count_trained(None)  # what was drawn ahead is left with the epoch
            for name in self._progress.taps:
                self._progress.close_tap(name)
            checkpointer._end_of_epoch(last=last)
        self._stop_here()

    def _stop_here(self) -> None:
        """End the loop where it has to end at this boundary."""
        if not self.checkpointer._stops_here():
            self._boundaries.settle()
            return
        self._stopped = True
        with self._call():
            self._progress.is_cut = self._progress.has_open_sources
            self.checkpointer._end_loop(self._capture_last)
        self._on_stop()

    def _capture_last(self) -> None:
        self._boundaries.capture_now(persist=True)

    # ---- the end

    def close(self, *, out_of_data: bool = False) -> None:
        """The trainer has ended in order: wait until what is captured is committed, and let the run go.
        Raises PersistError where it cannot be. out_of_data: the loader ended where an iteration had begun,
        and nothing was trained on since the boundary before, which is captured and committed."""
        checkpointer = self.checkpointer
        checkpointer._capture.heartbeat.rest()
        capture = self._capture_last if out_of_data and self.begun and checkpointer.completed else _nothing
        with self._call():
            if out_of_data:
                checkpointer._abandon_iteration()
            if self.begun and not self._stopped:
                checkpointer._end_loop(lambda: checkpointer._end(capture))
            else:
                checkpointer._end(_nothing)

    def abandon(self) -> None:
        """An exception has ended the trainer: nothing is captured; the newest snapshot is persisted by the
        keeper. Does nothing after `close`."""
        checkpointer = self.checkpointer
        with Call(checkpointer), checkpointer._signals.ending() as signals:
            if self.begun and not self._stopped:
                signals.leave()
            checkpointer._abandon_iteration()
            checkpointer._release()

    @contextmanager
    def _call(self) -> Iterator[None]:
        with Call(self.checkpointer):
            yield


class _Draws:
    """The taps' draws. drew_new: a batch was drawn that the run had not drawn before it was saved."""

    def __init__(self, run: TrainerRun) -> None:
        self._run, self._progress = run, run._progress
        self._sources: dict[str, Source] = {}
        self._has_drawn = self.drew_new = False

    def open(self, tap: Tap) -> None:
        name, loader = inside(tap)
        if self._run._due_rng is not None and not self._has_drawn:
            rng.restore(self._run._due_rng)
        source = self._progress.open_tap(name, loader, beside=self._has_drawn)
        self._sources[name] = source
        skipped = self._progress.to_skip if name == next(iter(self._progress.taps)) else 0
        if skipped:
            source.skip(skipped)
            self._progress.to_skip = 0
            source.count_trained(skipped)

    def next(self, tap: Tap) -> Any:
        name, _ = inside(tap)
        source = self._sources[name]
        is_redraw = source.redraws
        try:
            batch = source.next()
        except StopIteration:
            self._progress.end_pass(name)
            raise
        if not self._progress.is_open(name):
            raise BoundaryError(
                f"The loader {name!r} was asked for a batch by an iterator of an epoch that has ended, so "
                "the batch belongs to no epoch. What was captured is whole. Make an iterator in each epoch."
            )
        self._has_drawn = True
        self.drew_new = self.drew_new or not is_redraw
        return batch

    def resumes(self, name: str) -> bool:
        return self._progress.stands_in(self._progress.phase_of(name))

    def make_iterator(self, name: str) -> None:
        self._sources[name].make_iterator()

    def drawn(self, name: str) -> int:
        return self._progress.drawn(name)

    def passes(self, name: str) -> int:
        return self._progress.taps[name].ended


def _gradients(checkpointer: Checkpointer) -> list[tuple[Tensor, Tensor, int]]:
    """Each parameter that has a gradient, with that and its version."""
    parameters = [p for _, p in checkpointer._boundaries.parameters()]
    return [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]


def _nothing() -> None:
    """An end that captures nothing: the last boundary is committed already."""


class DisabledRun(TrainerRun):
    """A trainer without checkpoints (`enabled=False`, FLASHCKPT=off): a tap is its loader, and calls do
    nothing."""

    def __init__(self, checkpointer: Any) -> None:
        self.checkpointer, self.begun = checkpointer, False

    resumed = None
    epoch, trained, at_end = 0, 0, False

    def tap(
        self,
        loader: Any,
        name: str = "train",
        on_first: Callable[[], object] | None = None,
        *,
        opens: bool = False,
    ) -> Any:
        return loader

    def begin_at(self, step: int, epoch: int, batches: int) -> None:
        raise OptionError(
            "A run that is switched off cannot begin at another place: nothing would restore the batches. "
            "Nothing was started. Resume by the trainer's own means."
        )

    def restore_again(self) -> None:
        """Nothing was restored."""

    def begin(self) -> None:
        self.begun = True

    def end_iteration(self, *, trained: int | Mapping[str, int], last: bool = False) -> None:
        """There is no boundary."""

    def end_epoch(self, *, trained: int | Mapping[str, int] | None = None, last: bool = False) -> None:
        """There is no boundary."""

    def close(self, *, out_of_data: bool = False) -> None:
        """There is nothing to release."""

    def abandon(self) -> None:
        """There is nothing to release."""
