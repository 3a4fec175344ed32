"""Whether replicas are alike: of a step's parts, before their manifest. Writes nothing.

Ranks that hold leaves alike by declaration have tables with one checksum in the heads of their parts; only
where the checksums differ are the tables read, to say which rank holds another leaf.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flashckpt.errors import DivergedError
from flashckpt.format.records import Part, PartHead
from flashckpt.format.replicas import Ranks, Replicas, count_of
from flashckpt.store.base import Store

_SHOWN = 8

# Of a set of ranks: by checksum of their table, those that have it, each with its part's file.
_Held = dict[str, dict[int, str]]


def unlike(heads: Sequence[PartHead]) -> dict[Ranks, _Held]:
    """The sets of ranks, of all parts of a step, that do not all have the same table of replicas."""
    found: dict[Ranks, _Held] = defaultdict(lambda: defaultdict(dict))
    for head in heads:
        by_index = [found[ranks][checksum] for ranks, checksum in head.replicas]
        for rank in head.ranks:
            for index in rank.replicas:
                by_index[index][rank.rank] = head.file
    return {
        ranks: held
        for ranks, held in found.items()
        if len(held) > 1 or sum(map(len, held.values())) != count_of(ranks)
    }


def check_alike(store: Store, folder: str, heads: Sequence[PartHead]) -> None:
    """`heads` are those of all parts in a step's folder. Raises DivergedError unless each rank that is said
    to hold replicas has the same table of them as all others of its set; DamagedError, OSError."""
    rows = [row for ranks, held in unlike(heads).items() for row in _rows(store, folder, ranks, held)]
    if not rows:
        return
    step = heads[0].step
    shown = "; ".join(f"rank {_words(map(str, of))}: {_words(names)}" for of, names in rows[:_SHOWN])
    raise DivergedError(
        f"Step {step} is not committed: replicas have diverged. By declaration all ranks of a set hold them "
        f"alike, and these hold something else than most ({shown}). Committed steps are untouched, and these "
        "leaves are kept by rank from now on. Ranks that compute the same stay alike: look for a rank that "
        "computes something else, or whose memory is at fault, and go on from a step of before.",
        step=step,
        leaves=tuple(sorted({name for _, names in rows for name in names})),
        ranks=tuple(sorted({rank for of, _ in rows for rank in of})),
    )


def _rows(store: Store, folder: str, ranks: Ranks, held: _Held) -> list[tuple[list[int], list[str]]]:
    """Ranks of a set, and the names of what they do not have as most of the set do."""
    by_number = sorted(held.items(), key=lambda each: (-len(each[1]), min(each[1])))
    tables = [(sorted(of), _table(store, folder, ranks, *min(of.items()))) for _, of in by_number]
    (_, most), *others = tables
    rows = [(of, _differing(most, table)) for of, table in others]
    known = {rank for of, _ in tables for rank in of}
    missing = [rank for run in ranks for rank in run if rank not in known]
    if missing:
        rows.append((missing, sorted(leaf.name for leaf in most.leaves)))
    return rows


def _table(store: Store, folder: str, ranks: Ranks, rank: int, file: str) -> Replicas:
    path = f"{folder}/{file}"
    part = Part.from_bytes(store.read(path, Part.MAX_BYTES), path)
    [mine] = [each for each in part.ranks if each.rank == rank]
    [table] = [each for each in mine.replicas if each.ranks == ranks]
    return table


def _differing(one: Replicas, other: Replicas) -> list[str]:
    """Names of the leaves that two tables do not have alike."""
    rows = [
        {leaf.name: (leaf.content, digest, by) for leaf, digest, by in each.rows()} for each in (one, other)
    ]
    return sorted(name for name in rows[0].keys() | rows[1].keys() if rows[0].get(name) != rows[1].get(name))


def _words(each: Iterable[str]) -> str:
    every = list(each)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
