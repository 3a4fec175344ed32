"""What a run with ranks leaves for people: a table for each kind of job, and the raw numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ranks import KINDS
from benchmarks.ranks.peers import PEERS
from benchmarks.settings import GIB

_OURS = "flashckpt"
Figure = Callable[[dict[str, Any]], list[float]]


def _alone(name: str) -> Figure:
    return lambda job: [each[name] for each in job["alone"]]


def _loop(job: dict[str, Any]) -> list[float]:
    return [each["with_s"] - each["plain_s"] for each in job["rounds"]]


def _load(*, same: bool) -> Figure:
    def found(job: dict[str, Any]) -> list[float]:
        loads = [load for world, load in job["loads"].items() if (world == str(job["world"])) == same]
        return [load["seconds"] for load in loads if load.get("exact")]

    return found


FIGURES: dict[str, Figure] = {
    "held": lambda job: [*_alone("held_s")(job), *(each["held_s"] for each in job["rounds"])],
    "loop": _loop,
    "durable": _alone("durable_s"),
    "written": lambda job: [each["written_bytes"] / job["state_bytes"] for each in job["alone"]],
    "CPU": lambda job: [each["cpu_s"] / (job["state_bytes"] / GIB) for each in job["alone"]],
    "load": _load(same=True),
    "load on others": _load(same=False),
}
"""What is told of each peer: its values in one job, of which the median over all runs is shown."""


def of_peer(results: dict[str, Any], kind: str, world: int, name: str) -> dict[str, list[list[float]]]:
    """The values of each figure, run by run."""
    jobs = [job for job in results["jobs"] if (job["kind"], job["world"], job["peer"]) == (kind, world, name)]
    return {figure: [values(job) for job in jobs] for figure, values in FIGURES.items()}


def ratio(theirs: list[list[float]], ours: list[list[float]]) -> float | None:
    """Median over the runs of theirs against ours, both from the same run."""
    pairs = zip(map(_middle, theirs), map(_middle, ours), strict=False)
    found = [their / our for their, our in pairs if their is not None and our]
    return median(found) if found else None


def _middle(values: Iterable[float]) -> float | None:
    values = list(values)
    return median(values) if values else None


def show(results: dict[str, Any], console: Console) -> None:
    size = results["settings"]["state_bytes"] / GIB
    for kind, world in dict.fromkeys((job["kind"], job["world"]) for job in results["jobs"]):
        table = Table(title=f"{KINDS[kind]}; {world} ranks, {size:.2f} GiB of state", title_justify="left")
        table.add_column("")
        for figure in FIGURES:
            table.add_column(figure, justify="right")
        ours = of_peer(results, kind, world, _OURS)
        for name in PEERS:
            theirs = of_peer(results, kind, world, name)
            if theirs["durable"]:
                table.add_row(PEERS[name][1], *(_cell(figure, theirs, ours, name) for figure in FIGURES))
        console.print(table)
    loads = [job["load_average"] for job in results["jobs"]]
    if loads:
        console.print(f"load average before the jobs: {min(loads):.1f} to {max(loads):.1f}", highlight=False)
    console.print(
        "held: seconds that the training thread of the slowest rank stands still, in the call and before the "
        "next optimizer step · loop: what a checkpoint adds to the steps after it · durable: until all is "
        "synced · written: bytes against those of the state · CPU: seconds of a core for each GiB, of all "
        "processes · load: new processes, nothing in the page cache; on others: on half or twice as many "
        "ranks · × is against flashckpt, pair by pair",
        style="dim",
        highlight=False,
    )
    for job in results["jobs"]:
        for world, load in job["loads"].items():
            if not load.get("exact"):
                told = f"{job['peer']} {job['kind']} {job['world']} → {world} ranks: {_wrong(load)}"
                console.print(told, markup=False, highlight=False)
    for job, reason in results["failed"].items():
        console.print(f"{job} ranks: cannot run here: {reason}", markup=False, highlight=False)


def _cell(
    figure: str, theirs: dict[str, list[list[float]]], ours: dict[str, list[list[float]]], name: str
) -> str:
    value = _middle(value for values in theirs[figure] for value in values)
    if value is None:
        return "—"
    if figure == "written":
        return f"{value:.2f}"
    against = ratio(theirs[figure], ours[figure]) if name != _OURS and figure != "loop" else None
    return f"{value:.3f}" + (f" {against:5.1f}×" if against is not None else "")


def _wrong(load: dict[str, Any]) -> str:
    return str(load.get("failed") or f"NOT what was saved: {', '.join(load['differ'])}")


def write(results: dict[str, Any], folder: Path) -> Path:
    name = results["began"].replace(":", "").replace("-", "")
    path = folder / f"{name}-ranks.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path
