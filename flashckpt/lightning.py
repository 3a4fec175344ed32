"""The callback `Checkpoint` for Lightning's Trainer. `import lightning` here means Lightning's package.

    Trainer(callbacks=[flashckpt.lightning.Checkpoint("runs/gpt")])

Owns which methods of a trainer's loops are replaced while it trains, where the boundaries are, and the order
of a fit: attach, restore, taps, boundaries, end. Owns which attributes of Lightning's objects are saved.
Replaces methods only on the objects of one trainer, and restores them when its fit ends. Compares all names
that it replaces or calls with the installed release before anything starts: another signature means another
loop, with boundaries in the wrong place.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from flashckpt.checkpointer.run import Checkpointer
from flashckpt.checkpointer.trainer_run import (
    Deferred,
    TrainerRun,
    Unsaved,
    attach_trainer,
    by_class,
    check_overridden,
    numbered,
    refuse,
    require,
)
from flashckpt.errors import BoundaryError, OptionError, StateError
from flashckpt.options import is_switched_off

log = logging.getLogger(__name__)

__all__ = ["Checkpoint"]

TESTED = ("2.6.5", "2.6.6")


def _package() -> str:
    """The package that the program has imported, or the first installed one."""
    names = ("lightning.pytorch", "pytorch_lightning")
    found = [name for name in names if name in sys.modules]
    found += [name for name in names if importlib.util.find_spec(name.split(".")[0]) is not None]
    if not found:
        require("lightning", "lightning")
    return found[0]


PACKAGE = _package()

# Methods that are replaced on the objects of one trainer while it trains, with their parameters.
OVERRIDDEN = {
    "trainer.trainer:Trainer._run_stage": ("self",),
    "trainer.connectors.checkpoint_connector:_CheckpointConnector._restore_modules_and_callbacks": (
        "self", "checkpoint_path", "weights_only",
    ),
    "loops.fit_loop:_FitLoop._load_combined_loader_states": ("self",),
    "loops.fit_loop:_FitLoop.on_run_start": ("self",),
    "loops.fit_loop:_FitLoop.on_advance_end": ("self",),
    "loops.training_epoch_loop:_TrainingEpochLoop.on_run_start": ("self", "data_fetcher"),
    "loops.training_epoch_loop:_TrainingEpochLoop.advance": ("self", "data_fetcher"),
    "loops.training_epoch_loop:_TrainingEpochLoop.on_advance_end": ("self", "data_fetcher"),
}  # fmt: skip

_LOOP = "loops.loop:_Loop"

# Names that are called or instantiated.
USED = {
    "loops.fit_loop:_FitLoop.setup_data": ("self",),
    "loops.fit_loop:_FitLoop.on_run_end": ("self",),
    "utilities.combined_loader:CombinedLoader.flattened": None,
    "loops.fit_loop:_FitLoop._can_stop_early": None,
    "loops.training_epoch_loop:_TrainingEpochLoop.done": None,
    "loops.fetchers:_DataFetcher.reset": ("self",),
    "loops.progress:_BaseProgress.load_state_dict": ("self", "state_dict"),
    "trainer.connectors.logger_connector.result:_ResultMetric.__init__": ("self", "metadata", "is_tensor"),
    "trainer.connectors.logger_connector.result:_Metadata.__init__": (
        "self", "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph",
        "add_dataloader_idx", "dataloader_idx", "metric_attribute", "_sync",
    ),
    "trainer.connectors.logger_connector.result:_Sync.__init__": (
        "self", "fn", "_should", "rank_zero_only", "_op", "_group",
    ),
    "trainer.connectors.signal_connector:_SignalConnector._sigterm_notifier_fn": ("self", "signum", "_"),
    "trainer.connectors.signal_connector:_HandlersCompose.__init__": ("self", "signal_handlers"),
    "utilities.exceptions:SIGTERMException": None,
}  # fmt: skip

# Callbacks that change attached objects during the run: schedulers, or the optimizer's groups.
_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it replaces the schedulers in the middle of the run; use "
    "EMAWeightAveraging",
    "BaseFinetuning": "it adds groups to the optimizer in the middle of the run; give it all parameters with "
    "requires_grad=False",
}


def _named(place: str) -> Any:
    """The object at "module:Class.name" of the package."""
    module, _, path = place.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(f"{PACKAGE}.{module}"))


def check_release() -> None:
    """Raise OptionError if the installed release lacks a name in the tables, or has it with other parameters.
    Warn once for an untested release."""
    names = {f"{PACKAGE}.{place}": parameters for place, parameters in {**OVERRIDDEN, **USED}.items()}
    check_overridden("lightning", PACKAGE.partition(".")[0], TESTED, names)


def _refused(trainer: Any, kind: type, theirs: object) -> Iterator[tuple[bool, str]]:
    """Yield why a trainer is refused, and whether this holds. kind: the class `Checkpoint`. theirs: the
    checkpoint of Lightning that this fit has loaded, if any."""
    yield (
        sum(isinstance(callback, kind) for callback in trainer.callbacks) > 1,
        "it has two callbacks flashckpt.lightning.Checkpoint; keep one",
    )
    yield (
        bool(theirs),
        "a checkpoint of Lightning was loaded (fit's ckpt_path, or Slurm's requeueing), and the run's own "
        "state would replace it. Leave out ckpt_path; to start with its weights, use load_from_checkpoint "
        "before fit; under Slurm use SLURMEnvironment(auto_requeue=False)",
    )
    strategy = {base.__name__ for base in type(trainer.strategy).__mro__}
    for name in ("DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy"):
        yield name in strategy, f"{name} keeps the optimizer's state inside its engine; use FSDP2"
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            why = _REFUSED_CALLBACKS.get(base.__name__)
            yield why is not None, f"{type(callback).__name__}: {why}"
    step = getattr(trainer.lightning_module, "training_step", None)
    yield (
        step is not None and "dataloader_iter" in inspect.signature(step).parameters,
        "training_step draws batches itself (dataloader_iter), so flashckpt cannot know which batches it "
        "holds; take the batch as an argument",
    )


# The callback


Callback: Any = importlib.import_module(f"{PACKAGE}.callbacks").Callback


class Checkpoint(Callback):  # type: ignore[misc]  # Lightning's types are not read
    """Save the state of `Trainer.fit` in the run at `path`, and resume from it: the same line does both.

    path, options: see `flashckpt.attach`. own: attributes that change and that nothing else saves, as "name",
    "MyCallback.name", "module.name" or "datamodule.name". Raises OptionError for a release of Lightning with
    unknown loops, and in `fit`, before anything starts, for a trainer that cannot be resumed exactly.

    Saves the module, optimizers, schedulers, gradients, random number generators, positions of the loaders,
    all counters, the running means of self.log, and the state of callbacks and their modules. After
    `checkpointer.stop()` or a notice file, `fit` returns.
    """

    def __init__(self, path: str | os.PathLike[str], *, own: Iterable[str] = (), **options: Any) -> None:
        check_release()
        self._path, self._own, self._options = path, tuple(own), options
        self._fit: _Fit | None = None
        self._run: TrainerRun | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of the current or last fit. Raises BoundaryError before a fit is attached."""
        if self._run is None:
            raise BoundaryError(
                "No fit is attached to the run yet: a fit attaches after all on_fit_start hooks. Nothing was "
                "changed. Use the checkpointer in on_train_start or later."
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
            self._fit.restore_methods()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fit": None, "_run": None}


class _Stopped(BaseException):
    """Unwinds the loops of a fit that was asked to stop, so that `fit` returns."""


class _Fit:
    """One call of `Trainer.fit`."""

    def __init__(self, trainer: Any, callback: Checkpoint) -> None:
        self._trainer, self._callback = trainer, callback
        self._loop = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop
        self._replaced: list[tuple[Any, str]] = []
        self._originals: dict[str, Callable[..., Any]] = {}
        self._loaders: list[Any] = []  # loaders that taps replace
        self._taps: dict[str, Any] = {}
        self._theirs: object = None  # the checkpoint of Lightning that this fit loads
        self.run: TrainerRun | None = None
        self._replace(
            trainer._checkpoint_connector, "_restore_modules_and_callbacks", self._note_their_checkpoint
        )
        # When this is called, the strategy's setup, all on_fit_start hooks and the signal handlers are done.
        self._replace(trainer, "_run_stage", self._run_stage)

    # ---- replaced methods

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._originals[f"{type(owner).__name__}.{name}"] = getattr(owner, name)
        setattr(owner, name, method)
        self._replaced.append((owner, name))

    def restore_methods(self) -> None:
        """Restore the trainer's methods and loaders."""
        while self._replaced:
            owner, name = self._replaced.pop()
            vars(owner).pop(name, None)
        if self._loaders and self._loop._combined_loader is not None:
            self._loop._combined_loader.flattened = self._loaders
        self._loaders = []

    def _original(self, owner: Any, name: str, *arguments: Any) -> Any:
        return self._originals[f"{type(owner).__name__}.{name}"](*arguments)

    def _note_their_checkpoint(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        self._theirs = checkpoint_path
        connector = self._trainer._checkpoint_connector
        self._original(connector, "_restore_modules_and_callbacks", checkpoint_path, weights_only)

    def _run_stage(self) -> Any:
        trainer = self._trainer
        try:
            refuse(_refused(trainer, type(self._callback), self._theirs))
            self._forget_search()
            run = self._attach()
        except BaseException:
            self.restore_methods()
            raise
        sanity_steps = trainer.num_sanity_val_steps
        try:
            if run.resumed is not None:
                trainer.num_sanity_val_steps = 0
            self._original(trainer, "_run_stage")
            self._repeat_end()
        except _Stopped:
            run.close()
        except BaseException:
            run.abandon()
            raise
        else:
            run.close()
        finally:
            trainer.num_sanity_val_steps = sanity_steps
            self.restore_methods()

    def _forget_search(self) -> None:
        """Begin the fit as if no search of a rate or a batch size had run its loops. A search loads what it
        saved before, and leaves the loops marked as restarting; one inside this fit also leaves its loaders,
        which have no taps."""
        loops = [self._loop]
        if self._loop._loaded_from_state_dict:
            self._loop.restarting = False
            for loop in loops:
                loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
                loops += [each for each in vars(loop).values() if isinstance(each, _named(_LOOP))]
        self._loop._combined_loader = None

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
            **numbered(optimizer=trainer.optimizers, scheduler=schedulers),
            **dict(self._users.modules()),
            "trainer": self._counters,
            "callbacks": self._users,
        }

    # ---- start or resume of the loop

    def _insert_taps(self) -> None:
        """Replace the loaders by taps. Runs in setup_data, when the loaders are final and before their first
        iterator is made."""
        self._original(self._loop, "_load_combined_loader_states")
        assert self.run is not None
        combined = self._loop._combined_loader
        self._loaders = list(combined.flattened)
        names = ["train", *(f"train.{number}" for number in range(1, len(self._loaders)))]
        self._taps = {
            name: self.run.tap(loader, name) for name, loader in zip(names, self._loaders, strict=True)
        }
        # For loaders of unknown length, the iterator that setup_data makes draws a batch. That is too early,
        # except in the first epoch, where Lightning makes no other iterator.
        self.run.is_held = self.run.resumed is not None or self.run.begun
        combined.flattened = list(self._taps.values())

    def _on_run_start(self) -> None:
        self._original(self._loop, "on_run_start")
        if not self._is_within_epoch:
            self._continue()

    def _on_batches_start(self, data_fetcher: Any) -> None:
        assert self.run is not None
        self._original(self._epoch, "on_run_start", data_fetcher)
        if self.run.is_held:
            self.run.is_held = False
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

    def _repeat_end(self) -> None:
        """Call the hooks of the end of training again for a finished run, since a crash may have interrupted
        them. They copy averages into the model or save it."""
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
        if not self._epoch.done:  # otherwise the end of the epoch follows and is the boundary
            ready = self._epoch.batch_progress.current.ready
            # Loaders that are shorter than others may have given fewer batches.
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
        """Like `_FitLoop.done`, which would log the reason a second time."""
        loop = self._loop
        return bool(
            _reached(self._epoch.global_step, self._epoch.max_steps)
            or _reached(loop.epoch_progress.current.processed, loop.max_epochs)
            or (self._trainer.should_stop and loop._can_stop_early)
        )

    def _stop(self) -> None:
        """Stop after the boundary is committed. After a signal, Lightning's own handler has been called."""
        raise _named("utilities.exceptions:SIGTERMException") if self._trainer.received_sigterm else _Stopped


def _interrupted(call: Callable[..., Any], *arguments: Any) -> BaseException | None:
    """Call a method and return its SIGTERMException, which Lightning raises when all else is done."""
    try:
        call(*arguments)
    except _named("utilities.exceptions:SIGTERMException") as interrupt:
        error: BaseException = interrupt
        return error
    return None


def _drop_broadcast(trainer: Any) -> None:
    """Replace Lightning's handler, whose broadcast from rank 0 hangs if not all ranks got the signal, by one
    that notes the signal. flashckpt ends all ranks at one boundary."""
    connector = trainer._signal_connector
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _named("trainer.connectors.signal_connector:_HandlersCompose")):
        handler.signal_handlers = [
            (lambda *_: setattr(connector, "received_sigterm", True))
            if each == connector._sigterm_notifier_fn
            else each
            for each in handler.signal_handlers
        ]


