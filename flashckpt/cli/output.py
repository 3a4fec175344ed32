"""Where the shell writes: results to standard output, everything else to standard error.

Owns the one way in which a command ends: with its exit code, and an error as one paragraph (and as one
JSON object where JSON was asked for). Never decides what is shown.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

import typer
from rich.console import Console

from flashckpt.cli.exit_codes import ExitCode, exit_code
from flashckpt.errors import FlashckptError

P = ParamSpec("P")

# Names and numbers are data: no part of them is taken for markup, an emoji or a word to colour.
_PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}


def results() -> Console:
    """Made anew each time: tests, and pipes, exchange the stream under it. A pipe is never wrapped."""
    console = Console(file=sys.stdout, **_PLAIN)
    return console if console.is_terminal else Console(file=sys.stdout, width=_widest(console), **_PLAIN)


def notices() -> Console:
    return Console(file=sys.stderr, soft_wrap=True, **_PLAIN)


def write_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


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
        described: dict[str, object] = {
            "kind": type(error).__name__,
            "message": message,
            "exit_code": int(code),
        }
        for name in ("step", "rank", "path"):
            value = getattr(error, name, None)
            if value is not None:
                described[name] = value
        write_json({"error": described})


def _widest(console: Console) -> int:
    return max(console.width, 240)
