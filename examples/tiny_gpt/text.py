"""Real text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


def library_sources(num_bytes: int) -> bytes:
    """The first `num_bytes` of the standard library's modules, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            return bytes(text[:num_bytes])
    return bytes(text)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of `context` bytes, each with its target: the window one byte later."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1]
        return window[:-1], window[1:]
