"""Which rank writes which replica, and which one holds it in its node's memory: by bytes, a leaf at a time.

Every rank of a set comes to the same division without asking the others: it follows from the set, its
leaves and, for memory, from who shares the node. Owns this rule, and what a rank has learned of leaves that
are said to be alike and are not. Ranks that have not learned it yet divide otherwise: who commits sees that.

What holds of the memory of a node, and where:
1. What a rank writes to storage stands in its own slot: a part never needs another rank's memory (`divide`).
2. Each rank digests all leaves at each boundary, whoever holds them: its table is of its own state.
3. A boundary counts as sealed by a node only if all its ranks have the same table of what they divide: names,
   digests and holders (`ranks.node_table`). Any other is void, so that the one before it stays. From then on
   each rank holds its own of the leaves that may be meant, the rest stays divided: digests are compared in
   groups of leaves, by name, and whoever commits says which leaves of a group are not alike. So every leaf of
   a boundary that counts is in some slot of the node. Where boundary after boundary is void, each holds all.
4. A resume reads what a rank lacks out of the other slots of the same boundary, and believes it only by the
   digests in the rank's own table, before the vote and again in the live state (`restore.memory_tier`). No
   trainer writes a slot before all ranks have filled theirs. A slot that is gone, torn or written again makes
   this candidate unreadable for those that need it, and nothing else.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flashckpt._native import xxh3_64
from flashckpt.format.layout import Leaf
from flashckpt.format.replicas import EVERY, Ranks, has_rank

if TYPE_CHECKING:
    from flashckpt.state.leaves import LiveLeaf

log = logging.getLogger(__name__)

# A rank has a file of its own anyway; with less than a chunk of it nothing is won by dividing further.
LEAST_BYTES = 4 << 20
# In so many groups of leaves the ranks of a node compare what they divide: one word has a bit for each.
GROUPS = 64
ALL_GROUPS = (1 << GROUPS) - 1


def group_of(name: str) -> int:
    """Of a leaf, the same on all ranks."""
    return xxh3_64(name.encode()) % GROUPS


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


class SharedLeaves(NamedTuple):
    """Leaves that `ranks` hold: by name the rank that writes each, None where each of them does; and the one
    rank of this node that has its bytes in its slot, None where each of them has."""

    ranks: tuple[int, ...]
    writers: Mapping[str, int | None]
    holders: Mapping[str, int | None]


class Sharing:
    """What `rank` does about leaves that others hold too. `is_divided`: one rank writes each, and all that
    read it must be able to reach its files; else each does. `within` are the ranks that share this one's
    folder, None for all: others count as none. `node` are the ranks of its node, which divide what all of
    them hold in memory, too, but for the groups of leaves `held_whole`, a bit each. `by_rank` names those
    that have diverged, EVERY all that there are: where it has some of a group, the others of it are divided
    again."""

    def __init__(
        self,
        rank: int,
        *,
        is_divided: bool,
        least_bytes: int = LEAST_BYTES,
        within: Ranks | None = None,
        node: Collection[int] = (),
    ) -> None:
        self.rank, self.is_divided, self._least_bytes = rank, is_divided, least_bytes
        self._within, self._node = within, frozenset(node) | {rank}
        self._holders: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.held_whole = ALL_GROUPS if len(self._node) == 1 or not is_divided else 0
        self.by_rank: frozenset[str] = frozenset()

    def keep_by_rank(self, names: Iterable[str]) -> None:
        """These are not alike: from the next capture on each rank writes its own. Any thread."""
        fresh = frozenset(names) - self.by_rank
        if fresh:
            self.by_rank |= fresh
            log.warning("%d leaves are not alike on all ranks: each keeps its own from now on", len(fresh))

    def hold_whole(self, groups: int = ALL_GROUPS) -> None:
        """The ranks of this node do not divide its memory alike, or what they divide of these groups is not
        alike: from the next capture on each has its own of them. Any thread."""
        if groups & ~self.held_whole:
            self.held_whole |= groups
            log.warning(
                "what the ranks of this node are to hold alike was not the same on all of them: a snapshot "
                "is void, and from now on each rank keeps a copy of its own in memory of %s",
                "all" if self.held_whole == ALL_GROUPS else
                f"the leaves that may have diverged, {self.held_whole.bit_count()} of {GROUPS} groups",
            )  # fmt: skip

    @property
    def ground(self) -> tuple[frozenset[str], int]:
        """What a plan is made by."""
        return self.by_rank, self.held_whole

    def sets(
        self,
        lives: Sequence[LiveLeaf],
        copied: Sequence[Leaf],
        constants: Mapping[str, bool],
        plain: Collection[str],
    ) -> list[SharedLeaves]:
        """The leaves of a plan by the ranks that hold them. `copied` are those that stand in a slot. Each
        rank writes its own `constants` that still are: some may have no region for them, and all divide
        alike. Those that are none any more, which such a rank does not see, are divided apart, and in storage
        alone. `plain` names what can be digested where it lies: anything else has a place in each slot."""
        names: dict[tuple[int, ...], list[str]] = {}
        for live in lives:
            if self._is_shared(live):
                names.setdefault(self._near(live.replicas), []).append(live.name)
        sizes = {leaf.name: leaf.num_bytes for leaf in copied}
        always = {name: size for name, size in sizes.items() if name not in constants}
        since = {name: size for name, size in sizes.items() if not constants.get(name, True)}
        return [self._shared(ranks, names[ranks], always, since, plain) for ranks in sorted(names)]

    def _is_shared(self, live: LiveLeaf) -> bool:
        is_alike = self.by_rank.isdisjoint((EVERY, live.name))
        return is_alike and self.rank in live.replicas and len(self._near(live.replicas)) > 1

    def _near(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Of the ranks that hold a leaf, those whose files this one can read."""
        if self._within is None:
            return ranks
        if ranks not in self._holders:
            self._holders[ranks] = tuple(rank for rank in ranks if has_rank(self._within, rank))
        return self._holders[ranks]

    def _shared(
        self,
        ranks: tuple[int, ...],
        names: Sequence[str],
        always: Mapping[str, int],
        since: Mapping[str, int],
        plain: Collection[str],
    ) -> SharedLeaves:
        """`always`, `since`: sizes of what is divided, each for itself."""
        writers: dict[str, int | None] = dict.fromkeys(names)
        holders, held_whole = writers.copy(), self._groups_held()
        for sizes in (since, always) if self.is_divided else ():
            here = {name: sizes[name] for name in names if name in sizes}
            division = divide(here, ranks, self._node, self._least_bytes)
            writers |= division.writers
            if sizes is always and self._divides_memory(ranks, here):
                left = {name for name in plain if not held_whole >> group_of(name) & 1}
                holders |= {name: rank for name, rank in division.holders.items() if name in left}
        return SharedLeaves(ranks, writers, holders)

    def _divides_memory(self, ranks: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        # Of sets that all of the node are in, alone: then one number says of all its ranks that they agree.
        is_worth_it = sum(sizes.values()) >= 2 * self._least_bytes
        return is_worth_it and self._node <= set(ranks)

    def _groups_held(self) -> int:
        if self.held_whole == ALL_GROUPS:
            return ALL_GROUPS
        known = sum(1 << group for group in {group_of(name) for name in self.by_rank})
        return self.held_whole & ~known
