"""What of a Trainer changes while it trains and is neither module, optimizer nor scheduler.

Owns which attributes of Lightning's objects are saved, and how they are put back. Calls the hooks for
checkpoints that the user's objects have.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from flashckpt.checkpointer.trainer_run import Deferred
from flashckpt.errors import OptionError, StateError
from flashckpt.lightning.package import PACKAGE, named

log = logging.getLogger(__name__)

# Places below the trainer, and their attributes that change and are not in a progress.
_ATTRIBUTES = {
    "fit_loop": ("_last_train_dl_reload_epoch",),
    "fit_loop.epoch_loop": ("_batches_that_stepped",),
    "fit_loop.epoch_loop.val_loop": ("_has_run", "_last_val_dl_reload_epoch"),
    "_logger_connector": (
        "_first_loop_iter", "_current_fx", "_progress_bar_metrics", "_logged_metrics", "_callback_metrics",
    ),
}  # fmt: skip

# Attributes that callbacks of Lightning change, and that their state_dict lacks or load_state_dict drops.
_OF_CALLBACKS = {
    "ModelCheckpoint": (
        "current_score", "_last_global_step_saved", "_last_checkpoint_saved",
        "_defer_save_until_validation",
    ),
    "WeightAveraging": ("_latest_update_epoch",),
}  # fmt: skip

# Change, and need not be saved: times, and logs of what was logged.
_TRANSIENT = {
    "Trainer": ("_last_val_time",),
    "ModelCheckpoint": ("_last_time_checked",),
    "LearningRateMonitor": ("lrs", "last_momentum_values", "last_weight_decay_values"),
}

# Of a result of self.log: the arguments that it was made with, and what has come together since.
_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
    "dataloader_idx", "metric_attribute",
)  # fmt: skip
_OF_METRIC = ("_forward_cache", "_computed", "has_reset", "_update_count")
_OF_TENSOR = ("value", "cumulated_batch_size", *_OF_METRIC)
_REDUCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (torch,)
    for name in ("mean", "sum", "max", "min")
} | {"sum": sum, "max": max, "min": min}

_RESULTS = "trainer.connectors.logger_connector.result"


class TrainerState(Deferred):
    """Counters of all loops, the running means of self.log, the metrics that callbacks read, and the state of
    the precision's plugin."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def is_within_epoch(self) -> bool:
        """Whether what waits to be put in place stands between two batches of an epoch."""
        if self.pending is None:
            return False
        epoch = self.pending["progress"]["fit_loop.epoch_progress"]["current"]
        return bool(epoch["ready"] > epoch["completed"])

    def put_early(self) -> None:
        """What the loop reads before it continues. It counts the resumed epoch's beginning again, so that is
        taken back here."""
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
                f"The loops of the trainer have other counters than those of the checkpoint: "
                f"{', '.join(wrong)}. No batch was trained on, and what is saved is whole. Resume with the "
                "release of Lightning that the run was begun with."
            )
        for path, progress in live.items():
            progress.load_state_dict(state["progress"][path])
        for place, values in state["attributes"].items():
            for name, value in values.items():
                setattr(attrgetter(place)(trainer), name, value)
        trainer.should_stop = state["should_stop"]
        trainer.precision_plugin.load_state_dict(state["precision"])

    def _progress(self) -> Iterator[tuple[str, Any]]:
        """The counters of all loops, with their paths."""
        loop, progress = named("loops.loop:_Loop"), named("loops.progress:_BaseProgress")
        pending = [("fit_loop", self._trainer.fit_loop)]
        while pending:
            path, owner = pending.pop()
            for name, value in vars(owner).items():
                if isinstance(value, loop):
                    pending.append((f"{path}.{name}", value))
                elif isinstance(value, progress):
                    yield f"{path}.{name}", value

    def _consumed(self) -> list[bool]:
        """Of several loaders that are cycled: those that have ended once in this epoch."""
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
            f"self.log({meta.name!r}) has the reduce_fx {meta.reduce_fx!r} of its own, which cannot be "
            "saved. Nothing was captured. Use mean, sum, max or min, or log a torchmetrics.Metric."
        )
    if sync._group is not None:
        raise StateError(
            f"self.log({meta.name!r}) has a sync_dist_group, which cannot be saved. Nothing was captured. "
            "Reduce the value over the group before it is logged."
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
    metadata, sync, metric = (named(f"{_RESULTS}:{name}") for name in ("_Metadata", "_Sync", "_ResultMetric"))
    meta = metadata(reduce_fx=_REDUCTIONS[saved["reduce_fx"]], **saved["meta"])
    should, rank_zero_only = saved["sync"]
    # As LightningModule.log makes it: the next call of log compares it with its own.
    meta.sync = sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    result = metric(meta, saved["is_tensor"])
    for name, value in saved["fields"].items():
        setattr(result, name, value.clone() if isinstance(value, Tensor) else value)
    if not saved["is_tensor"]:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    return result


class UserState(Deferred):
    """State of callbacks, the data module and the user's module: their state_dict, what their hooks for
    checkpoints add, and plain attributes, among them `own` ("name", "module.name", "datamodule.name",
    "CallbackClass.name"). It is put in place as their own code does it, so it is not compared afterwards."""

    def __init__(self, trainer: Any, me: object, own: Iterable[str]) -> None:
        self._trainer = trainer
        callbacks = [callback for callback in trainer.callbacks if callback is not me]
        self.callbacks = dict(_labelled(callbacks))
        self.roots = {"trainer": trainer, "module": trainer.lightning_module, **self.callbacks}
        if trainer.datamodule is not None:
            self.roots["datamodule"] = trainer.datamodule
        self._own = tuple(own)
        labels = {name.rpartition(".")[0] for name in self._own} - {"", *self.roots}
        if labels:
            raise OptionError(
                f"own names {', '.join(sorted(labels))}, which this trainer does not have. Nothing was "
                f"started. Write one of {', '.join(self.roots)}, a dot and the attribute."
            )

    def known(self) -> dict[str, set[str]]:
        """Attributes of the roots that are saved here, or need not be."""
        saved = self.read()
        names = {
            label: {*_of_kind(_OF_CALLBACKS, root), *_of_kind(_TRANSIENT, root)}
            for label, root in self.roots.items()
        }
        # Their own code saves what has the name of an attribute.
        for part in (saved["callbacks"], saved["hooks"], {"datamodule": saved["datamodule"]}):
            for label, keys in part.items():
                names.setdefault(label, set()).update(each for key in keys for each in (key, f"_{key}"))
        return names

    def _attributes(self, label: str) -> list[str]:
        """Those of a root that are saved: of the class, and the user's own, as far as they are set."""
        root = self.roots[label]
        own = [name.rpartition(".")[2] for name in self._own if name.rpartition(".")[0] in ("", label)]
        return [name for name in (*_of_kind(_OF_CALLBACKS, root), *own) if name in vars(root)]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that are attributes of callbacks (averages of weights, metrics), with names for them."""
        for label, callback in self.callbacks.items():
            for name, value in vars(callback).items():
                if isinstance(value, nn.Module) and value is not self._trainer.lightning_module:
                    yield f"{label}.{name.strip('_')}", value

    def put_early(self) -> None:
        """Before the hooks of the loop's beginning, which may read it."""
        if self.pending is not None:
            self.put(self.pending)

    # ---- Deferred

    def apply(self) -> None:
        state, self.pending = self.pending, None
        if state is not None:
            self.put(state)
            self._report_left_out(state)

    def _report_left_out(self, state: dict[str, Any]) -> None:
        parts = (state["callbacks"], state["hooks"], state["attributes"])
        left_out = {label for part in parts for label, saved in part.items() if saved} - self.roots.keys()
        if left_out:
            log.warning(
                "The checkpoint has the state of %s, which this trainer does not have. All else was loaded; "
                "the next snapshot is without that state. If that is a mistake, stop and add it again.",
                ", ".join(sorted(left_out)),
            )

    def read(self) -> dict[str, Any]:
        datamodule = self._trainer.datamodule
        return {
            "callbacks": {label: each.state_dict() for label, each in self.callbacks.items()},
            "datamodule": {} if datamodule is None else datamodule.state_dict(),
            "hooks": {label: self._added(each) for label, each in self._hooked("on_save_checkpoint")},
            "attributes": {
                label: {name: _contained(vars(root)[name]) for name in self._attributes(label)}
                for label, root in self.roots.items()
            },
        }

    def put(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        for label, saved in state["callbacks"].items():
            if label in self.callbacks:
                self.callbacks[label].load_state_dict(saved)
        if self._trainer.datamodule is not None:
            self._trainer.datamodule.load_state_dict(state["datamodule"])
        for label, each in self._hooked("on_load_checkpoint"):
            checkpoint = self._checkpoint() | state["hooks"].get(label, {})
            self._call(each, "on_load_checkpoint", checkpoint)
        for label, values in state["attributes"].items():
            for name, value in values.items() if label in self.roots else ():
                setattr(self.roots[label], name, value)

    def _hooked(self, hook: str) -> Iterator[tuple[str, Any]]:
        """Those that have such a hook of the user's."""
        for label, each in self.roots.items():
            function = getattr(type(each), hook, None)
            if label != "trainer" and function is not None and not _is_lightnings(function):
                yield label, each

    def _added(self, owner: Any) -> dict[str, Any]:
        checkpoint = self._checkpoint()
        there = set(checkpoint)
        self._call(owner, "on_save_checkpoint", checkpoint)
        return {name: value for name, value in checkpoint.items() if name not in there}

    def _call(self, owner: Any, hook: str, checkpoint: dict[str, Any]) -> None:
        is_callback = any(owner is each for each in self.callbacks.values())
        around = (self._trainer, self._trainer.lightning_module) if is_callback else ()
        getattr(owner, hook)(*around, checkpoint)

    def _checkpoint(self) -> dict[str, Any]:
        """What hooks find in a checkpoint of Lightning's, as far as they may read it."""
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


def _labelled(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Each callback under the name of its class; from the second of a class on with a number."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] = counts.get(name, 0) + 1
        yield (name if counts[name] == 1 else f"{name}-{counts[name]}"), callback


def _of_kind(table: Mapping[str, tuple[str, ...]], value: object) -> list[str]:
    return [name for base in type(value).__mro__ for name in table.get(base.__name__, ())]


def _is_lightnings(function: Any) -> bool:
    return str(function.__module__).startswith((PACKAGE, "lightning."))


def _contained(value: Any) -> Any:
    """A dictionary or list that does not change with the original."""
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list) else value
