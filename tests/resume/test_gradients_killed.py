"""Loops that read the gradients of one iteration in the next one, killed with SIGKILL twice: what comes after
is, to the bit, a run that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashckpt
from tests.resume.gradients import READ, STEPS
from tests.resume.training import Trainer, last_of_each

KILLED_IN = 3, 6
GRADIENT_BYTES = 4 * (6 * 5 + 5 + 5 * 2 + 2)


@pytest.mark.parametrize("name", [each.__name__ for each in READ])
def test_a_killed_run_equals_one_that_was_never_stopped(name: str, tmp_path: Path, runtime: Path) -> None:
    reference = Trainer(tmp_path, runtime, name, persist_every=None)
    reference.run, reference.log = tmp_path / "reference", tmp_path / "reference.log"
    reference.finish()
    killed = Trainer(tmp_path, runtime, name, persist_every=None)
    for step in KILLED_IN:
        killed.kill_in_step(step)
    said = killed.finish()
    assert len(killed.resumed_steps()) == len(KILLED_IN), said
    assert last_of_each(killed.records()) == last_of_each(reference.records())
    assert len(reference.records()) == STEPS
    assert f"gradient bytes {GRADIENT_BYTES}" in said


def test_a_run_killed_after_its_first_boundary_equals_one_that_was_not(tmp_path: Path, runtime: Path) -> None:
    """At that boundary no iteration has shown yet that gradients are kept."""
    reference = Trainer(tmp_path, runtime, "never_zeroed", persist_every=None)
    reference.run, reference.log = tmp_path / "reference", tmp_path / "reference.log"
    reference.finish()
    killed = Trainer(tmp_path, runtime, "never_zeroed", persist_every=None)
    killed.kill_in_step(1)
    said = killed.finish()
    assert killed.resumed_steps() == [1], said
    assert last_of_each(killed.records()) == last_of_each(reference.records())


def test_a_loop_that_drops_its_gradients_saves_none_of_their_bytes(tmp_path: Path, runtime: Path) -> None:
    run = Trainer(tmp_path, runtime, "dropped", persist_every=None)
    run.kill_in_step(KILLED_IN[1])
    said = run.finish()
    assert "gradient bytes 0" in said
    assert "bytes of gradients" not in said
    assert flashckpt.steps(str(run.run))[-1] == STEPS
    assert not [name for name in flashckpt.load(str(run.run)) if name.startswith("gradients.")]
