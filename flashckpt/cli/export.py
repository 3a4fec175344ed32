"""`flashckpt export`: take the tensors of a step out of a run, for other programs."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from flashckpt.cli import units
from flashckpt.cli.arguments import AsJson, Run, step_name
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.output import ends, notices, results, write_json
from flashckpt.cli.verify import progress_bar
from flashckpt.export.exporting import Exported
from flashckpt.export.exporting import export as take_out
from flashckpt.store.base import open_store


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
    with progress_bar(notices()) as progress:
        done = take_out(
            open_store(run),
            out,
            format=format.value,
            step=number,
            attempt=attempt,
            only=only or (),
            force=force,
            progress=progress,
        )
    if as_json:
        write_json(_plain(done))
    else:
        size = units.size(sum(num_bytes for _, num_bytes in done.files))
        results().print(
            f"{done.leaves} leaves of step {done.step} of attempt {done.attempt}, {size}, in {out}"
        )
    return ExitCode.WELL


def _plain(done: Exported) -> dict[str, object]:
    return {
        "run": done.run,
        "step": done.step,
        "attempt": str(done.attempt),
        "out": done.out,
        "format": done.format,
        "leaves": done.leaves,
        "files": [{"file": name, "num_bytes": num_bytes} for name, num_bytes in done.files],
    }
