"""`flashckpt branch`: make the next start of a run go on from another step. Deletes nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from flashckpt.cli.arguments import AsJson, Run, place
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.output import ends, results, write_json
from flashckpt.commit.attempts import read_start
from flashckpt.format.names import AttemptName
from flashckpt.runs import branch as start_at
from flashckpt.store.base import open_store

Step = Annotated[
    str, typer.Argument(metavar="STEP[@ATTEMPT]", help="A visible step, or one of another branch.")
]


@ends
def branch(run: Run, step: Step, as_json: AsJson = False) -> ExitCode:
    """Go on from another step: the next start of the run resumes there. Nothing is deleted.

    Refused while a job holds the run; a job on another machine is watched for a few seconds first.
    """
    store = open_store(run)
    number, attempt = place(step)
    name = start_at(run, number, None if attempt is None else str(attempt))
    made = AttemptName.parse(name)
    start = None if made is None else read_start(store, made)
    parent = None if start is None else str(start.parent)
    if as_json:
        write_json({"run": store.url, "attempt": name, "step": number, "parent": parent})
    else:
        results().print(
            f"The next start of {store.url} goes on from step {number} of attempt {parent}. Later steps stay "
            f"as another branch: `flashckpt ls {run} --all` shows them. (This branch is attempt {name}.)"
        )
    return ExitCode.WELL
