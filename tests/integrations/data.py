"""Small data with random augmentation from Python, NumPy and torch, and a small model with dropout."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tests.integrations.job import DRAW, moment


def seed(number: int = 0) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Rows(Dataset[torch.Tensor]):
    """`count` rows of 8 numbers; augment: changed by all three generators at each draw. name: the moment that
    a draw reports, None for no report."""

    width = 8

    def __init__(self, count: int = 50, *, augment: bool = True, name: str | None = DRAW) -> None:
        self.count, self.augment, self.name = count, augment, name
        self.rows = torch.randn(count, self.width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index].clone()
        if self.augment:
            row += 0.1 * torch.randn(self.width) + 0.1 * random.random()
            if self.name is not None:
                moment(self.name)  # between two random numbers of one sample
            row += 0.01 * float(np.random.rand())
        elif self.name is not None:
            moment(self.name)
        return row


class Stream(IterableDataset[Any]):
    """The samples of a map-style set in their order, divided among the workers of a loader."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, len(self.rows), stride):
            yield self.rows[index]


def model(width: int = Rows.width) -> nn.Module:
    """Parameters, buffers (batch norm) and dropout."""
    return nn.Sequential(nn.Linear(width, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1))


def loss_of(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (net(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
