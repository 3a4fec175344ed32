"""Whether the ranks that say they hold the same leaves, or parts of the same, do: alike in names, dtypes,
shapes and placements, before anything is claimed.

Pure but for `check`. What a rank says does not grow with the number of ranks: a digest for each set of ranks
that it is one of. Only two that differ are asked for their leaves. Bytes are compared where they are
committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from flashckpt.errors import StateError
from flashckpt.ranks.job import Job

Tables = Mapping[tuple[int, ...], Mapping[str, str]]
"""Of each set of ranks that this one is in, ascending: what they hold alike, each leaf in words by its
name."""

_MOST_NAMED = 8


def check(job: Job, tables: Tables) -> None:
    """Raises StateError, on all ranks, where two that declare replicas hold different leaves."""
    mine = {_key(ranks): _digest(leaves) for ranks, leaves in tables.items()}
    asked = job.agree("whether replicas are alike", mine, differing)
    if asked:
        key, *pair = asked
        leaves = {_key(ranks): leaves for ranks, leaves in tables.items()}.get(key, {})
        said = dict(leaves) if job.rank in pair else None
        job.agree("how replicas differ", said, lambda rows: refuse(pair, [rows[rank] for rank in pair]))


def differing(rows: Sequence[Mapping[str, str]]) -> list[Any]:
    """The first set of ranks that do not hold the same, and two of them; empty where all do."""
    for key in dict.fromkeys(key for row in rows for key in row):
        members = _members(key)
        first, *others = [rank for rank in members if rank < len(rows)]
        for rank in others:
            if rows[rank].get(key) != rows[first].get(key):
                return [key, first, rank]
    return []


def refuse(pair: Sequence[int], tables: Sequence[Mapping[str, str]]) -> None:
    """Raises StateError with the leaves that two ranks hold differently."""
    one, other = tables
    wrong = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
    rows = [
        f"  {name}: {one.get(name, 'not there')} on rank {pair[0]}, {other.get(name, 'not there')} on rank "
        f"{pair[1]}"
        for name in wrong[:_MOST_NAMED]
    ]
    more = f"\n  … and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    raise StateError(
        f"Ranks {pair[0]} and {pair[1]} are declared to hold the same, or parts of it, and do not:\n"
        + "\n".join(rows)
        + f"{more}\nNothing was started. Build the same model and the same optimizer on both.",
        location=wrong[0] if wrong else "",
    )


def _digest(leaves: Mapping[str, str]) -> str:
    whole = hashlib.sha256()
    for name in sorted(leaves):
        whole.update(f"{name}\0{leaves[name]}\0".encode())
    return whole.hexdigest()[:32]


def _key(ranks: Sequence[int]) -> str:
    """Short where they lie evenly apart, as those of a mesh do."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    return ",".join(map(str, ranks))


def _members(key: str) -> list[int]:
    if ":" in key:
        return list(range(*map(int, key.split(":"))))
    return list(map(int, key.split(",")))
