"""Cases of Lightning's Trainer. Each is a function of its job; see harness.py."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as lp
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)  # fmt: skip
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader

import flashckpt.lightning
from tests.integrations import data
from tests.integrations.job import (
    ACCUMULATION,
    BETWEEN,
    EPOCH_END,
    SAVE,
    VALIDATION,
    Job,
    current,
    gradients,
    random_numbers,
)  # fmt: skip

Loader = Callable[[], Any]
TERMINATED = 7


class Model(lp.LightningModule):
    """Logs means, a maximum, and a value of some batches alone; validates with random numbers."""

    def __init__(
        self, loader: Loader, *, schedule: str = "step", manual: bool = False, metric: bool = False
    ) -> None:
        super().__init__()
        self.net, self.loader, self.schedule = data.model(), loader, schedule
        self.automatic_optimization = not manual
        self.metric = torchmetrics.MeanMetric() if metric else None

    @property
    def job(self) -> Job:
        """No attribute: callbacks copy the module."""
        return current[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.job.step(number)
        self.job.batch(number, batch)
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if batch_idx % 3 == 0:
            self.log("some", loss, on_step=False, on_epoch=True)
        if self.metric is not None:
            self.metric(loss)
            self.log("metric", self.metric, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            return self.step_both(batch, loss)
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches:
            self.job.moment(ACCUMULATION)
        return loss

    def loss(self, batch: Any) -> torch.Tensor:
        rows = batch if isinstance(batch, list | tuple) else [batch]
        return torch.stack([data.loss_of(self.net, each) for each in rows if each is not None]).mean()

    def step_both(self, batch: Any, loss: torch.Tensor) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        loss = self.loss(batch)
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.job.moment(VALIDATION)
        self.log("val", self.loss(batch) + 0.1 * torch.randn(()))

    def on_train_epoch_end(self) -> None:
        self.job.moment(EPOCH_END)

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            return [
                torch.optim.AdamW(self.net[0].parameters(), 1e-2),
                torch.optim.SGD(self.net[3].parameters(), 1e-3, momentum=0.9),
            ]
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        if self.schedule == "plateau":
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            how = {"scheduler": schedule, "monitor": "val", "interval": "epoch"}
        else:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
            how = {"scheduler": schedule, "interval": self.schedule}
        return {"optimizer": optimizer, "lr_scheduler": how}

    def train_dataloader(self) -> Any:
        return self.loader()

    def val_dataloader(self) -> Any:
        return DataLoader(data.Rows(8, augment=False, name=None), 4)


class Log(Logger):
    """Passes on to the job what is logged: after a batch, and in a validation that follows it."""

    name, version = "log", "0"

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        batches = self.model.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.model.job.log(f"step {step}, batch {batches}", metrics)

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        """No hyperparameters."""


class Ends(Callback):
    """Reports the place behind the last batch of an epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.job.moment(BETWEEN)


def trainer_of(job: Job, callbacks: list[Any], **options: Any) -> lp.Trainer:
    """Silent, on one CPU; it writes checkpoints where a callback does."""
    named: dict[str, Any] = {
        "max_epochs": 3, "accelerator": "cpu", "devices": 1, "logger": False, "log_every_n_steps": 2,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": job.folder,
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks),
    }  # fmt: skip
    return lp.Trainer(callbacks=callbacks, **{**named, **options})


def fit(
    job: Job,
    model: Model,
    *callbacks: Callback,
    own: Any = (),
    datamodule: Any = None,
    before: Callable[[Any], object] | None = None,
    **options: Any,
) -> Any:
    """Train, after `before`, and return the record."""
    every = [*callbacks, Ends()]
    if job.flashckpt:
        every.append(flashckpt.lightning.Checkpoint(job.run, own=own, every=1, persist_every=5))
    trainer = trainer_of(job, every, **{"logger": Log(model), **options})
    if before is not None:
        before(trainer)
    job.moments_in(trainer.strategy, "save_checkpoint", SAVE)
    try:
        trainer.fit(model, datamodule=datamodule)
    except SIGTERMException:
        raise SystemExit(TERMINATED) from None  # its own status is that of success
    return record(trainer, model, callbacks)


