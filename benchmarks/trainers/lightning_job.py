"""A training with the Trainer of Lightning."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.trainers.gate import Gate
from benchmarks.trainers.settings import TrainerJob
from benchmarks.trainers.workload import Layers, Rows, optimizer_of


class _Module(lightning.LightningModule):  # type: ignore[misc]  # types of Lightning are not read
    def __init__(self, model: Layers) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)


class _Steps(lightning.Callback):  # type: ignore[misc]
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._gate.step(trainer.global_step)


def train(job: TrainerJob, gate: Gate) -> None:
    """Never returns: the gate ends the process."""
    model, own = Layers(job.state_bytes, job.layers), Path(job.folder, "own")
    callbacks: list[Any] = [_Steps(gate)]
    if job.variant == "own":
        callbacks.append(ModelCheckpoint(own, every_n_train_steps=job.save_every, save_last=True))
    elif job.variant != "plain":
        ours = importlib.import_module("flashckpt.lightning")
        callbacks.append(ours.Checkpoint(Path(job.folder, "run"), **job.flashckpt_options))
    trainer = lightning.Trainer(
        accelerator="cpu" if job.device == "cpu" else "gpu",
        devices=1,
        max_steps=1 << 30,
        callbacks=callbacks,
        enable_checkpointing=job.variant == "own",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=str(own),
    )
    loader = DataLoader(Rows(model.width), batch_size=job.batch, shuffle=True)
    last = own / "last.ckpt"
    trainer.fit(_Module(model), loader, ckpt_path=str(last) if last.exists() else None)
