"""The figures that flashckpt means to reach, as ratios within one run: how each is measured, its target, and
whether it was reached. Only what was measured is told; what this machine cannot measure is told as such.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.session import Session
from benchmarks.settings import GIB, MIB

_RESUMES, _KILLS = 5, 3
_SLACK_S = 0.002

Start = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Runs `python -m MODULE` with this `extra` to its end, or to its SIGKILL of itself; gives its report."""


def _snapshot(start: Start, session: Session) -> dict[str, Any]:
    return start("benchmarks.own.snapshot", {})


def _auto(start: Start, session: Session) -> dict[str, Any]:
    return start("benchmarks.own.auto", {})


def _small(start: Start, session: Session) -> dict[str, Any]:
    return start("benchmarks.own.small", {})


def _durable(start: Start, session: Session) -> dict[str, Any]:
    result = start("benchmarks.own.durable", {})
    return {**result, "keeper_bytes": session.keeper_peak}


def _resume(start: Start, *, dies: bool) -> dict[str, Any]:
    """The first process makes what the others load."""
    reports = [start("benchmarks.own.resume", {"dies": dies}) for _ in range(1 + _RESUMES)]
    return {"resumes": reports[1:]}


def _memory(start: Start, session: Session) -> dict[str, Any]:
    return _resume(start, dies=True)


def _disk(start: Start, session: Session) -> dict[str, Any]:
    return _resume(start, dies=False)


def _kill(start: Start, session: Session) -> dict[str, Any]:
    """A training process that is killed in the middle of a step is started again at once; three times."""
    reports = []
    for index in range(1 + _KILLS):
        asked_s = time.monotonic()
        report = start("benchmarks.own.train", {"snapshots": 0 if index else 2})
        reports.append({**report, "asked_s": asked_s})
    return {"resumes": reports[1:]}


PARTS: dict[str, Callable[[Start, Session], dict[str, Any]]] = {
    "snapshot": _snapshot,
    "auto": _auto,
    "small": _small,
    "durable": _durable,
    "memory": _memory,
    "disk": _disk,
    "kill": _kill,
}


@dataclass(frozen=True)
class Figure:
    """measured, target: as they are printed. reached: None where it could not be measured."""

    name: str
    measured: str
    target: str
    reached: bool | None
    detail: str = ""


def figures_of(results: dict[str, Any]) -> list[Figure]:
    made: list[Figure] = []
    for part, describe in _DESCRIBED.items():
        measured = results["flashckpt"].get(part)
        if measured is None:
            continue
        if "failed" in measured:
            made.append(Figure(part, "not measured", "", None, measured["failed"]))
        else:
            made.extend(describe(measured))
    return made


def _describe_snapshot(part: dict[str, Any]) -> list[Figure]:
    cost_s, call_s = median(part["cost_s"]), median(part["call_s"])
    leaves = part["leaves"]
    if "clone_s" in part:
        ratio = cost_s / median(part["clone_s"])
        return [
            Figure("a snapshot, against a device clone", f"{ratio:.2f} ×", "≤ 1.5 ×", ratio <= 1.5),
            Figure(f"its call, {leaves} tensors", f"{1e3 * call_s:.2f} ms", "< 2 ms", call_s < _SLACK_S),
        ]
    copy_s = median(part["copy_s"])
    ratio, of_call = (cost_s - _SLACK_S) / copy_s, (call_s - _SLACK_S) / copy_s
    detail = (
        f"copy_ {1e3 * copy_s:.1f} ms, snapshot {1e3 * cost_s:+.1f} ms, its call alone {1e3 * call_s:.1f} ms "
        f"({of_call:.2f} ×); a boundary without one {1e6 * median(part['quiet_call_s']):.0f} µs"
    )
    return [
        Figure(
            f"a snapshot ({leaves} tensors) less 2 ms, against copy_",
            f"{ratio:.2f} ×",
            "≤ 1.0 ×",
            ratio <= 1.0,
            detail,
        )
    ]