def record(trainer: Any, model: Model, callbacks: Any) -> dict[str, Any]:
    folder = Path(trainer.default_root_dir, "theirs")
    held = [each for callback in callbacks for each in vars(callback).values()]
    return {
        "model": model.state_dict(),
        # Lightning drops them before it makes others: a resume brings back which there are, not their values.
        "gradients": [name for name, each in gradients(model).items() if each is not None],
        "optimizers": [each.state_dict() for each in trainer.optimizers],
        "schedules": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "random": random_numbers(),
        "metrics": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "loops": trainer.fit_loop.state_dict(),
        "callbacks": [_named(each.state_dict()) for each in callbacks],
        "averages": [each.state_dict() for each in held if isinstance(each, nn.Module)],
        "files": sorted(os.listdir(folder)) if folder.exists() else [],
    }


def _named(state: Any) -> Any:
    """Paths by their last part: the folder of a run is its own."""
    if isinstance(state, dict):
        return {_named(key): _named(value) for key, value in state.items()}
    return os.path.basename(state) if isinstance(state, str) else state


def rows(count: int = 26, *, stream: bool = False, augment: bool = True, **options: Any) -> Loader:
    """A loader of batches of 4."""

    def make() -> DataLoader[Any]:
        made = data.Rows(count, augment=augment)
        if stream:
            return DataLoader(data.Stream(made), 4, **options)
        return DataLoader(made, 4, shuffle=True, **options)

    return make


# ---- cases


def map_style(job: Job) -> Any:
    return fit(job, Model(rows()))


def workers(job: Job) -> Any:
    """Accumulation and validation in mid-epoch, too."""
    model = Model(rows(num_workers=2), schedule="epoch")
    return fit(job, model, accumulate_grad_batches=3, val_check_interval=5)


def accumulated(job: Job) -> Any:
    model = Model(rows(), schedule="epoch")
    return fit(job, model, accumulate_grad_batches=3, val_check_interval=2)


def plateau(job: Job) -> Any:
    """ModelCheckpoint and EarlyStopping, which ends the run."""
    save = ModelCheckpoint(
        job.folder / "theirs", monitor="val", save_top_k=2, save_last=True, enable_version_counter=False
    )
    model = Model(rows(), schedule="plateau")
    return fit(job, model, save, EarlyStopping("val", patience=1), max_epochs=6)


def manual(job: Job) -> Any:
    return fit(job, Model(rows(), manual=True))


def stream(job: Job) -> Any:
    return fit(job, Model(rows(stream=True)))


def max_steps(job: Job) -> Any:
    return fit(job, Model(rows()), max_epochs=-1, max_steps=18)


def average(job: Job) -> Any:
    return fit(job, Model(rows()), EMAWeightAveraging(decay=0.9))


def metrics(job: Job) -> Any:
    return fit(job, Model(rows(), metric=True))


def several_loaders(job: Job) -> Any:
    """options: `mode`, and `stream` for loaders without a length."""
    stream = bool(job.options.get("stream"))

    def loaders() -> CombinedLoader:
        return CombinedLoader([rows(24, stream=stream)(), rows(12, stream=stream)()], job.options["mode"])

    return fit(job, Model(loaders))


def ranks(job: Job) -> Any:
    """DDP on gloo; each rank has random numbers of its own."""
    data.seed(job.rank + 1)
    model = Model(rows(52))
    return fit(job, model, accumulate_grad_batches=2, devices=2, strategy="ddp", use_distributed_sampler=True)


def own_launcher(job: Job) -> Any:
    """In the environment that Lightning's own launcher makes: WORLD_SIZE and LOCAL_RANK without RANK."""
    del os.environ["RANK"]
    data.seed(job.rank + 1)
    how = {"devices": 2, "strategy": "ddp", "plugins": LightningEnvironment(), "max_epochs": 1}
    return fit(job, Model(rows(16)), **how)


