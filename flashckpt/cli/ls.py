"""`flashckpt ls`: the committed steps of a run, one line each."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flashckpt.cli import units
from flashckpt.cli.arguments import AsJson, Run
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.history import StepRow, lost_records, step_rows
from flashckpt.cli.output import ends, notices, results, write_json
from flashckpt.commit.run import open_run
from flashckpt.store.base import open_store

AllBranches = Annotated[bool, typer.Option("--all", help="Show the steps of other branches too.")]


@ends
def ls(run: Run, all_branches: AllBranches = False, as_json: AsJson = False) -> ExitCode:
    """List the committed steps, newest last. Ends with 1 if the records of one are damaged, or if records of
    attempts are lost: then all branches are listed, and a resume is refused until one is chosen."""
    store = open_store(run)
    run_id = open_run(store, create=False).run_id
    lost = lost_records(store)
    rows = step_rows(store, all_branches=all_branches or bool(lost))
    if as_json:
        steps = [_plain(row) for row in rows]
        write_json({"run": store.url, "run_id": run_id, "steps": steps, "problem": lost or None})
    elif rows:
        results().print(_table(rows, all_branches or bool(lost)))
    else:
        notices().print(f"{store.url} has no committed step yet.")
    if lost:
        notices().print(lost, style="red")
    return ExitCode.DAMAGED if lost or any(row.problem for row in rows) else ExitCode.WELL


def _table(rows: list[StepRow], all_branches: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("step", justify="right", style="bold")
    table.add_column("attempt", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("leaves", justify="right")
    table.add_column("committed", no_wrap=True)
    if all_branches:
        table.add_column("branch", no_wrap=True)
    noted = any(_notes(row) for row in rows)
    if noted:
        table.add_column("notes", overflow="fold")
    for row in rows:
        cells = [
            str(row.step),
            str(row.attempt),
            "?" if row.num_bytes is None else units.size(row.num_bytes),
            "?" if row.leaves is None else f"{row.leaves:,}",
            units.local_time(row.committed_at_s),
        ]
        if all_branches:
            cells.append("this" if row.visible else "other")
        if noted:
            cells.append(_notes(row))
        table.add_row(*cells, style="red" if row.problem else None)
    return table


def _notes(row: StepRow) -> str:
    notes = [f"marked on {mark.host}: {mark.reason}" for mark in row.marks]
    return "; ".join([row.problem, *notes] if row.problem else notes)


def _plain(row: StepRow) -> dict[str, object]:
    return {
        "step": row.step,
        "attempt": str(row.attempt),
        "visible": row.visible,
        "num_bytes": row.num_bytes,
        "leaves": row.leaves,
        "committed_at": units.iso_time(row.committed_at_s),
        "marks": [{"host": mark.host, "reason": mark.reason} for mark in row.marks],
        "problem": row.problem or None,
    }
