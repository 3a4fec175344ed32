"""From granted slots to slots that a capture may write: opened, faulted in, known to the devices.

Owns descriptors and mappings until it hands them over; asks the keeper nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.keeper.client import SlotGrant
from flashckpt.keeper.protocol import close_all
from flashckpt.memory.slot import Slot


def made_usable(grants: Sequence[SlotGrant], capture: Capture) -> list[Slot]:
    """The granted slots, ready to be written. Whatever is raised, nothing of them stays open.

    Faulted in and registered here, beside the loop: a first touch by a capture would cost it twenty times
    a copy.
    """
    slots: list[Slot] = []
    left = [grant.descriptor for grant in grants]
    try:
        for grant in grants:
            left.pop(0)  # from here on that of `open`, whatever becomes of it
            slots.append(grant.open())
        for slot in slots:
            _native.populate(slot.metadata_address, slot.metadata_capacity + slot.image_capacity, threads=1)
        capture.register(slots)
    except BaseException:
        for slot in slots:
            slot.close()
        close_all(left)
        raise
    return slots


def what_they_mean(grants: Sequence[SlotGrant], wanted: int) -> Iterator[str]:
    """What a user should know of slots that are fewer, or live shorter, than they should."""
    if len(grants) < wanted:
        yield (
            f"memory allows {len(grants)} slots where {wanted} are wanted: while one is being persisted, "
            "snapshots may be skipped"
        )
    if not all(grant.outlives_both for grant in grants):
        yield (
            "shared memory that outlives every process is too small here: slots survive the death of "
            "trainer or keeper, not of both; then the run goes on from disk"
        )
