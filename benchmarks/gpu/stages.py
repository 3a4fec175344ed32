"""Commands with a limit each, out of one budget. Owns the clock, the ending of what outlasts its limit, and
the file that holds all results so far.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.session import ProcessFailed, Session, TimedOut
from benchmarks.settings import Job, Settings

ROOT = Path(__file__).resolve().parent.parent.parent
# Left at the end for cleaning up and for the summary.
_MARGIN_S = 12.0


class OutOfTime(Exception):
    """Too little of the budget is left; the message says so."""


@dataclass(frozen=True)
class Budget:
    """Seconds from a beginning to an end, for a command or for one of its stages."""

    whole_s: float
    clock: Callable[[], float] = time.monotonic
    margin_s: float = _MARGIN_S
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "began_s", self.clock())

    @property
    def left_s(self) -> float:
        return max(0.0, self.began_s + self.whole_s - self.margin_s - self.clock())

    def share(self, weight: float, later: float) -> Budget:
        """The part of what is left for a stage of this weight, if those after it weigh `later` together. What
        it does not use is theirs; it can take nothing that is."""
        return Budget(self.left_s * weight / (weight + later), self.clock, 0.0)

    def limit(self, most_s: float, *, least_s: float = 0.0) -> float:
        """At most `most_s`, and not beyond the end. Raises OutOfTime where less than `least_s` is left."""
        if self.left_s < max(least_s, 1.0):
            raise OutOfTime(f"not run: no time left ({self.left_s:.0f} s of {self.whole_s:.0f} s)")
        return min(most_s, self.left_s)


class Record:
    """What was found so far: written whole after every change; a kill loses only what is under way."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path, self.found = path, found
        self.write()

    def stage(self, name: str, outcome: str, seconds: float) -> None:
        self.found["stages"].append({"name": name, "outcome": outcome, "seconds": round(seconds, 1)})
        self.write()

    def lacks(self, what: str) -> None:
        if what not in self.found["lacks"]:
            self.found["lacks"].append(what)
            self.write()

    def write(self) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.found, indent=1) + "\n")
        draft.replace(self.path)


@dataclass(frozen=True)
class Ended:
    """code: None where the command was ended at its limit."""

    code: int | None
    seconds: float
    limit_s: float

    @property
    def outcome(self) -> str:
        if self.code is None:
            return f"killed at its limit of {self.limit_s:.0f} s"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return "done" if self.code == 0 else f"exit code {self.code}"


def call(
    command: list[str], *, limit_s: float, log: Path, environment: dict[str, str] | None = None
) -> Ended:
    """Run a command to its end or to its limit; what it started and left goes too."""
    session = Session(command[0], log.parent)
    began = time.monotonic()
    try:
        code = session.call(command, log=log, timeout_s=limit_s, environment=environment)
    finally:
        session.clean()
    return Ended(code, time.monotonic() - began, limit_s)


def cut_short_at(limit_s: float) -> str:
    """What is said of a command that ran out of its stage's time."""
    return f"cut short after {limit_s:.0f} s: no time left"


def reason_of(found: dict[str, Any]) -> str:
    """Why something was not measured, or not to its end; "" where it was."""
    return str(found.get("failed") or found.get("no_time") or "")


def measure(
    session: Session,
    module: str,
    settings: Settings,
    *,
    limit_s: float,
    most_s: float,
    peer: str = "",
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One measuring process; its report as far as it came. `failed`: why there is none, or no more; `no_time`
    instead where it was ended at a limit that is less than `most_s`, the time that it is meant to have."""
    data = session.folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    result, path = session.folder / f"{module}.result.json", session.folder / f"{module}.job.json"
    result.unlink(missing_ok=True)
    Job(settings=settings, peer=peer, folder=str(data), result=str(result), extra=extra or {}).write(path)
    failure: dict[str, str] = {}
    try:
        session.run([module, str(path)], timeout_s=limit_s, may_die=True)
    except TimedOut as failed:
        cut_short = limit_s < most_s
        failure = {"no_time": cut_short_at(limit_s)} if cut_short else {"failed": str(failed)}
    except ProcessFailed as failed:
        failure = {"failed": str(failed)}
    reported: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    return {**failure, **reported} or {"failed": "killed before it could report"}
