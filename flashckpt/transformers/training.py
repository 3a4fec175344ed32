"""`train(trainer, path)`: trainer.train() of transformers and trl with checkpoints.

Owns the boundaries of their loop: one after each optimizer step with its log, evaluation and save; the last
of an epoch after the epoch's own code. Does not use the trainer's own resume, which reads its own files and
repeats or skips work around a boundary. Replaces methods only on the trainer object and only while it trains.
Compares all names that it replaces or calls with the installed release before anything starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from flashckpt.checkpointer.trainer_run import (
    Deferred,
    TrainerRun,
    Unsaved,
    attach_trainer,
    by_class,
    check_overridden,
    refuse,
    require,
)
from flashckpt.errors import MismatchError, OptionError, StateError
from flashckpt.options import user_path
from flashckpt.state.growing import GrowingList
from flashckpt.transformers.exporting import assets_of

require("transformers", "transformers", "accelerate")

import transformers.trainer  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME, Trainer  # noqa: E402
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState  # noqa: E402
from transformers.trainer_utils import TrainOutput  # noqa: E402

log = logging.getLogger(__name__)


def train(
    trainer: Any,
    path: str | os.PathLike[str],
    own: Iterable[str] = (),
    initial: str | os.PathLike[str] | None = None,
    **options: Any,
) -> TrainOutput:
    """Resume the run in `path`, or start it, train like `trainer.train()`, and return its result.

        flashckpt.transformers.train(trainer, "runs/gpt")

    own: attributes that change and that flashckpt does not know ("trainer.seen", "MyCallback.count"); a
    warning names them. initial: a checkpoint folder of the trainer itself, from which a run without steps
    starts; ignored if the run has a step. options: see `flashckpt.attach`.

    A signal ends the process at a step; a notice file ends training like `should_training_stop`, without the
    epoch's end. Raises OptionError, before anything starts, for trainers and releases that cannot be resumed
    exactly, and the errors of `attach` and `trainer.train()`.
    """
    check_release()
    check_trainer(trainer)
    return _Training(trainer, path, own, initial, options).train()


class _Stopped(Exception):
    """The run has stopped in the middle of an epoch."""


class _Training:
    """One call of `train`."""

    run: TrainerRun

    def __init__(
        self, trainer: Any, path: Any, own: Iterable[str], initial: Any, options: dict[str, Any]
    ) -> None:
        self._trainer, self._path, self._options = trainer, path, options
        self._initial = None if initial is None else user_path(initial)
        self._part = TrainerPart(trainer, own)
        self._originals = {name: getattr(trainer, name) for name in OVERRIDDEN}
        self._loader: Any = None
        self._prepared: tuple[Any, Any] = (None, None)
        self._tap: Any = None
        self._base_loader: Any = None  # the loader inside of Accelerate's loader
        self._attached = False
        self._is_open = False  # an iteration has batches, and its boundary follows
        self._given = 0  # batches of this epoch, as the trainer counts them
        self._offset = 0  # difference of the tap's count to that of the trainer
        self._is_offset_due = False
        self._resumed_epoch: int | None = None  # resumed in its middle; None once it has started
        self._initial_rng = False
        self._modules: dict[str, torch.nn.Module] = {}

    def train(self) -> TrainOutput:
        with self._overridden():
            try:
                output: TrainOutput = self._trainer.train()
                self.run.close()
            except BaseException:
                if self._attached:
                    self.run.abandon()
                self._trainer.is_in_train = False
                raise
        return output

    @contextmanager
    def _overridden(self) -> Iterator[None]:
        trainer = self._trainer
        callback = _OnTrainBegin(self._on_train_begin)
        kept = {name: vars(trainer)[name] for name in OVERRIDDEN if name in vars(trainer)}
        for name in OVERRIDDEN:
            setattr(trainer, name, getattr(self, name.lstrip("_")))
        trainer.add_callback(callback)
        try:
            yield
        finally:
            trainer.remove_callback(callback)
            for name in OVERRIDDEN:
                delattr(trainer, name)
            vars(trainer).update(kept)
            if self._base_loader is not None:
                self._prepared[1].base_dataloader = self._base_loader

    # ---- replacements for Trainer's methods, in the order of calls

    def get_train_dataloader(self) -> Any:
        loader = self._originals["get_train_dataloader"]()
        if self._loader is None:
            self._loader = loader
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = self._originals["get_eval_dataloader"](eval_dataset)
        if self._trainer.args.dataloader_persistent_workers and self._attached:
            name = eval_dataset if isinstance(eval_dataset, str) else "eval"
            base = getattr(loader, "base_dataloader", loader)
            if name in self._part.evaluated and getattr(base, "_iterator", None) is None:
                # The run drew the seed of these workers before it was saved.
                with torch.random.fork_rng(devices=[]):
                    iter(base)
            self._part.evaluated.add(name)
        return loader

    def init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        def set_up(checkpoint: str | None) -> tuple[int, int]:
            begin = self._originals["_init_training_state"]
            place: tuple[int, int] = begin(
                max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
            )
            return place

        set_up(None)
        model, loader = self._originals["_prepare_for_training"](max_steps, self._loader, None)
        self._attach(model, loader)
        if self.run.resumed is not None:
            return self._resume(max_steps, num_train_epochs)
        if self._initial is not None:
            return self._load_initial(set_up)
        return 0, 0

    def prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        return self._prepared

    def _on_train_begin(self) -> None:
        """Restore state after the trainer has set its counters and zeroed gradients."""
        self._part.check_counters()
        made = [name for name, module in self._callbacks_modules() if self._modules.get(name) is not module]
        if made:
            raise OptionError(
                f"A callback made {', '.join(made)} in on_train_begin, after the state was attached, so it "
                "would not be saved. No batch was trained on. Make it in the callback's __init__."
            )
        if self._part.pending is None:
            return
        if self._resumed_epoch is None:
            self._part.apply()
            self.run.restore_again()
        else:
            # Callbacks read this state. `run_epoch` restores it again after on_epoch_begin.
            self._part.put(self._part.pending)

    def evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> Any:
        if skip_scheduler and self.run.resumed is not None:
            return {}  # eval_on_start applies to the start of the run, not to a resume
        return self._originals["_evaluate"](trial, ignore_keys_for_eval, skip_scheduler)

    def run_epoch(self, **arguments: Any) -> None:
        trainer, epoch = self._trainer, arguments["epoch"]
        self._given = self._offset = 0
        self._is_offset_due = False
        is_resumed, self._resumed_epoch = self._resumed_epoch == epoch, None
        if is_resumed:
            self._given = arguments["steps_trained_in_current_epoch"]
            if not self._initial_rng:
                self._is_offset_due = self._part.ranks_before != self._trainer.args.world_size
                self._part.apply()
                self.run.restore_again()
        try:
            if is_resumed or self._initial_rng:
                arguments["resume_from_checkpoint"] = "flashckpt"
                with self._without_skipping():
                    self._originals["_run_epoch"](**arguments)
            else:
                self._originals["_run_epoch"](**arguments)
        except _Stopped:
            trainer.control.should_training_stop = True
            return
        self._end_epoch(arguments["steps_in_epoch"], epoch + 1 >= trainer.state.num_train_epochs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        is_boundary = self._is_open and not self._is_exhausted()
        if is_boundary:
            self._is_open = False
            self._unsaved.observe()
            self._part.batches = self._given
            self.run.end_iteration(trained=self._given + self._offset, provisional=not self._knows_end())
            if self.run.stopped:
                raise _Stopped
        samples = self._originals["get_batch_samples"](epoch_iterator, num_batches, device)
        if is_boundary and not self._knows_end():
            self.run.has_drawn(follows=bool(samples[0]))
            if self.run.stopped:
                raise _Stopped
        # The trainer keeps drawing from a loader without a length: an empty result is not an iteration.
        if samples[0]:
            self._given += len(samples[0])
            if self._is_offset_due:
                # With another number of ranks, the tap counts from where it divides the rest of the epoch.
                self._is_offset_due = False
                ahead = hasattr(self._prepared[1], "base_dataloader") and not self._is_exhausted()
                self._offset = self._tap.drawn - int(ahead) - self._given
            self._is_open = True
            self.run.begin()
        return samples

    def load_rng_state(self, checkpoint: Any) -> None:
        if self._initial_rng:
            self._initial_rng = False
            self._originals["_load_rng_state"](self._initial)

    # ---- the run

    def _attach(self, model: Any, loader: Any) -> None:
        trainer = self._trainer
        state = {"model": model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        self._modules = dict(self._callbacks_modules())
        self.run = attach_trainer(
            self._path,
            {
                **state,
                **self._modules,
                "trainer": self._part,
                "log": GrowingList(lambda: trainer.state.log_history),
            },
            integration="transformers",
            on_stop=self._on_stop,
            assets=partial(assets_of, trainer.model, trainer.processing_class),
            **self._options,
        )
        self._attached = True
        known = self._part.known()
        self._unsaved = Unsaved(self._part.roots(), known, self._part.own, (model, *state.values()))
        if hasattr(loader, "base_dataloader") and not hasattr(loader, "_fetch_batches"):
            # Accelerate's loaders draw one batch ahead.
            self._base_loader = loader.base_dataloader
            self._tap = loader.base_dataloader = self.run.tap(self._base_loader)
        else:
            loader = self._tap = self.run.tap(loader)
        trainer.callback_handler.train_dataloader = loader
        self._prepared = model, loader

    def _resume(self, max_steps: int, num_train_epochs: int) -> tuple[int, int]:
        """Return the epoch in which the trainer resumes, and the number of its batches already trained."""
        part, run = self._part, self.run
        if part.pending is None:
            return run.epoch, 0  # an imported run: the trainer counts its steps from 0
        part.fit_pending()
        part.put_counts(part.pending)
        if self._trainer.state.global_step >= max_steps or part.pending["control"]["should_training_stop"]:
            return num_train_epochs, 0  # training has ended: no epoch is left
        batches = self._resumed_batches()
        accumulated = self._trainer.args.gradient_accumulation_steps
        if batches % accumulated:
            raise MismatchError(
                f"The run resumes after {batches} batches of an epoch, which is not a multiple of "
                f"{accumulated} batches: gradient_accumulation_steps was changed. The state was loaded; no "
                "batch was trained on. Train with the former number until the epoch has ended.",
                differences=(("batches of a step", f"a divisor of {batches}", str(accumulated)),),
            )
        self._resumed_epoch = run.epoch if batches else None
        return run.epoch, batches

    def _load_initial(self, set_up: Callable[[str | None], tuple[int, int]]) -> tuple[int, int]:
        """Load the trainer's own checkpoint by its own code. Return its epoch and its batches, like
        `_resume`."""
        trainer, folder = self._trainer, self._initial
        assert folder is not None
        if not os.path.isfile(os.path.join(folder, TRAINER_STATE_NAME)):
            raise OptionError(
                f"initial={folder!r} has no {TRAINER_STATE_NAME}, so it is not a checkpoint of a trainer. "
                "Nothing was loaded, and the run has no step. Name a folder checkpoint-N that was saved "
                "without save_only_model."
            )
        trainer._load_from_checkpoint(folder, trainer.model_wrapped if trainer.is_fsdp_enabled else None)
        epoch, batches = set_up(folder)
        trainer._load_optimizer_and_scheduler(folder)
        trainer._load_scaler(folder)
        self.run.begin_at(trainer.state.global_step, epoch, batches)
        self._resumed_epoch = epoch if batches else None
        self._initial_rng = True
        return epoch, batches

    def _end_epoch(self, steps_in_epoch: int, is_last: bool) -> None:
        """The boundary of the epoch's last iteration, after the epoch's own code."""
        is_last = is_last or self._trainer.control.should_training_stop
        was_open, self._is_open = self._is_open, False
        if is_last and was_open and self._given < steps_in_epoch and not self._is_exhausted():
            # Batches are left: with more steps the run would continue in this epoch, like the trainer's own.
            self._part.batches = self._given
            self.run.end_iteration(trained=self._given + self._offset, last=True)
        else:
            self._part.batches = 0
            self.run.end_epoch(last=is_last)

    def _on_stop(self) -> None:
        self._trainer.control.should_training_stop = True

    # ---- batches

    def _knows_end(self) -> bool:
        """Whether the loader says with a batch that it is the last one, as those of Accelerate do."""
        return hasattr(self._prepared[1], "end_of_dataloader")

    def _is_exhausted(self) -> bool:
        """Whether Accelerate's loader has given its last batch. False for other loaders, which do not
        know."""
        return bool(getattr(self._prepared[1], "end_of_dataloader", False))

    def _resumed_batches(self) -> int:
        """Trained batches of the resumed epoch, converted to the current number of ranks."""
        assert self._part.pending is not None
        saved, before, ranks = (
            self._part.pending["batches"], self._part.ranks_before, self._trainer.args.world_size,
        )  # fmt: skip
        batches, rest = divmod(saved * before, ranks)
        if rest:
            raise MismatchError(
                f"The run resumes after {saved} batches of an epoch on each of {before} "
                f"ranks, which {ranks} ranks cannot divide. The state was loaded; no batch was trained on. "
                "Train with the former number of ranks for some more steps.",
                differences=(("ranks", str(before), str(ranks)),),
            )
        return int(batches)

    @contextmanager
    def _without_skipping(self) -> Iterator[None]:
        """Disable the trainer's skipping of batches in the resumed epoch: flashckpt has positioned the
        loader."""
        module = transformers.trainer
        original, skips = getattr(module, SKIP), self._trainer.args.ignore_data_skip

        def skip_none(loader: Any, num_batches: int = 0) -> Any:
            setattr(module, SKIP, original)
            return loader

        setattr(module, SKIP, skip_none)
        self._trainer.args.ignore_data_skip = False
        try:
            yield
        finally:
            setattr(module, SKIP, original)
            self._trainer.args.ignore_data_skip = skips

    def _callbacks_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield modules that callbacks hold, such as means of weights or a reference model, with names."""
        trained = set(self._trainer.model.modules()) | set(self._trainer.model_wrapped.modules())
        for kind, callback in named_callbacks(self._trainer).items():
            for name, value in vars(callback).items():
                if isinstance(value, torch.nn.Module) and value not in trained:
                    yield f"{kind}-{name}", value


