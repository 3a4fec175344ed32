"""What save() and wait() promise: a snapshot that was lost is ordered again or told, never passed over; a
stop in an epoch is not overwritten by what comes after it; options are refused before anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt import OptionError
from tests.checkpointer.test_loop import Job, loader

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"every": "5min"}, {"persist_every": "often"}, {"persist_every": 2.5}]
)
def test_options_are_refused_before_anything_is_restored(tmp_path: Path, options: dict[str, object]) -> None:
    run, job = str(tmp_path / "run"), Job()
    for x in flashckpt.loop(loader(), run, **job.named):
        job.train(x)
    attempts = sorted(path.name for path in (tmp_path / "run" / "attempts").iterdir())
    other = Job()
    before = other.model.weight.detach().clone()
    with pytest.raises(OptionError, match="every"):
        flashckpt.attach(run, **options, **other.named)  # type: ignore[arg-type]
    assert torch.equal(other.model.weight, before)
    assert sorted(path.name for path in (tmp_path / "run" / "attempts").iterdir()) == attempts


