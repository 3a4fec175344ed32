"""The history of a run for display: steps, branches, lineage, ranks, times. Reads records, never a shard.

A step that cannot be used is a row with its problem, never an error. Times come from the run's ledger, which
only this display depends on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Any

from flashckpt.catalogue.changes import ancestry
from flashckpt.commit.attempts import ending
from flashckpt.commit.lineage import damage, until_stable
from flashckpt.commit.steps import (
    StepRecord,
    committed,
    heads_at_rest,
    lacking,
    step_of,
    whole_or_why,
)
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, NoSuchStepError
from flashckpt.format.layout import DTYPES, Leaf
from flashckpt.format.names import MAX_BOUNDARY, AttemptName, CommitName, SnapshotId
from flashckpt.persist.ledger import Event, attempts_of, lines_of
from flashckpt.recovery.report import ranges_of
from flashckpt.store.base import Store

_MOST_ATTEMPTS = 64
_MOST = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A listed step. `problem`: why it cannot be used, empty if it can. `num_bytes`: of its shards and frozen
    instances. `committed_at_s`: seconds since 1970. `damage`: the host that failed to verify it, and why.
    `is_ambiguous`: its attempt has committed another boundary with that step number."""

    name: CommitName
    visible: bool
    world: int | None
    num_bytes: int | None
    leaves: int | None
    committed_at_s: float
    damage: tuple[str, str] | None
    problem: str
    is_ambiguous: bool = False


def step_rows(store: Store, *, all_branches: bool) -> list[StepRow]:
    """The steps of the run's branch, or of every branch, newest last."""
    return until_stable(store, lambda: list(_rows(store, all_branches)))


def committed_at_s(view: View, name: CommitName) -> float:
    """When the manifest was written, by the storage's clock; 0 if unknown."""
    checkpoint = view.checkpoint(name.id)
    if checkpoint is None:
        return 0.0
    folder, _, file = checkpoint.manifest_path.rpartition("/")
    try:
        return next((each.modified_s for each in view.store.list(folder) if each.name == file), 0.0)
    except OSError:
        return 0.0


def lineage(view: View, at: AttemptName) -> list[dict[str, Any]]:
    """The ancestors of an attempt and itself, newest first, as JSON: each with the step that it resumed from
    and the attempt of that step (`parent`), None if it began the run."""
    ancestors = ancestry(view.catalogue, SnapshotId(at, MAX_BOUNDARY))[1:]
    origins = []
    for attempt, parent in zip_longest((at, *(each.attempt for each in ancestors)), ancestors):
        step = 0 if parent is None else _step_of(view, attempt, parent)
        name = None if parent is None else str(parent.attempt)
        ended = ending(view, attempt) or None
        origins.append({"attempt": str(attempt), "parent": name, "step": step, "ended": ended})
    return origins


def _step_of(view: View, attempt: AttemptName, parent: SnapshotId) -> int | None:
    """The step number of the snapshot that an attempt resumed from, None if it is gone."""
    if attempt == view.attempt:
        return view.catalogue.parent_step
    found = view.checkpoint(parent)
    return None if found is None else found.step


def _rows(store: Store, all_branches: bool) -> Iterator[StepRow]:
    view = View.of(store)
    numbers = Counter((each.step, each.attempt) for each in view.checkpoints)
    visible = set(view.visible())
    for name in view.checkpoints:
        if not (all_branches or name in visible):
            continue
        record, problem = _read(view, name)
        if record is None and not problem:
            continue
        leaves = None
        if record is not None:
            leaves = sum(len(rank.counted()) for part in record.parts for rank in part.ranks)
        yield StepRow(
            name=name,
            visible=name in visible,
            world=None if record is None else record.world,
            num_bytes=None if record is None else record.manifest.leaf_bytes,
            leaves=leaves,
            committed_at_s=committed_at_s(view, name),
            damage=damage(view, name.id),
            problem=problem,
            is_ambiguous=numbers[name.step, name.attempt] > 1,
        )


def _read(view: View, name: CommitName) -> tuple[StepRecord | None, str]:
    """The step, or why it cannot be read; neither if it is deleted meanwhile."""
    try:
        found = whole_or_why(view.store, committed(view, name))
        if not isinstance(found, str):
            return step_of(view.store, found).check(), ""
        problem = found
    except (DamagedError, NoSuchStepError, FileNotFoundError) as error:
        problem = str(error)
    return None, problem if View.of(view.store).has(name) else ""


