"""`flashckpt show`: one step in full: where it comes from, how long it took, every leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Group
from rich.table import Table

from flashckpt.cli import units
from flashckpt.cli.arguments import AsJson, Run, step_name
from flashckpt.cli.exit_codes import ExitCode
from flashckpt.cli.history import Origin, committed_at_s, lineage, num_bytes
from flashckpt.cli.output import ends, results, write_json
from flashckpt.cli.timings import PersistTiming, persisted, resumed
from flashckpt.commit.lineage import VisibleStep, visible
from flashckpt.commit.reading import resolve
from flashckpt.commit.steps import StepRecord
from flashckpt.format.layout import Leaf
from flashckpt.store.base import Store, open_store

Step = Annotated[str | None, typer.Argument(metavar="STEP[@ATTEMPT]", help="The newest if left out.")]


class Placed(NamedTuple):
    """A leaf with where its bytes are."""

    leaf: Leaf
    digest: int
    rank: int
    file: str


@ends
def show(run: Run, step: Step = None, as_json: AsJson = False) -> ExitCode:
    """Show a step: sizes, timings, lineage, environment, leaves."""
    store = open_store(run)
    record = resolve(store, *(step_name(step) if step is not None else (None, None)))
    origins = lineage(store, record.attempt)
    if as_json:
        write_json(_plain(store, record, origins))
    else:
        results().print(Group(_summary(store, record, origins), _sizes(record), _leaf_table(record)))
    return ExitCode.WELL


def _placed(record: StepRecord) -> list[Placed]:
    placed = []
    for rank in (rank for part in record.parts for rank in part.ranks):
        for contents in (rank.contents, rank.constants):
            if contents is not None:
                file = contents.shard.file
                pairs = zip(contents.leaves, contents.digests, strict=True)
                placed += [Placed(leaf, digest, rank.rank, file) for leaf, digest in pairs]
    return sorted(placed, key=lambda each: (each.leaf.name, each.rank))


def _environment(record: StepRecord) -> Mapping[str, Any]:
    return record.parts[0].environment


def _summary(store: Store, record: StepRecord, origins: list[Origin]) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    here = "this one" if _is_visible(store, record) else "another: `flashckpt branch` gets it back"
    files = len(record.manifest.shards) + len(record.manifest.constants)
    table.add_row("run", store.url)
    table.add_row("step", f"{record.step}, of attempt {record.attempt}")
    table.add_row("branch", here)
    table.add_row("committed", units.local_time(committed_at_s(store, record.step, record.attempt)))
    table.add_row("ranks", str(record.world))
    table.add_row("size", f"{units.size(num_bytes(record))} in {files} {'file' if files == 1 else 'files'}")
    for index, write in enumerate(persisted(store, record.step, record.attempt)):
        table.add_row("" if index else "persisted", _persisted(write))
    for index, read in enumerate(resumed(store, record.step, record.attempt)):
        where = "memory" if read.tier == "memory" else "storage"
        table.add_row("" if index else "resumed", f"by {read.attempt} in {read.seconds:.2f} s, from {where}")
    for place_in_line, origin in enumerate(origins):
        table.add_row("" if place_in_line else "lineage", _origin(origin))
    for name, value in _environment(record).items():
        table.add_row(name, str(value))
    return table


def _origin(origin: Origin) -> str:
    if origin.parent is None:
        return f"{origin.attempt} began the run"
    return f"{origin.attempt} went on from step {origin.step} of {origin.parent}"


def _persisted(write: PersistTiming) -> str:
    rate = f", {units.size(int(write.num_bytes / write.seconds))}/s" if write.seconds > 1e-6 else ""
    return f"in {write.seconds:.2f} s{rate}{'' if write.direct else ', through the page cache'}"


def _is_visible(store: Store, record: StepRecord) -> bool:
    return VisibleStep(record.step, record.attempt) in visible(store)


def _sizes(record: StepRecord) -> Table:
    """By the name under which each part of the state was given."""
    sums: dict[str, tuple[int, int]] = {}
    for each in _placed(record):
        name = each.leaf.name.partition(".")[0]
        count, total = sums.get(name, (0, 0))
        sums[name] = (count + 1, total + each.leaf.num_bytes)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("state", style="bold")
    table.add_column("leaves", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    for name, (count, total) in sums.items():
        table.add_row(name, f"{count:,}", units.size(total))
    return table


def _leaf_table(record: StepRecord) -> Table:
    several = record.world > 1
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("leaf", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    if several:
        table.add_column("rank", justify="right")
    for leaf, _, rank, _ in _placed(record):
        name = leaf.name + "".join(f"\n  = {alias}" for alias in leaf.aliases)
        cells = [name, leaf.dtype, units.shape(leaf.shape), units.size(leaf.num_bytes)]
        table.add_row(*cells, *([str(rank)] if several else []))
    return table


def _plain(store: Store, record: StepRecord, origins: list[Origin]) -> dict[str, object]:
    files = [*record.manifest.shards, *record.manifest.constants]
    return {
        "run": store.url,
        "step": record.step,
        "attempt": str(record.attempt),
        "visible": _is_visible(store, record),
        "committed_at": units.iso_time(committed_at_s(store, record.step, record.attempt)),
        "world": record.world,
        "num_bytes": num_bytes(record),
        "files": [{"file": each.file, "num_bytes": each.num_bytes} for each in files],
        "persisted": [asdict(each) for each in persisted(store, record.step, record.attempt)],
        "resumed": [asdict(each) for each in resumed(store, record.step, record.attempt)],
        "lineage": [
            {
                "attempt": str(each.attempt),
                "parent": None if each.parent is None else str(each.parent),
                "step": each.step,
                "ended": each.ended or None,
            }
            for each in origins
        ],
        "environment": dict(_environment(record)),
        "leaves": [
            {
                "name": leaf.name,
                "aliases": list(leaf.aliases),
                "dtype": leaf.dtype,
                "shape": list(leaf.shape),
                "num_bytes": leaf.num_bytes,
                "digest": f"{digest:016x}",
                "rank": rank,
                "file": file,
            }
            for leaf, digest, rank, file in _placed(record)
        ],
    }
