"""What a run leaves for people: one table, the raw numbers as JSON, a picture. Owns their wording."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import chart
from benchmarks.settings import GIB
from benchmarks.summary import Limits, Row, limits_of, rows_of


def title(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    where = ", ".join(machine["devices"]) or f"{machine['cores']} cores {machine['processor']}"
    size = limits_of(results).num_bytes / GIB
    step_ms = 1e3 * min(results["limits"][0]["step_s"])
    return (
        f"{size:.2f} GiB of state, a checkpoint every {settings['every']} steps of {step_ms:.0f} ms; "
        f"{where}; {machine['file_system']}"
    )


def show(results: dict[str, Any], console: Console) -> None:
    limits = limits_of(results)
    table = Table(title=title(results), title_justify="left")
    table.add_column("")
    for name in ("loop cost", "call", "durable", "load", "peak memory"):
        table.add_column(name, justify="right")
    table.add_column("load is exact")
    table.add_row(*_limit_row(limits), style="bold")
    table.add_section()
    for row in rows_of(results):
        table.add_row(*_cells(row, limits), style="dim" if row.reason else "")
    console.print(table)
    console.print(
        "loop cost: seconds that one checkpoint adds to the loop · call: the loop stands still for it · "
        "durable: from the call until all is synced, the loop idle · load: a new process, into the live "
        "model, nothing in the page cache · peak memory: of the host, beyond the loop's own\n"
        "× is against the machine's limit in the first row",
        style="dim",
        highlight=False,
    )
    for row in rows_of(results):
        if row.reason or row.remark:
            console.print(f"[bold]{row.title}[/]: {row.reason or row.remark}", highlight=False)


def _limit_row(limits: Limits) -> list[str]:
    copy = f"{_seconds(limits.copy_s)} memcpy"
    if limits.to_host_s is not None and limits.clone_s is not None:
        copy = f"{_seconds(limits.to_host_s)} to host\n{_seconds(limits.clone_s)} clone\n{copy}"
    return [
        "limit of the machine",
        copy,
        copy,
        _rated("O_DIRECT write", limits.write_s, limits.num_bytes),
        _rated("O_DIRECT read", limits.read_s, limits.num_bytes),
        f"1 × state\n{limits.num_bytes / GIB:.2f} GiB",
        "",
    ]


def _rated(name: str, seconds: float | None, num_bytes: int) -> str:
    if seconds is None:
        return "no O_DIRECT here"
    return f"{_seconds(seconds)} {name}\n{num_bytes / GIB / seconds:.2f} GiB/s"


def _cells(row: Row, limits: Limits) -> list[str]:
    if row.reason:
        return [row.title, "cannot run here", "", "", "", "", ""]
    load = _against(row.load_s, limits.read_s if row.tier == "disk" else limits.loop_s)
    return [
        row.title,
        _against(row.loop_s, limits.loop_s),
        _against(row.call_s, limits.loop_s),
        _against(row.durable_s, limits.write_s),
        f"{load} {row.tier}" if row.load_s is not None else "—",
        f"{row.memory / row.state:.2f} × state" if row.memory is not None and row.state else "—",
        {True: "[green]yes[/]", False: "[bold red]NO[/]", None: "—"}[row.exact],
    ]


def _against(seconds: float | None, limit_s: float | None) -> str:
    if seconds is None:
        return "—"
    ratio = f"{seconds / limit_s:6.2f}×" if limit_s else "      "
    return f"{_seconds(seconds)} {ratio}"


def _seconds(seconds: float) -> str:
    if abs(seconds) < 0.0995:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.2f} s"


def command() -> list[str]:
    """Return this run's command for the report, absolute paths shortened to their last name: the report is
    published, and the folders of a machine say nothing to its readers."""
    words = []
    for word in sys.argv[1:]:
        option, equals, value = word.rpartition("=")
        words.append(f"{option}{equals}{Path(value).name if os.path.isabs(value) else value}")
    return [os.path.basename(sys.executable), "-m", "benchmarks", *words]


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write the raw numbers and the picture, and return their paths. A kill in the middle leaves the file
    of the call before."""
    name = results["began"].replace(":", "").replace("-", "")
    numbers, picture = folder / f"{name}.json", folder / f"{name}.png"
    draft = numbers.with_suffix(".draft")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    draft.replace(numbers)
    written = [numbers]
    if results["peers"] and chart.draw(results, title(results), picture):
        written.append(picture)
    return written
