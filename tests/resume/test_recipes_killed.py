"""Trainers with loaders, modules and loops of many kinds, killed with SIGKILL in a step: what comes after is,
to the bit, a run that was never stopped."""

from pathlib import Path

import pytest

import flashckpt
from tests.resume import gradients, modules
from tests.resume.loaders import BATCHES, EPOCHS, LOADERS, place
from tests.resume.training import Trainer, last_of_each, uninterrupted

GRADIENT_BYTES = 4 * (6 * 5 + 5 + 5 * 2 + 2)


def killed_in(steps: list[int], trainer: Trainer, folder: Path, runtime: Path) -> str:
    """Kill it in each of the steps, and compare. Returns what it said when it came to its end."""
    expected = uninterrupted(folder, runtime, trainer.recipe, **trainer.options)
    for step in steps:
        trainer.kill_in_step(step)
    said = trainer.finish()
    assert len(trainer.resumed_steps()) == len(steps), said
    assert last_of_each(trainer.records()) == expected
    return said


@pytest.mark.parametrize("name", LOADERS)
def test_each_loader_goes_on_with_its_next_batch(name: str, tmp_path: Path, runtime: Path) -> None:
    """Killed in the first batch of the second epoch, and in a later one of it."""
    assert name != "hugging face" or pytest.importorskip("datasets")
    killed = Trainer(tmp_path, runtime, name)
    killed_in([place(1, 0), place(1, 3)], killed, tmp_path, runtime)
    assert len(last_of_each(killed.records())) >= EPOCHS * BATCHES


@pytest.mark.parametrize("name", modules.RECIPES)
def test_modules_that_wrap_tie_or_compute_what_they_hold(name: str, tmp_path: Path, runtime: Path) -> None:
    killed = Trainer(tmp_path, runtime, name, persist_every=None)
    said = killed_in([4], killed, tmp_path, runtime)
    assert 2 <= killed.resumed_steps()[0] <= 4, said


@pytest.mark.parametrize("name", [each.__name__ for each in gradients.READ])
def test_gradients_that_the_next_iteration_reads(name: str, tmp_path: Path, runtime: Path) -> None:
    """At the first boundary no iteration has shown yet that gradients are kept."""
    killed = Trainer(tmp_path, runtime, name, persist_every=None)
    said = killed_in([1, 3, 6], killed, tmp_path, runtime)
    assert killed.resumed_steps()[0] == 1
    assert f"gradient bytes {GRADIENT_BYTES}" in said


def test_a_loop_that_drops_its_gradients_saves_none_of_their_bytes(tmp_path: Path, runtime: Path) -> None:
    run = Trainer(tmp_path, runtime, "dropped", persist_every=None)
    run.kill_in_step(3)
    said = run.finish()
    assert "gradient bytes 0" in said
    assert "bytes of gradients" not in said
    assert flashckpt.steps(run.run)[-1] == gradients.STEPS
    assert not [name for name in flashckpt.load(run.run) if name.startswith("gradients.")]
