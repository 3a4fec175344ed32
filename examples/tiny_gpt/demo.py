"""Trains a small GPT, kills it in the middle of a step, starts it again, and compares every bit.

    make demo                                   # or: python examples/tiny_gpt/demo.py --steps 120

Three processes run one after the other: a reference that is never stopped and knows nothing of flashckpt;
a run that gets SIGKILL in a backward pass; the same command line again. Ends with 0 only if every loss and
every weight of the two trainings are equal, bit for bit. Writes loss.png and result.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from picture import draw
from processes import TrainingFailed, read_losses, run_to_the_end, run_until_killed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.numpy import load_file

console = Console()


def main() -> int:
    args = arguments()
    reference, killed = args.output / "reference", args.output / "killed"
    for folder in (reference, killed):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        killed_at_s, lines_before = train_three_times(reference, killed, steps=args.steps, kill=args.kill)
        result = compare(
            reference, killed, kill=args.kill, killed_at_s=killed_at_s, lines_before=lines_before
        )
    except TrainingFailed as failure:
        console.print(str(failure), style="red", markup=False)
        return 1
    losses = read_losses(killed)
    draw(
        args.output / "loss.png",
        reference=read_losses(reference),
        before=losses[:lines_before],
        after=losses[lines_before:],
        killed_in=args.kill,
        resumed_from=result["resumed_from_step"],
    )
    (args.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    console.print(f"Loss curves of both runs: [bold]{args.output / 'loss.png'}[/]")
    return 0 if result["losses_equal"] and result["weights_equal"] else 1


def train_three_times(reference: Path, killed: Path, *, steps: int, kill: int) -> tuple[float, int]:
    """Returns when the kill was (monotonic seconds) and how many losses stood in the log then."""
    bars = Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    count = ("--steps", str(steps))
    with bars:
        bar = bars.add_task("1  never stopped, without flashckpt", total=steps)
        run_to_the_end(reference, *count, "--plain", follow=lambda step: bars.update(bar, completed=step))
        bar = bars.add_task(f"2  with flashckpt, SIGKILL in step {kill}", total=steps)
        killed_at_s = run_until_killed(
            killed, kill, *count, follow=lambda step: bars.update(bar, completed=step)
        )
        bars.stop_task(bar)
        lines_before = len(read_losses(killed))
        bar = bars.add_task("3  the same command again", total=steps)
        run_to_the_end(killed, *count, follow=lambda step: bars.update(bar, completed=step))
    return killed_at_s, lines_before


def compare(
    reference: Path, killed: Path, *, kill: int, killed_at_s: float, lines_before: int
) -> dict[str, Any]:
    """All that the table shows. Steps are counted from 1: step n is the n-th iteration of the loop."""
    report = json.loads((killed / "report.json").read_text())
    resumed, cost = report["resumed"], report["cost"]
    if resumed is None:
        raise TrainingFailed("The second process began from scratch: it found nothing to resume from.")
    expected = dict(read_losses(reference))
    losses = read_losses(killed)
    weights = [load_file(folder / "weights.safetensors") for folder in (reference, killed)]
    return {
        "steps": len(expected),
        "killed_in_step": kill,
        "completed_before_the_kill": lines_before,
        "resumed_from_step": resumed["step"],
        "resumed_from_tier": resumed["tier"],
        "steps_lost": lines_before - resumed["step"],
        "seconds_to_resume": resumed["seconds"],
        "seconds_from_kill_to_first_batch": report["first_batch_monotonic_s"] - killed_at_s,
        "seconds_of_captures": cost["capture_call_seconds"],
        "seconds_of_loop": cost["loop_seconds"],
        "snapshots": cost["snapshots"],
        "losses_compared": len(losses),
        "losses_equal": {step for step, _ in losses} == set(expected)
        and all(loss == expected[step] for step, loss in losses),
        "weights_compared": sum(array.size for array in weights[0].values()),
        "weights_equal": weights[0].keys() == weights[1].keys()
        and all(weights[0][name].tobytes() == weights[1][name].tobytes() for name in weights[0]),
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title="killed in the middle of a step, and started again", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    share = result["seconds_of_captures"] / result["seconds_of_loop"]
    lost = result["steps_lost"]
    rows = [
        ("died in", f"the backward pass of step {result['killed_in_step']}, by SIGKILL"),
        ("resumed from", f"step {result['resumed_from_step']}, tier {result['resumed_from_tier']}"),
        ("steps lost", f"{lost} completed, and the one in flight" if lost else "none but the one in flight"),
        ("seconds to resume", f"{result['seconds_to_resume']:.2f}  (found, verified, in place)"),
        (
            "kill to first batch",
            f"{result['seconds_from_kill_to_first_batch']:.2f} s  (a new process, its imports)",
        ),
        (
            "cost to the loop",
            f"{share:.2%}  ({result['seconds_of_captures']:.3f} s of {result['seconds_of_loop']:.1f} s, "
            f"{result['snapshots']} snapshots)",
        ),
        (f"{result['losses_compared']} losses", verdict(result["losses_equal"])),
        (f"{result['weights_compared']:,} final weights", verdict(result["weights_equal"])),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def verdict(equal: bool) -> str:
    return "[green]equal, bit for bit[/]" if equal else "[bold red]NOT equal[/]"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, kill, go on, compare.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--kill", type=int, help="the step to die in (default: a little past the middle)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    args = parser.parse_args()
    if args.kill is None:
        args.kill = args.steps * 57 // 100
    if not 2 <= args.kill < args.steps:
        parser.error(f"--kill must be between 2 and the last step, not {args.kill}")
    return args


if __name__ == "__main__":
    sys.exit(main())