class Searched(Model):
    """Takes part in a search of a rate or a batch size, which is no part of the job."""

    rate, batch_size = 0.01, 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_search = not any(isinstance(each, Ends) for each in self.trainer.callbacks)
        return self.loss(batch) if is_search else super().training_step(batch, batch_idx)


def rate_searched(job: Job) -> Any:
    """By `Tuner`, which calls fit once before."""
    model = Searched(rows())
    how = {"num_training": 5, "attr_name": "rate"}
    return fit(job, model, before=lambda trainer: Tuner(trainer).lr_find(model, **how))


def rate_searched_in_fit(job: Job) -> Any:
    return fit(job, Searched(rows()), LearningRateFinder(num_training_steps=5, attr_name="rate"))


def size_searched(job: Job) -> Any:
    model = Searched(rows())
    how = {"steps_per_trial": 1, "max_trials": 2}
    return fit(job, model, before=lambda trainer: Tuner(trainer).scale_batch_size(model, **how))


class Raises(Callback):
    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        if trainer.global_step == 9:
            raise ValueError("a failure in mid-epoch")


def failed(job: Job) -> Any:
    """What `map_style` does, by two calls of fit on one trainer: the first one fails."""
    model, checkpoint = Model(rows()), flashckpt.lightning.Checkpoint(job.run, every=1)
    trainer = trainer_of(job, [Raises(), checkpoint], logger=Log(model))
    try:
        trainer.fit(model)
    except ValueError:
        del trainer.callbacks[0]
    loops = (trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop)
    overridden = [
        name for each in loops for name in vars(each) if inspect.isfunction(vars(type(each)).get(name))
    ]
    trainer.fit(model)
    return {**record(trainer, model, ()), "overridden": overridden}


def switched_off(job: Job) -> Any:
    checkpoint = flashckpt.lightning.Checkpoint(job.run, enabled=False)
    found: list[Any] = []

    class Asks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            checkpoint.checkpointer.save()
            found.append([checkpoint.checkpointer.stopping, checkpoint.checkpointer.resumed])

    trainer_of(job, [Asks(), checkpoint], max_epochs=1).fit(Model(rows(8)))
    return {"found": found, "made": os.path.exists(job.run)}


class Counts(Callback):
    """State in all the ways that a callback can have it."""

    def __init__(self) -> None:
        self.batches, self.added, self.plain = 0, 0, 0
        self.recent: list[float] = []
        self.metric = torchmetrics.MeanMetric()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        torch.randn(3)
        self.plain = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        torch.randn(2)
        self.recent = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.batches, self.added, self.plain = self.batches + 1, self.added + 2, self.plain + 3
        self.recent.append(float(outputs["loss"]))
        self.metric.update(outputs["loss"].detach())
        pl_module.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = (self.added, len(checkpoint["state_dict"]))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.added = checkpoint["added"][0]


class Hooked(Model):
    seen = 0
    last = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.last = self.last / 2 + loss.item()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["last"] = torch.tensor(self.last, dtype=torch.float64)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.last = checkpoint["last"].item()


