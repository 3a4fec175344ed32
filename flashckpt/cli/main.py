"""The `flashckpt` command. Owns the list of its subcommands and nothing of what they do.

A command imports inside its function the modules that it alone needs: all commands wait for imports on top.
"""

from __future__ import annotations

import io
import signal
import sys
from typing import Annotated

import typer

import flashckpt
from flashckpt.cli.copy import copy, import_
from flashckpt.cli.recovery import keepers, recover
from flashckpt.cli.show import show
from flashckpt.cli.steps import branch, export, ls, prune, verify

_EPILOG = (
    "Exit codes: 0 well; 1 damage found; 2 wrong usage; 3 the run cannot be used as asked; "
    "4 anything else; 130 interrupted."
)

app = typer.Typer(
    name="flashckpt",
    help="Look at the checkpoints of a run, verify and recover them, go back, take weights out.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (ls, show, verify, branch, copy, recover, prune, export, keepers):
    app.command(epilog=_EPILOG)(command)
app.command(name="import", epilog=_EPILOG)(import_)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flashckpt {flashckpt.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at the checkpoints of a run, verify and recover them, go back, take weights out."""


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    # A reader that went away (`flashckpt ls RUN | head`) ends the writer, as it does every shell command.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A terminal that lacks a letter must not keep anybody from the rest of what is said.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
