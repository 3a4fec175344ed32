"""Sealing a slot that is written outside of a capture: what a resume reads in, constants that are shared."""

from __future__ import annotations

from flashckpt import _native
from flashckpt.format.metadata import Geometry
from flashckpt.memory.page import State, Word
from flashckpt.memory.slot import Slot

_PATIENCE_S = 60.0


def seal(slot: Slot, owner: int, generation: int, places: Geometry, count: int) -> str:
    """Seal a slot whose metadata, `count` digests and record are written, and wait for it. Returns why it
    could not be, or nothing."""
    sealer = _native.Sealer()
    try:
        sealer.submit(
            waits=[],
            word=slot.word_address,
            expected=Word(State.WRITING, owner, generation).packed(),
            desired=Word(State.SEALED, 0, generation).packed(),
            record=slot.record_address,
            metadata=slot.metadata_address,
            metadata_bytes=places.num_bytes,
            table=slot.metadata_address + places.table,
            table_count=count,
        )
        if sealer.drain(_PATIENCE_S) and slot.state().state is State.SEALED:
            return ""
        return f"it could not be sealed ({'; '.join(why for _, why, _ in sealer.failures())})"
    finally:
        sealer.close()
