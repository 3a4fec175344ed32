"""A training with the Trainer of transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import transformers

from benchmarks.trainers.gate import Gate
from benchmarks.trainers.settings import TrainerJob
from benchmarks.trainers.workload import Layers, Rows, optimizer_of


class _Steps(transformers.TrainerCallback):  # type: ignore[misc]  # types of transformers are not read
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gate.step(state.global_step)


def train(job: TrainerJob, gate: Gate) -> None:
    """Never returns: the gate ends the process."""
    model, own = Layers(job.state_bytes, job.layers), Path(job.folder, "own")
    saves: dict[str, Any] = {"save_strategy": "no"}
    if job.variant == "own":
        saves = {"save_strategy": "steps", "save_steps": job.save_every, "save_total_limit": 2}
    arguments = transformers.TrainingArguments(
        output_dir=str(own),
        per_device_train_batch_size=job.batch,
        max_steps=1 << 30,
        use_cpu=job.device == "cpu",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        **saves,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(model.width),
        optimizers=(optimizer_of(model), None),
        callbacks=[_Steps(gate)],
    )
    if job.variant in ("plain", "own"):
        trainer.train(resume_from_checkpoint=any(own.glob("checkpoint-*")))
        return
    ours = importlib.import_module("flashckpt.transformers")
    ours.train(trainer, Path(job.folder, "run"), **job.flashckpt_options)
