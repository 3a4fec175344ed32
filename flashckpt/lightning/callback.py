"""The callback `Checkpoint`: which methods of a trainer's loops are replaced while it trains, and where the
boundaries are.

Owns the order of a fit: attach, restore, taps, boundaries, end. What is replaced is replaced on the objects
of one trainer, and put back when its fit ends.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flashckpt.checkpointer.checkpointer import Checkpointer
from flashckpt.checkpointer.trainer_run import TrainerRun, attach_trainer
from flashckpt.checkpointer.unsaved import Unsaved
from flashckpt.errors import BoundaryError
from flashckpt.lightning.package import PACKAGE, check_release, check_trainer, named
from flashckpt.lightning.state import TrainerState, UserState
from flashckpt.options import is_switched_off

log = logging.getLogger(__name__)

Callback: Any = importlib.import_module(f"{PACKAGE}.callbacks").Callback
SIGTERMException: Any = named("utilities.exceptions:SIGTERMException")


class Checkpoint(Callback):  # type: ignore[misc]  # Lightning's types are not read
    """Save the state of `Trainer.fit` in the run at `path`, and resume from it: the same line does both.

    path, options: as `flashckpt.attach` has them. own: attributes that change and that nothing else saves, as
    "name", "MyCallback.name", "module.name" or "datamodule.name". Raises OptionError for a release of
    Lightning that has other loops, and in `fit` for a trainer that cannot be continued exactly, before
    anything starts.

    Saved are the module, optimizers, schedulers, gradients, random numbers, positions of the loaders, all
    counters, the running means of self.log, the state of callbacks and their modules. A stop that asks for
    nothing else (`checkpointer.stop()`, a notice file) lets `fit` return.
    """

    def __init__(self, path: str | os.PathLike[str], *, own: Iterable[str] = (), **options: Any) -> None:
        check_release()
        self._path, self._own, self._options = path, tuple(own), options
        self._fit: _Fit | None = None
        self._run: TrainerRun | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """That of the fit that runs, or ran last. Raises BoundaryError before the first one is attached."""
        if self._run is None:
            raise BoundaryError(
                "No fit is attached to the run yet: that happens after all on_fit_start hooks. Nothing was "
                "changed. Ask for the checkpointer from on_train_start on."
            )
        return self._run.checkpointer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if not self._options.get("enabled", True) or is_switched_off():
            self._run = attach_trainer(
                self._path, {}, integration="lightning", on_stop=lambda: None, **self._options
            )
            return
        if trainer.fast_dev_run:
            log.warning("fast_dev_run: flashckpt saves and resumes nothing.")
            return
        self._fit = _Fit(trainer, self)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._fit is not None:
            self._fit.put_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fit": None, "_run": None}


class _Stopped(BaseException):
    """Ends the loops of a fit that was asked to stop, out of which `fit` returns."""


class _Fit:
    """One call of `Trainer.fit`."""

    def __init__(self, trainer: Any, callback: Checkpoint) -> None:
        self._trainer, self._callback = trainer, callback
        self._loop = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop
        self._replaced: list[tuple[Any, str]] = []
        self._originals: dict[str, Callable[..., Any]] = {}
        self._loaders: list[Any] = []  # those in whose places taps are
        self._taps: dict[str, Any] = {}
        self._is_held = False
        self.run: TrainerRun | None = None
        # Here all is built: the strategy's setup, all hooks of on_fit_start and the signal handlers are done.
        self._replace(trainer, "_run_stage", self._run_stage)

    # ---- what is replaced

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._originals[f"{type(owner).__name__}.{name}"] = getattr(owner, name)
        setattr(owner, name, method)
        self._replaced.append((owner, name))

    def put_back(self) -> None:
        """Let the trainer be what it was before."""
        while self._replaced:
            owner, name = self._replaced.pop()
            vars(owner).pop(name, None)
        if self._loaders and self._loop._combined_loader is not None:
            self._loop._combined_loader.flattened = self._loaders
        self._loaders = []

    def _original(self, owner: Any, name: str, *arguments: Any) -> Any:
        return self._originals[f"{type(owner).__name__}.{name}"](*arguments)

    def _run_stage(self) -> Any:
        trainer = self._trainer
        try:
            check_trainer(trainer, type(self._callback))
            run = self._attach()
        except BaseException:
            self.put_back()
            raise
        sanity_steps = trainer.num_sanity_val_steps
        try:
            if run.resumed is not None:
                trainer.num_sanity_val_steps = 0
            self._original(trainer, "_run_stage")
            self._end_again()
        except _Stopped:
            run.close()
        except BaseException:
            run.abandon()
            raise
        else:
            run.close()
        finally:
            trainer.num_sanity_val_steps = sanity_steps
            self.put_back()

    def _attach(self) -> TrainerRun:
        trainer, callback, loop, epoch = self._trainer, self._callback, self._loop, self._epoch
        self._counters = TrainerState(trainer)
        self._users = UserState(trainer, callback, callback._own)
        state = self._state()
        self.run = run = callback._run = attach_trainer(
            callback._path, state, integration="lightning", on_stop=self._stop, **callback._options
        )
        users = self._users
        self._unsaved = Unsaved(users.roots, users.known(), callback._own, state.values())
        self._is_within_epoch = self._counters.is_within_epoch
        self._counters.put_early()
        self._users.put_early()
        self._replace(loop, "_load_combined_loader_states", self._insert_taps)
        self._replace(loop, "on_run_start", self._on_run_start)
        self._replace(loop, "on_advance_end", self._on_epoch_end)
        self._replace(epoch, "on_run_start", self._on_batches_start)
        self._replace(epoch, "advance", self._advance)
        self._replace(epoch, "on_advance_end", self._on_batch_end)
        return run

    def _state(self) -> dict[str, object]:
        trainer = self._trainer
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        return {
            "model": trainer.strategy.model or trainer.lightning_module,
            **_numbered("optimizer", trainer.optimizers),
            **_numbered("scheduler", schedulers),
            **dict(self._users.modules()),
            "trainer": self._counters,
            "callbacks": self._users,
        }

    # ---- where the loop begins or continues

    def _insert_taps(self) -> None:
        """Called in setup_data, once the loaders are those that are iterated over, before their first
        iterator is made."""
        self._original(self._loop, "_load_combined_loader_states")
        assert self.run is not None
        combined = self._loop._combined_loader
        self._loaders = list(combined.flattened)
        names = ["train", *(f"train.{number}" for number in range(1, len(self._loaders)))]
        self._taps = {
            name: self.run.tap(loader, name, opens=True)
            for name, loader in zip(names, self._loaders, strict=True)
        }
        # Where no length is known, the iterator that setup_data makes draws a batch: too early, but in the
        # first epoch, where Lightning makes no other.
        self._is_held = self.run.resumed is not None or self.run.begun
        taps = self._taps.values()
        combined.flattened = [_Held(tap) for tap in taps] if self._is_held else list(taps)

    def _on_run_start(self) -> None:
        self._original(self._loop, "on_run_start")
        if not self._is_within_epoch:
            self._continue()

    def _on_batches_start(self, data_fetcher: Any) -> None:
        self._original(self._epoch, "on_run_start", data_fetcher)
        if self._is_held:
            self._is_held = False
            self._loop._combined_loader.flattened = list(self._taps.values())
            iter(data_fetcher)
            self._continue()
            data_fetcher.fetched += self._epoch.batch_progress.current.ready

    def _continue(self) -> None:
        assert self.run is not None
        is_due = self._counters.pending is not None
        self._counters.apply()
        self._users.apply()
        if is_due:
            self.run.restore_again()

    def _end_again(self) -> None:
        """A finished run trains nothing, but the end of its training may have been cut off: its hooks copy
        averages into the model, or save it."""
        if self._counters.pending is not None:
            self._is_within_epoch = False
            self._loop.on_run_start()
            self._loop.on_run_end()

    # ---- boundaries

    def _advance(self, data_fetcher: Any) -> None:
        assert self.run is not None
        if not self.run.begun and self._trainer.world_size > 1:
            _drop_broadcast(self._trainer)
        self.run.begin()
        self._original(self._epoch, "advance", data_fetcher)

    def _on_batch_end(self, data_fetcher: Any) -> None:
        assert self.run is not None
        interrupt = _interrupted(self._original, self._epoch, "on_advance_end", data_fetcher)
        self._unsaved.observe()
        if not self._epoch.done:  # else the epoch's end follows, and the boundary is there
            ready = self._epoch.batch_progress.current.ready
            # Loaders beside a longer one may have given fewer batches.
            self.run.end_iteration(trained={name: min(ready, t.drawn) for name, t in self._taps.items()})
        if interrupt is not None:
            raise interrupt

    def _on_epoch_end(self) -> None:
        assert self.run is not None
        interrupt = _interrupted(self._original, self._loop, "on_advance_end")
        self.run.end_epoch(last=self._is_last())
        if interrupt is not None:
            raise interrupt

    def _is_last(self) -> bool:
        """`_FitLoop.done`, which would log the reason a second time."""
        loop = self._loop
        return bool(
            _reached(self._epoch.global_step, self._epoch.max_steps)
            or _reached(loop.epoch_progress.current.processed, loop.max_epochs)
            or (self._trainer.should_stop and loop._can_stop_early)
        )

    def _stop(self) -> None:
        """The boundary is committed, and Lightning's own handler has been called, if a signal asked."""
        raise SIGTERMException if self._trainer.received_sigterm else _Stopped


class _Held:
    """In the place of a tap: gives no batch until the loop has come to where it continues."""

    def __init__(self, tap: Any) -> None:
        self._tap = tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tap"], name)

    def __len__(self) -> int:
        return len(self._tap)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _interrupted(call: Callable[..., Any], *arguments: Any) -> BaseException | None:
    """Call it, and return its SIGTERMException: Lightning raises that last, where all else is done."""
    try:
        call(*arguments)
    except SIGTERMException as interrupt:
        error: BaseException = interrupt
        return error
    return None


def _drop_broadcast(trainer: Any) -> None:
    """Lightning's handler broadcasts from rank 0, which hangs where not all ranks got the signal. All ranks
    of ours end at one boundary, so noting it is enough."""
    connector = trainer._signal_connector
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, named("trainer.connectors.signal_connector:_HandlersCompose")):
        handler.signal_handlers = [
            (lambda *_: setattr(connector, "received_sigterm", True))
            if each == connector._sigterm_notifier_fn
            else each
            for each in handler.signal_handlers
        ]


def _reached(count: int, limit: int) -> bool:
    return limit != -1 and count >= limit


def _numbered(name: str, values: list[Any]) -> dict[str, Any]:
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}{number}": value for number, value in enumerate(values)}