def persisted(store: Store, step: int, attempt: AttemptName) -> list[dict[str, Any]]:
    """The writes of a step in the ledger, as JSON. `direct`: the page cache was bypassed."""
    found = []
    for line in lines_of(store, str(attempt)):
        seconds, num_bytes = number_of(line.get("seconds")), number_of(line.get("num_bytes"))
        is_persist = line["event"] == Event.PERSIST.value and line.get("step") == step
        if is_persist and seconds is not None and num_bytes is not None:
            direct = line.get("direct") is True
            found.append({"seconds": seconds, "num_bytes": int(num_bytes), "direct": direct})
    return found


def resumed(store: Store, step: int, attempt: AttemptName) -> list[dict[str, Any]]:
    """The resumes from a step, by the newest attempts, from "memory" or "local"."""
    found = []
    for name in attempts_of(store)[-_MOST_ATTEMPTS:]:
        for line in lines_of(store, str(name)):
            seconds = number_of(line.get("seconds"))
            is_resume = line["event"] == Event.RESUME.value and line.get("step") == step
            if is_resume and seconds is not None and line.get("from_attempt") == str(attempt):
                tier = str(line.get("tier", ""))[:20]
                found.append({"attempt": str(name), "seconds": seconds, "tier": tier})
    return found


def number_of(value: object) -> float | None:
    """A value in a ledger line, None if it is no plausible number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= _MOST else None


# ---- a step of several ranks: which slices of a leaf which ranks have, how long each rank wrote

Box = tuple[tuple[int, int], ...]
"""For each dimension the first index and the index after the last."""

_MOST_WAITING = 8
_MOST_HOST_CHARS = 64
# For a normal distribution, the standard deviation is this times the median distance from the median.
_DEVIATIONS = 1.4826
_FAR = 6.0
_FAR_SHARE = 0.5
_FAR_S = 0.001
_LEAST_RANKS = 4


# ---- numbers of ranks


def spans(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"."""
    runs = ranges_of(sorted(set(ranks)))
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def named(ranks: Sequence[int]) -> str:
    """[3] -> "rank 3"; [0, 1] -> "ranks 0–1"."""
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {spans(ranks)}"


# ---- leaves


@dataclass(frozen=True)
class LeafRow:
    """One tensor of the state: its whole shape, and which ranks' files hold which slice. `digests`: how many
    different contents there are among ranks that hold it whole."""

    name: str
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    boxes: Mapping[Box, tuple[int, ...]] = field(repr=False)
    digests: int = 1

    @property
    def num_bytes(self) -> int:
        """The length of the whole tensor."""
        return self.item_bytes * math.prod(self.shape)

    @property
    def where(self) -> str:
        """The ranks that hold it, in words."""
        ranks = [rank for those in self.boxes.values() for rank in those]
        if len(self.boxes) == 1 and next(iter(self.boxes)) == whole_box(self.shape):
            own = "each its own, on " if self.digests > 1 else "whole on "
            return own + named(ranks)
        return f"{len(self.boxes)} boxes on {named(ranks)}"


def box_of(leaf: Leaf) -> Box:
    if leaf.box is None:
        return whole_box(leaf.shape)
    return tuple((first, first + size) for first, size in zip(leaf.box.start, leaf.shape, strict=True))


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_text(box: Box, shape: Sequence[int]) -> str:
    """[0:512, :] of a tensor of 1024 × 512; empty for the whole tensor."""
    if box == whole_box(shape):
        return ""
    pairs = zip(box, shape, strict=True)
    return "[" + ", ".join(":" if each == (0, size) else f"{each[0]}:{each[1]}" for each, size in pairs) + "]"


def leaf_rows(record: StepRecord) -> list[LeafRow]:
    """The tensors of a step by name. A name with several shapes has a row for each."""
    found: dict[tuple[str, str, tuple[int, ...]], tuple[Leaf, dict[Box, list[int]], set[int]]] = {}
    for rank in (rank for part in record.parts for rank in part.ranks):
        for _, leaf, digest in rank.counted():
            row = found.setdefault((leaf.name, leaf.dtype, leaf.whole_shape), (leaf, {}, set()))
            row[1].setdefault(box_of(leaf), []).append(rank.rank)
            row[2].add(digest)
    rows = []
    for (name, dtype, shape), (leaf, boxes, digests) in sorted(found.items(), key=lambda item: item[0]):
        ordered = {box: tuple(sorted(ranks)) for box, ranks in sorted(boxes.items())}
        rows.append(LeafRow(name, leaf.aliases, dtype, shape, DTYPES[dtype][0], ordered, len(digests)))
    return rows