class _OnTrainBegin(TrainerCallback):  # type: ignore[misc]  # their types are not read
    """Calls a function at the start of training, after all other callbacks."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._function()


# Refused trainers and releases


TESTED = ("5.22", "5.23")

# Methods of Trainer that are replaced on the trainer object while it trains.
OVERRIDDEN = {
    "get_train_dataloader": (),
    "get_eval_dataloader": ("eval_dataset",),
    "_init_training_state": (
        "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": (
        "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial",
        "ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained",
        "steps_trained_in_current_epoch",
    ),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "_load_rng_state": ("checkpoint",),
    "_evaluate": ("trial", "ignore_keys_for_eval", "skip_scheduler"),
}  # fmt: skip

# Methods of Trainer that `initial=` calls.
CALLED = {
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
}

# Function of transformers.trainer that is replaced until the first epoch after a resume has called it.
SKIP = "skip_first_batches"

_RELIED_ON = {
    f"transformers.trainer:Trainer.{name}": ("self", *parameters)
    for name, parameters in {**OVERRIDDEN, **CALLED}.items()
} | {f"transformers.trainer:{SKIP}": ("dataloader", "num_batches")}

# A subclass with its own loops would call the methods above at other places or never.
_LOOPS = ("train", "_inner_training_loop", "_run_epoch")


def check_release() -> None:
    """Raise OptionError if the installed release lacks a name that is replaced or called."""
    check_overridden("transformers", "transformers", TESTED, _RELIED_ON)


def check_trainer(trainer: Any) -> None:
    """Raise OptionError for a trainer whose loop flashckpt cannot resume exactly."""
    if not isinstance(trainer, Trainer):
        raise OptionError(
            f"flashckpt.transformers.train takes a transformers.Trainer, not a {type(trainer).__name__}. "
            "Nothing was started. Pass a trainer of transformers or trl."
        )
    refuse(_refused(trainer))


def _refused(trainer: Any) -> Iterator[tuple[bool, str]]:
    kind = type(trainer)
    args, accelerator = trainer.args, trainer.accelerator
    own = [n for n in _LOOPS if not inspect.unwrap(getattr(kind, n)).__module__.startswith("transformers.")]
    yield bool(own), f"{kind.__name__} has its own {', '.join(own)}, whose boundaries flashckpt does not know"
    yield (
        trainer.is_in_train,
        "it is already training, or an exception has ended its training; make a new trainer",
    )
    distributed = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    yield (
        trainer.is_deepspeed_enabled or distributed == "DEEPSPEED",
        "DeepSpeed keeps the optimizer's state inside its engine; use FSDP2",
    )
    yield distributed == "MEGATRON_LM", "Megatron keeps the optimizer's state inside its engine; use FSDP2"
    yield distributed == "XLA", "XLA devices are not supported"
    yield (
        bool(args.auto_find_batch_size),
        "auto_find_batch_size restarts the loop with other batches; set per_device_train_batch_size",
    )
    yield (
        bool(getattr(args, "enable_jit_checkpoint", False)),
        "enable_jit_checkpoint ends training like early stopping, so the next start would train nothing; "
        "set it to False, since flashckpt itself saves at a signal",
    )
    yield (
        trainer.hp_search_backend is not None,
        "a hyper-parameter search trains many models in one trainer; train the best model in its own run",
    )


# State of a Trainer outside of module, optimizer and scheduler


# Fields of TrainerState that the trainer sets from its arguments or from other saved state.
_BY_ARGUMENTS = {
    "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs",
    "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
    "stateful_callbacks",
    "log_history",  # a separate object in the run, since it only grows
}  # fmt: skip
_FIELDS = [field.name for field in dataclasses.fields(TrainerState)]
_COUNTED = [name for name in _FIELDS if name not in _BY_ARGUMENTS]

# Attributes of Trainer that _inner_training_loop sets before on_train_begin.
COUNTERS = (
    "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
    "_initial_num_input_tokens_seen", "current_flos",
)  # fmt: skip

# Attributes of trl's trainers: running means for the logs, generations used for several steps, and the
# entropy controller.
TRL = (
    "_metrics", "_total_train_tokens", "_step", "_buffered_inputs", "_logs", "_pending_metrics",
    "_pending_extra_logs", "_current_train_step_time", "entropy_coef", "_last_world_entropy",
    "_entropy_window_stats",
)  # fmt: skip

# Attributes that change with each step, and are set again before they are read.
TRANSIENT = ("current_gradient_accumulation_steps", "is_in_train", "_last_loaded_step")

# Keys that are not saved: pictures in `_logs` have no exact encoding and affect no number.
_NOT_SAVED = {"_logs": ("images",)}


class TrainerPart(Deferred):
    """The state of `trainer`, with the attributes `own`: "root.attribute" (see `roots`), or "attribute" for
    each root that has this attribute.

    evaluated: names of evaluation loaders whose persistent workers the run has started. batches: number of
    trained batches in this epoch, as the trainer counts them. ranks_before: number of ranks at that time.
    """

    def __init__(self, trainer: Any, own: Iterable[str]) -> None:
        self._trainer = trainer
        self.own = tuple(own)
        self.evaluated: set[str] = set()
        self.batches = 0
        self._ranks = self.ranks_before = int(trainer.args.world_size)
        self._owned()

    def roots(self) -> dict[str, Any]:
        """The objects whose attributes may be state, by their names in `own`."""
        return {"trainer": self._trainer, "state": self._trainer.state, **named_callbacks(self._trainer)}

    def known(self) -> dict[str, set[str]]:
        """Attributes of the roots that are saved here or need not be saved."""
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
        """Set the counters that callbacks read at the start of training."""
        for name, value in state["state"].items():
            setattr(self._trainer.state, name, value)

    # ---- a resume

    def fit_pending(self) -> None:
        """Adapt the loaded state to this trainer. Attributes and callbacks that the saved trainer did not
        have keep their values; those that this trainer does not have are dropped with a warning."""
        assert self.pending is not None
        saved, now = self.pending, self.read()
        for section in ("state", "trainer", "own"):
            lost = [name for name in saved[section] if name not in now[section]]
            # A trainer sets its counters only when it starts to train.
            lost = [name for name in lost if name not in COUNTERS]
            _warn_lost(lost)
            kept = {name: value for name, value in saved[section].items() if name not in lost}
            saved[section] = {**now[section], **kept}
        unmatched = list(saved["callbacks"])
        for row in now["callbacks"]:
            found = next((other for other in unmatched if other[0] == row[0]), None)
            if found is not None:
                unmatched.remove(found)
                row[1] = {**row[1], **found[1]}
        _warn_lost([name for name, _ in unmatched])
        saved["callbacks"] = now["callbacks"]
        saved["ranks"], self.ranks_before = now["ranks"], saved["ranks"]
        saved["max_steps"], before = now["max_steps"], saved["max_steps"]
        step = saved["state"]["global_step"]
        if step >= before or now["max_steps"] > before:
            # Training ended at the last step, or a callback ended it and more steps are requested now.
            saved["control"]["should_training_stop"] = step >= now["max_steps"]
        elif saved["control"]["should_training_stop"]:
            log.warning(
                "A callback ended this run at step %d of %d (should_training_stop), so nothing is trained. "
                "To continue the run, start it with more steps or epochs.",
                step,
                now["max_steps"],
            )
        best = saved["state"]["best_model_checkpoint"]
        if best is not None and not os.path.isdir(best):
            # Like the trainer's own resume. At its end the trainer compares this folder with existing ones.
            log.warning("The best checkpoint %s no longer exists. The trainer continues without one.", best)
            saved["state"]["best_model_checkpoint"] = None

    def check_counters(self) -> None:
        """Raise StateError if the trainer has not set a counter when its loop starts."""
        missing = [name for name in COUNTERS if not hasattr(self._trainer, name)]
        if missing:
            raise StateError(
                f"The trainer has no {', '.join(missing)} at the start of its loop: the installed release "
                "of transformers counts elsewhere. No batch was trained on, and the saved state is intact. "
                "Install a release that docs/transformers.md names."
            )

    def _exportable(self) -> list[Any]:
        return [c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)]

    def _owned(self) -> dict[str, tuple[Any, str]]:
        """The objects and attributes in `own`, by "root.attribute"."""
        owned = {}
        for name in self.own:
            label, _, attribute = name.rpartition(".")
            roots = {root: held for root, held in self.roots().items() if label in ("", root)}
            found = {
                f"{root}.{attribute}": (o, attribute) for root, o in roots.items() if hasattr(o, attribute)
            }
            if not found:
                raise OptionError(
                    f"own={name!r} names no attribute of the trainer, its state or one of its callbacks. No "
                    f"batch was trained on. Name an existing attribute, with one of "
                    f"{', '.join(self.roots())} before the dot."
                )
            owned.update(found)
        return owned


def named_callbacks(trainer: Any) -> dict[str, Any]:
    return by_class(trainer.callback_handler.callbacks)


def _warn_lost(names: list[str]) -> None:
    if names:
        log.warning(
            "The checkpoint has %s, which this trainer does not have. It was dropped.", ", ".join(names)
        )


def _plain(value: Any, without: tuple[str, ...] = ()) -> Any:
    """Copy a value without the factories of default dictionaries, which are code, and without some keys."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key not in without}
    if type(value) is list:
        return [_plain(item) for item in value]
    return value


def _put(current: Any, value: Any, keep: tuple[str, ...] = ()) -> Any:
    """Return `value`. Update existing dictionaries and tensors in place: they have factories, and other
    objects reference them."""
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and current.shape == value.shape:
        return current.copy_(value)
    if not isinstance(current, dict) or not isinstance(value, Mapping):
        return value
    for key in [key for key in current if key not in value and key not in keep]:
        del current[key]
    for key, item in value.items():
        current[key] = _put(current.get(key), item)
    return current
