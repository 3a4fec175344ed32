"""The region that holds the constants of a rank's snapshots: laid out as a slot, written once.

A snapshot names it by its nonce, and repeats its plan and its digests: a region that does not match both was
never this snapshot's.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Layout
from flashckpt.format.metadata import Metadata, geometry, plan_bytes, write
from flashckpt.format.names import AttemptName
from flashckpt.memory.control_page import Record, SlotSize
from flashckpt.memory.slot import Slot

VALUES = b"{}"


def region_size(layout: Layout) -> SlotSize:
    """What a region for these constants has to have room for."""
    places = geometry(len(plan_bytes(layout)), len(layout.leaves), len(VALUES))
    return SlotSize(places.num_bytes, layout.num_bytes)


def not_held(region: Slot, metadata: Metadata) -> list[int]:
    """Indexes, among the leaves of a snapshot, of the constants that a region was not sealed with: all of
    them where it was sealed with other leaves, or is damaged. Whether its bytes still have their digests is
    for an audit to say."""
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


def seal_region(
    region: Slot,
    owner: int,
    generation: int,
    layout: Layout,
    digests: Sequence[int],
    attempt: AttemptName,
    step: int,
) -> str:
    """Seal a region whose image is whole. Returns why it could not be, or nothing."""
    plan = plan_bytes(layout)
    places = geometry(len(plan), len(digests), len(VALUES))
    write(region.metadata_view, plan, array("Q", digests), VALUES)
    region.write_record(
        Record(
            attempt_number=attempt.number,
            attempt_nonce=int(attempt.nonce, 16),
            step=step,
            generation=generation,
            plan_id=_native.xxh3_64(plan),
            plan_bytes=len(plan),
            table_count=len(digests),
            values_bytes=len(VALUES),
            metadata_bytes=places.num_bytes,
            image_bytes=layout.num_bytes,
            data_start=layout.data_start,
            captured_ns=time.monotonic_ns(),
        )
    )
    return region.seal(owner, generation, places, len(digests))