# ---- times of ranks


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """A rank's files of a step, and its times in seconds, if the ledger has them: `write_s` of this step,
    `capture_s` (of the call) and `step_s` of the newest minutes of its attempt. `far`: the names of times
    that are far above the other ranks'."""

    rank: int
    node: int
    file: str
    num_bytes: int
    host: str = ""
    write_s: float | None = None
    capture_s: float | None = None
    step_s: float | None = None
    far: tuple[str, ...] = ()


TIMES = ("write_s", "capture_s", "step_s")


def rank_rows(store: Store, record: StepRecord) -> list[RankTimes]:
    """A row for each rank, in order. A node is named by its lowest rank."""
    found_by_rank = _ledger_rows(store, record.step, record.attempt)
    far = {
        name: far_above({rank: times[name] for rank, times in found_by_rank.items() if name in times})
        for name in TIMES
    }
    rows = []
    for part in record.parts:
        for rank in part.ranks:
            rows.append(
                RankTimes(
                    rank=rank.rank,
                    node=part.node,
                    file=rank.shard.file,
                    num_bytes=sum(each.num_bytes for each in rank.files),
                    far=tuple(name for name in TIMES if rank.rank in far[name]),
                    **found_by_rank.get(rank.rank, {}),
                )
            )
    return sorted(rows, key=lambda row: row.rank)


def far_above(values: Mapping[int, float]) -> set[int]:
    """The ranks whose value is far above the others': by more than six deviations and half of the median. The
    deviation comes from medians, so that slow ranks, up to half of all, do not hide themselves."""
    if len(values) < _LEAST_RANKS:
        return set()
    usual = median(values.values())
    deviation = _DEVIATIONS * median(abs(value - usual) for value in values.values())
    limit = usual + max(_FAR * deviation, _FAR_SHARE * usual, _FAR_S)
    return {rank for rank, value in values.items() if value > limit}


def _ledger_rows(store: Store, step: int, attempt: AttemptName) -> dict[int, dict[str, Any]]:
    """The times of each rank in the ledger. The newest line counts."""
    found_by_rank: dict[int, dict[str, Any]] = {}
    for line in lines_of(store, str(attempt)):
        rank = number_of(line.get("rank"))
        if line["event"] == Event.TIMES.value and rank is not None:
            times = {
                "step_s": number_of(line.get("step_seconds")),
                "capture_s": number_of(line.get("capture_seconds")),
            }
            mine = found_by_rank.setdefault(int(rank), {})
            mine.update({name: value for name, value in times.items() if value is not None})
            mine["host"] = str(line.get("host", ""))[:_MOST_HOST_CHARS]
        elif line["event"] == Event.PERSIST.value and line.get("step") == step:
            for row in _rows_in(line.get("written")):
                found_by_rank.setdefault(int(row[0]), {})["write_s"] = row[1]
    return found_by_rank


def _rows_in(value: object) -> list[tuple[float, float, float]]:
    """Rank, seconds and bytes of each rank in a line about a write."""
    found = []
    for row in value if isinstance(value, list) else []:
        numbers = [number_of(cell) for cell in row] if isinstance(row, list) else []
        known = [each for each in numbers if each is not None]
        if len(known) == len(numbers) == 3:
            found.append((known[0], known[1], known[2]))
    return found


# ---- steps that wait for ranks


@dataclass(frozen=True)
class Waiting:
    """A step of the newest attempt, newer than all committed ones, without the parts of some ranks."""

    step: int
    attempt: AttemptName
    world: int
    missing: tuple[int, ...]


def waiting(store: Store) -> list[Waiting]:
    """The newest waiting steps, newest last."""
    found = []
    for folder in View.of(store).pending()[-_MOST_WAITING:]:
        heads = heads_at_rest(store, folder)
        head = next(iter(heads.values()), None)
        if head is not None and (missing := lacking(heads, head.world)):
            found.append(Waiting(head.step, folder.id.attempt, head.world, tuple(missing)))
    return found


def waiting_text(each: Waiting) -> str:
    """A sentence that names the missing ranks."""
    there = each.world - len(each.missing)
    return (
        f"flashckpt: step {each.step} of attempt {each.attempt} is not committed: it waits for "
        f"{named(each.missing)}, the parts of {there:,} of {each.world:,} ranks are there."
    )
