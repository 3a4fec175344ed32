"""`flashckpt import`: the checkpoint of another library as a new run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from flashckpt.cli import command
from flashckpt.cli.command import (
    AsJson,
    Bar,
    ExitCode,
    ends,
    notices,
    number,
    results,
    size,
    text,
    word,
    write_json,
)

if TYPE_CHECKING:
    from flashckpt.importing.run import Imported

_RNG = ("torch", "python", "numpy", "cuda")

Src = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="A DCP folder, safetensors (file, index or folder), or a torch.save file."
    ),
]
NewRun = Annotated[str, typer.Argument(metavar="RUN", help="The run to make: a folder, or a URL.")]
State = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        metavar="NAME=KEY",
        help="Take what SRC has under KEY (empty: all of it) as NAME of the state. Every key if left out.",
    ),
]
StepOrKey = Annotated[
    str, typer.Option("--step", metavar="N|KEY", help="The number of the step, or where SRC has it.")
]
EpochOrKey = Annotated[
    str, typer.Option("--epoch", metavar="N|KEY", help="The epoch that begins there, or where SRC has it.")
]
Generators = Annotated[
    list[str] | None,
    typer.Option("--rng", metavar="NAME=KEY", help=f"A generator's state: {', '.join(_RNG)}."),
]
Skip = Annotated[
    bool, typer.Option("--skip-unreadable", help="Import all but what cannot be read without running code.")
]


@ends
def import_(
    src: Src,
    run: NewRun,
    state: State = None,
    step: StepOrKey = "0",
    epoch: EpochOrKey = "0",
    rng: Generators = None,
    skip_unreadable: Skip = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Write a new run whose first step holds the checkpoint SRC: training that names its parts resumes from
    it.

    No code of SRC is run. What cannot be read without is named, and then nothing is written.
    """
    from flashckpt.importing.parts import Mapped
    from flashckpt.importing.run import import_checkpoint

    generators = _pairs("--rng", rng or ())
    if unknown := sorted(generators.keys() - set(_RNG)):
        raise typer.BadParameter(f"--rng {unknown[0]}: one of {', '.join(_RNG)}.")
    mapped = Mapped(
        state=_pairs("--state", state or ()),
        step=step,
        epoch=epoch,
        rng=generators,
        skip_unreadable=skip_unreadable,
    )
    with Bar(notices(), "importing") as bar:
        done = import_checkpoint(src, run, mapped, progress=bar.progress)
    if as_json:
        write_json(
            asdict(done)
            | {"attempt": str(done.attempt)}
            | {"parts": [{"name": n, "tensors": count, "num_bytes": b} for n, count, b in done.parts]}
        )
    else:
        _print(done)
    return ExitCode.WELL


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """NAME=KEY, of each name one."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, key = each.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9][^=]*", name) or name in found:
            raise typer.BadParameter(f"{option} {each!r}: NAME=KEY, each name once.")
        found[name] = key
    return found


def _print(done: Imported) -> None:
    table = command.table(word("name"), number("tensors"), number("size"))
    for name, tensors, num_bytes in done.parts:
        table.add_row(name, str(tensors), size(num_bytes) if tensors else "values")
    results().print(table)
    results().print(f"step {done.step} of {done.run}, from {done.source} ({done.format})", soft_wrap=True)
    if done.skipped or done.left_out:
        rest = command.table(text("not imported"))
        for line in (*done.skipped, *(f"{key}: not chosen" for key in done.left_out)):
            rest.add_row(line)
        notices().print(rest)
