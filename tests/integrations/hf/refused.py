"""What train() refuses before anything starts, and the names that it replaces. Run in a forked process."""

import inspect
import types
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback

import flashckpt
from flashckpt.transformers import training
from tests.integrations.hf.cases import Sentences, arguments, model
from tests.integrations.job import Job


def trainer_of(job: Job, **changed: Any) -> Trainer:
    return Trainer(model(), arguments(job.folder, **changed), train_dataset=Sentences(8))


def refuses(job: Job, trainer: Any, match: str, **more: Any) -> None:
    with pytest.raises(flashckpt.OptionError, match=match):
        flashckpt.transformers.train(trainer, job.run, **more)
    assert not (job.folder / "run").exists()


def trainers(job: Job) -> None:
    refuses(job, torch.nn.Linear(1, 1), r"transformers\.Trainer, not a Linear")
    refuses(job, trainer_of(job, auto_find_batch_size=True), "auto_find_batch_size")
    deepspeed = trainer_of(job)
    deepspeed.is_deepspeed_enabled = True
    refuses(job, deepspeed, "DeepSpeed")
    megatron = trainer_of(job)
    megatron.accelerator = types.SimpleNamespace(distributed_type="MEGATRON_LM")
    refuses(job, megatron, "Megatron")
    search = trainer_of(job)
    search.hp_search_backend = "optuna"
    refuses(job, search, "hyper-parameter search")
    refuses(job, trainer_of(job, enable_jit_checkpoint=True), "enable_jit_checkpoint")
    running = trainer_of(job)
    running.is_in_train = True
    refuses(job, running, "already training")

    class Other(Trainer):
        def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
            return None

    refuses(job, Other(model(), arguments(job.folder)), "Other has its own _inner_training_loop")
    refuses(job, trainer_of(job), "own='nothing'", own=("nothing",))


def replaced_modules(job: Job) -> None:
    """A module that takes the place of the one that is attached would not be saved."""

    class Replaces(TrainerCallback):
        def __init__(self) -> None:
            self.net = torch.nn.Linear(1, 1)

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.net = torch.nn.Linear(1, 1)

    trainer = trainer_of(job)
    trainer.add_callback(Replaces())
    with pytest.raises(flashckpt.OptionError, match="A callback made Replaces-net"):
        flashckpt.transformers.train(trainer, f"{job.run}-replaced")


def _other_signature(self: Any, iterator: Any, number: int) -> None:
    """As a release to come might have it."""


def releases(job: Job) -> None:
    trainer = trainer_of(job)
    with mock.patch.object(Trainer, "get_batch_samples", _other_signature):
        refuses(job, trainer, r"get_batch_samples of .* takes \(self, iterator, number\)")
    theirs = Trainer._load_scaler
    del Trainer._load_scaler
    refuses(job, trainer, r"Trainer\._load_scaler of .* is missing")
    Trainer._load_scaler = theirs


def names(job: Job) -> dict[str, Any]:
    """The installed release is one of those that were tested, and has what is replaced and called."""
    installed = transformers.__version__.rpartition(".")[0]
    assert installed in training.TESTED
    assert job.options.get("release") in (None, installed)
    training.check_release()
    assert flashckpt.transformers.__all__ == ["assets_of", "export", "keep_config", "train"]
    taken = inspect.signature(flashckpt.transformers.train).parameters
    assert list(taken) == ["trainer", "path", "own", "initial", "options"]
    return {}


def all_of_it(job: Job) -> dict[str, Any]:
    for each in (trainers, releases, replaced_modules):
        each(job)
    return names(job)
