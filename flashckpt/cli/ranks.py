"""A step of several ranks, as people look at it: which boxes of a leaf which ranks have, what each rank wrote
and how long that took, which of them is far from the others, and which ones a step waits for.

Times are those of the run's ledger: one that is gone, or lies, changes what is shown and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flashckpt.cli.history import number_in, number_of
from flashckpt.commit.attempts import bounds, newest_started, ranks_here
from flashckpt.commit.lineage import in_lineage, newest_first
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError
from flashckpt.format.layout import DTYPES, Leaf
from flashckpt.format.names import AttemptName
from flashckpt.persist.ledger import Event, lines_of
from flashckpt.persist.stored_steps import Completeness, stored_step
from flashckpt.store.base import Store

Box = tuple[tuple[int, int], ...]
"""For each dimension the first index and the one behind the last."""

_MOST_WAITING = 8
_MOST_HOST_CHARS = 64
# Of a normal distribution the median of distances from the median, times this, is the standard deviation.
_DEVIATIONS = 1.4826
_FAR = 6.0
_FAR_SHARE = 0.5
_FAR_S = 0.001
_LEAST_RANKS = 4


# ---- numbers of ranks


def spans(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def named(ranks: Sequence[int]) -> str:
    """[3] -> "rank 3"; [0, 1] -> "ranks 0–1"."""
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {spans(ranks)}"


# ---- leaves


@dataclass(frozen=True)
class LeafRow:
    """One tensor of the state: its whole shape, and which ranks' files have which box of it. `digests`: how
    many different contents the ranks have that hold it whole."""

    name: str
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    boxes: Mapping[Box, tuple[int, ...]] = field(repr=False)
    digests: int = 1

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        total = self.item_bytes
        for size in self.shape:
            total *= size
        return total

    @property
    def where(self) -> str:
        """Which ranks have it, in words."""
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
    """[0:512, :] of a tensor of 1024 × 512; nothing for the whole."""
    if box == whole_box(shape):
        return ""
    pairs = zip(box, shape, strict=True)
    return "[" + ", ".join(":" if each == (0, size) else f"{each[0]}:{each[1]}" for each, size in pairs) + "]"


def leaf_rows(record: StepRecord) -> list[LeafRow]:
    """The tensors of a step by name. A name that ranks have in several shapes has a row for each."""
    found: dict[tuple[str, str, tuple[int, ...]], tuple[Leaf, dict[Box, list[int]], set[int]]] = {}
    for rank in (rank for part in record.parts for rank in part.ranks):
        for _, leaf, digest in rank.counted():
            shape = leaf.shape if leaf.box is None else leaf.box.shape
            row = found.setdefault((leaf.name, leaf.dtype, shape), (leaf, {}, set()))
            row[1].setdefault(box_of(leaf), []).append(rank.rank)
            row[2].add(digest)
    rows = []
    for (name, dtype, shape), (leaf, boxes, digests) in sorted(found.items(), key=lambda item: item[0]):
        ordered = {box: tuple(sorted(ranks)) for box, ranks in sorted(boxes.items())}
        rows.append(LeafRow(name, leaf.aliases, dtype, shape, DTYPES[dtype][0], ordered, len(digests)))
    return rows


# ---- what ranks take


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What a rank has of a step, and its times in seconds as far as the ledger has them: `write_s` of this
    step, `capture_s` (of the call) and `step_s` of the newest minutes of its attempt. `far`: of those names,
    which are far above the other ranks'."""

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
    """In the order of ranks. A node is named by the lowest of its ranks."""
    told = _told(store, record.step, record.attempt)
    far = {
        name: far_above({rank: times[name] for rank, times in told.items() if name in times})
        for name in TIMES
    }
    rows = []
    for part in record.parts:
        for rank in part.ranks:
            files = [rank.shard, *([rank.constants.shard] if rank.constants is not None else [])]
            rows.append(
                RankTimes(
                    rank=rank.rank,
                    node=part.keeper,
                    file=rank.shard.file,
                    num_bytes=sum(each.num_bytes for each in files),
                    far=tuple(name for name in TIMES if rank.rank in far[name]),
                    **told.get(rank.rank, {}),
                )
            )
    return sorted(rows, key=lambda row: row.rank)


