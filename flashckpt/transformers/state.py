"""What of a Trainer changes while it trains and is neither module, optimizer nor scheduler.

Owns which attributes are saved. Values are read and put where they stand; what only the arguments of the
trainer decide is not saved.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from flashckpt.checkpointer.trainer_run import Deferred
from flashckpt.errors import OptionError, StateError

log = logging.getLogger(__name__)

# Of TrainerState: set by the trainer from its arguments, or from what else is saved.
_BY_ARGUMENTS = {
    "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs",
    "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
    "stateful_callbacks",
    "log_history",  # an object of its own in the run: it only grows
}  # fmt: skip
_FIELDS = [field.name for field in dataclasses.fields(TrainerState)]
_COUNTED = [name for name in _FIELDS if name not in _BY_ARGUMENTS]

# Of Trainer: set in _inner_training_loop, before on_train_begin.
COUNTERS = (
    "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
    "_initial_num_input_tokens_seen", "current_flos",
)  # fmt: skip

# Of trl's trainers: running means that go into the logs, generations that are used for several steps, and
# the controller of the entropy.
TRL = (
    "_metrics", "_total_train_tokens", "_step", "_buffered_inputs", "_logs", "_pending_metrics",
    "_pending_extra_logs", "_current_train_step_time", "entropy_coef", "_last_world_entropy",
    "_entropy_window_stats",
)  # fmt: skip

# Change with each step, and are set anew before they are read.
TRANSIENT = ("current_gradient_accumulation_steps", "is_in_train", "_last_loaded_step")

# Of `_logs`: pictures, which have no exact encoding and go into no number.
_NOT_SAVED = {"_logs": ("images",)}


class TrainerPart(Deferred):
    """The state of `trainer`, with the attributes `own`: "root.attribute" (see `roots`), or "attribute" for
    each root that has one of this name.

    evaluated: the names of evaluation loaders whose persistent workers the run has started. batches: those of
    this epoch that were trained on, as the trainer counts them. ranks_before: how many ranks had them.
    """

    def __init__(self, trainer: Any, own: Iterable[str]) -> None:
        self._trainer = trainer
        self.own = tuple(own)
        self.evaluated: set[str] = set()
        self.batches = 0
        self._ranks = self.ranks_before = int(trainer.args.world_size)
        self._owned()

    def roots(self) -> dict[str, Any]:
        """The objects whose attributes may be state, by the names that `own` has for them."""
        return {"trainer": self._trainer, "state": self._trainer.state, **named_callbacks(self._trainer)}

    def known(self) -> dict[str, set[str]]:
        """Attributes of the roots that are saved here, or need not be."""
        known = {"trainer": {*COUNTERS, *TRL, *TRANSIENT}, "state": set(_FIELDS)}
        for name, callback in named_callbacks(self._trainer).items():
            if isinstance(callback, ExportableState):
                known[name] = set(callback.state()["attributes"])
        for name in ("ProgressCallback", "NotebookProgressCallback", "RichProgressCallback"):
            known[name] = {"current_step", "first_column", "_force_next_update"}
        return known

    # ---- Deferred

    def read(self) -> dict[str, Any]:
        trainer = self._trainer
        names = [name for name in (*COUNTERS, *TRL) if hasattr(trainer, name)]
        values = {name: _plain(getattr(trainer, name), _NOT_SAVED.get(name, ())) for name in names}
        values.setdefault("_tr_loss", torch.zeros((), device=trainer.args.device))
        return {
            "state": {name: getattr(trainer.state, name) for name in _COUNTED},
            "max_steps": trainer.state.max_steps,
            "control": dict(vars(trainer.control)),
            "callbacks": [[type(c).__name__, _plain(c.state()["attributes"])] for c in self._exportable()],
            "trainer": values,
            "own": {name: _plain(getattr(*place)) for name, place in self._owned().items()},
            "accelerator_step": trainer.accelerator.step,
            "evaluated": sorted(self.evaluated),
            "batches": self.batches,
            "ranks": self._ranks,
        }

    def put(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        self.put_counts(state)
        for name, value in state["control"].items():
            setattr(trainer.control, name, value)
        for callback, (_, attributes) in zip(self._exportable(), state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, _put(getattr(callback, name, None), value))
        for name, value in state["trainer"].items():
            kept = _NOT_SAVED.get(name, ())
            setattr(trainer, name, _put(getattr(trainer, name, None), value, kept))
        for name, (root, attribute) in self._owned().items():
            setattr(root, attribute, _put(getattr(root, attribute), state["own"][name]))
        trainer.accelerator.step = state["accelerator_step"]
        self.evaluated, self.batches = set(state["evaluated"]), state["batches"]

    def put_counts(self, state: dict[str, Any]) -> None:
        """What callbacks read at the beginning of training: the counters that logs and saves go by."""
        for name, value in state["state"].items():
            setattr(self._trainer.state, name, value)

    # ---- a resume

    def fit_pending(self) -> None:
        """Make what was loaded fit the trainer: attributes and callbacks that the saved one did not have
        stay as they are, and those that this one does not have are dropped, with a warning."""
        assert self.pending is not None
        saved, now = self.pending, self.read()
        for section in ("state", "trainer", "own"):
            lost = [name for name in saved[section] if name not in now[section]]
            # Before it trains, a trainer has not set its counters.
            lost = [name for name in lost if name not in COUNTERS]
            _warn_lost(lost)
            kept = {name: value for name, value in saved[section].items() if name not in lost}
            saved[section] = {**now[section], **kept}
        left = list(saved["callbacks"])
        for row in now["callbacks"]:
            found = next((other for other in left if other[0] == row[0]), None)
            if found is not None:
                left.remove(found)
                row[1] = {**row[1], **found[1]}
        _warn_lost([name for name, _ in left])
        saved["callbacks"] = now["callbacks"]
        saved["ranks"], self.ranks_before = now["ranks"], saved["ranks"]
        saved["max_steps"], before = now["max_steps"], saved["max_steps"]
        step = saved["state"]["global_step"]
        if step >= before or now["max_steps"] > before:
            # The end of the steps has stopped it, or a callback has; and more of them are asked for now.
            saved["control"]["should_training_stop"] = step >= now["max_steps"]
        elif saved["control"]["should_training_stop"]:
            log.warning(
                "A callback has ended this run at step %d of %d (should_training_stop): nothing is trained. "
                "To continue it, start it with more steps or epochs.",
                step,
                now["max_steps"],
            )
        best = saved["state"]["best_model_checkpoint"]
        if best is not None and not os.path.isdir(best):
            # As the trainer's own resume has it. Its end compares this folder with those that are there.
            log.warning("The best checkpoint %s does not exist any more: it is forgotten.", best)
            saved["state"]["best_model_checkpoint"] = None

    def check_counters(self) -> None:
        """Raise StateError where the trainer has not set a counter by the time its loop begins."""
        missing = [name for name in COUNTERS if not hasattr(self._trainer, name)]
        if missing:
            raise StateError(
                f"The trainer has no {', '.join(missing)} where its loop begins: the installed release of "
                "transformers counts elsewhere. No batch was trained on; what is saved is whole. Install a "
                "release that docs/transformers.md names."
            )

    def _exportable(self) -> list[Any]:
        return [c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)]

    def _owned(self) -> dict[str, tuple[Any, str]]:
        """The objects and attributes that `own` names, by "root.attribute"."""
        owned = {}
        for name in self.own:
            asked, _, attribute = name.rpartition(".")
            roots = {root: held for root, held in self.roots().items() if asked in ("", root)}
            found = {
                f"{root}.{attribute}": (o, attribute) for root, o in roots.items() if hasattr(o, attribute)
            }
            if not found:
                raise OptionError(
                    f"own={name!r} names no attribute of the trainer, its state or one of its callbacks. No "
                    f"batch was trained on. Name one that exists, before the dot one of "
                    f"{', '.join(self.roots())}."
                )
            owned.update(found)
        return owned


def named_callbacks(trainer: Any) -> dict[str, Any]:
    """The callbacks of a trainer by their classes' names; the second one of a class is NAME-2."""
    named: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name}-{counts[name]}"] = callback
    return named


def _warn_lost(names: list[str]) -> None:
    if names:
        log.warning("The checkpoint has %s, which this trainer does not have: dropped.", ", ".join(names))


def _plain(value: Any, without: tuple[str, ...] = ()) -> Any:
    """Without the factories of default dictionaries, which are code, and without these keys."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key not in without}
    if type(value) is list:
        return [_plain(item) for item in value]
    return value


def _put(held: Any, value: Any, keep: tuple[str, ...] = ()) -> Any:
    """`value`, in the dictionaries and tensors that are there: they have factories, and are referenced."""
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
        return held.copy_(value)
    if not isinstance(held, dict) or not isinstance(value, Mapping):
        return value
    for key in [key for key in held if key not in value and key not in keep]:
        del held[key]
    for key, item in value.items():
        held[key] = _put(held.get(key), item)
    return held
