"""How large a slot is, and how much more than it needs now a state is given. Sums only."""

from __future__ import annotations

from typing import NamedTuple

from flashckpt.format.layout import PAGE
from flashckpt.memory.page import round_up

# Headroom in a slot for what a patch may add, beside a mebibyte: a sixteenth of the image, half of the
# metadata.
_IMAGE_SLACK = 16
_METADATA_SLACK = 2
_LEAST_SLACK_BYTES = 1 << 20


class SlotSize(NamedTuple):
    """Bytes of metadata and of image that a slot has room for, or that a state needs."""

    metadata_bytes: int
    image_bytes: int

    @property
    def region_bytes(self) -> int:
        """What a region for it takes: with the control page, in whole pages."""
        return PAGE + round_up(self.metadata_bytes) + round_up(self.image_bytes)

    def holds(self, other: SlotSize) -> bool:
        return self.metadata_bytes >= other.metadata_bytes and self.image_bytes >= other.image_bytes

    def with_slack(self, parts: int = 1) -> SlotSize:
        """Room for a state that needs this, in whole pages, with headroom for what a patch may add; or with
        one of so many `parts` of the headroom."""
        metadata_slack = self.metadata_bytes // _METADATA_SLACK + _LEAST_SLACK_BYTES
        image_slack = self.image_bytes // _IMAGE_SLACK + _LEAST_SLACK_BYTES
        return SlotSize(
            round_up(self.metadata_bytes + metadata_slack // parts),
            round_up(self.image_bytes + image_slack // parts),
        )

    def grown(self) -> SlotSize:
        """Half as much again, for a state that has outgrown its slots and may go on growing: it outgrows
        slots seldom then, however small its steps are."""
        return SlotSize(
            round_up(self.metadata_bytes + self.metadata_bytes // 2),
            round_up(self.image_bytes + self.image_bytes // 2),
        )
