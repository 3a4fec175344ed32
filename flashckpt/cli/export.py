"""`flashckpt export`: take the tensors of a step out of a run, for other programs."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from flashckpt.cli.command import AsJson, ExitCode, Run, ends, step_name
from flashckpt.cli.console import Bar, notices, results, size, write_json
from flashckpt.export.step import export as take_out
from flashckpt.store import open_store


class Format(str, Enum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"


Out = Annotated[
    str, typer.Argument(metavar="OUT", help="The file to write; a folder where the step has several ranks.")
]
Step = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP[@ATTEMPT]", help="The one a resume would take if left out."),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="NAME", help="A part of the state (model), or a leaf.")
]
As = Annotated[Format, typer.Option("--format", help="torch is a pickle, for torch.load(weights_only=True).")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")]


@ends
def export(
    run: Run,
    out: Out,
    format: As = Format.SAFETENSORS,
    step: Step = None,
    only: Only = None,
    force: Force = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Write the tensors of a step to a file. Every byte is verified before anything is written."""
    number, attempt = step_name(step) if step is not None else (None, None)
    with Bar(notices(), "verifying") as bar:
        done = take_out(
            open_store(run),
            out,
            format=format.value,
            step=number,
            attempt=attempt,
            only=only or (),
            force=force,
            progress=bar.progress,
        )
    if as_json:
        files = [{"file": name, "num_bytes": num_bytes} for name, num_bytes in done.files]
        write_json(asdict(done) | {"attempt": str(done.attempt), "files": files})
    else:
        total = size(sum(num_bytes for _, num_bytes in done.files))
        results().print(
            f"{done.leaves} leaves of step {done.step} of attempt {done.attempt}, {total}, in {out}"
        )
    return ExitCode.WELL
