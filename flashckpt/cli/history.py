"""What a run holds, gathered for display: steps, branches, lineage, times. Reads records, and never a shard.

A step that cannot be used is a row with its problem, never an error: this is where people look for it. Times
are those of the run's ledger: one that is gone, or lies, changes what is shown and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from flashckpt.commit.attempts import alive, attempts, bounds
from flashckpt.commit.lineage import (
    VisibleStep,
    check_records,
    everything,
    has_manifest,
    in_lineage,
    looked_for,
    marks,
    visible,
)
from flashckpt.commit.steps import StepRecord, missing_files, read_manifest, read_step
from flashckpt.errors import DamagedError, NoSuchStepError, UnusableRunError
from flashckpt.format.names import MANIFEST, AttemptName, step_attempt_folder
from flashckpt.format.records import Manifest, Mark
from flashckpt.format.replicas import Ranks
from flashckpt.persist.ledger import Event, lines_of
from flashckpt.store.base import Store

_MOST_ATTEMPTS = 64
_MOST = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A step that has a manifest. `problem` says why it cannot be used, empty where it can.

    `num_bytes` are those of its shards, constants included; `committed_at_s` counts from 1970. `here` are the
    ranks of `world` that this folder has, None for all.
    """

    step: int
    attempt: AttemptName
    visible: bool
    world: int | None
    num_bytes: int | None
    leaves: int | None
    committed_at_s: float
    marks: tuple[Mark, ...]
    problem: str
    here: Ranks | None = None


def step_rows(store: Store, *, all_branches: bool) -> list[StepRow]:
    """The steps of the run's branch, or of every branch, newest last."""

    def look() -> list[StepRow]:
        shown = everything(store) if all_branches else in_lineage(store, bounds(store))
        try:
            seen = set(visible(store))
        except DamagedError:  # the newest start.json: what a resume would see nobody knows
            seen = set()
        return list(_rows(store, shown, seen))

    return looked_for(store, look)[::-1]


def lost_records(store: Store) -> str:
    """Why a resume would be refused, empty where it would not."""
    try:
        check_records(store)
    except UnusableRunError as error:
        return str(error)
    return ""


def committed_at_s(store: Store, step: int, attempt: AttemptName) -> float:
    """When the manifest was written, as its storage says; 0 where that cannot be told."""
    try:
        found = store.list(step_attempt_folder(step, attempt))
    except OSError:
        return 0.0
    return next((entry.modified_s for entry in found if entry.name == MANIFEST), 0.0)


def lineage(store: Store, at: AttemptName) -> list[dict[str, Any]]:
    """The attempts that led to one, newest first, as JSON has them: each with the step that it went on from,
    and the attempt of that (`parent`), None where it began the run."""
    found, origins = bounds(store, at), []
    for bound, older in zip_longest(found, found[1:]):
        counter = alive(store, bound.attempt)
        parent, step = (str(older.attempt), older.last_step) if older is not None else (None, 0)
        ended = (counter.ended or None) if counter is not None else None
        origins.append({"attempt": str(bound.attempt), "parent": parent, "step": step, "ended": ended})
    return origins


def num_bytes(record: StepRecord) -> int:
    return sum(shard.num_bytes for shard in (*record.manifest.shards, *record.manifest.constants))


def num_leaves(record: StepRecord) -> int:
    ranks = [rank for part in record.parts for rank in part.ranks]
    return sum(len(rank.counted()) for rank in ranks)


def _rows(store: Store, shown: Iterator[VisibleStep], seen: set[VisibleStep]) -> Iterator[StepRow]:
    for each in shown:
        record, problem = _read(store, each)
        if record is None and not problem:
            continue
        yield StepRow(
            step=each.step,
            attempt=each.attempt,
            visible=each in seen,
            world=None if record is None else record.world,
            num_bytes=None if record is None else num_bytes(record),
            leaves=None if record is None else num_leaves(record),
            committed_at_s=committed_at_s(store, each.step, each.attempt),
            marks=tuple(marks(store, each.step, each.attempt)),
            problem=problem,
            here=None if record is None else record.manifest.ranks,
        )


def _read(store: Store, each: VisibleStep) -> tuple[StepRecord | None, str]:
    """The step's records, or what is wrong with them; neither where it was never committed or is pruned,
    perhaps while it is read."""
    try:
        manifest = read_manifest(store, each.step, each.attempt)
        if not isinstance(manifest, Manifest):
            return None, ""
        missing = missing_files(store, manifest)
        if not missing:
            return read_step(store, each.step, each.attempt), ""
        problem = f"missing or cut short: {', '.join(missing)}"
    except (DamagedError, NoSuchStepError, FileNotFoundError) as error:
        problem = str(error)
    return None, problem if has_manifest(store, each) else ""


def persisted(store: Store, step: int, attempt: AttemptName) -> list[dict[str, Any]]:
    """The writes of a step, one a rank, as JSON has them; none where the ledger does not have them. `direct`:
    past the page cache."""
    found = []
    for line in lines_of(store, str(attempt)):
        seconds, num_bytes = number_in(line, "seconds"), number_in(line, "num_bytes")
        is_persist = line["event"] == Event.PERSIST.value and line.get("step") == step
        if is_persist and seconds is not None and num_bytes is not None:
            direct = line.get("direct") is True
            found.append({"seconds": seconds, "num_bytes": int(num_bytes), "direct": direct})
    return found


def resumed(store: Store, step: int, attempt: AttemptName) -> list[dict[str, Any]]:
    """The resumes from a step, by the newest attempts, from "memory" or "local"."""
    found = []
    for info in attempts(store)[-_MOST_ATTEMPTS:]:
        for line in lines_of(store, str(info.name)):
            seconds = number_in(line, "seconds")
            is_resume = line["event"] == Event.RESUME.value and line.get("step") == step
            if is_resume and seconds is not None and line.get("from_attempt") == str(attempt):
                tier = str(line.get("tier", ""))[:20]
                found.append({"attempt": str(info.name), "seconds": seconds, "tier": tier})
    return found


def number_in(line: dict[str, Any], key: str) -> float | None:
    """What a line of the ledger says under a name, None where it is no number that could be meant."""
    return number_of(line.get(key))


def number_of(value: object) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= _MOST else None