def _reached(count: int, limit: int) -> bool:
    return limit != -1 and count >= limit


# State of a Trainer outside of module, optimizers and schedulers


# Objects below the trainer, and their attributes that change and are not in a progress.
_ATTRIBUTES = {
    "fit_loop": ("_last_train_dl_reload_epoch",),
    "fit_loop.epoch_loop": ("_batches_that_stepped",),
    "fit_loop.epoch_loop.val_loop": ("_has_run", "_last_val_dl_reload_epoch"),
    "_logger_connector": (
        "_first_loop_iter", "_current_fx", "_progress_bar_metrics", "_logged_metrics", "_callback_metrics",
    ),
}  # fmt: skip

# Attributes that Lightning's callbacks change, and that their state_dict lacks or load_state_dict drops.
_OF_CALLBACKS = {
    "ModelCheckpoint": (
        "current_score", "_last_global_step_saved", "_last_checkpoint_saved",
        "_defer_save_until_validation",
    ),
    "WeightAveraging": ("_latest_update_epoch",),
}  # fmt: skip

# Attributes that change but need not be saved: times, and copies of logged values.
_TRANSIENT = {
    "Trainer": ("_last_val_time",),
    "ModelCheckpoint": ("_last_time_checked",),
    "LearningRateMonitor": ("lrs", "last_momentum_values", "last_weight_decay_values"),
}

