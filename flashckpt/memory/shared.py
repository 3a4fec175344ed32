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
    return metadata.constants is not None and not not_held(region, metadata)


def not_held(region: Slot, metadata: Metadata) -> list[int]:
    """Indexes, among the leaves of a snapshot, of the constants that a region was not sealed with: all of
    them where it was sealed with other leaves, or is damaged."""
    first = len(metadata.layout.leaves)
    try:
        sealed = region.sealed()
        held = region.metadata(sealed) if sealed is not None else None
    except DamagedError:
        held = None
    if held is None or held.layout != metadata.constants:
        return list(range(first, len(metadata.leaves)))
    pairs = enumerate(zip(held.digests, metadata.constants_digests, strict=True), first)
    return [index for index, (digest, wanted) in pairs if digest != wanted]
