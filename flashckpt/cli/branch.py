"""`flashckpt branch`: make the next start of a run go on from another step. Deletes nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from flashckpt.cli.arguments import AsJson, Run, step_name
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.output import ends, notices, results, write_json
from flashckpt.commit.attempts import read_start
from flashckpt.commit.lineage import VisibleStep
from flashckpt.commit.marks import marked_here
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Start
from flashckpt.runs import branch as start_at
from flashckpt.store.base import Store, open_store

Step = Annotated[
    str, typer.Argument(metavar="STEP[@ATTEMPT]", help="A visible step, or one of another branch.")
]


@ends
def branch(run: Run, step: Step, as_json: AsJson = False) -> ExitCode:
    """Go on from another step: the next start of the run resumes there. Nothing is deleted.

    Refused while a job holds the run; a job on another machine is watched for a few seconds first.
    """
    store = open_store(run)
    number, attempt = step_name(step)
    name = start_at(run, number, None if attempt is None else str(attempt))
    made = AttemptName.parse(name)
    start = None if made is None else read_start(store, made)
    parent = None if start is None else str(start.parent)
    mark = _mark(store, start) or None
    if as_json:
        write_json({"run": store.url, "attempt": name, "step": number, "parent": parent, "mark": mark})
    else:
        results().print(
            f"The next start of {store.url} goes on from step {number} of attempt {parent}. Later steps stay "
            f"as another branch: `flashckpt ls {run} --all` shows them. (This branch is attempt {name}.)"
        )
    if mark:
        notices().print(
            f"flashckpt: step {number} is marked on this host: {mark}. A start here goes on from an older "
            "step, where there is one without a mark. If its files are whole again (`flashckpt verify`), "
            "delete the mark-*.json beside them.",
            style="yellow",
        )
    return ExitCode.WELL


def _mark(store: Store, start: Start | None) -> str:
    """Why this host would pass over the step, empty where it would not."""
    if start is None or start.parent is None:
        return ""
    found = marked_here(store, VisibleStep(start.step, start.parent))
    return "" if found is None else found.reason
