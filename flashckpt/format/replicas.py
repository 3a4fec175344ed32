"""Replicas: leaves that a set of ranks holds alike, by declaration, and whose files have the bytes of each.

Owns the form of such a set, and of the table of its leaves. Compares nothing over ranks: see commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from flashckpt._native import xxh3_128
from flashckpt.format.checked_json import Fields, compact
from flashckpt.format.layout import Leaf, digests_of, digests_to_hex, leaf_columns, leaves_from_columns

# In the place of names of leaves where they are too many: no leaf has this one.
EVERY = ""
_SHOWN = 8
Ranks = tuple[range, ...]
"""A set of ranks as runs of equal distance, ascending, each behind the one before it."""


def ranks_of(members: Iterable[int]) -> Ranks:
    """The set of these ranks: equal sets have equal runs."""
    runs: list[range] = []
    for rank in sorted(set(members)):
        last = runs[-1] if runs else None
        if last is None or (len(last) > 1 and rank - last[-1] != last.step):
            runs.append(range(rank, rank + 1))
        else:
            runs[-1] = range(last[0], rank + 1, rank - last[-1])
    return tuple(runs)


def has_rank(ranks: Ranks, rank: int) -> bool:
    return any(rank in run for run in ranks)


def place_in(ranks: Ranks, rank: int) -> int:
    """How many of the set are below a rank of it. ValueError where it has not that rank."""
    before = 0
    for run in ranks:
        if rank in run:
            return before + run.index(rank)
        before += len(run)
    raise ValueError(f"{rank} is not in {ranks}")


def numbers(ranks: Ranks | None) -> list[int] | None:
    """All of a set, ascending. None where it is None."""
    return None if ranks is None else [rank for run in ranks for rank in run]


def in_words(ranks: Ranks) -> str:
    """For a message: "rank 3", or "ranks 0-7, 16-23"."""
    runs = [each for run in ranks for each in ([run] if run.step == 1 else [range(r, r + 1) for r in run])]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:_SHOWN])
    more = ", …" if len(runs) > _SHOWN else ""
    return f"rank {shown}" if count_of(ranks) == 1 else f"ranks {shown}{more}"


def count_of(ranks: Ranks) -> int:
    return sum(map(len, ranks))


def ranks_to_json(ranks: Ranks) -> list[list[int]]:
    return [[run[0], run[-1] + 1, run.step] for run in ranks]


def ranks_from_json(fields: Fields, key: str, world: int, least: int = 2) -> Ranks:
    """DamagedError unless it is a set of at least so many ranks of `world`, in the order of runs."""
    runs: list[range] = []
    for row in fields.rows(key, "start", "stop", "step", max_items=world):
        start = row.integer("start", 0, world - 1)
        run = range(start, row.integer("stop", start + 1, world), row.integer("step", 1, world))
        is_odd = run.stop != run[-1] + 1 or (len(run) == 1 and run.step != 1)
        if is_odd or (runs and start <= runs[-1][-1]):
            fields.refuse("a set of ranks is out of order")
        runs.append(run)
    if count_of(tuple(runs)) < least:
        fields.refuse(f"a set of ranks has fewer than {least}")
    return tuple(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Leaves, in image order, that all of `ranks` hold with the same bytes, and the digest of each.

    `writers` has for each leaf the one rank whose files (shard or constants) have its bytes, None where those
    of each of `ranks` do. Leaves have no offsets here.
    """

    ranks: Ranks
    leaves: tuple[Leaf, ...] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)
    writers: tuple[int | None, ...] = field(repr=False)

    def rows(self) -> Iterable[tuple[Leaf, int, int | None]]:
        """Each leaf with its digest and its writer."""
        return zip(self.leaves, self.digests, self.writers, strict=True)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": ranks_to_json(self.ranks),
            "leaves": leaf_columns(self.leaves),
            "digests": digests_to_hex(self.digests),
            "writers": list(self.writers),
        }

    def checksum(self) -> str:
        """XXH3-128, in hex, of the table as it stands in a part: ranks that hold the same have the same."""
        return xxh3_128(compact(self.to_dict())).hex()

    @classmethod
    def of(cls, fields: Fields, world: int) -> Replicas:
        ranks = ranks_from_json(fields, "ranks", world)
        leaves = tuple(replace(leaf, offset=-1) for leaf in leaves_from_columns(fields.within("leaves")))
        writers = fields.items("writers", len(leaves))
        if not leaves or len(writers) != len(leaves):
            fields.refuse("a table of replicas is empty, or its columns are of different lengths")
        for writer in writers:
            if writer is not None and (type(writer) is not int or not has_rank(ranks, writer)):
                fields.refuse("a replica is written by a rank that does not hold it")
        digests = digests_of(fields.hex("digests", 8 * len(leaves)))
        return cls(ranks=ranks, leaves=leaves, digests=digests, writers=tuple(writers))
