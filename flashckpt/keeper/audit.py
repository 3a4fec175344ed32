"""Whether a snapshot's bytes are those of its boundary: digests of a slot's image against its table.

Owns the windows through which the keeper looks at an image: never more than 64 MiB are mapped, so that
the keeper's memory stays small and so does its OOM score. Changes nothing.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

from flashckpt import _native
from flashckpt.format.layout import PAGE, Layout
from flashckpt.format.metadata import Metadata
from flashckpt.memory.shared import not_held
from flashckpt.memory.slot import Slot

WINDOW_BYTES = 64 << 20
assert WINDOW_BYTES % _native.BLOCK_BYTES == 0


class Stopped(Exception):
    """An audit was ended before its end: it says nothing."""


class Torn(Exception):
    """A snapshot that nobody may use; `leaves` are (index, name) of those that differ."""

    def __init__(self, message: str, leaves: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message)
        self.leaves = leaves


def torn(metadata: Metadata, leaves: list[int]) -> Torn:
    known = metadata.leaves
    named = tuple((index, known[index].name) for index in leaves)
    return Torn(f"{len(leaves)} leaves are not those of their boundary.", named)


def check_header(slot: Slot, start: int, layout: Layout) -> None:
    """Raises Torn unless the image at `start` bytes into the slot's begins as its layout says."""
    if os.pread(slot.descriptor, layout.data_start, slot.image_offset + start) != layout.header:
        raise Torn("An image does not begin with the header of its plan.")


def differing(
    slot: Slot,
    metadata: Metadata,
    constants: Slot | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Indexes, in the order of the table, of the leaves whose bytes do not have the digest of their
    boundary, constants included: of `constants`, the region that the snapshot names, if it names one.

    May run while the slot is written again: then its result means nothing, and the word tells. Raises
    Stopped at the next window once `is_stopped`.
    """
    found = []
    image = metadata.image
    own = len(image.shard.leaves) if metadata.shared else len(image.leaves)
    absent = set(not_held(constants, metadata)) if constants is not None and metadata.shared else set()
    for index, (leaf, start) in enumerate(zip(image.leaves, image.starts(), strict=True)):
        holder = slot if index < own else constants
        if holder is None or index in absent:
            found.append(index)
            continue
        offset = holder.image_offset + start
        if _digest_of(holder.descriptor, offset, leaf.num_bytes, is_stopped) != metadata.digests[index]:
            found.append(index)
    return found


def unlike(metadata: Metadata, digests: Sequence[int], first: int = 0) -> list[int]:
    """Indexes of the leaves, from `first` on, whose digests differ from those in the table."""
    return [index for index, now in enumerate(digests, first) if metadata.digests[index] != now]


def _digest_of(descriptor: int, offset: int, num_bytes: int, is_stopped: Callable[[], bool]) -> int:
    """The digest of a range of a region, in windows of whole blocks."""
    hashes = 0
    for done in range(0, num_bytes, WINDOW_BYTES):
        if is_stopped():
            raise Stopped
        length = min(WINDOW_BYTES, num_bytes - done)
        hashes += _hashes(descriptor, offset + done, length, done // _native.BLOCK_BYTES)
    return _native.finish_digest(num_bytes, hashes % 2**64)


def _hashes(descriptor: int, offset: int, length: int, first_block: int) -> int:
    begin = offset // PAGE * PAGE
    with mmap.mmap(
        descriptor, offset - begin + length, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin
    ) as window:
        return _native.hash_blocks(_native.address_of(window) + offset - begin, length, first_block)
