"""FSDP2 inside HF Trainer and Lightning, on one GPU over NCCL and on CPUs over gloo. Options of a job:
`device`, "cuda" or "cpu"."""

import os
import socket
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from transformers import Trainer

from tests.integrations import data
from tests.integrations.hf.cases import Sentences, arguments, model
from tests.integrations.hf.cases import train as train_hf
from tests.integrations.job import Job
from tests.integrations.lightning.cases import Model, fit, rows


def begin() -> None:
    """A job of one rank has the environment of torchrun, too: FSDP2 asks for a process group."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip


def transformers(job: Job) -> dict[str, Any]:
    begin()
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    args = arguments(
        job.folder, use_cpu=job.options["device"] == "cpu", fsdp="full_shard", fsdp_config=layers,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    return train_hf(job, Trainer(model(), args, train_dataset=Sentences(40)))


class _Sharded(Model):
    def configure_model(self) -> None:
        for layer in self.net.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def lightning(job: Job) -> Any:
    begin()
    data.seed(1)
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    device = "cpu" if job.options["device"] == "cpu" else "gpu"
    return fit(
        job, _Sharded(rows(32)), accumulate_grad_batches=2, accelerator=device, devices=ranks,
        strategy=strategy,
    )  # fmt: skip


def scaled(job: Job) -> Any:
    """fp16 with a GradScaler, not sharded."""
    begin()
    data.seed(1)
    return fit(job, Model(rows(26)), accelerator="gpu", devices=1, precision="16-mixed")
