"""`flashckpt show`: one step, with its ranks and its leaves."""

from __future__ import annotations

import math
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Column, Table

from flashckpt.cli import command
from flashckpt.cli.command import (
    AsJson,
    ExitCode,
    Run,
    ends,
    fields_of,
    number,
    results,
    size,
    step_name,
    text,
    word,
    write_json,
)
from flashckpt.cli.history import (
    TIMES,
    LeafRow,
    RankTimes,
    box_of,
    box_text,
    committed_at_s,
    leaf_rows,
    lineage,
    persisted,
    rank_rows,
    resumed,
    waiting,
    waiting_text,
)
from flashckpt.commit.lineage import resolve
from flashckpt.commit.steps import StepRecord
from flashckpt.commit.view import View
from flashckpt.replication.mirror import known_remote
from flashckpt.store import open_store
from flashckpt.store.base import Store

_MOST_ROWS = 32
_MOST_WRITES = 4
_TIERS = {"memory": "memory", "cache": "the cache", "remote": "the remote"}

Shown = Annotated[str | None, typer.Argument(metavar="STEP[@ATTEMPT]", help="The newest if left out.")]
OfRank = Annotated[
    int | None, typer.Option("--rank", metavar="R", min=0, help="The boxes that this rank has of the leaves.")
]


@ends
def show(run: Run, step: Shown = None, rank: OfRank = None, as_json: AsJson = False) -> ExitCode:
    """Show a step: sizes, timings, lineage, environment, ranks, leaves. Points at ranks that are far slower
    than the others, and, where no step is named, at those that the next one waits for."""
    store = open_store(run)
    record = resolve(store, *step_name(step))
    if rank is not None:
        record.rank(rank)
    origins = lineage(View.of(store), record.attempt)
    if as_json:
        write_json(_plain_step(store, record, origins, rank))
        return ExitCode.WELL
    ranks, leaves = rank_rows(store, record), leaf_rows(record)
    tables = [_summary(store, record, origins), *([_rank_table(ranks)] if record.world > 1 else [])]
    tables += [_sizes(leaves), _leaf_table(leaves, record.world) if rank is None else _boxes(leaves, rank)]
    results().print(Group(*tables))
    for each in _slow(ranks):
        command.notices().print(each, style="yellow")
    for waits in waiting(store) if step is None else ():
        command.notices().print(waiting_text(waits), style="yellow")
    return ExitCode.WELL


def _summary(store: Store, record: StepRecord, origins: list[dict[str, Any]]) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    here = "this one" if _is_visible(store, record) else "another: `flashckpt branch` gets it back"
    files = command.count(len(record.manifest.shards) + len(record.manifest.frozen), "file")
    nodes = f", on {command.count(len(record.manifest.parts), 'node')}" if record.world > 1 else ""
    table.add_row("run", store.url)
    if remote := known_remote(store):
        table.add_row("remote", remote)
    table.add_row("step", f"{record.step}, of attempt {record.attempt}")
    table.add_row("branch", here)
    table.add_row("committed", command.local_time(committed_at_s(View.of(store), record.name)))
    table.add_row("ranks", f"{record.world:,}{nodes}")
    table.add_row("size", f"{size(record.manifest.leaf_bytes)} in {files}")
    for index, how in enumerate(_writes(persisted(store, record.step, record.attempt))):
        table.add_row("" if index else "persisted", how)
    for index, read in enumerate(_resumes(resumed(store, record.step, record.attempt))):
        table.add_row("" if index else "resumed", read)
    for index, origin in enumerate(origins):
        step = "?" if origin["step"] is None else origin["step"]
        how = f"{origin['attempt']} resumed from step {step} of {origin['parent']}"
        if origin["parent"] is None:
            how = f"{origin['attempt']} began the run"
        table.add_row("" if index else "lineage", how)
    for name, value in record.parts[0].environment.items():
        table.add_row(name, str(value))
    return table


def _writes(found: list[dict[str, Any]]) -> list[str]:
    """The slowest of many: a line for each node would be thousands."""
    lines = []
    for write in sorted(found, key=lambda each: each["seconds"], reverse=True)[:_MOST_WRITES]:
        seconds, num = write["seconds"], write["num_bytes"]
        rate = f", {size(int(num / seconds))}/s" if seconds > 1e-6 else ""
        lines.append(f"in {seconds:.2f} s{rate}{'' if write['direct'] else ', through the page cache'}")
    if len(found) > _MOST_WRITES:
        lines.append(f"and sooner by {command.count(len(found) - _MOST_WRITES, 'more node')}")
    return lines


def _resumes(found: list[dict[str, Any]]) -> list[str]:
    """One line for all ranks of an attempt: the slowest is what the job waited for."""
    by_attempt: dict[str, list[dict[str, Any]]] = {}
    for read in found:
        by_attempt.setdefault(read["attempt"], []).append(read)
    lines = []
    for attempt, reads in by_attempt.items():
        seconds = max(read["seconds"] for read in reads)
        tiers = sorted({_TIERS.get(read["tier"], "storage") for read in reads})
        ranks = f", {len(reads):,} ranks" if len(reads) > 1 else ""
        lines.append(f"by {attempt} in {seconds:.2f} s, from {' and '.join(tiers)}{ranks}")
    return lines


