"""`enabled=False` and FLASHCKPT=off: the loop as it is without the library, with the same calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import flashckpt
from flashckpt import OptionError
from tests.checkpointer.test_loop import Job, loader

PROGRAM = """
import sys, threading
import flashckpt
class Stateful:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
seen = []
batches = flashckpt.loop(range(3), "run", steps=7, every=1, thing=Stateful())
for batch in batches:
    seen.append(batch)
with flashckpt.attach("run", thing=Stateful()) as ckpt:
    for epoch in ckpt.epochs(2):
        for position, batch in ckpt.enumerate([5, 6]):
            ckpt.save()
        ckpt.save()
        ckpt.wait()
print(seen, batches.completed, ckpt.completed, ckpt.resumed, ckpt.report())
print(threading.active_count(), sorted(m for m in sys.modules if m in (
    "torch", "numpy", "flashckpt._native", "flashckpt.keeper.client", "flashckpt.checkpointer.resume")))
"""


@pytest.mark.process
def test_nothing_is_started_written_or_imported(tmp_path: Path) -> None:
    environment = {**os.environ, "FLASHCKPT": "off", "FLASHCKPT_RUNTIME": str(tmp_path / "runtime")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1, 2, 0, 1, 2, 0] 7 4 None {}", "1 []"]
    assert list(tmp_path.iterdir()) == []
    assert done.stderr.count("FLASHCKPT=off: nothing is restored from run, and nothing is saved") == 2


def test_the_numbers_are_those_of_a_run_that_is_saved(tmp_path: Path, runtime: Path) -> None:
    def train(enabled: bool) -> tuple[list[int], torch.Tensor]:
        job, seen = Job(), []
        torch.manual_seed(5)
        run = tmp_path / str(enabled)
        batches = flashckpt.loop(loader(), run, epochs=2, enabled=enabled, **job.named)
        for x in batches:
            job.train(x)
            seen.append(batches.completed)
            seen.append(len(batches))
        with flashckpt.attach(run, enabled=enabled, **job.named) as ckpt:
            data: Any = torch.arange(32.0).view(8, 4)
            sampler: Any = DistributedSampler(data, num_replicas=1, rank=0)
            sampled = DataLoader(data, batch_size=2, sampler=sampler)
            before = ckpt.completed
            for epoch in ckpt.epochs(2):
                if not enabled or ckpt.resumed is None or epoch >= 0:
                    for x in ckpt.batches(sampled):
                        job.train(x)
                        seen.append(ckpt.completed - before)
        return seen, job.model.weight.detach()

    first = train(False)
    assert not (tmp_path / "False").exists()
    seen, weight = train(False)
    assert seen == first[0]
    assert torch.equal(weight, first[1])
    with_us, saved = train(True)
    assert with_us[: len(seen) // 2] == seen[: len(seen) // 2]
    assert saved.shape == weight.shape


def test_it_ends_where_it_is_told_to() -> None:
    batches = flashckpt.loop(range(100), "never/made", enabled=False)
    for _ in batches:
        if batches.completed == 3:
            batches.stop()
    assert batches.completed == 4
    assert batches.checkpointer.stop_reason == "stop"
    assert list(batches) == []
    assert not Path("never").exists()


def test_a_loaders_attributes_are_handed_on() -> None:
    data = loader()
    with flashckpt.attach("never/made", enabled=False) as ckpt:
        batches: Any = ckpt.batches(data)
        assert batches.dataset is data.dataset
        assert len(batches) == 6
        ckpt.step()
        assert ckpt.completed == 1
        for _ in batches:
            ckpt.step()
            break
        assert ckpt.completed == 2


def test_options_are_looked_at_all_the_same() -> None:
    with pytest.raises(OptionError, match="every"):
        flashckpt.attach("never/made", every="often", enabled=False)  # type: ignore[arg-type]