# Fields of a result of self.log: its arguments, and the accumulated values.
_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
    "dataloader_idx", "metric_attribute",
)  # fmt: skip
_OF_METRIC = ("_forward_cache", "_computed", "has_reset", "_update_count")
_OF_TENSOR = ("value", "cumulated_batch_size", *_OF_METRIC)
_REDUCTIONS = {f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "max", "min")} | {
    "sum": sum,
    "max": max,
    "min": min,
}

_RESULTS = "trainer.connectors.logger_connector.result"


class TrainerState(Deferred):
    """Counters of all loops, running means of self.log, metrics that callbacks read, and the state of the
    precision plugin."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def is_within_epoch(self) -> bool:
        """Whether the pending state is from between two batches of an epoch."""
        if self.pending is None:
            return False
        epoch = self.pending["progress"]["fit_loop.epoch_progress"]["current"]
        return bool(epoch["ready"] > epoch["completed"])

    def put_early(self) -> None:
        """Restore counters that the loop reads before it resumes. Undo the counts of the resumed epoch's
        start, which the loop counts again."""
        if self.pending is None:
            return
        self._put_counters(self.pending)
        epoch = self._trainer.fit_loop.epoch_progress
        for part in (epoch.total, epoch.current):
            part.ready, part.started = min(part.ready, part.processed), min(part.started, part.processed)

    # ---- Deferred

    def read(self) -> dict[str, Any]:
        trainer = self._trainer
        epoch = trainer.fit_loop.epoch_loop
        return {
            "progress": {path: progress.state_dict() for path, progress in self._progress()},
            "should_stop": trainer.should_stop,
            "attributes": {
                place: {name: _contained(getattr(attrgetter(place)(trainer), name)) for name in names}
                for place, names in _ATTRIBUTES.items()
            },
            "results": [_read_result(key, result) for key, result in epoch._results.items()],
            "consumed": self._consumed(),
            "precision": trainer.precision_plugin.state_dict(),
        }

    def put(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        self._put_counters(state)
        results = trainer.fit_loop.epoch_loop._results
        results.clear()
        for saved in state["results"]:
            results[saved["key"]] = _make_result(saved, trainer)
        if state["consumed"]:
            trainer.fit_loop._combined_loader._iterator._consumed = list(state["consumed"])

    def _put_counters(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        state = copy.deepcopy(state)
        live = dict(self._progress())
        if live.keys() != state["progress"].keys():
            wrong = sorted(live.keys() ^ state["progress"].keys())
            raise StateError(
                f"The counters of the trainer's loops differ from those in the checkpoint: "
                f"{', '.join(wrong)}. No batch was trained on, and the saved state is intact. Resume with "
                "the release of Lightning with which the run was started."
            )
        for path, progress in live.items():
            progress.load_state_dict(state["progress"][path])
        for place, values in state["attributes"].items():
            for name, value in values.items():
                setattr(attrgetter(place)(trainer), name, value)
        trainer.should_stop = state["should_stop"]
        trainer.precision_plugin.load_state_dict(state["precision"])

    def _progress(self) -> Iterator[tuple[str, Any]]:
        """Yield the counters of all loops, with their paths."""
        loop, progress = _named(_LOOP), _named("loops.progress:_BaseProgress")
        pending = [("fit_loop", self._trainer.fit_loop)]
        while pending:
            path, owner = pending.pop()
            for name, value in vars(owner).items():
                if isinstance(value, loop):
                    pending.append((f"{path}.{name}", value))
                elif isinstance(value, progress):
                    yield f"{path}.{name}", value

    def _consumed(self) -> list[bool]:
        """For several cycled loaders: whether each has ended once in this epoch."""
        fit = self._trainer.fit_loop
        current = fit.epoch_progress.current
        iterator = getattr(fit._combined_loader, "_iterator", None)
        is_within_epoch = current.ready > current.completed
        return list(getattr(iterator, "_consumed", [])) if is_within_epoch else []


def _read_result(key: str, result: Any) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    reduction = next((name for name, each in _REDUCTIONS.items() if each is meta.reduce_fx), None)
    if reduction is None:
        raise StateError(
            f"self.log({meta.name!r}) has the custom reduce_fx {meta.reduce_fx!r}, which cannot be saved. "
            "Nothing was captured. Use mean, sum, max or min, or log a torchmetrics.Metric."
        )
    if sync._group is not None:
        raise StateError(
            f"self.log({meta.name!r}) has a sync_dist_group, which cannot be saved. Nothing was captured. "
            "Reduce the value over the group before logging it."
        )
    fields = _OF_TENSOR if result.is_tensor else _OF_METRIC
    return {
        "key": key,
        "is_tensor": result.is_tensor,
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce_fx": reduction,
        "sync": [sync._should, sync.rank_zero_only],
        "fields": {name: getattr(result, name) for name in fields if hasattr(result, name)},
    }


def _make_result(saved: dict[str, Any], trainer: Any) -> Any:
    metadata, sync, metric = (
        _named(f"{_RESULTS}:{name}") for name in ("_Metadata", "_Sync", "_ResultMetric")
    )
    meta = metadata(reduce_fx=_REDUCTIONS[saved["reduce_fx"]], **saved["meta"])
    should, rank_zero_only = saved["sync"]
    # Like LightningModule.log: its next call compares the metadata with its own.
    meta.sync = sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    result = metric(meta, saved["is_tensor"])
    for name, value in saved["fields"].items():
        setattr(result, name, value.clone() if isinstance(value, Tensor) else value)
    if not saved["is_tensor"]:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    return result


class UserState(Deferred):
    """State of callbacks, the data module and the user's module: their state_dict, the additions of their
    checkpoint hooks, and plain attributes, among them `own` ("name", "module.name", "datamodule.name",
    "CallbackClass.name"). Their own code restores it, so it is not compared afterwards."""

    def __init__(self, trainer: Any, me: object, own: Iterable[str]) -> None:
        self._trainer = trainer
        callbacks = [callback for callback in trainer.callbacks if callback is not me]
        self.callbacks = by_class(callbacks)
        self.roots = {"trainer": trainer, "module": trainer.lightning_module, **self.callbacks}
        if trainer.datamodule is not None:
            self.roots["datamodule"] = trainer.datamodule
        self._own = tuple(own)
        labels = {name.rpartition(".")[0] for name in self._own} - {"", *self.roots}
        if labels:
            raise OptionError(
                f"own= names {', '.join(sorted(labels))}, which this trainer does not have. Nothing was "
                f"started. Write one of {', '.join(self.roots)}, a dot and the attribute."
            )

    def known(self) -> dict[str, set[str]]:
        """Attributes of the roots that are saved here or need not be saved."""
        saved = self.read()
        names = {
            label: {*_of_kind(_OF_CALLBACKS, root), *_of_kind(_TRANSIENT, root)}
            for label, root in self.roots.items()
        }
        # A key of a state_dict or hook with an attribute's name means that the object itself saves it.
        for part in (saved["callbacks"], saved["hooks"], {"datamodule": saved["datamodule"]}):
            for label, keys in part.items():
                names.setdefault(label, set()).update(each for key in keys for each in (key, f"_{key}"))
        return names

    def _attributes(self, label: str) -> list[str]:
        """Names of a root's saved attributes: those of its class and in `own`, if they are set."""
        root = self.roots[label]
        own = [name.rpartition(".")[2] for name in self._own if name.rpartition(".")[0] in ("", label)]
        return [name for name in (*_of_kind(_OF_CALLBACKS, root), *own) if name in vars(root)]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules that are attributes of callbacks (averages of weights, metrics), with names."""
        for label, callback in self.callbacks.items():
            for name, value in vars(callback).items():
                if isinstance(value, nn.Module) and value is not self._trainer.lightning_module:
                    yield f"{label}.{name.strip('_')}", value

    def put_early(self) -> None:
        """Restore before the hooks at the start of the loop, which may read the state."""
        if self.pending is not None:
            self.put(self.pending)

    # ---- Deferred

    def apply(self) -> None:
        state, self.pending = self.pending, None
        if state is not None:
            self.put(state)
            self._report_left_out(state)

    def _places(self, state: dict[str, Any]) -> dict[str, str]:
        """Map saved labels to labels of this trainer. A callback's state belongs to the next callback with
        the same `state_key`, as in Lightning, so callbacks may change their order or be missing."""
        places = {label: label for label in self.roots if label not in self.callbacks}
        free = {label: each.state_key for label, each in self.callbacks.items()}
        for label, key in state["keys"].items():
            place = next((each for each, live in free.items() if live == key), None)
            if place is not None:
                del free[place]
                places[label] = place
        return places

    def _report_left_out(self, state: dict[str, Any]) -> None:
        parts = (state["callbacks"], state["hooks"], state["attributes"])
        left_out = {label for part in parts for label, saved in part.items() if saved}
        left_out -= self._places(state).keys()
        if left_out:
            log.warning(
                "The checkpoint has the state of %s, which this trainer does not have. Everything else was "
                "loaded; the next snapshot will not have that state. If this is a mistake, stop and add it "
                "again.",
                ", ".join(sorted(left_out)),
            )

    def read(self) -> dict[str, Any]:
        datamodule = self._trainer.datamodule
        return {
            "keys": {label: each.state_key for label, each in self.callbacks.items()},
            "callbacks": {label: each.state_dict() for label, each in self.callbacks.items()},
            "datamodule": {} if datamodule is None else datamodule.state_dict(),
            "hooks": {label: self._added(each) for label, each in self._hooked("on_save_checkpoint")},
            "attributes": {
                label: {name: _contained(vars(root)[name]) for name in self._attributes(label)}
                for label, root in self.roots.items()
            },
        }

    def put(self, state: dict[str, Any]) -> None:
        state, places = copy.deepcopy(state), self._places(state)
        callbacks, hooks, attributes = (
            {places[label]: saved for label, saved in state[part].items() if label in places}
            for part in ("callbacks", "hooks", "attributes")
        )
        for label, saved in callbacks.items():
            self.callbacks[label].load_state_dict(saved)
        if self._trainer.datamodule is not None:
            self._trainer.datamodule.load_state_dict(state["datamodule"])
        for label, each in self._hooked("on_load_checkpoint"):
            checkpoint = self._checkpoint() | hooks.get(label, {})
            self._call(each, "on_load_checkpoint", checkpoint)
        for label, values in attributes.items():
            for name, value in values.items():
                setattr(self.roots[label], name, value)

    def _hooked(self, hook: str) -> Iterator[tuple[str, Any]]:
        """Yield roots for which the user has defined this hook."""
        for label, each in self.roots.items():
            function = getattr(type(each), hook, None)
            if label == "trainer" or function is None:
                continue
            if not str(function.__module__).startswith((PACKAGE, "lightning.")):
                yield label, each

    def _added(self, owner: Any) -> dict[str, Any]:
        checkpoint = self._checkpoint()
        before = set(checkpoint)
        self._call(owner, "on_save_checkpoint", checkpoint)
        return {name: value for name, value in checkpoint.items() if name not in before}

    def _call(self, owner: Any, hook: str, checkpoint: dict[str, Any]) -> None:
        is_callback = any(owner is each for each in self.callbacks.values())
        around = (self._trainer, self._trainer.lightning_module) if is_callback else ()
        getattr(owner, hook)(*around, checkpoint)

    def _checkpoint(self) -> dict[str, Any]:
        """The checkpoint that hooks get: Lightning's keys, with values for those that hooks may read."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {},
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
            "hyper_parameters": {},
        }


def _of_kind(table: Mapping[str, tuple[str, ...]], value: object) -> list[str]:
    return [name for base in type(value).__mro__ for name in table.get(base.__name__, ())]


def _contained(value: Any) -> Any:
    """Copy a dictionary or list, so that it does not change with the original."""
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list) else value