def _describe_auto(part: dict[str, Any]) -> list[Figure]:
    """The loss over all turns. Reached or missed only where the turns agree well enough to tell."""
    plain = [each["plain_s"] for each in part["blocks"]]
    looped = [each["with_s"] for each in part["blocks"]]
    loss = sum(looped) / sum(plain) - 1
    differences = [with_s - plain_s for with_s, plain_s in zip(looped, plain, strict=True)]
    error = stdev(differences) * len(differences) ** 0.5 / sum(plain)
    detail = (
        f"{part['snapshots']:.0f} snapshots in {sum(looped):.0f} s, beside as many seconds without; standard "
        f"error of {len(plain)} turns {error:.2%}; the calls alone are {part['call_s'] / sum(looped):.2%}"
    )
    reached = None
    if part["snapshots"] and (error <= part["overhead"] / 2 or abs(loss - part["overhead"]) > 2 * error):
        reached = loss <= part["overhead"]
    return [Figure('the loop\'s loss with every="auto"', f"{loss:+.2%}", "≤ 1 %", reached, detail)]


def _describe_small(part: dict[str, Any]) -> list[Figure]:
    beyond_s = median(part["call_s"]) - median(part["copy_s"])
    detail = (
        f"call {1e3 * median(part['call_s']):.2f} ms, copy of {part['num_bytes'] / MIB:.0f} MiB in one piece "
        f"{1e3 * median(part['copy_s']):.2f} ms"
    )
    return [
        Figure(
            f"{part['leaves']:,} small tensors: call beyond the copy",
            f"{1e3 * beyond_s:.2f} ms",
            "< 10 ms",
            beyond_s < 0.010,
            detail,
        )
    ]


def _describe_durable(part: dict[str, Any]) -> list[Figure]:
    keeper = part["keeper_bytes"]
    memory = Figure("the keeper's own memory", f"{keeper / 1e6:.0f} MB", "< 60 MB", keeper < 60e6)
    disk = [seconds for seconds in part["write_s"] if seconds is not None]
    if not disk:
        return [
            Figure("durable, against O_DIRECT", "not measured", "≥ 90 %", None, "no O_DIRECT here"),
            memory,
        ]
    whole_s, call_s = median(part["save_s"]), median(part["call_s"])
    after_s, rate = whole_s - call_s, part["num_bytes"] / GIB
    share = median(disk) / after_s
    detail = (
        f"committed {after_s:.3f} s after the snapshot ({rate / after_s:.2f} GiB/s), O_DIRECT write "
        f"{median(disk):.3f} s ({rate / median(disk):.2f} GiB/s); with the snapshot's own copy "
        f"({1e3 * call_s:.0f} ms) {whole_s:.3f} s, which is {median(disk) / whole_s:.0%}"
    )
    return [
        Figure("from sealed to committed, against O_DIRECT", f"{share:.0%}", "≥ 90 %", share >= 0.9, detail),
        memory,
    ]


def _describe_memory(part: dict[str, Any]) -> list[Figure]:
    """Medians over all resumes on both sides: the best of several against one would be no ratio of rates."""
    resumed_s = median(each["resumed_s"] for each in part["resumes"])
    digest_s, copy_s = _median_of(part, "digest_s"), _median_of(part, "copy_s")
    share = (2 * digest_s + copy_s) / resumed_s
    least, most = _range(each["resumed_s"] for each in part["resumes"])
    detail = (
        f"medians: resumed in {resumed_s:.3f} s ({least:.3f} to {most:.3f}; {part['resumes'][0]['tier']}); "
        f"digest {digest_s:.3f} s, copy {copy_s:.3f} s, digest {digest_s:.3f} s"
    )
    return [
        Figure(
            "load from memory, against digest + copy + digest", f"{share:.0%}", "≥ 80 %", share >= 0.8, detail
        )
    ]


