"""Training processes of these tests, in a process group of their own: held, signalled, let go, read out."""

import json
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import flashckpt
from flashckpt.store import open_store
from tests import run_view, zygote
from tests.events import ledger, whole_lines
from tests.resume.training import key_of, last_of_each
from tests.waiting import until


@dataclass
class Ended:
    """How a process ended: its status as `subprocess` gives it, and what it printed."""

    status: int
    out: list[str]
    err: str


class Process:
    """One program, until it has ended. `held`: it stands still where it was told to. fresh: an interpreter
    of its own runs it, else it is forked from one."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], folder: Path, *, fresh: bool = False
    ) -> None:
        self._out, self._err = folder / "out", folder / "err"
        self._out.unlink(missing_ok=True)
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.popen = zygote.start(
                arguments, fresh=fresh, stdout=out, stderr=err, env=environment, start_new_session=True
            )

    def has_said(self, word: str) -> bool:
        assert self.popen.poll() is None or word in self._out.read_text(), self._err.read_text()
        return word in self._out.read_text()

    def until_held(self) -> None:
        until(lambda: self.has_said("held"), "the hold")

    def said(self) -> list[str]:
        return self._out.read_text().splitlines()

    def until_noted(self, name: str) -> None:
        """Wait until the program has logged that this signal, or notice, ends its loop."""

        def is_logged() -> bool:
            assert self.popen.poll() is None, self._err.read_text()
            return f"{name}: the loop ends" in self._err.read_text()

        until(is_logged, f"{name} to be noted")

    def send(self, name: str, *, group: bool = False) -> None:
        number = getattr(signal, name)
        if group:
            os.killpg(self.popen.pid, number)
        else:
            self.popen.send_signal(number)

    def ended(self, limit_s: float = 120.0) -> Ended:
        status = self.popen.wait(limit_s)
        return Ended(status, self._out.read_text().splitlines(), self._err.read_text())


class Job:
    """One recipe on one run folder. fresh: in interpreters of its own."""

    def __init__(self, folder: Path, recipe: str, *, fresh: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.recipe, self._fresh = folder, recipe, fresh
        self.run, self.log, self.go = folder / "run", folder / "log", folder / "go"

    def start(self, **orders: object) -> Process:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        environment.update(orders.pop("environment", {}))  # type: ignore[call-overload]
        hold_at = str(orders.pop("hold_at", -1))
        options = json.dumps({"every": 1, "persist_every": None, "release": str(self.go), **orders})
        arguments = ["tests.resume.trainer", self.recipe, str(self.run), str(self.log), hold_at, options]
        return Process(arguments, environment, self.folder, fresh=self._fresh)

    def script(self, name: str) -> Process:
        """A script instead of a recipe; held where it says so."""
        arguments = ["tests.signals.scripts", name, str(self.run), str(self.go)]
        return Process(arguments, dict(os.environ), self.folder, fresh=self._fresh)

    def held_script(self, name: str) -> Process:
        process = self.script(name)
        process.until_held()
        return process

    def held(self, hold_at: int, **orders: object) -> Process:
        process = self.start(hold_at=hold_at, **orders)
        process.until_held()
        return process

    def finish(self) -> Ended:
        self._fresh = False  # an interpreter of its own was for the signal
        ended = self.start().ended()
        assert ended.status == 0, ended.err
        return ended

    def steps(self) -> list[int]:
        return flashckpt.steps(self.run)

    def endings(self) -> list[str]:
        """How each attempt ended, as the run's folder says it."""
        return list(run_view.endings(open_store(str(self.run))).values())

    def stops(self) -> list[tuple[int, str]]:
        """The ends that were asked for, as the run's ledger says them."""
        return [(each["step"], each["reason"]) for each in ledger(self.run) if each["event"] == "stop"]

    def records(self) -> dict[object, object]:
        """The last value of each step and of each epoch's code; what was done twice gave the same."""
        return last_of_each(self._lines())

    def times(self) -> dict[object, int]:
        """How often each step, and each epoch's code, was done."""
        return dict(Counter(key_of(*line) for line in self._lines()))

    def _lines(self) -> list[list[object]]:
        return [json.loads(line) for line in whole_lines(self.log)]
