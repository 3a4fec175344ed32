"""Trainers are killed with SIGKILL in the middle of a step; what comes after must equal, bit for bit, a
run that was never stopped. Real processes, real signals, real files."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashckpt
from tests.processes import end, keepers_of
from tests.resume.recipes import RECIPES
from tests.resume.training import Trainer, last_of_each, uninterrupted

HOLDS = {"plain": 10, "workers": 9, "epochs": 7, "accumulation": 11, "amp": 7, "closure": 7, "marked": 8}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[object, object]]]:
    """The records of each recipe's run that was never stopped, made when first asked for."""
    with tempfile.TemporaryDirectory(prefix="flashckpt-test-", dir="/dev/shm") as runtime:

        @functools.cache
        def reference(recipe: str) -> dict[object, object]:
            return uninterrupted(tmp_path_factory.mktemp(recipe), Path(runtime), recipe)

        yield reference
        end(keepers_of(Path(runtime)))


References = Callable[[str], dict[object, object]]


def after_a_kill(killed: Trainer) -> dict[object, object]:
    """What a trainer, which has not trained yet, has printed of each step once it was killed and went on."""
    hold = HOLDS[killed.recipe]
    killed.kill_in_step(hold)
    killed.finish(fresh=True)  # nothing of the interpreter that was killed is in the next one, as in any job

    [resume] = killed.events("resume")
    assert resume["tier"] == "memory"
    assert hold - 2 <= int(str(resume["step"])) <= hold, "at most the step in flight and the one being copied"
    assert flashckpt.verify(str(killed.run)).ok
    return last_of_each(killed.records())


def after_memory_is_lost(
    killed: Trainer, kill_keepers: Callable[..., None], tier: str = "local"
) -> dict[object, object]:
    """The same, where it can go on from storage, or a cache, alone."""
    killed.kill_in_step(HOLDS[killed.recipe])
    killed.wait_committed()
    kill_keepers(remove_regions=True)
    killed.finish(fresh=killed.recipe == "workers")

    [resume] = killed.events("resume")
    assert resume["tier"] == tier
    return last_of_each(killed.records())


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_killed_run_equals_uninterrupted_run(
    recipe: str, tmp_path: Path, runtime: Path, references: References
) -> None:
    assert after_a_kill(Trainer(tmp_path, runtime, recipe)) == references(recipe)


@pytest.mark.parametrize(
    ("recipe", "copies"), [("workers", False), ("epochs", True), ("accumulation", False)]
)
def test_resume_from_disk_equals_uninterrupted_run(
    recipe: str,
    copies: bool,
    tmp_path: Path,
    runtime: Path,
    references: References,
    kill_keepers: Callable[..., None],
) -> None:
    killed = Trainer(tmp_path, runtime, recipe, copies=copies)
    assert after_memory_is_lost(killed, kill_keepers) == references(recipe)
