"""The checkpoint manager for torchtitan.

    config.checkpoint = FlashCheckpointManager.Config(enable=True, interval=500)

torchtitan's trainer calls `save` before it validates, and draws the next batches after validation. So `save`
only marks an iteration as done, and the next draw is its boundary. In addition to the state that torchtitan's
own manager saves, this manager saves random number generators, and it saves the loader without pickle.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashckpt.checkpointer.trainer_run import (
    Tap,
    TrainerRun,
    attach_trainer,
    check_overridden,
    numbered,
    require,
)
from flashckpt.errors import OptionError
from flashckpt.options import Keep

require("torchtitan", "torchtitan", "torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from torchtitan.components.checkpointer.base import BaseCheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402

__all__ = ["FlashCheckpointManager"]

TESTED = ("0.3",)
_BASE = "torchtitan.components.checkpointer.base:BaseCheckpointManager"
OVERRIDDEN = {
    f"{_BASE}._load": ("self", "step"),
    f"{_BASE}._save": ("self", "curr_step", "last_step"),
    f"{_BASE}._close": ("self",),
    f"{_BASE}._maybe_wait_for_staging": ("self",),
    f"{_BASE}._wait_for_saving": ("self",),
    "torchtitan.components.dataloader:ParallelAwareDataloader.state_dict": ("self",),
    "torchtitan.components.dataloader:ParallelAwareDataloader.load_state_dict": ("self", "state_dict"),
}
# Options of torchtitan's own manager that load or save something else than the run.
_UNSUPPORTED = (
    "initial_load_path", "initial_load_in_hf", "initial_load_in_hf_quantized", "last_save_in_hf",
    "export_dtype", "load_step", "exclude_from_loading", "enable_first_step_checkpoint",
    "create_seed_checkpoint", "load_only",
)  # fmt: skip
_ALL = 1 << 31


class FlashCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and resumes a torchtitan job by flashckpt. `Config.build` makes it, as for torchtitan's own
    manager."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """`interval`: steps between two commits to storage. `keep_latest_k`: number of committed steps to
        keep. `folder`: the run's folder in the job's dump folder."""

        every: int | str | None = "auto"
        """Steps between two snapshots into memory; "auto" takes them as often as costs allow."""

        remote: str | None = None
        """A second folder or URL to which committed steps are copied."""

        cache: str | None = None
        """A folder on a disk of each node, where snapshots rest on their way to a slower `folder`."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Sequence[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable, self.save_future = config.enable, None
        if not self.enable:
            return
        check_overridden("torchtitan", "torchtitan", TESTED, OVERRIDDEN)
        _check(config)
        self._config, self._path = config, os.path.join(base_folder, config.folder)
        self._loader, self._trainer = dataloader, _trainer_of(states, dataloader)
        self._train_state = _TrainState(self._trainer)
        self._state = numbered(
            model=model_parts, optimizer=optimizers.optimizers, lr_scheduler=lr_schedulers.schedulers
        )
        self._state.update({name: part for name, part in states.items() if part is not self._trainer})
        self._state["train_state"] = self._train_state
        self._run: TrainerRun | None = None
        self._drawn = 0
        self._in_iteration = self._is_done = False

    # ---- what torchtitan calls

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise _unsupported_option(f"load(step={step})")
        loader = self._loader
        if isinstance(loader, ParallelAwareDataloader):
            # The methods of ParallelAwareDataloader pickle the state.
            loader.state_dict = partial(StatefulDataLoader.state_dict, loader)
            loader.load_state_dict = partial(StatefulDataLoader.load_state_dict, loader)
        config = self._config
        run = self._run = attach_trainer(
            self._path,
            self._state,
            integration="torchtitan",
            on_stop=self._on_stop,
            every=config.every,
            persist_every=config.interval,
            keep=Keep(last=config.keep_latest_k or _ALL),
            remote=config.remote,
            cache=config.cache,
        )
        self._drawn = run.trained
        self._trainer.dataloader = _Draws(self, run.tap(loader))
        return run.resumed is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # Validation follows, and belongs to this iteration.
        self._train_state.step, self._is_done = curr_step, True
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the optimizer's step itself waits for copies of the tensors that it writes."""

    def _wait_for_saving(self) -> None:
        if self._run is not None:
            self._run.checkpointer.wait()

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        if sys.exc_info()[0] is not None:
            # torchtitan closes its trainer while it handles the exception that ended training.
            run.abandon()
            return
        if self._is_done:
            self._end_iteration(run, last=True)
        run.close(out_of_data=self._in_iteration)

    # ---- draws

    def at_draw(self) -> bool:
        """Handle the boundary before a batch is drawn. Return False if the loop ends instead."""
        run = self._run
        if run is not None and self._is_done:
            self._end_iteration(run)
        if run is None or run.stopped:
            return False
        if not self._in_iteration:
            self._in_iteration = True
            run.begin()
        return True

    def has_drawn(self) -> None:
        self._drawn += 1

    def _end_iteration(self, run: TrainerRun, *, last: bool = False) -> None:
        self._is_done = self._in_iteration = False
        run.end_iteration(trained=self._drawn, last=last)

    def _on_stop(self) -> None:
        # The trainer treats the end of its data as the end of the loop. It counts a step before it draws.
        self._trainer.step = self._train_state.step


class _TrainState:
    """The trainer's own state, with the step saved last: at a draw the trainer has counted the next one."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self.step = trainer, trainer.step

    def state_dict(self) -> dict[str, Any]:
        return {**self._trainer.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(state)
        self.step = state["step"]


class _Draws:
    """Replacement for the trainer's loader, with a boundary before the first draw of each iteration."""

    def __init__(self, manager: FlashCheckpointManager, tap: Tap) -> None:
        self._manager, self._tap = manager, tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tap, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._tap)
        while self._manager.at_draw():
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._manager.has_drawn()
            yield batch


def _check(config: Any) -> None:
    usual = FlashCheckpointManager.Config()
    for name in _UNSUPPORTED:
        if getattr(config, name) != getattr(usual, name):
            raise _unsupported_option(f"checkpoint.{name}={getattr(config, name)!r}")


def _unsupported_option(option: str) -> OptionError:
    return OptionError(
        f"{option} is an option of torchtitan's own checkpoints; FlashCheckpointManager does not have it. "
        "Nothing was started. Leave it out. `flashckpt import` begins a run with other weights, "
        "`flashckpt branch` with an older step, and `flashckpt export` writes weights for others."
    )


def _trainer_of(states: Mapping[str, Any], dataloader: Any) -> Any:
    for part in states.values():
        if getattr(part, "dataloader", None) is dataloader and hasattr(part, "step"):
            return part
    raise OptionError(
        "states= has no trainer that has this dataloader and counts its steps, so flashckpt cannot find the "
        "boundaries. Nothing was started. Pass torchtitan's Trainer as states['train_state']."
    )
