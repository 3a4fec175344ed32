"""Lightning keeps the best weights, flashckpt resumes. Kill it at any moment and run it again:

python examples/lightning_best.py --folder /tmp/best
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flashckpt.lightning


class Regression(lp.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x) - x.sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.log("val", (self.net(x) - x.sum(1, keepdim=True)).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def rows(count: int, seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--epochs", type=int, default=5)
    chosen = options.parse_args()
    lp.seed_everything(0)
    best = ModelCheckpoint(
        chosen.folder / "best", monitor="val", save_weights_only=True, enable_version_counter=False
    )
    trainer = lp.Trainer(
        max_epochs=chosen.epochs,
        callbacks=[best, flashckpt.lightning.Checkpoint(chosen.folder / "run")],
        default_root_dir=chosen.folder,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), DataLoader(rows(64, 1), 8, shuffle=True), DataLoader(rows(16, 2), 8))
    print(f"step {trainer.global_step}, best {best.best_model_path}, val {best.best_model_score:.6f}")


if __name__ == "__main__":
    main()
