"""What every command takes (RUN, STEP@ATTEMPT, --json) and how it ends: with an exit code, and an error as
one paragraph (and as one JSON object where JSON was asked for)."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, NamedTuple, NoReturn, ParamSpec

import typer

from flashckpt.cli.console import notices, write_json
from flashckpt.errors import DamagedError, FlashckptError, RunError, UsageError
from flashckpt.format.names import MAX_STEP, AttemptName

P = ParamSpec("P")

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run: a folder or a file:// URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


class StepName(NamedTuple):
    """A step, and the attempt whose step is meant where it was named."""

    step: int
    attempt: AttemptName | None


def step_name(text: str) -> StepName:
    """1200, or 1200@000002-7fa3c1d2. Wrong usage for anything else."""
    digits, at, name = text.partition("@")
    attempt = AttemptName.parse(name) if at else None
    if not (digits.isascii() and digits.isdigit()) or int(digits[:20]) > MAX_STEP or (at and attempt is None):
        raise typer.BadParameter(
            f"{text!r} is neither a step (1200) nor a step of an attempt (1200@000002-7fa3c1d2). "
            "`flashckpt ls RUN --all` shows both."
        )
    return StepName(int(digits), attempt)


class ExitCode(IntEnum):
    """What each code says, of every command; `recover` ends with the worst that holds. Scripts depend on
    them: pinned by a test, listed in docs/errors.md."""

    WELL = 0
    """Done. recover: all that survived and still counts is saved, and nothing is damaged."""
    DAMAGED = 1
    """Damage was found: bytes at rest, or (recover) a snapshot in memory that was let go for it."""
    USAGE = 2
    """Wrong usage. export: OUT is there already and --force was not given."""
    UNUSABLE_RUN = 3
    """The run cannot be used as asked: held by a job or another recovery, not there, no such step.
    recover: training could not go on from any step. prune: nothing may be deleted yet."""
    FAILED = 4
    """Anything else. recover: something could not be saved; it is still where it was."""
    INTERRUPTED = 130


def exit_code(error: BaseException) -> ExitCode:
    """The code with which a command ends that `error` ended."""
    for kind, code in (
        (DamagedError, ExitCode.DAMAGED),
        (UsageError, ExitCode.USAGE),
        (RunError, ExitCode.UNUSABLE_RUN),
        (KeyboardInterrupt, ExitCode.INTERRUPTED),
    ):
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED


def ends(command: Callable[P, ExitCode]) -> Callable[P, NoReturn]:
    """A command that ends the program with the code it returns, or with its error's."""

    @functools.wraps(command)
    def ending(*args: P.args, **kwargs: P.kwargs) -> NoReturn:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except (Exception, KeyboardInterrupt) as error:
            code = exit_code(error)
            _tell(error, code, run=str(kwargs.get("run", "")), as_json=bool(kwargs.get("as_json")))
        raise typer.Exit(int(code))

    return ending


def _tell(error: BaseException, code: ExitCode, *, run: str, as_json: bool) -> None:
    if not isinstance(error, (FlashckptError, OSError, KeyboardInterrupt)):
        traceback.print_exc()
    message = str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    if isinstance(error, OSError):
        # The system names a file within the run, or none at all.
        message = (
            f"{run}: {message}. What is committed is as whole as it was. Mend the storage or the path, and "
            "run this again."
        )
    notices().print(f"flashckpt: {message}", style="red")
    if as_json:
        told = {"kind": type(error).__name__, "message": message, "exit_code": int(code)}
        known = {name: getattr(error, name, None) for name in ("step", "rank", "path")}
        write_json({"error": told | {name: value for name, value in known.items() if value is not None}})