def _describe_disk(part: dict[str, Any]) -> list[Figure]:
    """Medians on both sides, as with memory; of the shapes of O_DIRECT requests, the faster."""
    by_shape = [
        [seconds for each in reads for seconds in each]
        for reads in zip(*(each["direct_read_s"] for each in part["resumes"]), strict=True)
    ]
    if not all(by_shape):
        return [Figure("disk to verified memory", "not measured", "≥ 90 %", None, "no O_DIRECT here")]
    verified_s = median(each["verified_s"] for each in part["resumes"])
    direct = min(by_shape, key=median)
    checksum_s = _median_of(part, "checksum_s")
    share = max(median(direct), checksum_s) / verified_s
    least, most = _range(each["verified_s"] for each in part["resumes"])
    file_s = median(each["read_file_s"] for each in part["resumes"])
    resumed_s = median(each["resumed_s"] for each in part["resumes"])
    detail = (
        f"medians: verified in {verified_s:.3f} s ({least:.3f} to {most:.3f}), of it the file {file_s:.3f} "
        f"s; O_DIRECT read of the same file {median(direct):.3f} s ({min(direct):.3f} to {max(direct):.3f}), "
        f"checksum alone {checksum_s:.3f} s; all in place after {resumed_s:.3f} s"
    )
    return [
        Figure("disk to verified memory, against O_DIRECT", f"{share:.0%}", "≥ 90 %", share >= 0.9, detail)
    ]


def _median_of(part: dict[str, Any], name: str) -> float:
    return float(median(seconds for each in part["resumes"] for seconds in each[name]))


def _range(seconds: Iterable[float]) -> tuple[float, float]:
    found = sorted(seconds)
    return found[0], found[-1]


def _describe_kill(part: dict[str, Any]) -> list[Figure]:
    beyond = [each["first_batch_s"] - each["built_s"] for each in part["resumes"]]
    one = part["resumes"][len(beyond) // 2]
    per_gib = median(beyond) * GIB / one["num_bytes"]
    resumed = one["resumed"] or {"tier": "nothing", "seconds": 0.0}
    names = ("asked_s", "started_s", "imported_s", "built_s", "first_batch_s")
    spent = [one[after] - one[before] for before, after in zip(names, names[1:], strict=False)]
    detail = "in all {:.2f} s: interpreter {:.2f} s, imports {:.2f} s, model {:.2f} s, then {:.2f} s".format(
        sum(spent), *spent
    )
    return [
        Figure(
            "kill -9 to first batch, beyond imports and model",
            f"{per_gib:.2f} s a GiB",
            "≤ 1 s a GiB",
            per_gib <= 1.0,
            f"{detail} (resumed from {resumed['tier']} in {resumed['seconds']:.2f} s)",
        )
    ]


_DESCRIBED: dict[str, Callable[[dict[str, Any]], list[Figure]]] = {
    "snapshot": _describe_snapshot,
    "auto": _describe_auto,
    "small": _describe_small,
    "durable": _describe_durable,
    "memory": _describe_memory,
    "disk": _describe_disk,
    "kill": _describe_kill,
}


def show(results: dict[str, Any], console: Console) -> None:
    figures = figures_of(results)
    if not figures:
        return
    small = results["limits"][0]["num_bytes"] < 256 * MIB
    note = " (this state is too small to say anything)" if small else ""
    table = Table(title=f"figures to reach, from the same run{note}", title_justify="left")
    for name in ("figure", "measured", "target", "reached", "from"):
        table.add_column(name)
    for figure in figures:
        reached = {True: "[green]yes[/]", False: "[bold red]no[/]", None: "—"}[figure.reached]
        table.add_row(figure.name, figure.measured, figure.target, reached, figure.detail)
    console.print(table)
    if not results["machine"]["devices"]:
        console.print("GPU figures: not measured, torch sees no device", style="dim")
