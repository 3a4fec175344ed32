"""The processes of one framework, and their turns.

All variants live at once and train in turn, a block of steps each: a minute in which the machine is slower is
slower for all of them. After its turn a variant is given the time to end what it does beside the loop. Then
each is killed between two checkpoints, started again, and killed again.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from benchmarks import files
from benchmarks.session import Session
from benchmarks.trainers.settings import TrainerJob

_LIMIT_S = 900.0
_QUIET_S = 1.0
_QUIET_LIMIT_S = 60.0


class TrainingFailed(Exception):
    """A training's process ended without an answer. The message is the last line that it wrote."""


@dataclass
class Training:
    """One variant in a process of its own."""

    job: TrainerJob
    session: Session
    answer: dict[str, Any] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None
    _asked_s: float = 0.0

    def start(self) -> dict[str, Any]:
        """Start it, and wait until its first step is done. Returns seconds from the start of the process to
        its imports' end and to the first step's, and the number of the step at which it began."""
        Path(self.job.folder).mkdir(parents=True, exist_ok=True)
        environment = self.session.environment()
        os.makedirs(environment["FLASHCKPT_RUNTIME"], mode=0o700, exist_ok=True)
        with open(self._log, "w") as log:
            self._asked_s = time.monotonic()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.trainers.job", self.job.dumps()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,
                env=environment,
            )
        found = self._hear()
        return {
            "first_step": found["first_step"],
            "imports_s": found["imported_s"] - self._asked_s,
            "step_done_s": found["now_s"] - self._asked_s,
        }

    def turn(self, steps: int) -> float:
        """Train so many steps. Returns their seconds."""
        self._say({"steps": steps})
        return float(self._hear()["seconds"])

    def die_after(self, steps: int) -> int:
        """Train so many steps; the process is killed as the next one begins. Returns the steps that the run
        had done."""
        done = int(self.answer["step"]) + steps
        self._say({"steps": steps, "dies": True})
        assert self._process is not None
        code = self._process.wait(_LIMIT_S)
        if code != -signal.SIGKILL:
            raise TrainingFailed(self._last_line() or f"exit code {code}")
        return done

    def settle(self) -> None:
        """Wait until nothing is written for it any more."""
        folder, end = Path(self.job.folder), time.monotonic() + _QUIET_LIMIT_S
        before: dict[Path, int] | None = None
        while before != (now := files.sizes(folder)) and time.monotonic() < end:
            before = now
            time.sleep(_QUIET_S)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def _log(self) -> Path:
        return Path(f"{self.job.folder}.log")

    def _say(self, order: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TrainingFailed(self._last_line()) from None

    def _hear(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = _line_of(self._process.stdout)
        if not line:
            self.end()
            raise TrainingFailed(self._last_line() or "it ended without a word")
        self.answer = json.loads(line)
        return self.answer

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [""])[-1][:300]


def _line_of(stream: IO[str]) -> str:
    """The next line; empty where the stream has ended, or nothing comes."""
    ready, _, _ = select.select([stream], [], [], _LIMIT_S)
    return stream.readline() if ready else ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """turns: of each variant. steps: of a turn, a multiple of save_every. kills: of each variant."""

    turns: int
    steps: int
    kills: int
    seed: int = 0


def measure(job: TrainerJob, variants: list[str], plan: Plan, session: Session) -> dict[str, Any]:
    """Turns, then kills. A variant that fails is left out from there on, with its reason in `failed`."""
    found: dict[str, Any] = {"starts": {}, "turns": [], "kills": {}, "failed": {}}
    trainings: dict[str, Training] = {}
    for variant in variants:
        own = replace(job, variant=variant, folder=str(Path(job.folder, variant.replace(" ", "-"))))
        training = Training(own, session)
        try:
            found["starts"][variant] = training.start()
            training.turn(plan.steps)  # the first checkpoint makes pools, slots and files: in no figure
            trainings[variant] = training
        except TrainingFailed as failed:
            found["failed"][variant] = str(failed)
        training.settle()
    try:
        for number in range(plan.turns):
            found["turns"].append(_round(trainings, number, plan.steps, found["failed"]))
        for variant, training in list(trainings.items()):
            try:
                found["kills"][variant] = _killed(training, plan)
            except TrainingFailed as failed:
                found["failed"][variant] = str(failed)
            training.end()
    finally:
        for training in trainings.values():
            training.end()
    return found


def _round(
    trainings: dict[str, Training], number: int, steps: int, failed: dict[str, str]
) -> dict[str, float]:
    """One turn of each, in another order each time: seconds a step."""
    names = list(trainings)
    at = number % max(1, len(names))
    seconds = {}
    for name in names[at:] + names[:at]:
        try:
            seconds[name] = trainings[name].turn(steps) / steps
            trainings[name].settle()
        except TrainingFailed as why:
            failed[name] = str(why)
            del trainings[name]
    return seconds


def _killed(training: Training, plan: Plan) -> list[dict[str, Any]]:
    """Kills at places between two checkpoints on disk that are the same for all variants, at the earliest one
    interval after a start."""
    places, every = random.Random(plan.seed), training.job.save_every
    found = []
    for _ in range(plan.kills):
        until_place = (places.randrange(every) - int(training.answer["step"])) % every
        done = training.die_after(every + until_place)
        # What the keeper still saves of the dead is part of the next start, if that waits for it.
        began = training.start()
        found.append({"done": done, **began, "lost": done - began["first_step"]})
    return found
