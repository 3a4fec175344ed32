"""`flashckpt prune`: delete older steps by hand, by the rules that a run's own retention follows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flashckpt.cli import units
from flashckpt.cli.arguments import AsJson, Run
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.output import ends, notices, results, write_json
from flashckpt.options import Keep
from flashckpt.recovery.pruning import Pruning
from flashckpt.recovery.pruning import prune as let_go
from flashckpt.store.base import open_store

KeepLast = Annotated[
    int, typer.Option("--keep-last", metavar="N", min=1, help="Keep the newest N; at least 2 always stay.")
]
EverySteps = Annotated[
    int | None, typer.Option("--every-steps", metavar="K", min=1, help="Keep every multiple of K, too.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]


@ends
def prune(
    run: Run,
    keep_last: KeepLast,
    every_steps: EverySteps = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Delete the older visible steps. Refused while a job holds the run.

    Never goes: the newest two committed steps, the newest two that no verification failed on, and steps of
    other branches. Ends with 3 where nothing may be deleted yet.
    """
    pruning = let_go(open_store(run), Keep(last=keep_last, every_steps=every_steps), dry_run=dry_run)
    if as_json:
        write_json(_plain(pruning))
    else:
        _print(pruning)
    return ExitCode.UNUSABLE_RUN if pruning.refusal else ExitCode.WELL


def _print(pruning: Pruning) -> None:
    if pruning.refusal:
        notices().print(f"flashckpt: nothing was deleted: {pruning.refusal}", style="red")
        return
    if pruning.gone:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("would go" if pruning.dry_run else "gone", justify="right")
        table.add_column("attempt", no_wrap=True)
        table.add_column("size", justify="right", no_wrap=True)
        for each in pruning.gone:
            table.add_row(str(each.step), str(each.attempt), units.size(each.num_bytes))
        results().print(table)
    size = units.size(sum(each.num_bytes for each in pruning.gone))
    steps = f"{len(pruning.gone)} {'step' if len(pruning.gone) == 1 else 'steps'}, {size}"
    kept = ", ".join(map(str, pruning.kept)) or "none"
    results().print(f"{'would delete' if pruning.dry_run else 'deleted'} {steps}; kept: {kept}")


def _plain(pruning: Pruning) -> dict[str, object]:
    return {
        "run": pruning.run,
        "dry_run": pruning.dry_run,
        "gone": [
            {"step": each.step, "attempt": str(each.attempt), "num_bytes": each.num_bytes}
            for each in pruning.gone
        ],
        "kept": list(pruning.kept),
        "refusal": pruning.refusal or None,
    }
