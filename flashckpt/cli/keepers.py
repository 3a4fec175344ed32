"""`flashckpt keepers`: what runs on this node in the background, for which run, and what it holds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from flashckpt.cli import console
from flashckpt.cli.command import AsJson, ExitCode, ends
from flashckpt.cli.console import Bar, notices, number, results, size, text, word, write_json
from flashckpt.recovery import keepers as node
from flashckpt.recovery.keepers import KeeperRow

End = Annotated[
    str | None,
    typer.Option(
        "--end",
        metavar="RUN|PID|FOLDER",
        help="End this keeper, once all that is in its memory is saved. Refused while its job trains.",
    ),
]
Discard = Annotated[
    bool,
    typer.Option("--discard", help="With --end: give up what cannot be saved, and all that is in memory."),
]


@ends
def keepers(end: End = None, discard: Discard = False, as_json: AsJson = False) -> ExitCode:
    """List this user's keepers on this node: process, run, state, memory, newest steps. Or end one.

    With --end the keeper first saves what is in its memory and not committed; where that fails it stays, and
    the command ends with 4. Nothing that is committed nowhere is lost without --discard. It ends with 3 while
    a trainer of the run lives: its keeper goes with it. A runtime folder that no keeper looks after (of a run
    that was deleted, say) is freed by its path with --discard.
    """
    if end is None and discard:
        raise typer.BadParameter("--discard says what becomes of memory with --end RUN or --end PID.")
    if end is not None:
        return _end(end, discard=discard, as_json=as_json)
    rows = node.keepers()
    if as_json:
        write_json({"keepers": [row.to_dict() for row in rows]})
    elif rows:
        results().print(_table(rows))
    else:
        notices().print("No keeper of this user runs on this node.")
    return ExitCode.WELL


def _end(target: str, *, discard: bool, as_json: bool) -> ExitCode:
    row = node.find(target)
    with Bar(notices()) as watcher:
        node.end(row, watcher, discard=discard)
    if as_json:
        write_json({"ended": row.to_dict()})
    else:
        what = f"{row.folder} is empty" if row.pid is None else f"the keeper {row.pid} of {row.run} has ended"
        results().print(f"{what}; {size(row.num_bytes)} are free", soft_wrap=True)
    return ExitCode.WELL


def _table(rows: list[KeeperRow]) -> Table:
    numbers = [number(name) for name in ("memory", "slots", "sealed", "committed")]
    table = console.table(number("process", "bold"), word("state"), *numbers, text("run"))
    for row in rows:
        table.add_row(
            _or_dash(row.pid),
            _state(row),
            size(row.num_bytes),
            str(row.slots),
            _or_dash(row.newest_sealed),
            _or_dash(row.newest_committed),
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


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
