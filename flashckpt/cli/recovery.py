"""`flashckpt recover | keepers`: snapshots in this node's memory, saved after a crash or held by a keeper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flashckpt.cli import command
from flashckpt.cli.command import (
    AsJson,
    Bar,
    ExitCode,
    Remote,
    Run,
    ends,
    notices,
    number,
    remote_of,
    results,
    size,
    text,
    word,
    write_json,
)
from flashckpt.options import user_path
from flashckpt.recovery.report import Fate, Finding, Kind, RecoveryReport, ranges_of
from flashckpt.store import open_store

if TYPE_CHECKING:
    from flashckpt.keeper.node_keepers import KeeperRow

_MOST_DEBRIS = _MOST_STEPS = 8
_TIERS = {"memory": "this node's memory", "cache": "this node's cache", "remote": "its remote"}

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing at all: report what a recovery would do.")
]
Cache = Annotated[
    str | None,
    typer.Option("--cache", metavar="DIR", help="The folder that attach(cache=) named on this node."),
]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Read every byte of the steps at rest.")]
End = Annotated[
    str | None,
    typer.Option(
        "--end",
        metavar="RUN|PID|FOLDER",
        help="End this keeper, once all that is in its memory is saved. Refused while its job trains.",
    ),
]
DiscardAll = Annotated[
    bool,
    typer.Option(
        "--discard", help="With --end: give up snapshots that cannot be saved, and free all memory."
    ),
]


@ends
def recover(
    run: Run,
    dry_run: DryRun = False,
    verify: Verify = True,
    remote: Remote = None,
    cache: Cache = None,
    as_json: AsJson = False,
) -> ExitCode:
    """Save what survived a crash, in memory and at rest, and name the step from which training resumes. With
    --cache also snapshots in a cache of this node. With --remote name the step that a start with this mirror
    takes.

    Refused while a job holds the run. May be run again at any time, also after it was killed. Ends with 1 if
    damage was found, with 3 if training cannot resume from any step, with 4 if a snapshot could not be
    saved: it is then still where it was.
    """
    from flashckpt.recovery.recover import recover as save_what_survived

    store = open_store(run)
    far = remote_of(store, remote)
    with Bar(notices()) as watcher:
        report = save_what_survived(
            store, dry_run=dry_run, read=verify, remote=far, cache=cache, watcher=watcher
        )
    code = exit_code_of(report)
    if as_json:
        write_json({**report.to_dict(), "exit_code": int(code)})
    else:
        _print(report)
    return code


def exit_code_of(report: RecoveryReport) -> ExitCode:
    """The exit code of a report: the worst that applies."""
    if report.failed:
        return ExitCode.FAILED
    if report.resume_problem:
        return ExitCode.UNUSABLE_RUN
    return ExitCode.DAMAGED if report.damaged else ExitCode.WELL


def _print(report: RecoveryReport) -> None:
    out = results()
    if report.findings:
        out.print(_table(report))
    read = f", {size(report.num_bytes)} read" if report.verified else ", not read (--no-verify)"
    out.print(f"at rest: {command.count(report.whole, 'step')} whole{read}")
    if report.keeper is not None:
        out.print(f"a keeper still lives (process {report.keeper}); it keeps the newest step in memory")
    if report.unseen:
        names = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges_of(report.unseen))
        out.print(f"ranks {names} have nothing in memory on this node: run this on their nodes, too")
    if report.resume is not None:
        tier = _TIERS.get(report.resume.tier, "storage")
        at = f"step {report.resume.step} of attempt {report.resume.attempt}, from {tier}"
        now = ", as of now" if report.dry_run else ""
        if report.resume.of_all:
            out.print(f"training resumes from {at}{now}")
        else:
            out.print(f"this node can resume from {at}{now}")
            out.print("training resumes from the newest step that all nodes can: run this on the others, too")
    elif report.resume_problem:
        out.print(f"training cannot resume: {report.resume_problem}", style="red")
    else:
        out.print("training begins at step 0: the run has no step")
    if report.dry_run:
        out.print("nothing was changed: this was a dry run")


def _table(report: RecoveryReport) -> Table:
    table = command.table(
        word("found"),
        number("step"),
        word("attempt"),
        number("size"),
        word("would be" if report.dry_run else "done"),
        text("where, why"),
    )
    orphans = [each for each in report.findings if each.kind is Kind.ORPHANS]
    for each in [each for each in report.findings if each.kind is not Kind.ORPHANS] + orphans[:_MOST_DEBRIS]:
        table.add_row(*_cells(each), style=_style(each))
    if len(orphans) > _MOST_DEBRIS:
        rest = orphans[_MOST_DEBRIS:]
        total = size(sum(each.num_bytes for each in rest))
        table.add_row("orphans", "", "", total, Fate.REMOVED.value, f"{len(rest)} more files")
    return table


def _cells(each: Finding) -> list[str]:
    return [
        {Kind.SNAPSHOT: "in memory", Kind.PARTS: "no record", Kind.STEP: "at rest"}.get(
            each.kind, each.kind.value
        ),
        "?" if each.step is None and each.kind is not Kind.ORPHANS else str(each.step or ""),
        str(each.attempt or ""),
        size(each.num_bytes) if each.num_bytes else "",
        each.outcome.value,
        f"{each.place}: {each.detail}" if each.detail else each.place,
    ]


def _style(each: Finding) -> str | None:
    if each.damage or each.outcome is Fate.FAILED:
        return "red"
    return "green" if each.outcome is Fate.COMMITTED else None


# ---- keepers


@ends
def keepers(
    end: End = None, discard: DiscardAll = False, cache: Cache = None, as_json: AsJson = False
) -> ExitCode:
    """List this user's keepers on this node: process, run, state, memory, newest steps, cache. Or end one.
    With --cache also list the runs without a keeper in that folder: `flashckpt recover RUN --cache DIR`
    saves their snapshots, and so does the next start.

    With --end the keeper first saves the uncommitted snapshots in its memory; if that fails, it stays, and
    the command ends with 4. Uncommitted snapshots are lost only with --discard. Ends with 3 while a trainer
    of the run lives: its keeper ends with it. Memory without a keeper is freed with --discard; that of a
    deleted run by the path of its runtime folder.
    """
    from flashckpt.keeper import node_keepers as node

    if end is None and discard:
        raise typer.BadParameter(
            "--discard needs --end RUN or --end PID: it frees the memory of a keeper that ends."
        )
    if end is not None:
        return _end(end, discard=discard, as_json=as_json)
    rows = [*node.keepers(), *([] if cache is None else node.caches(user_path(cache)))]
    if as_json:
        write_json({"keepers": rows})
    elif rows:
        results().print(_keeper_table(rows))
    else:
        notices().print("No keeper of this user runs on this node.")
    return ExitCode.WELL


def _end(target: str, *, discard: bool, as_json: bool) -> ExitCode:
    from flashckpt.keeper import node_keepers as node

    row = node.find(target)
    with Bar(notices()) as watcher:
        node.end(row, discard=discard, progress=watcher.progress, say=watcher.say)
    if as_json:
        write_json({"ended": row})
    else:
        what = f"{row.folder} is empty" if row.pid is None else f"the keeper {row.pid} of {row.run} has ended"
        results().print(f"{what}; {size(row.num_bytes)} are free", soft_wrap=True)
    return ExitCode.WELL


def _keeper_table(rows: list[KeeperRow]) -> Table:
    numbers = [number(name) for name in ("memory", "slots", "sealed", "committed")]
    has_cache = any(row.cache is not None for row in rows)
    columns = [number("cached"), number("newest there"), text("not at home")] * has_cache
    table = command.table(number("process", "bold"), word("state"), *numbers, *columns, text("run"))
    for row in rows:
        cached = [size(row.cached_bytes), _or_dash(row.newest_cached), _steps(row.not_at_home)] * has_cache
        table.add_row(
            _or_dash(row.pid),
            _state(row),
            size(row.num_bytes),
            str(row.slots),
            _or_dash(row.newest_sealed),
            _or_dash(row.newest_committed),
            *cached,
            (row.run or row.folder) + (" (not there)" if row.run_is_gone else ""),
            style="red" if row.state == "silent" else None,
        )
    return table


def _state(row: KeeperRow) -> str:
    if row.trainers:
        return f"{row.state} ({', '.join(map(str, row.trainers))})"
    if row.state == "lingering" and row.lingers_s is not None:
        return f"lingering, {row.lingers_s:.0f} s"
    return row.state


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[-_MOST_STEPS:])) + (", …" if len(steps) > _MOST_STEPS else "") or "-"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
