"""The loop without checkpoints, for the demo's reference: iterates over the loader up to a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from torch.utils.data import DataLoader

T = TypeVar("T")


class PlainLoop(Generic[T]):
    """Draws `steps` batches from `loader`, and restarts it when it is exhausted."""

    def __init__(self, loader: DataLoader[T], *, steps: int) -> None:
        self.completed = 0
        self._loader = loader
        self._steps = steps

    def __iter__(self) -> Iterator[T]:
        while True:
            for batch in self._loader:
                yield batch
                self.completed += 1
                if self.completed == self._steps:
                    return
