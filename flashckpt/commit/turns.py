"""Which keepers gather the parts of a step and commit it. All others look for its manifest alone.

Where a few nodes make a step, all of them gather: who writes the last part commits. Of many, four are picked
by the step's number, so that no keeper is asked more than others: the first gathers at once, each further one
after more looks that found no manifest. In the end everybody does: keepers that died hold no step up.
"""

from __future__ import annotations

from collections.abc import Collection

_LOOKS_BEFORE = (0, 3, 5, 7)
_LOOKS_OF_ALL = 12
_MASK = (1 << 64) - 1


def looks_before(step: int, ranks: Collection[int], world: int) -> int:
    """How often the keeper of these ranks, of `world`, looks for the manifest of a step in vain before it
    gathers the parts itself. 0: it does so at once."""
    if world <= len(_LOOKS_BEFORE) * len(ranks):
        return 0
    for turn, looks in enumerate(_LOOKS_BEFORE):
        if _mix(step * len(_LOOKS_BEFORE) + turn) % world in ranks:
            return looks
    return _LOOKS_OF_ALL


def _mix(number: int) -> int:
    """64 bits that depend on all of a number's (splitmix64 of Steele, Lea and Flood, 2014)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
