"""Trainers of modules that wrap, tie or compute what they hold, killed with SIGKILL in a step: what
comes after is, to the bit, a run that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.modules import RECIPES, STEPS
from tests.resume.training import Trainer, last_of_each

KILLED_IN = 4


@pytest.mark.parametrize("name", RECIPES)
def test_a_killed_run_equals_one_that_was_never_stopped(name: str, tmp_path: Path, runtime: Path) -> None:
    reference = Trainer(tmp_path, runtime, name, persist_every=None)
    reference.run, reference.log = tmp_path / "reference", tmp_path / "reference.log"
    reference.finish()
    killed = Trainer(tmp_path, runtime, name, persist_every=None)
    killed.kill_in_step(KILLED_IN)
    said = killed.finish()
    [step] = killed.resumed_steps()
    assert 0 < KILLED_IN - 2 <= step <= KILLED_IN, said
    assert last_of_each(killed.records()) == last_of_each(reference.records())
    assert len(reference.records()) == STEPS
