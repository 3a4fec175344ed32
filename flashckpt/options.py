"""Every option there is, frozen, and the only place where the environment is read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flashckpt.errors import OptionError

_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*")


def duration_s(text: str, option: str) -> float:
    """Seconds in a duration such as "30s", "5min" or "1.5h". Raises OptionError for anything else."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise OptionError(
            f"{option}={text!r} is not a duration. Nothing was changed. "
            'Write a number and a unit: "500ms", "30s", "5min", "2h", "1d".'
        )
    return float(match[1]) * _UNITS_S[match[2]]


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which committed steps stay: the newest `last` (at least 2 always stay), and every multiple of
    `every_steps`, counted in steps."""

    last: int = 3
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise OptionError(f"Keep(last={self.last}): at least one step must be kept.")
        if self.every_steps is not None and self.every_steps < 1:
            raise OptionError(f"Keep(every_steps={self.every_steps}): must be a positive number of steps.")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is rarely changed.

    overhead: share of the loop's time that captures may cost with every="auto" (0.01 is 1 %).
    slots: snapshots held in host memory; None takes 3, or 2 where memory does not allow more.
    device_memory: bytes a device that the clone arena may take; None takes up to half of what is free.
    streams: further device streams that write the state, beside the current and the default ones.
    linger: how long the keeper stays after an abnormal death, waiting for the next attempt.
    grace: how long `wait()` and the end of a run go on waiting while nothing is written, or writing fails.
    read_ahead_check: refuse a second batch before the first was trained on.
    threads: native threads for copies; None takes torch's own number.
    watchdog: how long a boundary may be missing before the trainer counts as stuck, a duration; "auto"
        takes it from the run's own steps (10 minutes at least), None watches nothing.
    watchdog_action: what becomes of a stuck trainer. "report" writes its Python stacks into the ledger and
        persists the newest snapshot; "kill" also ends it with SIGKILL, so that its launcher restarts it.
    """

    overhead: float = 0.01
    slots: int | None = None
    device_memory: int | None = None
    streams: Sequence[object] = ()
    linger: str = "30min"
    grace: str = "60s"
    read_ahead_check: bool = True
    threads: int | None = None
    watchdog: str | None = "auto"
    watchdog_action: Literal["report", "kill"] = "report"

    def __post_init__(self) -> None:
        if not 0 < self.overhead < 1:
            raise OptionError(f"overhead={self.overhead}: a share of the loop's time, between 0 and 1.")
        if self.slots is not None and self.slots < 2:
            raise OptionError(f"slots={self.slots}: two are the least (one sealed, one being written).")
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"threads={self.threads}: at least one thread must copy.")
        duration_s(self.linger, "linger")
        duration_s(self.grace, "grace")
        if self.watchdog not in (None, "auto") and duration_s(self.watchdog, "watchdog") <= 0:
            raise OptionError(
                f'watchdog={self.watchdog!r}: no time at all. Write a duration, "auto" or None.'
            )
        if self.watchdog_action not in ("report", "kill"):
            raise OptionError(f'watchdog_action={self.watchdog_action!r}: "report" or "kill".')

    @property
    def linger_s(self) -> float:
        return duration_s(self.linger, "linger")

    @property
    def grace_s(self) -> float:
        return duration_s(self.grace, "grace")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment says of this process: its place in the job, and the job's name."""

    rank: int = 0
    world: int = 1
    job_id: str = ""
    restart_count: int = 0
    runtime_folder: str | None = None

    @classmethod
    def read(cls) -> Environment:
        """Read the launcher's variables: torchrun's, else Slurm's job id. FLASHCKPT_RUNTIME moves the
        runtime folder (tests use it)."""
        get = os.environ.get
        return cls(
            rank=_number("RANK", 0),
            world=_number("WORLD_SIZE", 1),
            job_id=get("TORCHELASTIC_RUN_ID") or get("SLURM_JOB_ID") or "",
            restart_count=_number("TORCHELASTIC_RESTART_COUNT", _number("SLURM_RESTART_COUNT", 0)),
            runtime_folder=get("FLASHCKPT_RUNTIME") or None,
        )


def crash_at() -> str:
    """The point at which a test wants this process to die (see crashpoints.py); empty outside of tests."""
    return os.environ.get("FLASHCKPT_CRASH_AT", "")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
