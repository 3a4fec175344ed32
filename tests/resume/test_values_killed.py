"""A trainer with 210 MB of plain values is killed with SIGKILL: what comes after is, to the bit, a run that
was never stopped, from memory and from storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import flashckpt
from tests.resume.training import Trainer, last_of_each
from tests.resume.values import FLOATS, STEPS


@pytest.mark.long
def test_a_replay_buffer_is_committed_and_comes_back(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    reference = Trainer(tmp_path, runtime, "replay", persist_every=None)
    reference.run, reference.log = tmp_path / "reference", tmp_path / "reference.log"
    reference.finish()
    killed = Trainer(tmp_path, runtime, "replay", persist_every=1)
    killed.kill_in_step(2)
    killed.kill_in_step(3)
    killed.wait_committed()
    kill_keepers(remove_regions=True)
    said = killed.finish()
    assert [event["tier"] for event in killed.events("resume")] == ["memory", "local"], said
    assert last_of_each(killed.records()) == last_of_each(reference.records())
    assert flashckpt.steps(str(killed.run))[-1] == STEPS
    assert flashckpt.verify(str(killed.run)).ok
    loaded = flashckpt.load(str(killed.run))
    assert loaded["own.observations"].shape == (FLOATS + 100_000 * STEPS,)