class Rows(lp.LightningDataModule):
    draws = 0

    def train_dataloader(self) -> Any:
        return rows()()

    def val_dataloader(self) -> Any:
        return DataLoader(data.Rows(8, augment=False, name=None), 4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.draws += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.draws = state_dict["draws"]


def hooks(job: Job) -> Any:
    model, counts, loaders = Hooked(rows()), Counts(), Rows()
    model.train_dataloader, model.val_dataloader = loaders.train_dataloader, loaders.val_dataloader
    own = () if job.options.get("forget") else ("Counts.plain", "recent", "module.seen")
    found = fit(job, model, counts, own=own, datamodule=loaders)
    state = {name: vars(counts)[name] for name in ("batches", "added", "plain", "recent")}
    return {**found, "counts": state, "seen": model.seen, "last": model.last, "draws": loaders.draws}


def continued(job: Job) -> Any:
    """What `map_style` does, by three calls of fit: one is stopped, one ends after fewer epochs."""
    checkpoint = flashckpt.lightning.Checkpoint(job.run, every=1, persist_every=5)

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == 9:
                checkpoint.checkpointer.stop()

        def state_dict(self) -> dict[str, Any]:
            return {"at": 9}

    model = Model(rows())
    trainer = trainer_of(job, [Stop(), checkpoint], max_epochs=2, logger=Log(model))
    trainer.fit(model)
    stopped = trainer.global_step, trainer.state.status.value, checkpoint.checkpointer.stop_reason
    model = Model(rows())
    trainer = trainer_of(job, [checkpoint], max_epochs=2, logger=Log(model))
    trainer.fit(model)
    ended = trainer.global_step
    trainer.validate(model, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    overridden = [name for name in ("_run_stage",) if name in vars(trainer)]
    overridden += [name for name in vars(trainer.fit_loop.epoch_loop) if name.startswith("on_")]
    loader = type(trainer.train_dataloader).__name__
    return {
        **record(trainer, model, ()), "stopped": stopped, "ended": ended, "overridden": overridden,
        "loader": loader,
    }  # fmt: skip


class Found(Callback):
    """The best checkpoints that other callbacks know where training begins."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        kept = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]
        self.found = {str(each.monitor): Path(each.best_model_path).parent.name for each in kept}


def several_checkpoints(job: Job) -> Any:
    """An epoch more in each attempt. options: monitored, by a ModelCheckpoint each."""
    found = Found()
    kept = [ModelCheckpoint(job.folder / name, monitor=name) for name in job.options["monitored"]]
    fit(job, Model(rows()), *kept, found, max_epochs=job.task.attempt + 1)
    return found.found


def names(job: Job) -> Any:
    """The release of the job's options is used, and has the names that flashckpt relies on."""
    assert lp.__version__ == job.options["release"]
    assert lp.__version__ in flashckpt.lightning.TESTED
    flashckpt.lightning.check_release()
    return {}


def refused(job: Job) -> Any:
    """Each refusal has its message, and starts nothing."""

    class Iterates(Model):
        def training_step(self, dataloader_iter: Any) -> Any:
            return None

    theirs = job.folder / "theirs.ckpt"
    trainer = trainer_of(job, [], max_epochs=1)
    trainer.fit(Model(rows()))
    trainer.save_checkpoint(theirs)

    def refuses(words: str, *callbacks: Callback, model: Any = None, how: Any = None, **named: Any) -> None:
        def start() -> None:
            checkpoint = flashckpt.lightning.Checkpoint(job.run, every=1, **named)
            trainer = trainer_of(job, [*callbacks, checkpoint], max_epochs=1)
            trainer.fit(model or Model(rows()), **(how or {}))

        with pytest.raises(flashckpt.OptionError, match=words) as error:
            start()
        assert "Nothing was started" in str(error.value)
        assert not os.path.exists(job.run)

    refuses("two callbacks", flashckpt.lightning.Checkpoint(job.run))
    refuses("load_from_checkpoint before fit", how={"ckpt_path": theirs, "weights_only": False})
    refuses("StochasticWeightAveraging: it replaces the schedulers", StochasticWeightAveraging(1e-3))
    refuses("training_step draws batches itself", model=Iterates(rows()))
    refuses("own= names Missing", own=("Missing.count",))
    refuses("no option colour", colour="red")

    def on_advance_end(self: Any, data_fetcher: Any, more: Any = None) -> None:
        """Another release's."""

    with mock.patch.object(type(trainer.fit_loop.epoch_loop), "on_advance_end", on_advance_end):
        refuses(r"epoch_loop takes \(self, data_fetcher, more\) and not \(self, data_fetcher\)")
    sequential = Model(lambda: CombinedLoader([rows()(), rows()()], "sequential"))
    with pytest.raises(ValueError, match="does not support the `CombinedLoader"):
        trainer_of(job, [flashckpt.lightning.Checkpoint(job.run)], max_epochs=1).fit(sequential)
    return {}
