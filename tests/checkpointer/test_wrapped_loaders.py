"""Loaders that a trainer's library has wrapped: a run that is stopped and resumed has the batches of a plain
loop over the same wrapper."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import flashckpt
from tests.checkpointer.test_loop import Job

pytestmark = pytest.mark.usefixtures("runtime")
_EPOCHS, _BATCHES = 4, 3


def of_fabric(loader: DataLoader[Any]) -> Any:
    """The loader as `setup_dataloaders` gives it on one of several ranks."""
    wrappers = pytest.importorskip("lightning_fabric.wrappers")
    return wrappers._FabricDataLoader(loader, torch.device("cpu"))


def wrapped(workers: int) -> Any:
    data = torch.arange(12.0 * 4).view(12, 4)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)  # type: ignore[arg-type]
    return of_fabric(DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers))  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("stop_at", "workers"), [(4, 0), (3, 2), (8, 2)])
def test_a_resume_has_the_batches_of_a_plain_loop(
    stop_at: int, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = wrapped(workers)
    expected = [batch for _ in range(_EPOCHS) for batch in plain]
    first = train(tmp_path / "run", wrapped(workers), stop_at)
    rest = train(tmp_path / "run", wrapped(workers), None)
    assert len(first) == stop_at
    assert torch.equal(torch.stack(first + rest), torch.stack(expected))
    assert "drawn again" not in caplog.text
