"""The live state of the runs in this folder, and what is compared of one. Fixed once a run is kept."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

_BUFFERS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint16, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


class Net(nn.Module):
    """A tied weight, a layer in another memory order, a frozen one, and a buffer of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.encoder.weight
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.arange(512.0).view(32, 16), requires_grad=False)
        for dtype in _BUFFERS:
            self.register_buffer(f"of_{_name(dtype)}", torch.zeros(3, dtype=torch.float32).to(dtype))
        self.register_buffer("empty", torch.zeros(0, 3))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Job:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)
        self.own: dict[str, Any] = {"seen": 0, "names": ["a", "b"], "pair": (1, 2.5)}

    @property
    def named(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "own": self.own}

    def train(self) -> None:
        x = torch.ones(2, 4)
        loss = (self.model.encoder(x) + self.model.tied(x)).square().sum()
        (loss + self.model.conv(torch.ones(1, 2, 3, 3)).square().sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.own["seen"] += 1
        with torch.no_grad():
            for dtype in _BUFFERS:
                buffer = getattr(self.model, f"of_{_name(dtype)}")
                buffer.copy_(torch.tensor([1.0, 0.5, 3.0]).mul(self.own["seen"]).to(dtype))


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bytes, row-major."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    about = f"{_name(tensor.dtype)} {list(tensor.shape)} ".encode()
    return hashlib.sha256(about + data).hexdigest()
