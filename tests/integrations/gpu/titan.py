"""torchtitan's own Trainer with its debug model, which asks for a GPU and Triton; no network."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torchtitan.components.dataloader import ParallelAwareDataloader

from flashckpt.torchtitan import FlashCheckpointManager
from tests.integrations import data
from tests.integrations.gpu.fsdp2 import begin
from tests.integrations.job import Job, gradients, random_numbers
from tests.integrations.torchtitan.cases import Nothing, Text

TOKENS, STEPS = 16, 18


class _Documents(Text):
    def __iter__(self) -> Iterator[Any]:
        for sample, labels in super().__iter__():
            yield {**sample, "positions": torch.arange(TOKENS)}, labels


class _Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        def build(self, **found: Any) -> Any:
            return ParallelAwareDataloader(
                _Documents(1 << 30, True),
                dp_rank=found["dp_rank"], dp_world_size=found["dp_world_size"],
                batch_size=found["local_batch_size"], snapshot_every_n_steps=1,
            )  # fmt: skip


def config(job: Job, files: Path) -> Any:
    # Late: it imports Triton.
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    found = llama3_debugmodel()
    Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>")).save(
        str(files / "tokenizer.json")
    )
    found.hf_assets_path, found.dump_folder = str(files), str(job.folder)
    found.training.seq_len, found.training.local_batch_size = TOKENS, 4
    found.training.steps, found.training.disable_cuda_graphs = STEPS, True
    found.dataloader, found.validator.enable = _Loader.Config(), False
    ours = FlashCheckpointManager.Config(enable=True, every=1, interval=5)
    found.checkpoint = ours if job.flashckpt else Nothing.Config()
    return found


def trainer(job: Job) -> dict[str, Any]:
    begin()
    data.seed(1)
    files = job.folder / "tokenizer"
    files.mkdir(parents=True, exist_ok=True)
    made = config(job, files).build()
    step, log = made.train_step, made.metrics_processor.log

    def train_step(batches: Any) -> Any:
        job.step(made.step)
        return step(batches)

    def logged(number: int, loss: float, *arguments: Any, **named: Any) -> Any:
        job.log(number, {"loss": loss})
        return log(number, loss, *arguments, **named)

    made.train_step, made.metrics_processor.log = train_step, logged
    made.train()
    made.close()
    [model] = made.model_parts
    return {
        "model": {name: each.detach() for name, each in model.named_parameters()},
        "gradients": gradients(model),
        "optimizers": [each.state_dict() for each in made.optimizers.optimizers],
        "schedulers": made.lr_schedulers.state_dict(),
        "random": random_numbers(),
        "trainer": made.state_dict(),
    }
