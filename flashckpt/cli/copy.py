"""`flashckpt copy`: committed steps of a run to another store."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flashckpt.cli import command
from flashckpt.cli.command import (
    AsJson,
    Bar,
    ExitCode,
    Run,
    Step,
    ends,
    fields_of,
    notices,
    number,
    results,
    size,
    step_name,
    text,
    word,
    write_json,
)
from flashckpt.options import checked_compress
from flashckpt.store import open_store

if TYPE_CHECKING:
    from flashckpt.importing.run import Imported
    from flashckpt.replication.run_copy import Copied, RunCopy

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Where to: a folder, file://, s3://, gs:// or az://.")
]
CompressHow = Annotated[
    str,
    typer.Option(
        "--compress",
        metavar="auto|zstd|none",
        help="Compress shards there, without loss: on object stores if they shrink (auto), always, or never.",
    ),
]
Repair = Annotated[
    bool,
    typer.Option(
        "--repair", help="Read every byte of what is there already, and send again what is damaged."
    ),
]
All = Annotated[bool, typer.Option("--all", help="Every visible step, newest first.")]


@ends
def copy(
    run: Run,
    url: Url,
    step: Step = None,
    all_steps: All = False,
    compress: CompressHow = "none",
    repair: Repair = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Copy committed steps to another folder or object store: the same run there, for every command and for
    training.

    The command verifies every byte, and commits a step in the target after all its files have arrived. It
    sends no step that the target has, and sends an interrupted step again. Ends with 1 if a step here is
    damaged, or one there is not whole.
    """
    from flashckpt.recovery.node import refuse_if_trained
    from flashckpt.replication.run_copy import copy_run

    if step is not None and all_steps:
        raise typer.BadParameter("--step names one, --all every one.")
    how = checked_compress(compress)
    number, at = step_name(step)
    source, target = open_store(run), open_store(url)
    began_s = time.monotonic()
    with Bar(notices(), "copying") as bar:
        done = copy_run(
            source,
            target,
            number,
            at=at,
            all_steps=all_steps,
            compress=how,
            repairs=repair,
            progress=bar.progress,
            may_supersede=lambda: refuse_if_trained(target),
        )
    if as_json:
        plain = {"run": done.source, "target": done.target, "run_id": done.run_id, "ok": done.ok}
        steps = [_plain_step(each) for each in done.steps]
        write_json(plain | {"sent_bytes": done.sent_bytes, "steps": steps})
    else:
        _print(done, time.monotonic() - began_s, has_read=repair)
    return ExitCode.WELL if done.ok else ExitCode.DAMAGED


def _plain_step(each: Copied) -> dict[str, object]:
    return {
        **fields_of(each.name),
        "outcome": None if each.problem else each.outcome.value,
        "num_bytes": None if each.problem else each.num_bytes,
        "sent_bytes": None if each.problem else each.sent_bytes,
        "visible": each.is_visible,
        "problem": each.problem or None,
    }


def _print(done: RunCopy, seconds: float, *, has_read: bool) -> None:
    from flashckpt.replication.run_copy import Outcome

    table = command.table(
        number("step", "bold"), word("attempt"), number("size"), number("sent"), text("outcome")
    )
    for each in done.steps:
        table.add_row(
            str(each.name.step),
            str(each.name.attempt),
            "?" if each.problem else size(each.num_bytes),
            "" if each.problem else size(each.sent_bytes),
            each.problem or each.outcome.value,
            style="red" if each.problem else None,
        )
    results().print(table)
    results().print(f"sent {size(done.sent_bytes)} in {seconds:.1f} s to {done.target}", soft_wrap=True)
    if not has_read and any(each.outcome is Outcome.THERE for each in done.steps):
        notices().print(
            "flashckpt: of existing files the lengths were compared, and no byte was read: "
            f"`flashckpt verify {done.target}` reads every byte."
        )
    if hidden := [each.name.step for each in done.steps if not (each.problem or each.is_visible)]:
        notices().print(
            f"flashckpt: a resume from {done.target} does not see {', '.join(map(str, hidden))}: of another "
            "branch there, or deleted. `flashckpt ls --all` shows all steps.",
            style="yellow",
        )


# ---- flashckpt import: the checkpoint of another library as a new run

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

    No code of SRC is run. If a part cannot be read without, it is named, and nothing is written.
    """
    from flashckpt.importing.run import Mapped, import_checkpoint

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
        parts = [{"name": name, "tensors": count, "num_bytes": b} for name, count, b in done.parts]
        write_json(fields_of(done) | {"parts": parts})
    else:
        _print_import(done)
    return ExitCode.WELL


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse NAME=KEY options, each name once."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, key = each.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9][^=]*", name) or name in found:
            raise typer.BadParameter(f"{option} {each!r}: NAME=KEY, each name once.")
        found[name] = key
    return found


def _print_import(done: Imported) -> None:
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
