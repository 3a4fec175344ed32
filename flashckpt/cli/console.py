"""Where the shell writes, and how: results to standard output, everything else to standard error; numbers as
people read them (JSON always has the plain number); tables and one bar. Never decides what is shown.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

# Names and numbers are data: no part of them is taken for markup, an emoji or a word to colour.
_PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BAR_AFTER_S = 1.0


def results() -> Console:
    """Made anew each time: tests, and pipes, exchange the stream under it. A pipe is never wrapped."""
    console = Console(file=sys.stdout, **_PLAIN)
    if not console.is_terminal:
        console.width = max(console.width, 240)
    return console


def notices() -> Console:
    return Console(file=sys.stderr, soft_wrap=True, **_PLAIN)


def write_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def size(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(num_bytes)
    for unit in _BINARY:
        if value < 1024 or unit == _BINARY[-1]:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def count(number: int, what: str) -> str:
    """(1, "step") -> "1 step"; (2, "step") -> "2 steps"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def local_time(seconds: float) -> str:
    """Seconds since 1970 as this machine's clock shows them."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def table(*columns: Column) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD)


def number(name: str, style: str = "") -> Column:
    return Column(name, justify="right", no_wrap=True, style=style)


def word(name: str) -> Column:
    return Column(name, no_wrap=True)


def text(name: str) -> Column:
    """What may be long."""
    return Column(name, overflow="fold")


class Bar:
    """One bar for whatever takes longer than a second; on a terminal only. A `Watcher` of a recovery."""

    def __init__(self, console: Console, stage: str = "looking", after_s: float = _BAR_AFTER_S) -> None:
        self._console, self._after_s = console, after_s
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(stage, total=None)
        self._began_s = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        self._bar.reset(self._task, description=name, total=None)
        self._draw()

    def progress(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total or None)
        self._draw()

    def say(self, text: str) -> None:
        self._console.print(f"flashckpt: {text}", style="yellow")

    def _draw(self) -> None:
        if not self._bar.live.is_started and time.monotonic() - self._began_s >= self._after_s:
            self._bar.start()
