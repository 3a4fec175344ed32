"""Which rank writes which replica, and which one holds it in its node's memory: by bytes, a leaf at a time.

Every rank of a set comes to the same division without asking the others: it follows from the set, its leaves
and, for memory, from who shares the node. Owns this rule alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import NamedTuple

# A rank has a file of its own anyway; with less than a chunk of it nothing is won by dividing further.
LEAST_BYTES = 4 << 20


class Division(NamedTuple):
    """By name of a leaf: the one rank that writes it, and the one of this node that holds it in memory."""

    writers: Mapping[str, int]
    holders: Mapping[str, int]


def divide(
    sizes: Mapping[str, int],
    members: Collection[int],
    node: Collection[int],
    least_bytes: int = LEAST_BYTES,
) -> Division:
    """Divide leaves that all `members` hold, by their sizes in bytes. `node` are the ranks of one node, on
    which at least one of the members is. A leaf's writer holds it on its own node."""
    ranks = sorted(members)
    count = min(len(ranks), max(1, sum(sizes.values()) // max(1, least_bytes)))
    # Spread, so that it is not the first nodes alone that write.
    chosen = [ranks[place * len(ranks) // count] for place in range(count)]
    writers = _balanced(sizes, dict.fromkeys(chosen, 0))
    here = sorted(set(ranks) & set(node))
    holders = {name: rank for name, rank in writers.items() if rank in here}
    loads = dict.fromkeys(here, 0)
    for name, rank in holders.items():
        loads[rank] += sizes[name]
    others = {name: num_bytes for name, num_bytes in sizes.items() if name not in holders}
    return Division(writers, {**holders, **_balanced(others, loads)})


def _balanced(sizes: Mapping[str, int], loads: Mapping[int, int]) -> dict[str, int]:
    """Each leaf to the rank with the least, the largest leaf first (longest processing time first)."""
    heap = sorted((num_bytes, rank) for rank, num_bytes in loads.items())
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + sizes[name], rank))
        found[name] = rank
    return found
