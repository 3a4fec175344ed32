"""Trains a small GPT, kills it twice in the middle of a step, resumes it, and compares every bit.

    make demo                                   # or: python examples/tiny_gpt/demo.py --steps 120

Runs a reference without flashckpt and without a stop; a run that gets SIGKILL in a backward pass; the same
command, until it is killed together with its keeper; `flashckpt recover`; the same command to the end. Then
runs two ranks under torchrun, which restarts them after one rank gets SIGKILL in a backward pass. Exits with
0 only if every loss and every weight equal those of uninterrupted trainings, bit for bit. Writes loss.png and
result.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from picture import draw
from processes import Losses, TrainingFailed, read_losses, recover, run_to_the_end, run_until_killed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.numpy import load_file
from two_ranks import RANKS, TwoRanks, run_two_ranks

console = Console()


@dataclass
class Kill:
    """The kill of a process. `step`: the step (from 1) in which it died. `at_s`: time in monotonic seconds.
    `lines`: number of logged losses. `resumed_from`, `tier`: step and tier from which the next process
    resumed."""

    step: int
    keeper_too: bool
    at_s: float = 0.0
    lines: int = 0
    resumed_from: int = 0
    tier: str = ""
    seconds_to_resume: float = 0.0
    seconds_to_first_batch: float = 0.0

    @property
    def steps_lost(self) -> int:
        return self.step - 1 - self.resumed_from


def main() -> int:
    args = arguments()
    reference, killed = args.output / "reference", args.output / "killed"
    alone, together = args.output / "ranks-reference", args.output / "ranks-killed"
    for folder in (reference, killed, alone, together):
        shutil.rmtree(folder, ignore_errors=True)
    kills = [Kill(args.kill, keeper_too=False), Kill(args.kill_both, keeper_too=True)]
    try:
        recovered = train(reference, killed, kills, steps=args.steps)
        note_restarts(killed, kills)
        ranks = train_two_ranks(alone, together, steps=args.rank_steps)
        result = compare(reference, killed, kills) | compare_ranks(ranks)
    except TrainingFailed as failure:
        console.print(str(failure), style="red", markup=False)
        return 1
    draw(
        args.output / "loss.png",
        reference=read_losses(reference),
        pieces=pieces_of(read_losses(killed), kills),
        kills=[kill.step for kill in kills],
        resumed=[kill.resumed_from for kill in kills],
        ranks=ranks,
    )
    (args.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print("\n[bold]$ flashckpt recover[/]   (after the second kill)")
    console.print(recovered, markup=False, highlight=False)
    show(kills, result)
    show_ranks(ranks, result)
    console.print(f"Loss curves of both runs: [bold]{args.output / 'loss.png'}[/]")
    return 0 if all(equal for name, equal in result.items() if name.endswith("_equal")) else 1


def train(reference: Path, killed: Path, kills: list[Kill], *, steps: int) -> str:
    """Run all processes in order. Return the output of `flashckpt recover`."""
    bars = progress()
    count = ("--steps", str(steps))

    def kill_one(title: str, kill: Kill) -> None:
        bar = bars.add_task(title, total=steps)
        kill.at_s = run_until_killed(
            killed,
            kill.step,
            *count,
            follow=lambda step: bars.update(bar, completed=step),
            keeper_too=kill.keeper_too,
        )
        bars.stop_task(bar)
        kill.lines = len(read_losses(killed))

    def run_one(title: str, folder: Path, *more: str) -> None:
        bar = bars.add_task(title, total=steps)
        run_to_the_end(folder, *count, *more, follow=lambda step: bars.update(bar, completed=step))

    with bars:
        run_one("1  reference without flashckpt", reference, "--plain")
        kill_one(f"2  with flashckpt, SIGKILL in step {kills[0].step}", kills[0])
        kill_one(f"3  resumed; killed with its keeper in step {kills[1].step}", kills[1])
        recovered = recover(killed, columns=console.width)
        run_one("4  recovered and resumed", killed)
    return recovered


def train_two_ranks(reference: Path, killed: Path, *, steps: int) -> TwoRanks:
    """Run both jobs. The kill happens in a step that no rank has completed."""
    kill = steps * 3 // 5
    with progress() as bars:
        bar = {
            reference: bars.add_task(f"5  {RANKS} ranks, reference without flashckpt", total=steps),
            killed: bars.add_task(f"6  {RANKS} ranks; one gets SIGKILL in step {kill}", total=steps),
        }
        return run_two_ranks(
            reference,
            killed,
            steps=steps,
            kill=kill,
            follow=lambda step, folder: bars.update(bar[folder], completed=step),
        )


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<46}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def note_restarts(killed: Path, kills: list[Kill]) -> None:
    """Record the step from which each process after a kill resumed."""
    starts = [json.loads(line) for line in (killed / "starts.jsonl").read_text().splitlines()]
    for kill, start in zip(kills, starts[1:], strict=True):
        resumed = start["resumed"]
        if resumed is None:
            raise TrainingFailed("A process started from scratch: it found no snapshot to resume from.")
        kill.resumed_from, kill.tier = resumed["step"], resumed["tier"]
        kill.seconds_to_resume = resumed["seconds"]
        kill.seconds_to_first_batch = start["first_batch_monotonic_s"] - kill.at_s


def pieces_of(losses: Losses, kills: list[Kill]) -> list[Losses]:
    """Split the losses by the process that wrote them."""
    cuts = [0, *(kill.lines for kill in kills), len(losses)]
    return [losses[first:last] for first, last in zip(cuts, cuts[1:], strict=False)]


def compare(reference: Path, killed: Path, kills: list[Kill]) -> dict[str, Any]:
    """Compute the results. Steps count from 1: step n is the n-th iteration of the loop."""
    cost = json.loads((killed / "report.json").read_text())
    expected = dict(read_losses(reference))
    losses = read_losses(killed)
    weights = [load_file(folder / "weights.safetensors") for folder in (reference, killed)]
    return {
        "steps": len(expected),
        "kills": [{**asdict(kill), "steps_lost": kill.steps_lost} for kill in kills],
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


def compare_ranks(ranks: TwoRanks) -> dict[str, Any]:
    return {
        "ranks": {
            "killed_in": ranks.killed_in,
            "resumed_from": ranks.resumed_from,
            "tier": ranks.tier,
            "seconds_to_first_batch": ranks.seconds,
            "losses_compared": sum(map(len, ranks.losses)),
        },
        "rank_losses_equal": ranks.losses_equal,
        "rank_weights_equal": ranks.weights_equal,
    }


def show(kills: list[Kill], result: dict[str, Any]) -> None:
    table = Table(title="killed in the middle of a step, and resumed")
    for name in ("", "trainer killed", "trainer and keeper killed"):
        table.add_column(name, style="" if name else "bold")
    for name, of in (
        ("died in", lambda kill: f"backward of step {kill.step}"),
        ("resumed from", lambda kill: f"step {kill.resumed_from}, tier {kill.tier}"),
        ("steps lost", lambda kill: lost(kill.steps_lost)),
        ("seconds to resume", lambda kill: f"{kill.seconds_to_resume:.2f}"),
        ("kill to first batch", lambda kill: f"{kill.seconds_to_first_batch:.2f} s"),
    ):
        table.add_row(name, *map(of, kills))
    console.print(table)
    share = result["seconds_of_captures"] / result["seconds_of_loop"]
    console.print(
        f"cost to the loop: [bold]{share:.2%}[/]  ({result['seconds_of_captures']:.3f} s of "
        f"{result['seconds_of_loop']:.1f} s of the last process, {result['snapshots']:.0f} snapshots)"
    )
    console.print(f"{result['losses_compared']} losses: {verdict(result['losses_equal'])}")
    console.print(f"{result['weights_compared']:,} final weights: {verdict(result['weights_equal'])}")


def show_ranks(ranks: TwoRanks, result: dict[str, Any]) -> None:
    console.print(
        f"{RANKS} ranks under torchrun: rank 1 died in backward of step {ranks.killed_in}, both resumed from "
        f"step {ranks.resumed_from}, tier {ranks.tier}, {ranks.seconds:.2f} s after the kill"
    )
    console.print(f"{result['ranks']['losses_compared']} losses: {verdict(result['rank_losses_equal'])}")
    console.print(f"final weights: {verdict(result['rank_weights_equal'])}")


def lost(steps: int) -> str:
    return f"{steps}, and the unfinished one" if steps else "the unfinished one"


def verdict(equal: bool) -> str:
    return "[green]equal, bit for bit[/]" if equal else "[bold red]NOT equal[/]"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train, kill, resume, kill with the keeper, recover, resume, compare."
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--kill", type=int, help="the step in which the trainer dies")
    parser.add_argument("--kill-both", type=int, help="the step in which trainer and keeper die")
    parser.add_argument("--rank-steps", type=int, default=40, help="steps of the job of two ranks")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    args = parser.parse_args()
    args.kill = args.kill or args.steps * 37 // 100
    args.kill_both = args.kill_both or args.steps * 71 // 100
    if not 2 <= args.kill < args.kill_both < args.steps:
        parser.error("the kills must be in this order, after step 1 and before the last step")
    if args.rank_steps < 8:
        parser.error("--rank-steps must be at least 8")
    return args


if __name__ == "__main__":
    sys.exit(main())
