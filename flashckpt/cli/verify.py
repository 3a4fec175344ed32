"""`flashckpt verify`: read every byte of committed steps again and say which files are whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from flashckpt.cli import units
from flashckpt.cli.arguments import AsJson, Run, step_name
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.history import lost_records
from flashckpt.cli.output import ends, notices, results, write_json
from flashckpt.commit.run import open_run
from flashckpt.commit.verification import Progress as Callback
from flashckpt.commit.verification import Report
from flashckpt.commit.verification import verify as read_again
from flashckpt.store.base import open_store

_BAR_AFTER_S = 1.0

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
    number, attempt = step_name(step) if step is not None else (None, None)
    lost = lost_records(store) if step is None else ""
    all_branches = all_branches or bool(lost)
    began_s = time.monotonic()
    with progress_bar(notices()) as progress:
        report = read_again(store, number, attempt=attempt, all_steps=all_branches, progress=progress)
    if as_json:
        write_json({**_plain(store.url, report), "ok": report.ok and not lost, "problem": lost or None})
    else:
        _print(report, time.monotonic() - began_s)
    if lost:
        notices().print(lost, style="red")
    return ExitCode.WELL if report.ok and not lost else ExitCode.DAMAGED


@contextmanager
def progress_bar(
    console: Console, after_s: float = _BAR_AFTER_S, what: str = "verifying"
) -> Iterator[Callback]:
    """A callback (bytes done, bytes in all) that draws a bar on a terminal once `after_s` have passed."""
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(what, total=None)
    began_s = time.monotonic()

    def tell(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - began_s >= after_s:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield tell
    finally:
        bar.stop()


def _print(report: Report, seconds: float) -> None:
    if report.damaged:
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("step", "attempt", "file", "status", "what is wrong"):
            table.add_column(name, overflow="fold", justify="right" if name == "step" else "left")
        for row in report.damaged:
            table.add_row(str(row.step), row.attempt, row.file.rpartition("/")[2], row.status, row.detail)
        results().print(table)
    steps = len({(row.step, row.attempt) for row in report.rows})
    files = f"{len(report.rows)} files of {steps} {'step' if steps == 1 else 'steps'}"
    read = f"{files}, {units.size(report.num_bytes)} read in {seconds:.1f} s"
    if report.ok:
        results().print(f"whole: {read}")
    else:
        results().print(f"not whole: {len(report.damaged)} of {read}")


def _plain(url: str, report: Report) -> dict[str, object]:
    rows = [
        {
            "step": row.step,
            "attempt": row.attempt,
            "file": row.file,
            "status": row.status,
            "detail": row.detail or None,
            "num_bytes": row.num_bytes,
        }
        for row in report.rows
    ]
    return {"run": url, "ok": report.ok, "num_bytes": report.num_bytes, "files": rows}
