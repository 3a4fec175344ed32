"""Ray Train with flashckpt: the worker function uses `flashckpt.loop`, like a plain loop.

    python examples/ray_train/train.py RUN [WORKERS [FAIL_AT]]

A worker group that Ray Train restarts resumes from the newest snapshot. The workers report only metrics, so
Ray Train neither uploads nor deletes files of the run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flashckpt

EPOCHS, REPORT_EVERY = 4, 8


def train(config: dict[str, Any]) -> None:
    """Runs in each worker. `prepare_model` wraps the model in DDP; the loader needs no
    `prepare_data_loader`."""
    torch.manual_seed(0)
    context = ray.train.get_context()
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    sampler: Any = DistributedSampler(rows, context.get_world_size(), context.get_world_rank())
    loader = DataLoader(rows, 4, sampler=sampler)

    batches = flashckpt.loop(
        loader, config["run"], epochs=EPOCHS, every=1, persist_every=8, model=model, optimizer=optimizer
    )
    for (batch,) in batches:
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = batches.completed + 1
        if config.get("fail_at") == step and batches.checkpointer.resumed is None:
            raise RuntimeError("a failure, to test the restart")
        if step % REPORT_EVERY == 0:
            # All workers wait for each other here.
            ray.train.report({"step": step, "loss": loss.item()})


def main(run: str, workers: str = "1", fail_at: str = "0") -> None:
    ray.init(include_dashboard=False, _node_ip_address="127.0.0.1")
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"run": str(Path(run).resolve()), "fail_at": int(fail_at)},
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig(
            storage_path=str(Path(run).resolve().parent / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
