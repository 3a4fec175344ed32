"""Saves and resumes the objects and loaders that Accelerate's `Accelerator` has prepared.

    with flashckpt.accelerate.attach(accelerator, "runs/x") as run:
        for epoch in run.epochs(3):
            for batch in run.batches(loader):
                ...                           # the body does not change

Owns which parts of an accelerator are state. The program owns its loop, so boundaries are those of
`flashckpt.Checkpointer`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.checkpointer.attach import attach_for
from flashckpt.checkpointer.trainer_run import check_overridden, numbered, require
from flashckpt.errors import OptionError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flashckpt.checkpointer.run import Checkpointer

__all__ = ["attach"]

TESTED = ("1.14", "1.15")
OVERRIDDEN = {
    "accelerate:Accelerator._do_sync": ("self",),
    "accelerate.state:GradientState._set_sync_gradients": ("self", "sync_gradients"),
    "accelerate.data_loader:DataLoaderAdapter.__getattr__": ("self", "name"),
    "accelerate.data_loader:DataLoaderShard.__iter__": ("self",),
    "accelerate.data_loader:DataLoaderShard.set_epoch": ("self", "epoch"),
    "accelerate.data_loader:DataLoaderDispatcher.__iter__": ("self",),
    "accelerate.data_loader:DataLoaderDispatcher.set_epoch": ("self", "epoch"),
    "accelerate.data_loader:DataLoaderDispatcher._fetch_batches": ("self", "iterator"),
    "accelerate.data_loader:slice_tensors": ("data", "tensor_slice", "process_index", "num_processes"),
    "accelerate.utils:broadcast_object_list": ("object_list", "from_process"),
    "accelerate.utils:recursively_apply": (
        "func", "data", "args", "test_type", "error_on_other_type", "kwargs",
    ),
}  # fmt: skip
_ATTRIBUTES = (
    "_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler", "step",
    "gradient_state", "project_configuration", "distributed_type",
)  # fmt: skip
_REFUSED = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "torch_xla"}


def attach(
    accelerator: Accelerator,
    path: str | os.PathLike[str],
    state: Mapping[str, object] | None = None,
    **options: Any,
) -> Checkpointer:
    """Attach the objects that the accelerator has prepared to the run in `path`, and restore them if the run
    has a snapshot. Call it after `accelerator.prepare` and `register_for_checkpointing`.

    Saves models, optimizers, schedulers and registered objects as "model", "optimizer", "scheduler" and
    "custom" (further ones as "model1", …), with the scaler and the accelerator's own counters. state:
    further objects to save, by name. path, options: see `flashckpt.attach`.

    Returns a `flashckpt.Checkpointer`, whose `batches` takes prepared loaders. Raises OptionError for
    DeepSpeed, Megatron-LM and torch_xla, which keep state elsewhere, and if nothing was prepared; raises
    whatever `flashckpt.attach` raises.
    """
    require("accelerate", "accelerate")
    check_overridden("accelerate", "accelerate", TESTED, OVERRIDDEN)
    _check(accelerator, state)
    found = _prepared(accelerator)
    clashes = sorted(found.keys() & (state or {}).keys())
    if clashes:
        raise OptionError(
            f"state= has {', '.join(clashes)}, which are names of objects that the accelerator has prepared. "
            "Nothing was started. Give them other names."
        )
    return attach_for("accelerate", path, {**found, **(state or {})}, **options)


def _check(accelerator: Any, state: Mapping[str, object] | None) -> None:
    missing = [name for name in _ATTRIBUTES if not hasattr(accelerator, name)]
    if missing:
        raise OptionError(
            f"A {type(accelerator).__name__} has no {', '.join(missing)}. Nothing was started. Pass the "
            "accelerate.Accelerator that has prepared the model."
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _REFUSED:
        raise OptionError(
            f"{_REFUSED[kind]} keeps model and optimizer in its own engine, whose state flashckpt cannot "
            "read. Nothing was started. Save it by its own means, or train with DDP or FSDP2."
        )
    if not accelerator._models and not state:
        raise OptionError(
            "The accelerator has prepared no model, so there is no state to save. Nothing was started. Call "
            "flashckpt.accelerate.attach after accelerator.prepare()."
        )


def _prepared(accelerator: Any) -> dict[str, object]:
    """Objects that the accelerator has prepared, by name."""
    named = numbered(
        model=accelerator._models,
        optimizer=[getattr(each, "optimizer", each) for each in accelerator._optimizers],
        scheduler=[getattr(each, "scheduler", each) for each in accelerator._schedulers],
        custom=accelerator._custom_objects,
    )
    if accelerator.scaler is not None:
        named["scaler"] = accelerator.scaler
    named["accelerator"] = _Counters(accelerator)
    return named


class _Counters:
    """An accelerator's own state: its place in the gradient accumulation, its number of saves, and for each
    prepared loader the number of passes over it and the generator that Accelerate has made for it. The
    generators order the samples, also of loaders over which the program itself iterates."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._loaders = {str(number): each for number, each in enumerate(accelerator._dataloaders)}
        self._initial = {number: _loader_state(each) for number, each in self._loaders.items()}
        self._others: dict[str, Any] = {}  # states of loaders that this program has not prepared

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        current = {number: _loader_state(each) for number, each in self._loaders.items()}
        # A loader that the program has added but not used must not change the state.
        used = {number: value for number, value in current.items() if value != self._initial[number]}
        return {
            "step": accelerator.step,
            "sync_gradients": accelerator.gradient_state.sync_gradients,
            "saves": accelerator.project_configuration.iteration,
            "loaders": {**self._others, **used},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        accelerator = self._accelerator
        accelerator.step = state["step"]
        accelerator.gradient_state._set_sync_gradients(state["sync_gradients"])
        accelerator.project_configuration.iteration = state["saves"]
        saved = state["loaders"]
        self._others = {number: value for number, value in saved.items() if number not in self._loaders}
        for number, (passes, drawn) in saved.items():
            if number in self._loaders:
                loader = self._loaders[number]
                loader.iteration = passes
                if passes and "StatefulDataLoader" in {
                    kind.__name__ for kind in type(_inside(loader)).__mro__
                }:
                    # prepare() has made an iterator that only the run's first pass may use.
                    _inside(loader).load_state_dict({})
                generator = getattr(loader, "synchronized_generator", None)
                if generator is not None and drawn is not None:
                    generator.set_state(torch.frombuffer(bytearray(drawn), dtype=torch.uint8))


def _inside(loader: Any) -> Any:
    return vars(loader).get("base_dataloader")


def _loader_state(loader: Any) -> list[Any]:
    """The part of a prepared loader that a pass over it changes: number of passes, generator state."""
    generator = getattr(loader, "synchronized_generator", None)
    return [loader.iteration, None if generator is None else bytes(generator.get_state().numpy())]
