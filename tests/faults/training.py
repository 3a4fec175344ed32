"""A training in the test's own process, a boundary at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import flashckpt
from flashckpt.errors import PersistError
from tests.waiting import until


class Training:
    """A model that changes in every step; a snapshot at every boundary, none persisted unless asked."""

    def __init__(self, run: Path, checkpointer: flashckpt.Checkpointer, model: nn.Module) -> None:
        self.run, self.checkpointer, self.model = run, checkpointer, model

    def goes_on(self, steps: int = 20) -> None:
        """Boundaries are passed and snapshots sealed, whatever the keeper does: a boundary that waited for
        storage would never return while storage hangs."""
        before = self.checkpointer.completed
        sealed = self.checkpointer.report()["snapshots"]
        for _ in range(steps):
            self.step()
            self.checkpointer._capture.wait()
        assert self.checkpointer.completed == before + steps
        assert self.checkpointer.report()["snapshots"] - sealed >= steps // 2

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 1
        self.checkpointer.step()

    def save(self) -> int:
        """Train a step and order it to be persisted. Returns the step."""
        self.step()
        self.checkpointer.save()
        return self.checkpointer.completed

    def recovers(self) -> None:
        """The next save works, and everything that is committed verifies."""
        step = self.save()
        until(self._is_well, "a commit after the fault")
        assert flashckpt.steps(self.run)[-1] == step
        assert flashckpt.verify(self.run).ok
        loaded = flashckpt.load(self.run)
        for name, value in self.model.state_dict().items():
            assert torch.equal(loaded[f"model.{name}"], value)

    def _is_well(self) -> bool:
        try:
            self.checkpointer.wait()
        except PersistError:
            return False
        return True


@contextmanager
def training(run: Path, *, size: int = 256, grace: str = "3s") -> Iterator[Training]:
    model = nn.Linear(size, size)
    options = flashckpt.Options(grace=grace)
    with flashckpt.attach(run, every=1, persist_every=None, options=options, model=model) as checkpointer:
        checkpointer.save()
        checkpointer.wait()  # until there are slots and a first step is committed
        yield Training(run, checkpointer, model)
