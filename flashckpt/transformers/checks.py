"""What of transformers this package replaces or calls, and the trainers and releases that it refuses.

Owns the tables of names and parameters. A check compares them with the installed release before anything
starts: another signature means another loop, and boundaries in the wrong place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from transformers.trainer import Trainer

from flashckpt.checkpointer.extras import check_overridden
from flashckpt.errors import OptionError

TESTED = ("5.22", "5.23")

# Of Trainer: replaced on the trainer object while it trains.
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

# Of Trainer: called by `initial=`.
CALLED = {
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
}

# Of transformers.trainer: replaced until the first epoch after a resume has called it.
SKIP = "skip_first_batches"

_RELIED_ON = {
    **{
        f"transformers.trainer:Trainer.{name}": ("self", *parameters)
        for name, parameters in OVERRIDDEN.items()
    },
    **{f"transformers.trainer:Trainer.{name}": ("self", *parameters) for name, parameters in CALLED.items()},
    f"transformers.trainer:{SKIP}": ("dataloader", "num_batches"),
}

# A subclass with loops of its own would call the names above elsewhere, or never.
_LOOPS = ("train", "_inner_training_loop", "_run_epoch")


def check_release() -> None:
    """Raise OptionError where the installed release lacks what is replaced or called."""
    check_overridden("transformers", "transformers", TESTED, _RELIED_ON)


def check_trainer(trainer: Any) -> None:
    """Raise OptionError for a trainer whose loop flashckpt cannot continue exactly."""
    if not isinstance(trainer, Trainer):
        raise OptionError(
            f"flashckpt.transformers.train takes a transformers.Trainer, not a {type(trainer).__name__}. "
            "Nothing was started."
        )
    for is_so, what in _refused(trainer):
        if is_so:
            raise OptionError(f"flashckpt cannot checkpoint this trainer: {what}. Nothing was started.")


def _refused(trainer: Any) -> Iterator[tuple[bool, str]]:
    kind = type(trainer)
    args, accelerator = trainer.args, trainer.accelerator
    own = [n for n in _LOOPS if not _function(kind, n).__module__.startswith("transformers.")]
    yield bool(own), f"{kind.__name__} has its own {', '.join(own)}, whose boundaries flashckpt does not know"
    yield (
        trainer.is_in_train,
        "it is training already, or an exception has ended its training; make a new trainer",
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
        "auto_find_batch_size begins the loop again with other batches; set per_device_train_batch_size",
    )
    yield (
        bool(getattr(args, "enable_jit_checkpoint", False)),
        "enable_jit_checkpoint ends training as a callback does that has seen enough, so the next start "
        "would train nothing; set it to False, flashckpt saves at a signal",
    )
    yield (
        trainer.hp_search_backend is not None,
        "a hyper-parameter search trains many models in one trainer; train the best one in a run of its own",
    )


def _function(kind: type, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = inspect.unwrap(getattr(kind, name))
    return function
