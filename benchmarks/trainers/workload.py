"""The model and the data that all trainers here train: square layers, and batches made from their number."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

_BYTES = 12  # a parameter, and two values of AdamW, fp32
_ITEMS = 1 << 20  # more than any run draws: no epoch ends, and their order takes 8 MiB


class Layers(nn.Module):
    """`layers` square layers that have, with AdamW's state, about `state_bytes`. Takes what transformers and
    Lightning hand to it, and returns the loss."""

    def __init__(self, state_bytes: int, layers: int) -> None:
        super().__init__()
        self.width = math.isqrt(state_bytes // (_BYTES * layers))
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(layers))
        self.drop = nn.Dropout(0.1)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + self.drop(torch.tanh(layer(hidden)))
        target = inputs if labels is None else labels
        return {"loss": (hidden - target).square().mean()}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of random numbers, each of its own seed."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randn(self._width, generator=generator)
        return {"inputs": row, "labels": row.flip(0)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)
