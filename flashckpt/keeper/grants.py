"""What a keeper hands over to a trainer. Owns no descriptor: whoever received it does."""

from __future__ import annotations

import os
from dataclasses import dataclass

from flashckpt.memory.region import MEMFD
from flashckpt.memory.slot import Slot


@dataclass(frozen=True)
class SlotGrant:
    """A slot that the keeper handed over. `descriptor` is the receiver's to close (`open` passes it on);
    `owner` is this trainer's index in the slot; `kind` is "named" or "memfd". One that `holds_constants` is
    no slot but a region, laid out as one, of what several slots share."""

    descriptor: int
    index: int
    name: str
    owner: int
    kind: str
    num_bytes: int
    holds_constants: bool = False

    @property
    def outlives_both(self) -> bool:
        """Whether the slot survives the death of trainer and keeper together."""
        return self.kind != MEMFD

    def open(self, *, map_image: bool = True) -> Slot:
        """Map the slot, which owns the descriptor from here on. The descriptor is closed where that fails."""
        try:
            return Slot.open(self.descriptor, map_image=map_image)
        except BaseException:
            os.close(self.descriptor)
            raise
