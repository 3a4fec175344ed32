"""Loaders that a trainer's library has wrapped: a run that is stopped and resumed has the batches of a plain
loop over the same wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import flashckpt
from tests.checkpointer.test_loop import Job

pytestmark = pytest.mark.usefixtures("runtime")
_EPOCHS, _BATCHES = 4, 3


class _FabricDataLoader:
    """What Fabric's wrapper does, without a device."""

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self.__dict__.update(dataloader.__dict__)
        self._dataloader, self._device, self._num_iter_calls = dataloader, None, 0

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        self._dataloader.sampler.set_epoch(self._num_iter_calls)  # type: ignore[attr-defined]
        self._num_iter_calls += 1
        yield from iter(self._dataloader)


_FabricDataLoader.__module__ = "lightning_fabric.wrappers"


def of_fabric(loader: DataLoader[Any]) -> Any:
    """The loader as `setup_dataloaders` gives it on one of several ranks."""
    wrappers = pytest.importorskip("lightning_fabric.wrappers")
    return wrappers._FabricDataLoader(loader, torch.device("cpu"))


def wrapped(wrap: Callable[[DataLoader[Any]], Any], workers: int) -> Any:
    data = torch.arange(12.0 * 4).view(12, 4)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)  # type: ignore[arg-type]
    return wrap(DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers))  # type: ignore[arg-type]


def train(run: Path, loader: Any, stop_at: int | None) -> list[torch.Tensor]:
    """The batches of one start of the run."""
    job, batches = Job(), []
    with flashckpt.attach(run, every=1, **job.named) as checkpointer:
        for _ in checkpointer.epochs(_EPOCHS):
            for batch in checkpointer.batches(loader):
                batches.append(batch)
                job.train(batch)
                if checkpointer.completed + 1 == stop_at:
                    checkpointer.stop()
            if checkpointer.stopping:
                break
    return batches


@pytest.mark.parametrize(
    ("wrap", "stop_at", "workers"),
    [(_FabricDataLoader, 4, 0), (_FabricDataLoader, 3, 2), (of_fabric, 3, 0), (of_fabric, 8, 2)],
)
def test_a_resume_has_the_batches_of_a_plain_loop(
    wrap: Callable[[DataLoader[Any]], Any],
    stop_at: int,
    workers: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = wrapped(wrap, workers)
    expected = [batch for _ in range(_EPOCHS) for batch in plain]
    first = train(tmp_path / "run", wrapped(wrap, workers), stop_at)
    rest = train(tmp_path / "run", wrapped(wrap, workers), None)
    assert len(first) == stop_at
    assert torch.equal(torch.stack(first + rest), torch.stack(expected))
    assert "drawn again" not in caplog.text