def far_above(values: Mapping[int, float]) -> set[int]:
    """The ranks whose value is far above the others': by more than six deviations, taken from medians, so
    that no number of slow ranks below half of all hides itself, and by half of the median at least."""
    if len(values) < _LEAST_RANKS:
        return set()
    usual = median(values.values())
    deviation = _DEVIATIONS * median(abs(value - usual) for value in values.values())
    limit = usual + max(_FAR * deviation, _FAR_SHARE * usual, _FAR_S)
    return {rank for rank, value in values.items() if value > limit}


def _told(store: Store, step: int, attempt: AttemptName) -> dict[int, dict[str, Any]]:
    """What the ledger says of each rank: the newest line counts."""
    told: dict[int, dict[str, Any]] = {}
    for line in lines_of(store, str(attempt)):
        rank = number_in(line, "rank")
        if line["event"] == Event.TIMES.value and rank is not None:
            times = {
                "step_s": number_in(line, "step_seconds"),
                "capture_s": number_in(line, "capture_seconds"),
            }
            mine = told.setdefault(int(rank), {})
            mine.update({name: value for name, value in times.items() if value is not None})
            mine["host"] = str(line.get("host", ""))[:_MOST_HOST_CHARS]
        elif line["event"] == Event.PERSIST.value and line.get("step") == step:
            for row in _rows_in(line.get("written")):
                told.setdefault(int(row[0]), {})["write_s"] = row[1]
    return told


def _rows_in(value: object) -> list[tuple[float, float, float]]:
    """Rank, seconds and bytes of each rank that a line says was written."""
    found = []
    for row in value if isinstance(value, list) else []:
        numbers = [number_of(cell) for cell in row] if isinstance(row, list) else []
        known = [each for each in numbers if each is not None]
        if len(known) == len(numbers) == 3:
            found.append((known[0], known[1], known[2]))
    return found


# ---- what a step waits for


@dataclass(frozen=True)
class Waiting:
    """A step of the newest attempt, newer than all that are committed, of which some ranks' parts are not
    there. `problem`: what is wrong with one that is."""

    step: int
    attempt: AttemptName
    world: int
    missing: tuple[int, ...]
    problem: str = ""


def waiting(store: Store) -> list[Waiting]:
    """Newest last; none where the records of attempts are damaged."""
    try:
        return _waiting(store)
    except DamagedError:
        return []


def _waiting(store: Store) -> list[Waiting]:
    attempt, newest = newest_started(store), next(newest_first(store), None)
    found: list[Waiting] = []
    for each in in_lineage(store, bounds(store)):
        if (newest is not None and each.step <= newest.step) or len(found) == _MOST_WAITING:
            break
        stored = stored_step(store, each.step, each.attempt)
        if each.attempt == attempt and stored.completeness is Completeness.PARTIAL and stored.heads:
            there = {rank.rank for head in stored.heads for rank in head.ranks}
            world = stored.heads[0].world
            here = ranks_here(store, each.attempt) or (range(world),)
            missing = tuple(rank for run in here for rank in run if rank not in there)
            found.append(Waiting(each.step, each.attempt, world, missing, stored.problem))
    return found[::-1]


def waiting_text(each: Waiting) -> str:
    """Of a job that trains, the ranks that all others wait for; of one that died, those that never came."""
    there = each.world - len(each.missing)
    problem = f" {each.problem}" if each.problem else ""
    return (
        f"flashckpt: step {each.step} of attempt {each.attempt} is not committed: it waits for "
        f"{named(each.missing)}, the parts of {there:,} of {each.world:,} ranks are there.{problem}"
    )


def plain_waiting(each: Waiting) -> dict[str, object]:
    """As JSON has it."""
    return {
        "step": each.step,
        "attempt": str(each.attempt),
        "world": each.world,
        "missing": list(each.missing),
        "problem": each.problem or None,
    }
