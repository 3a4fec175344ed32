"""The example of Ray Train: a worker that fails is restarted, and ends with the weights of a plain run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flashckpt

ROOT = Path(__file__).parents[3]


def _plain() -> dict[str, Any]:
    """The example's loop, without Ray and flashckpt."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    sampler: Any = DistributedSampler(rows, 1, 0)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(rows, 4, sampler=sampler):
            loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.long  # Ray's own start takes 20 seconds of a CPU
@pytest.mark.process
def test_a_failed_worker_continues(tmp_path: Path, runtime: Path) -> None:
    pytest.importorskip("ray")
    said = subprocess.run(
        [sys.executable, "examples/ray_train/train.py", str(tmp_path / "run"), "1", "20"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    assert "resumed from step 19" in said.stdout + said.stderr
    saved = flashckpt.load(tmp_path / "run", only="model", strip=True)
    expected = _plain()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
