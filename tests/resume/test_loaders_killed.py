"""Trainers over loaders of many kinds, killed with SIGKILL in every epoch: each batch and each random number
of the whole run must be, to the bit, those of a run that was never stopped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.resume.loaders import BATCHES, EPOCHS, EXTRA, LOADERS, place
from tests.resume.training import Trainer, last_of_each

# The last batch of the first epoch, the first of the second one, and one of the third.
KILLS = [place(0, BATCHES - 1), place(1, 0), place(2, 2)]


# One of each way to put a loader back; the others go through the same code with other data.
EACH_WAY = [
    "two persistent workers", "own sampler", "stream, two workers", "generator", "shards", "sticky",
    "torchdata, workers",
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in EACH_WAY else pytest.param(name, marks=pytest.mark.long) for name in LOADERS]
)
def test_killed_in_each_epoch(name: str, tmp_path: Path, runtime: Path) -> None:
    if name.startswith(EXTRA) and importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    reference = Trainer(tmp_path, runtime, name, every=1)
    reference.run, reference.log = tmp_path / "reference", tmp_path / "reference.log"
    reference.finish()
    expected = last_of_each(reference.records())
    killed = Trainer(tmp_path, runtime, name, every=1)
    for step in KILLS:
        killed.kill_in_step(step)
    said = killed.finish()
    assert len(killed.resumed_steps()) == len(KILLS), said
    assert last_of_each(killed.records()) == expected
    assert len(expected) >= EPOCHS * BATCHES
