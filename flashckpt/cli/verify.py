"""`flashckpt verify`: read every byte of committed steps again and say which files are whole."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from flashckpt.cli import console
from flashckpt.cli.command import AsJson, ExitCode, Run, ends, step_name
from flashckpt.cli.console import Bar, notices, number, results, text, write_json
from flashckpt.cli.history import lost_records
from flashckpt.commit.attempts import open_run
from flashckpt.commit.verification import Report
from flashckpt.commit.verification import verify as read_again
from flashckpt.store import open_store

Step = Annotated[str | None, typer.Argument(metavar="STEP[@ATTEMPT]", help="Every visible one if left out.")]
AllBranches = Annotated[bool, typer.Option("--all", help="Verify the steps of other branches too.")]


@ends
def verify(
    run: Run, step: Step = None, all_branches: AllBranches = False, as_json: AsJson = False
) -> ExitCode:
    """Read every byte again and compare. Ends with 1 if anything is damaged or missing; changes nothing.

    Where records of attempts are lost, all branches are read: which is the run's nobody can tell."""
    store = open_store(run)
    open_run(store, create=False)
    at, attempt = step_name(step) if step is not None else (None, None)
    lost = lost_records(store) if step is None else ""
    all_branches = all_branches or bool(lost)
    began_s = time.monotonic()
    with Bar(notices(), "verifying") as bar:
        report = read_again(store, at, attempt=attempt, all_steps=all_branches, progress=bar.progress)
    if as_json:
        files = [asdict(row) | {"detail": row.detail or None} for row in report.rows]
        told = {"run": store.url, "ok": report.ok and not lost, "num_bytes": report.num_bytes}
        write_json(told | {"files": files, "problem": lost or None})
    else:
        _print(report, time.monotonic() - began_s)
    if lost:
        notices().print(lost, style="red")
    return ExitCode.WELL if report.ok and not lost else ExitCode.DAMAGED


def _print(report: Report, seconds: float) -> None:
    if report.damaged:
        table = console.table(number("step"), *map(text, ("attempt", "file", "status", "what is wrong")))
        for row in report.damaged:
            table.add_row(str(row.step), row.attempt, row.file.rpartition("/")[2], row.status, row.detail)
        results().print(table)
    steps = console.count(len({(row.step, row.attempt) for row in report.rows}), "step")
    read = f"{len(report.rows)} files of {steps}, {console.size(report.num_bytes)} read in {seconds:.1f} s"
    if report.ok:
        results().print(f"whole: {read}")
    else:
        results().print(f"not whole: {len(report.damaged)} of {read}")
