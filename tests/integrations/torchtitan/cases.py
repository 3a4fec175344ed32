"""torchtitan's own optimizers, schedules, loader and base class of managers, in a copy of its
`Trainer.train`, call for call: its trainer asks for an accelerator."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError, ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig

from flashckpt.torchtitan import FlashCheckpointManager
from tests.integrations.job import (
    ACCUMULATION,
    BETWEEN,
    DRAW,
    SAVE,
    VALIDATION,
    Job,
    gradients,
    moment,
    random_numbers,
)  # fmt: skip
from tests.integrations.torchtitan import STEPS

VOCABULARY = 90


class Text(IterableDataset[Any]):
    """As torchtitan's text data sets: packs a stream into samples and keeps what is left over; with noise, as
    that of Flux has it."""

    def __init__(self, documents: int, noise: bool) -> None:
        self.documents, self.noise = documents, noise
        self.document, self.tokens = 0, list[int]()

    def __iter__(self) -> Any:
        while self.document < self.documents:
            while len(self.tokens) < 16:
                first = self.document
                self.tokens += [(first * 7 + k * k) % VOCABULARY for k in range(5 + first % 4)]
                self.document += 1
            x, self.tokens = torch.tensor(self.tokens[:16]), self.tokens[16:]
            if self.noise:
                x[torch.randint(0, 16, ())] = 7
            moment(DRAW)
            yield {"input": x}, x.roll(-1)

    def state_dict(self) -> dict[str, Any]:
        return {"document": self.document, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.document, self.tokens = state["document"], list(state["tokens"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, 16), nn.Dropout(0.2)
        self.output = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.dropout(self.embedding(x)))


class Trainer:
    """torchtitan.trainer.Trainer, as far as a checkpoint manager sees it."""

    def __init__(self, job: Job) -> None:
        self.job, self.accumulated = job, int(job.options.get("accumulated", 1))
        self.step = self.ntokens_seen = 0
        self.stop_at = job.options.get("stop_at")
        self.net = Net()
        groups = [
            ParamGroupConfig(pattern="embedding", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3}),
        ]
        self.optimizers = OptimizersContainer(
            OptimizersContainer.Config(implementation="for-loop", param_groups=groups), model_parts=[self.net]
        )
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.dataloader: Any = ParallelAwareDataloader(
            Text(int(job.options.get("documents", 1 << 30)), bool(job.options.get("noise", True))),
            dp_rank=0, dp_world_size=1, batch_size=4,
            num_workers=int(job.options.get("workers", 0)), snapshot_every_n_steps=5 * self.accumulated,
        )  # fmt: skip
        every = int(job.options.get("every", 1))
        ours = FlashCheckpointManager.Config(enable=True, every=every, interval=5 * every)
        config = ours if job.flashckpt else None
        self.checkpointer = (config or Nothing.Config()).build(
            dataloader=self.dataloader, model_parts=[self.net], optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers, states={"train_state": self}, sd_adapter=None,
            base_folder=str(job.folder),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def batch_generator(self, loader: Any) -> Any:
        batches = iter(loader)
        while True:
            try:
                inputs, labels = next(batches)
            except StopIteration as ex:
                raise DataloaderExhaustedError from ex
            yield inputs, labels

    def train_step(self, batches: Any) -> None:
        self.optimizers.zero_grad()
        drawn = [next(batches) for _ in range(self.accumulated)]
        # The boundary of the iteration before is at the first draw.
        self.job.step(self.step)
        self.job.batch(self.step, drawn)
        total = 0.0
        for inputs, labels in drawn:
            self.ntokens_seen += labels.numel()
            found = self.net(inputs["input"]).flatten(0, 1)
            loss = nn.functional.cross_entropy(found, labels.flatten()) / self.accumulated
            loss.backward()
            total += loss.item()
            self.job.moment(ACCUMULATION)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.job.log(self.step, {"loss": total, "tokens": self.ntokens_seen})

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        batches = self.batch_generator(self.dataloader)
        while self.step < STEPS:
            self.step += 1
            try:
                self.train_step(batches)
            except DataloaderExhaustedError:
                break
            self.job.moment(BETWEEN)
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
            self.job.moment(SAVE)
            if self.step % 4 == 0 or self.step == STEPS:
                self.job.moment(VALIDATION)
                self.job.log(f"validation {self.step}", {"loss": torch.rand(())})
            if self.step == self.stop_at and self.job.task.attempt == 0:
                self.checkpointer._run.checkpointer.stop()


class Nothing(BaseCheckpointManager):  # type: ignore[misc]
    """The plain run: no checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        enable: bool = False

    def __init__(self, config: Config, **parts: Any) -> None:
        self.enable, self.save_future = config.enable, None

    def _load(self, step: int = -1) -> bool:
        return False

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        return False

    def _maybe_wait_for_staging(self) -> None: ...

    def _wait_for_saving(self) -> None: ...

    def _close(self) -> None: ...


def train(job: Job) -> dict[str, Any]:
    """options: accumulated, workers, documents, every (steps from one snapshot to the next), stop_at (a step
    after which the first attempt is stopped)."""
    trainer = Trainer(job)
    try:
        trainer.train()
    except Exception:
        trainer.checkpointer.close()
        raise
    trainer.checkpointer.close()
    return {
        "net": trainer.net.state_dict(), "gradients": gradients(trainer.net), "random": random_numbers(),
        "optimizers": [each.state_dict() for each in trainer.optimizers],
        "schedulers": trainer.lr_schedulers.state_dict(), "trainer": trainer.state_dict(),
    }  # fmt: skip
