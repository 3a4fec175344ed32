"""A training process of these tests: started, killed in a step, started again, read out."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import flashckpt
from tests import zygote
from tests.events import ledger, whole_lines
from tests.waiting import until


class Trainer:
    """One recipe on one run folder, started as often as it takes."""

    program: Sequence[str] = ("tests.resume.trainer",)

    def __init__(self, folder: Path, runtime: Path, recipe: str, **options: object) -> None:
        self.run, self.log, self._err, self.recipe = folder / "run", folder / "log", folder / "err", recipe
        self.environment = {**os.environ, "FLASHCKPT_RUNTIME": str(runtime)}
        self.options = {"every": 1, "persist_every": 3, **options}

    def start(self, hold_at: int = -1, *, fresh: bool = False) -> zygote.Program:
        """fresh: in an interpreter of its own."""
        module = [*self.program, self.recipe, str(self.run), str(self.log)]
        module += [str(hold_at), json.dumps(self.options)]
        with open(self._err, "wb") as err:
            return zygote.start(module, fresh=fresh, stdout=zygote.PIPE, stderr=err, env=self.environment)

    def finish(self, *, fresh: bool = False) -> str:
        """Run it to its end. Returns what it wrote to its standard error."""
        process = self.start(fresh=fresh)
        with process.stdout:
            out = process.stdout.read()
        err = self._ended(process)
        assert process.returncode == 0, err
        assert out.strip().endswith("finished"), out
        return err

    def kill_in_step(self, step: int, *, fresh: bool = False) -> None:
        process = self.start(hold_at=step, fresh=fresh)
        line = process.stdout.readline()
        said = self.kill(process)
        assert line == f"held {step}\n", f"the trainer did not reach step {step}: {line!r} {said}"

    def kill(self, process: zygote.Program) -> str:
        """Returns what it had written to its standard error."""
        process.kill()
        said = self._ended(process)
        process.stdout.close()
        return said

    def _ended(self, process: zygote.Program) -> str:
        process.wait(timeout=240)
        return self._err.read_text()

    def wait_committed(self) -> None:
        """The keeper outlives the trainer: wait until it has committed the newest snapshot."""
        until(lambda: self.run.exists() and flashckpt.steps(self.run), "a committed step")

    def records(self) -> list[list[object]]:
        return [json.loads(line) for line in whole_lines(self.log)]

    def resumed_steps(self) -> list[int]:
        """The steps that the attempts resumed from, in their order."""
        return [int(str(event["step"])) for event in self.events("resume")]

    def events(self, kind: str) -> list[dict[str, object]]:
        return [event for event in ledger(self.run) if event["event"] == kind]


def key_of(step: object, value: object) -> object:
    """A step; or an epoch, whose code runs under the step of its last batch's boundary, as the next iteration
    does."""
    first = value[0] if isinstance(value, list) else None
    return first if str(first).startswith("epoch") else step


def last_of_each(records: list[list[object]]) -> dict[object, object]:
    """A step, or an epoch's code, that was done twice, before the kill and after it, must have given the same
    both times."""
    by_step: dict[object, object] = {}
    for step, value in records:
        key = key_of(step, value)
        assert by_step.setdefault(key, value) == value, f"step {key} went differently the second time"
    return by_step


def uninterrupted(folder: Path, runtime: Path, recipe: str, **options: object) -> dict[object, object]:
    """The records of a run that is never stopped."""
    (folder / "uninterrupted").mkdir()
    trainer = Trainer(folder / "uninterrupted", runtime, recipe, **options)
    trainer.finish()
    return last_of_each(trainer.records())
