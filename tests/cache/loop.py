"""A run that is trained in this process, whose keeper is a process of its own: weights that say their step,
and a MiB that never changes, which slots share."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import flashckpt
from tests.waiting import until_room, until_slots


class Model(nn.Module):
    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.arange(1 << 18, dtype=torch.float32), requires_grad=False)
        self.weight = nn.Parameter(torch.zeros(numbers))


class Training:
    """Attach on the making; `numbers` floats change. `options` are those of `attach`."""

    def __init__(self, run: str | Path, cache: Path | None, numbers: int = 1 << 18, **options: Any) -> None:
        self.model = Model(numbers)
        self._optimizer = torch.optim.SGD([self.model.weight], lr=1.0)
        self.made = flashckpt.attach(
            run, **{"every": 1, "persist_every": 1} | options, cache=cache, model=self.model,
            optimizer=self._optimizer,
        )  # fmt: skip
        self.check()

    @property
    def resumed(self) -> tuple[int, str]:
        """The step that it has resumed, and from which tier."""
        return self.made.resumed.step, self.made.resumed.tier

    def train(self, to: int, *, saves: bool = False) -> None:
        """Each step adds one to all weights. Every boundary is captured; with `saves` each is to be
        persisted, else those that the loop's schedule takes."""
        while self.made.completed < to:
            until_slots(self.made)
            self.model.weight.grad = -torch.ones_like(self.model.weight)
            self._optimizer.step()
            self.made.step()
            if saves:
                self.made.save()
            until_room(self.made)
        self.check()

    def check(self) -> None:
        """The weights are those of the step."""
        found = self.model.weight.detach()
        assert torch.equal(found, torch.full_like(found, float(self.made.completed)))
        assert torch.equal(self.model.frozen.detach(), torch.arange(1 << 18, dtype=torch.float32))
