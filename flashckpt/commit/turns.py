"""Whose turn it is to gather the parts of a step and to commit it. Looks at nothing."""

from __future__ import annotations

from collections.abc import Collection

from flashckpt.format.replicas import Ranks, count_of, has_rank, place_in

# Where a few nodes make a step, all of them gather its parts: who writes the last one commits. Of many, four
# are picked by the step's number, so that no keeper is asked more than others: the first gathers at once,
# each further one after more looks that found no manifest. In the end everybody does: keepers that died hold
# no step up.
_LOOKS_BEFORE = (0, 3, 5, 7)
_LOOKS_OF_ALL = 12
_MASK = (1 << 64) - 1


def looks_before(step: int, ranks: Collection[int], world: int, here: Ranks | None = None) -> int:
    """How often the keeper of these ranks, of `world`, looks for the manifest of a step in vain before it
    gathers the parts itself. 0: it does so at once. `here`: the ranks that commit in this folder, None for
    all."""
    count = world if here is None else count_of(here)
    if count <= len(_LOOKS_BEFORE) * len(ranks):
        return 0
    places = ranks if here is None else {place_in(here, rank) for rank in ranks if has_rank(here, rank)}
    for turn, looks in enumerate(_LOOKS_BEFORE):
        if _mix(step * len(_LOOKS_BEFORE) + turn) % count in places:
            return looks
    return _LOOKS_OF_ALL


def _mix(number: int) -> int:
    """64 bits that depend on all of a number's (splitmix64 of Steele, Lea and Flood, 2014)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