def _is_visible(store: Store, record: StepRecord) -> bool:
    return record.name in View.of(store).visible()


# ---- ranks


_SLOW_TEXTS = {
    "write_s": "writing what it has of this step took {} s",
    "capture_s": "the call of a snapshot took {} s",
    "step_s": "a step took {} s",
}


def _rank_table(rows: list[RankTimes]) -> Table:
    """Of many ranks those that are far from the others come first, and the rest is counted."""
    shown = sorted(rows, key=lambda row: (not row.far, row.rank))[:_MOST_ROWS]
    columns = [number("rank", "bold"), number("node"), word("host"), number("size")]
    table = command.table(*columns, *(number(name) for name in ("write", "capture", "step")), text("file"))
    for row in sorted(shown, key=lambda row: row.rank):
        times = [_seconds(row, name) for name in TIMES]
        style = "yellow" if row.far else None
        table.add_row(
            str(row.rank), str(row.node), row.host, size(row.num_bytes), *times, row.file, style=style
        )
    if len(rows) > len(shown):
        table.caption = f"and {len(rows) - len(shown):,} more ranks; --json has them all"
    return table


def _seconds(row: RankTimes, name: str) -> str:
    value = getattr(row, name)
    return "" if value is None else f"{value:.3g} s{' !' if name in row.far else ''}"


def _slow(rows: list[RankTimes]) -> list[str]:
    """A sentence for each of the ranks that are far from the others, as far as they are few."""
    lines = []
    for row in [row for row in rows if row.far][:_MOST_ROWS]:
        for name in row.far:
            others = median(value for each in rows if (value := getattr(each, name)) is not None)
            how = _SLOW_TEXTS[name].format(f"{getattr(row, name):.3g}")
            host = f" on {row.host}" if row.host else ""
            lines.append(
                f"flashckpt: rank {row.rank}{host} is slower than the others: {how}, theirs {others:.3g} s."
            )
    return lines


# ---- leaves


def _sizes(rows: list[LeafRow]) -> Table:
    """By the name under which each part of the state was given."""
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        name = row.name.partition(".")[0]
        leaves, total = sums.get(name, (0, 0))
        sums[name] = (leaves + 1, total + row.num_bytes)
    table = command.table(Column("state", style="bold"), number("leaves"), number("size"))
    for name, (leaves, total) in sums.items():
        table.add_row(name, f"{leaves:,}", size(total))
    return table


def _leaf_table(rows: list[LeafRow], world: int) -> Table:
    several = world > 1
    columns = [text("leaf"), Column("dtype"), word("shape"), number("size")]
    table = command.table(*columns, *[text("where")] * several)
    for row in rows:
        table.add_row(_names(row), row.dtype, _shape(row), size(row.num_bytes), *[row.where] * several)
    return table


def _boxes(rows: list[LeafRow], rank: int) -> Table:
    columns = [text("leaf"), Column("dtype"), word("shape"), word(f"of it on rank {rank}"), number("size")]
    table = command.table(*columns)
    for row in rows:
        for box in [box for box, ranks in row.boxes.items() if rank in ranks]:
            own = row.item_bytes * math.prod(behind - first for first, behind in box)
            table.add_row(_names(row), row.dtype, _shape(row), box_text(box, row.shape) or "all", size(own))
    return table


def _names(row: LeafRow) -> str:
    return row.name + "".join(f"\n  = {alias}" for alias in row.aliases)


def _shape(row: LeafRow) -> str:
    return " × ".join(map(str, row.shape)) or "scalar"


# ---- JSON


def _plain_step(
    store: Store, record: StepRecord, origins: list[dict[str, Any]], rank: int | None
) -> dict[str, object]:
    manifest = record.manifest
    files = [(each.name, each.num_bytes) for each in manifest.shards]
    files += [(each.name, each.num_bytes) for each in manifest.frozen]
    return {
        "run": store.url,
        "remote": known_remote(store) or None,
        **fields_of(record.name),
        "visible": _is_visible(store, record),
        "committed_at": command.iso_time(committed_at_s(View.of(store), record.name)),
        "world": record.world,
        "num_bytes": record.manifest.leaf_bytes,
        "files": [{"file": name, "num_bytes": num} for name, num in files],
        "persisted": persisted(store, record.step, record.attempt),
        "resumed": resumed(store, record.step, record.attempt),
        "lineage": origins,
        "environment": dict(record.parts[0].environment),
        "ranks": rank_rows(store, record),
        "waiting": waiting(store),
        "leaves": _plain_leaves(record, rank),
    }


def _plain_leaves(record: StepRecord, only: int | None) -> list[dict[str, object]]:
    """Of each rank what its files have: `shape` is that of the box."""
    ranks = [rank for part in record.parts for rank in part.ranks if only in (None, rank.rank)]
    rows = [(leaf, digest, rank.rank, file) for rank in ranks for file, leaf, digest in rank.counted()]
    return [
        {
            "name": leaf.name,
            "aliases": list(leaf.aliases),
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "global_shape": list(leaf.whole_shape),
            "box": None if leaf.box is None else [list(pair) for pair in box_of(leaf)],
            "num_bytes": leaf.num_bytes,
            "digest": f"{digest:016x}",
            "rank": rank,
            "file": file,
        }
        for leaf, digest, rank, file in sorted(rows, key=lambda row: (row[0].name, row[2]))
    ]
