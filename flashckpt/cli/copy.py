"""`flashckpt copy`: committed steps of a run to another store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from flashckpt.cli import command
from flashckpt.cli.command import (
    AsJson,
    Bar,
    ExitCode,
    Run,
    ends,
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
    from flashckpt.tiers.run_copy import RunCopy, StepResult

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Where to: a folder, file://, s3://, gs:// or az://.")
]
Step = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP[@ATTEMPT]", help="The one a resume would take if left out."),
]
CompressHow = Annotated[
    str,
    typer.Option(
        "--compress",
        metavar="auto|zstd|none",
        help="Shards stand compressed there, without loss: where they arrive earlier so, always, or never.",
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
    training to go on from.

    Every byte is verified on the way, and a step is there whole or not at all. What is there already is not
    sent again: a copy that was interrupted goes on. Ends with 1 if a step is damaged here.
    """
    from flashckpt.recovery.remote import refuse_if_trained
    from flashckpt.tiers.run_copy import copy_run

    if step is not None and all_steps:
        raise typer.BadParameter("--step names one, --all every one.")
    how = checked_compress(compress)
    at, attempt = step_name(step) if step is not None else (None, None)
    source, target = open_store(run), open_store(url)
    began_s = time.monotonic()
    with Bar(notices(), "copying") as bar:
        done = copy_run(
            source,
            target,
            at,
            attempt=attempt,
            all_steps=all_steps,
            compress=how,
            repairs=repair,
            progress=bar.progress,
            may_supersede=lambda: refuse_if_trained(target),
        )
    if as_json:
        write_json(_plain(done))
    else:
        _print(done, time.monotonic() - began_s, has_read=repair)
    return ExitCode.WELL if done.ok else ExitCode.DAMAGED


def _plain(done: RunCopy) -> dict[str, object]:
    return {
        "run": done.source,
        "target": done.target,
        "run_id": done.run_id,
        "ok": done.ok,
        "sent_bytes": done.sent_bytes,
        "steps": [_plain_step(each) for each in done.steps],
    }


def _plain_step(each: StepResult) -> dict[str, object]:
    copied = each.copied
    return {
        "step": each.step,
        "attempt": str(each.attempt),
        "outcome": None if copied is None else copied.outcome.value,
        "num_bytes": None if copied is None else copied.num_bytes,
        "sent_bytes": None if copied is None else copied.sent_bytes,
        "visible": each.is_visible,
        "problem": each.problem or None,
    }


def _print(done: RunCopy, seconds: float, *, has_read: bool) -> None:
    from flashckpt.tiers.step_copy import Outcome

    table = command.table(
        number("step", "bold"), word("attempt"), number("size"), number("sent"), text("outcome")
    )
    for each in done.steps:
        copied = each.copied
        told = each.problem or (copied.outcome.value if copied is not None else "")
        table.add_row(
            str(each.step),
            str(each.attempt),
            "?" if copied is None else size(copied.num_bytes),
            "" if copied is None else size(copied.sent_bytes),
            told,
            style="red" if each.problem else None,
        )
    results().print(table)
    results().print(f"sent {size(done.sent_bytes)} in {seconds:.1f} s to {done.target}", soft_wrap=True)
    if not has_read and any(
        each.copied is not None and each.copied.outcome is Outcome.THERE for each in done.steps
    ):
        notices().print(
            "flashckpt: of what is there already the lengths were compared, and no byte was read: "
            f"`flashckpt verify {done.target}` reads every one."
        )
    if hidden := [each.step for each in done.steps if each.copied is not None and not each.is_visible]:
        notices().print(
            f"flashckpt: a resume from {done.target} does not see {', '.join(map(str, hidden))}: of another "
            "branch there, or deleted. `flashckpt ls --all` shows what there is.",
            style="yellow",
        )
