"""Constants that the snapshots in several slots share: one region, laid out as a slot, written once.

Owns the check that a region is the one a snapshot means. A snapshot names it by its nonce, and repeats its
plan and its digests: a region that does not match both was never this snapshot's.
"""

from __future__ import annotations

from flashckpt.errors import DamagedError
from flashckpt.format.metadata import Metadata
from flashckpt.memory.slot import Slot


def holds_constants_of(region: Slot, metadata: Metadata) -> bool:
    """Whether a region was sealed with the constants of a snapshot: the same leaves at the same places, of
    the same digests. Whether its bytes still have them is for an audit to say."""
    try:
        sealed = region.sealed()
        if sealed is None:
            return False
        held = region.metadata(sealed)
    except DamagedError:
        return False
    return held.layout == metadata.constants and held.digests == metadata.constants_digests
