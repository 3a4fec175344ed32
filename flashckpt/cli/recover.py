"""`flashckpt recover`: the morning after a crash. Saves what survived, says where training goes on from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn
from rich.table import Table

from flashckpt.cli import units
from flashckpt.cli.arguments import AsJson, Run
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.output import ends, notices, results, write_json
from flashckpt.recovery.recover import recover as save_what_survived
from flashckpt.recovery.report import Finding, Kind, Outcome, Report
from flashckpt.store.base import open_store

_BAR_AFTER_S = 1.0
_MOST_DEBRIS = 8

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only look: change nothing at all.")]
Discard = Annotated[
    bool, typer.Option("--discard", help="Let go of what is in memory and can be committed nowhere.")
]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Read every byte of the steps at rest.")]


@ends
def recover(
    run: Run,
    dry_run: DryRun = False,
    discard: Discard = False,
    verify: Verify = True,
    as_json: AsJson = False,
) -> ExitCode:
    """Save what survived a crash, in memory and at rest, and say where training goes on from.

    Refused while a job holds the run. May be run again at any time, also after it was killed. Ends with 1 if
    damage was found, with 3 if training could not go on from any step, with 4 if something could not be
    saved: it is then still where it was.
    """
    with Bars(notices()).shown() as watcher:
        report = save_what_survived(
            open_store(run), dry_run=dry_run, discard=discard, read=verify, watcher=watcher
        )
    code = exit_code_of(report)
    if as_json:
        write_json({**report.to_dict(), "exit_code": int(code)})
    else:
        _print(report)
    return code


def exit_code_of(report: Report) -> ExitCode:
    """The worst of what was found."""
    if report.failed:
        return ExitCode.FAILED
    if report.resume_problem:
        return ExitCode.UNUSABLE_RUN
    return ExitCode.DAMAGED if report.damaged else ExitCode.WELL


class Bars:
    """One bar for whatever takes longer than a second; on a terminal only."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("looking", total=None)
        self._began_s = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[Bars]:
        try:
            yield self
        finally:
            self._bar.stop()

    def stage(self, name: str) -> None:
        self._bar.reset(self._task, description=name, total=None)
        self._draw()

    def progress(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total or None)
        self._draw()

    def say(self, text: str) -> None:
        self._console.print(f"flashckpt: {text}", style="yellow")

    def _draw(self) -> None:
        if not self._bar.live.is_started and time.monotonic() - self._began_s >= _BAR_AFTER_S:
            self._bar.start()


def _print(report: Report) -> None:
    console = results()
    if report.findings:
        console.print(_table(report))
    read = f", {units.size(report.num_bytes)} read" if report.verified else ", not read (--no-verify)"
    whole = f"{report.whole} {'step' if report.whole == 1 else 'steps'}"
    console.print(f"at rest: {whole} whole{read}")
    if report.keeper is not None:
        console.print(f"a keeper still lives (process {report.keeper}); it keeps the newest step in memory")
    if report.resume is not None:
        tier = "this node's memory" if report.resume.tier == "memory" else "storage"
        at = f"step {report.resume.step} of attempt {report.resume.attempt}, from {tier}"
        console.print(f"training resumes from {at}" + (", as things stand" if report.dry_run else ""))
    elif report.resume_problem:
        console.print(f"training cannot resume: {report.resume_problem}", style="red")
    else:
        console.print("training begins at step 0: the run has no step")
    if report.dry_run:
        console.print("nothing was changed: this was a dry run")


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("found", no_wrap=True)
    table.add_column("step", justify="right")
    table.add_column("attempt", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("would be" if report.dry_run else "done", no_wrap=True)
    table.add_column("where, why", overflow="fold")
    debris = [each for each in report.findings if each.kind is Kind.DEBRIS]
    for each in [each for each in report.findings if each.kind is not Kind.DEBRIS] + debris[:_MOST_DEBRIS]:
        table.add_row(*_cells(each), style=_style(each))
    if len(debris) > _MOST_DEBRIS:
        rest = debris[_MOST_DEBRIS:]
        size = units.size(sum(each.num_bytes for each in rest))
        table.add_row("debris", "", "", size, Outcome.REMOVED.value, f"{len(rest)} more files")
    return table


def _cells(each: Finding) -> list[str]:
    return [
        {Kind.SNAPSHOT: "in memory", Kind.PARTS: "no manifest", Kind.STEP: "at rest"}.get(
            each.kind, each.kind.value
        ),
        "?" if each.step is None and each.kind is not Kind.DEBRIS else str(each.step or ""),
        str(each.attempt or ""),
        units.size(each.num_bytes) if each.num_bytes else "",
        each.outcome.value,
        f"{each.place}: {each.detail}" if each.detail else each.place,
    ]


def _style(each: Finding) -> str | None:
    if each.damage or each.outcome is Outcome.FAILED:
        return "red"
    return "green" if each.outcome is Outcome.COMMITTED else None
