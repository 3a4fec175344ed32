"""The common parts of all commands: arguments (RUN, STEP@ATTEMPT, --json), exit codes, errors (one paragraph;
with --json also one JSON object), and output: results to standard output, all else to standard error, with
numbers for people (in JSON plain numbers). Never decides what is shown.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, NoReturn, ParamSpec

import typer
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
from rich.text import Text

from flashckpt.errors import DamagedError, DivergedError, FlashckptError, RunError, UsageError
from flashckpt.format.names import MAX_STEP, AttemptName, CommitName, SnapshotId, parse_at
from flashckpt.printable import escaped
from flashckpt.recovery.report import Watcher
from flashckpt.replication.mirror import known_remote
from flashckpt.store import open_store
from flashckpt.store.base import Store

P = ParamSpec("P")
# Names and numbers are data, and never markup, an emoji or a word to colour.
_PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BAR_AFTER_S = 1.0
_REASONS = ("detail", "problem")

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run: a folder, or a URL as s3://bucket/run.")]
Remote = Annotated[
    str | None,
    typer.Option("--remote", metavar="URL", help='Its remote too; "auto": the one it was last trained with.'),
]
Step = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP[@ATTEMPT]", help="The one a resume would take if left out."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


class StepName(NamedTuple):
    """A step number, and the attempt or the snapshot named with it; None for those that are not named."""

    step: int | None
    at: AttemptName | SnapshotId | None


def step_name(text: str | None) -> StepName:
    """Parse 1200, 1200@000002-7fa3c1d2, or 1200@000002-7fa3c1d2:1234. BadParameter for any other text."""
    if text is None:
        return StepName(None, None)
    digits, sign, name = text.partition("@")
    at = parse_at(name) if sign else None
    if not (digits.isascii() and digits.isdigit()) or int(digits[:20]) > MAX_STEP or (sign and at is None):
        raise typer.BadParameter(
            f"{text!r} is neither a step (1200) nor a step of an attempt (1200@000002-7fa3c1d2). "
            "`flashckpt ls RUN --all` shows both."
        )
    return StepName(int(digits), at)


def remote_of(store: Store, named: str | None) -> Store | None:
    """The store that --remote names, None if it was not given. BadParameter if "auto" finds none."""
    if named != "auto":
        return None if named is None else open_store(named)
    if url := known_remote(store):
        return open_store(url)
    raise typer.BadParameter(
        f"--remote auto: the ledgers of the newest attempts of {store.url} name no remote. Give its URL."
    )


class ExitCode(IntEnum):
    """Exit codes of all commands; `recover` ends with the worst that applies. Scripts depend on them: a test
    pins them, and docs/errors.md lists them."""

    WELL = 0
    """Done. recover: all needed snapshots are saved, and nothing is damaged."""
    DAMAGED = 1
    """Damage was found: at rest, or (recover) in a snapshot in memory, which was freed."""
    USAGE = 2
    """Wrong usage. export: OUT exists and --force was not given."""
    UNUSABLE_RUN = 3
    """The run cannot be used as asked: held by a job or another recovery, not there, no such step.
    recover: training cannot resume from any step."""
    FAILED = 4
    """Any other failure. recover: a snapshot could not be saved; it is still where it was."""
    INTERRUPTED = 130


def exit_code(error: BaseException) -> ExitCode:
    """The exit code for an error."""
    for kind, code in (
        (DamagedError, ExitCode.DAMAGED),
        (DivergedError, ExitCode.DAMAGED),
        (UsageError, ExitCode.USAGE),
        (RunError, ExitCode.UNUSABLE_RUN),
        (KeyboardInterrupt, ExitCode.INTERRUPTED),
    ):
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED


def ends(command: Callable[P, ExitCode]) -> Callable[P, NoReturn]:
    """Make a command end the program with the code that it returns, or with that of its error."""

    @functools.wraps(command)
    def ending(*args: P.args, **kwargs: P.kwargs) -> NoReturn:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except (Exception, KeyboardInterrupt) as error:
            code = exit_code(error)
            _report_error(error, code, run=str(kwargs.get("run", "")), as_json=bool(kwargs.get("as_json")))
        raise typer.Exit(int(code))

    return ending


def _report_error(error: BaseException, code: ExitCode, *, run: str, as_json: bool) -> None:
    if not isinstance(error, (FlashckptError, OSError, KeyboardInterrupt)):
        sys.stderr.write(escaped(traceback.format_exc()))
    message = str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    if isinstance(error, OSError):
        # The error names a file within the run, or no file.
        message = (
            f"{run}: {message}. Committed steps are as whole as they were. Repair the storage or the path, "
            "and run this again."
        )
    notices().print(f"flashckpt: {message}", style="red")
    if as_json:
        fields = {"kind": type(error).__name__, "message": message, "exit_code": int(code)}
        known = {name: getattr(error, name, None) for name in ("step", "rank", "path")}
        write_json({"error": fields | {name: value for name, value in known.items() if value is not None}})


# ---- output


class _Plain(Console):
    """Shows texts without markup and with control characters escaped: names, reasons and hosts come from the
    checkpoint, which may be foreign. rich renders each text of a line and of a cell here."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(escaped(text), **how)


def results() -> Console:
    """The console for results. A new one for each call, since tests replace the stream. A pipe is not
    wrapped."""
    console = _Plain(file=sys.stdout, **_PLAIN)
    if not console.is_terminal:
        console.width = max(console.width, 240)
    return console


def notices() -> Console:
    return _Plain(file=sys.stderr, soft_wrap=True, **_PLAIN)


def write_json(value: object) -> None:
    """Write a value whose dataclasses become objects, and the names of attempts texts."""
    sys.stdout.write(json.dumps(value, indent=2, default=_plain) + "\n")


def fields_of(row: Any) -> dict[str, Any]:
    """The fields of a dataclass: those of a checkpoint's name stand beside the others, and an empty reason is
    None."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(row):
        value = getattr(row, each.name)
        if isinstance(value, CommitName):
            found |= fields_of(value)
        else:
            found[each.name] = value or None if each.name in _REASONS else value
    return found


def _plain(value: object) -> object:
    return str(value) if isinstance(value, AttemptName) else fields_of(value)


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
    """A column of long texts."""
    return Column(name, overflow="fold")


class Bar(Watcher):
    """A progress bar for work that takes longer than a second; on a terminal only."""

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
