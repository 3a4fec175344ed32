"""A small training whose next step depends on all of its state, and what it has after some steps."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import flashckpt
from tests.dcp.states import equal


class Net(nn.Module):
    """Tied weights, buffers of both kinds, dropout, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.GELU())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(self.embedding(tokens))) * self.mask)  # type: ignore[no-any-return]


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    @classmethod
    def made(cls, seed: int = 0, kind: str = "adamw") -> "Training":
        """With two groups, whose parameters alternate in the module."""
        torch.manual_seed(seed)
        model = Net()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer
        if kind == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
        else:
            optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
        return cls(model, optimizer, scheduler)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    @property
    def state_dicts(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.state.items()}

    def step(self) -> float:
        """One step on a batch of torch's random numbers. Returns the loss."""
        loss: Tensor = self.model(torch.randint(0, 11, (8,))).float().square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def trained(steps: int = 5, kind: str = "adamw") -> Training:
    training = Training.made(kind=kind)
    seed_all(1)
    for _ in range(steps):
        training.step()
    return training


def is_free(run: Path) -> bool:
    """Whether an import left no files."""
    return not run.exists() or not any(run.iterdir())


class Reduced:
    """Is pickled as a call: `Reduced(function, arguments)`."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def check_goes_on(run: Path, expected: Training, seed: int = 7, kind: str = "adamw", **more: Any) -> Training:
    """Check that a resumed training repeats the next steps of `expected`, which torch loaded."""
    training = Training.made(seed=99, kind=kind)
    seed_all(seed)
    with flashckpt.attach(run, every=None, state=training.state, **more) as checkpointer:
        assert checkpointer.resumed is not None
        assert equal(training.state_dicts, expected.state_dicts)
        losses = [training.step() for _ in checkpointer.batches(range(3))]
    seed_all(seed)
    assert losses == [expected.step() for _ in range(3)]
    assert equal(training.state_dicts, expected.state_dicts)
    return training
