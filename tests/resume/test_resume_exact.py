"""Trainers are killed with SIGKILL in the middle of a step; what comes after must equal, bit for bit, a
run that was never stopped. Real processes, real signals, real files."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.processes import end, keepers_of
from tests.resume.recipes import RECIPES
from tests.waiting import until

import flashckpt

ROOT = Path(__file__).parents[2]
HOLDS = {"plain": 10, "workers": 9, "epochs": 7, "accumulation": 11, "amp": 7, "closure": 7, "marked": 8}


class Trainer:
    """One recipe on one run folder, started as often as it takes."""

    def __init__(self, folder: Path, runtime: Path, recipe: str, **options: object) -> None:
        self.run, self.log, self.recipe = folder / "run", folder / "log", recipe
        self.environment = {**os.environ, "FLASHCKPT_RUNTIME": str(runtime)}
        self.options = {"every": 1, "persist_every": 3, **options}

    def start(self, hold_at: int = -1) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.resume.trainer", self.recipe, str(self.run), str(self.log)]
        return subprocess.Popen(
            [*command, str(hold_at), json.dumps(self.options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=ROOT,
        )

    def finish(self) -> str:
        process = self.start()
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip().endswith("finished"), out
        return err

    def kill_in_step(self, step: int) -> None:
        process = self.start(hold_at=step)
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if line != f"held {step}\n":
            process.kill()
            pytest.fail(f"the trainer did not reach step {step}: {line!r} {process.stderr.read()}")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()

    def wait_committed(self) -> None:
        """The keeper outlives the trainer: wait until it has committed the newest snapshot."""
        until(lambda: self.run.exists() and flashckpt.steps(self.run), "a committed step")

    def records(self) -> list[list[object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, object]]:
        lines = [
            line for file in sorted((self.run / "events").iterdir()) for line in file.read_text().splitlines()
        ]
        return [event for event in map(json.loads, lines) if event["event"] == kind and "tier" in event]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[object, object]]]:
    """The records of each recipe's run that was never stopped, made when first asked for."""
    with tempfile.TemporaryDirectory(prefix="flashckpt-test-", dir="/dev/shm") as runtime:

        @functools.cache
        def reference(recipe: str) -> dict[object, object]:
            trainer = Trainer(tmp_path_factory.mktemp(recipe), Path(runtime), recipe)
            trainer.finish()
            return last_of_each(trainer.records())

        yield reference
        end(keepers_of(Path(runtime)))


def last_of_each(records: list[list[object]]) -> dict[object, object]:
    """A step that was done twice, before the kill and after it, must have given the same both times."""
    by_step: dict[object, object] = {}
    for step, value in records:
        assert by_step.setdefault(step, value) == value, f"step {step} went differently the second time"
    return by_step


References = Callable[[str], dict[object, object]]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_killed_run_equals_uninterrupted_run(
    recipe: str, tmp_path: Path, runtime: Path, references: References
) -> None:
    killed, hold = Trainer(tmp_path, runtime, recipe), HOLDS[recipe]
    killed.kill_in_step(hold)
    killed.finish()

    [resume] = killed.events("resume")
    assert resume["tier"] == "memory"
    assert hold - 2 <= int(str(resume["step"])) <= hold, "at most the step in flight and the one being copied"
    assert last_of_each(killed.records()) == references(recipe)
    assert flashckpt.verify(killed.run).ok


@pytest.mark.parametrize("recipe", ["workers", "epochs", "accumulation"])
def test_resume_from_disk_equals_uninterrupted_run(
    recipe: str, tmp_path: Path, runtime: Path, references: References, kill_keepers: Callable[..., None]
) -> None:
    killed = Trainer(tmp_path, runtime, recipe)
    killed.kill_in_step(HOLDS[recipe])
    killed.wait_committed()
    kill_keepers(remove_regions=True)
    killed.finish()

    [resume] = killed.events("resume")
    assert resume["tier"] == "local"
    assert last_of_each(killed.records()) == references(recipe)
