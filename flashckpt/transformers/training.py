"""`train(trainer, path)`: trainer.train() of transformers and trl with checkpoints.

Owns where the boundaries of their loop are: one for each optimizer step, after its log, evaluation and save;
the last of an epoch after the epoch's own code. The trainer's way to resume is not used: it reads files of
its own, and repeats or skips what a boundary in the middle leaves. Methods are replaced on the trainer
object alone, and only while it trains.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from flashckpt.checkpointer.extras import require

require("transformers", "transformers", "accelerate")

import transformers.trainer  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_callback import TrainerCallback  # noqa: E402
from transformers.trainer_utils import TrainOutput  # noqa: E402

from flashckpt.checkpointer.trainer_run import TrainerRun, attach_trainer  # noqa: E402
from flashckpt.checkpointer.unsaved import Unsaved  # noqa: E402
from flashckpt.errors import MismatchError, OptionError  # noqa: E402
from flashckpt.state.growing import GrowingList  # noqa: E402
from flashckpt.transformers.checks import OVERRIDDEN, SKIP, check_release, check_trainer  # noqa: E402
from flashckpt.transformers.exporting import assets_of  # noqa: E402
from flashckpt.transformers.state import TrainerPart, named_callbacks  # noqa: E402

log = logging.getLogger(__name__)


def train(
    trainer: Any,
    path: str | os.PathLike[str],
    own: Iterable[str] = (),
    initial: str | os.PathLike[str] | None = None,
    **options: Any,
) -> TrainOutput:
    """Train as `trainer.train()` does, from where the run in `path` stands, and return what that returns.

        flashckpt.transformers.train(trainer, "runs/gpt")

    own: attributes that change and that flashckpt does not know ("trainer.seen", "MyCallback.count"); a
    warning names them. initial: a checkpoint folder of the trainer's own, from which a run without a step
    begins; ignored once it has one. options: those of `flashckpt.attach`.

    A signal ends the process at a step; a notice file ends training as `should_training_stop` does, without
    the epoch's end. Raises OptionError for trainers and releases that cannot be continued
    exactly, before anything starts, and else what `attach` and `trainer.train()` raise.
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
        self._trainer, self._path, self._initial, self._options = trainer, path, initial, options
        self._part = TrainerPart(trainer, own)
        self._theirs = {name: getattr(trainer, name) for name in OVERRIDDEN}
        self._loader: Any = None
        self._prepared: tuple[Any, Any] = (None, None)
        self._tap: Any = None
        self._drawn_from: Any = None  # inside of Accelerate's loader
        self._attached = False
        self._is_open = False  # batches were given for an iteration whose boundary is still to come
        self._stops = False
        self._given = 0  # batches of this epoch, as the trainer counts them
        self._offset = 0  # what the tap counts beyond them
        self._divides_anew = False
        self._continues: int | None = None  # the epoch in whose middle the run stands, until it begins
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
        begins = _Begins(self._on_train_begin)
        kept = {name: vars(trainer)[name] for name in OVERRIDDEN if name in vars(trainer)}
        for name in OVERRIDDEN:
            setattr(trainer, name, getattr(self, name.lstrip("_")))
        trainer.add_callback(begins)
        try:
            yield
        finally:
            trainer.remove_callback(begins)
            for name in OVERRIDDEN:
                delattr(trainer, name)
            vars(trainer).update(kept)
            if self._drawn_from is not None:
                self._prepared[1].base_dataloader = self._drawn_from

    # ---- in the place of Trainer's methods, in the order in which it calls them

    def get_train_dataloader(self) -> Any:
        loader = self._theirs["get_train_dataloader"]()
        if self._loader is None:
            self._loader = loader
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = self._theirs["get_eval_dataloader"](eval_dataset)
        if self._trainer.args.dataloader_persistent_workers and self._attached:
            name = eval_dataset if isinstance(eval_dataset, str) else "eval"
            base = getattr(loader, "base_dataloader", loader)
            if name in self._part.evaluated and getattr(base, "_iterator", None) is None:
                # The run has drawn the seed of these workers before it was saved.
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
            begin = self._theirs["_init_training_state"]
            place: tuple[int, int] = begin(
                max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
            )
            return place

        set_up(None)
        model, loader = self._theirs["_prepare_for_training"](max_steps, self._loader, None)
        self._attach(model, loader)
        if self.run.resumed is not None:
            return self._resume(max_steps, num_train_epochs)
        if self._initial is not None:
            return self._load_initial(set_up)
        return 0, 0

    def prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        return self._prepared

    def _on_train_begin(self) -> None:
        """The trainer has set its counters, and dropped gradients."""
        self._part.check_counters()
        made = [name for name, module in self._callbacks_modules() if self._modules.get(name) is not module]
        if made:
            raise OptionError(
                f"A callback has made {', '.join(made)} when training began, after the state was attached: "
                "it would not be saved. No batch was trained on. Make it in the callback's __init__."
            )
        if self._part.pending is None:
            return
        if self._continues is None:
            self._part.apply()
            self.run.restore_again()
        else:
            # For callbacks. What they change in on_epoch_begin is put again.
            self._part.put(self._part.pending)

    def evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> Any:
        if skip_scheduler and self.run.resumed is not None:
            return {}  # eval_on_start: that start was the run's
        return self._theirs["_evaluate"](trial, ignore_keys_for_eval, skip_scheduler)

    def run_epoch(self, **arguments: Any) -> None:
        trainer, epoch = self._trainer, arguments["epoch"]
        self._given = self._offset = 0
        self._divides_anew = False
        continues, self._continues = self._continues == epoch, None
        if continues:
            self._given = arguments["steps_trained_in_current_epoch"]
            if not self._initial_rng:
                self._divides_anew = self._part.ranks_before != self._trainer.args.world_size
                self._part.apply()
                self.run.restore_again()
        try:
            if continues or self._initial_rng:
                arguments["resume_from_checkpoint"] = "flashckpt"
                with self._without_skipping():
                    self._theirs["_run_epoch"](**arguments)
            else:
                self._theirs["_run_epoch"](**arguments)
        except _Stopped:
            trainer.control.should_training_stop = True
            return
        self._end_epoch(arguments["steps_in_epoch"], epoch + 1 >= trainer.state.num_train_epochs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self._is_open and not self._is_exhausted():
            self._is_open = False
            self._unsaved.observe()
            self._part.batches = self._given
            self.run.end_iteration(trained=self._given + self._offset)
            if self._stops:
                raise _Stopped
        samples = self._theirs["get_batch_samples"](epoch_iterator, num_batches, device)
        # A loader without a length is asked on after its end: an empty answer is no iteration.
        if samples[0]:
            self._given += len(samples[0])
            if self._divides_anew:
                # On other ranks than before the tap counts from where it divides what is left of the epoch.
                self._divides_anew = False
                ahead = hasattr(self._prepared[1], "base_dataloader") and not self._is_exhausted()
                self._offset = self._tap.drawn - int(ahead) - self._given
            self._is_open = True
            self.run.begin()
        return samples

    def load_rng_state(self, checkpoint: Any) -> None:
        if self._initial_rng:
            self._initial_rng = False
            self._theirs["_load_rng_state"](os.fspath(self._initial))

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
            # Accelerate's loaders draw a batch ahead of the one that they give.
            self._drawn_from = loader.base_dataloader
            self._tap = loader.base_dataloader = self.run.tap(self._drawn_from)
        else:
            loader = self._tap = self.run.tap(loader)
        trainer.callback_handler.train_dataloader = loader
        self._prepared = model, loader

    def _resume(self, max_steps: int, num_train_epochs: int) -> tuple[int, int]:
        """The epoch and its batches where the trainer continues."""
        part, run = self._part, self.run
        if part.pending is None:
            return run.epoch, 0  # an imported run: the trainer counts its steps from the beginning
        part.fit_pending()
        part.put_counts(part.pending)
        if self._trainer.state.global_step >= max_steps or part.pending["control"]["should_training_stop"]:
            return num_train_epochs, 0  # it has ended: no epoch is left
        batches = self._stands_at()
        accumulated = self._trainer.args.gradient_accumulation_steps
        if batches % accumulated:
            raise MismatchError(
                f"The run stands behind {batches} batches of an epoch, which are no whole number of steps of "
                f"{accumulated} batches: gradient_accumulation_steps was changed. The state was loaded; no "
                "batch was trained on. Train with the former number until the epoch has ended.",
                differences=(("batches of a step", f"a divisor of {batches}", str(accumulated)),),
            )
        self._continues = run.epoch if batches else None
        return run.epoch, batches

    def _load_initial(self, set_up: Callable[[str | None], tuple[int, int]]) -> tuple[int, int]:
        """Load the trainer's own checkpoint by its own code; where it stands."""
        trainer, folder = self._trainer, os.fspath(self._initial)
        if not os.path.isfile(os.path.join(folder, TRAINER_STATE_NAME)):
            raise OptionError(
                f"initial={folder!r} has no {TRAINER_STATE_NAME}, so it is no checkpoint of a trainer. "
                "Nothing was loaded, and the run has no step. Name a folder checkpoint-N that was saved "
                "without save_only_model."
            )
        trainer._load_from_checkpoint(folder, trainer.model_wrapped if trainer.is_fsdp_enabled else None)
        epoch, batches = set_up(folder)
        trainer._load_optimizer_and_scheduler(folder)
        trainer._load_scaler(folder)
        self.run.begin_at(trainer.state.global_step, epoch, batches)
        self._continues = epoch if batches else None
        self._initial_rng = True
        return epoch, batches

    def _end_epoch(self, steps_in_epoch: int, is_last: bool) -> None:
        """The boundary of the epoch's last iteration, after the epoch's own code."""
        is_last = is_last or self._trainer.control.should_training_stop
        was_open, self._is_open = self._is_open, False
        if is_last and was_open and self._given < steps_in_epoch and not self._is_exhausted():
            # Batches are left: with more steps the run would continue in this epoch, as theirs does.
            self._part.batches = self._given
            self.run.end_iteration(trained=self._given + self._offset, last=True)
        else:
            self._part.batches = 0
            self.run.end_epoch(last=is_last)

    def _on_stop(self) -> None:
        self._stops = True
        self._trainer.control.should_training_stop = True

    # ---- batches

    def _is_exhausted(self) -> bool:
        """Whether Accelerate's loader has given its last batch. Another loader does not know."""
        return bool(getattr(self._prepared[1], "end_of_dataloader", False))

    def _stands_at(self) -> int:
        """The trainer's batches of the epoch in which the run resumes, on as many ranks as there are."""
        assert self._part.pending is not None
        saved, before, ranks = (
            self._part.pending["batches"], self._part.ranks_before, self._trainer.args.world_size,
        )  # fmt: skip
        batches, rest = divmod(saved * before, ranks)
        if rest:
            raise MismatchError(
                f"The run stands behind {saved} batches of an epoch on each of {before} "
                f"ranks, which {ranks} ranks cannot divide. The state was loaded; no batch was trained on. "
                "Train with the former number of ranks for some steps more.",
                differences=(("ranks", str(before), str(ranks)),),
            )
        return int(batches)

    @contextmanager
    def _without_skipping(self) -> Iterator[None]:
        """The trainer begins in the middle of an epoch, and its loader stands there already."""
        module = transformers.trainer
        theirs, skips = getattr(module, SKIP), self._trainer.args.ignore_data_skip

        def stand_still(loader: Any, num_batches: int = 0) -> Any:
            setattr(module, SKIP, theirs)
            return loader

        setattr(module, SKIP, stand_still)
        self._trainer.args.ignore_data_skip = False
        try:
            yield
        finally:
            setattr(module, SKIP, theirs)
            self._trainer.args.ignore_data_skip = skips

    def _callbacks_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Modules that callbacks hold and train: means of weights, a reference that follows the model."""
        trained = set(self._trainer.model.modules()) | set(self._trainer.model_wrapped.modules())
        for kind, callback in named_callbacks(self._trainer).items():
            for name, value in vars(callback).items():
                if isinstance(value, torch.nn.Module) and value not in trained:
                    yield f"{kind}-{name}", value


class _Begins(TrainerCallback):  # type: ignore[misc]  # their types are not read
    """Called after all other callbacks where training begins."""

    def __init__(self, begun: Callable[[], None]) -> None:
        self._begun = begun

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._begun()
