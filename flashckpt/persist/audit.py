"""Whether a snapshot's bytes are those of its boundary: digests of a slot's image against its table.

Owns the windows through which the keeper looks at an image: never more than 64 MiB are mapped, so that
the keeper's memory stays small and so does its OOM score. Changes nothing but the word of a slot whose
snapshot is torn.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

from flashckpt import _native, crashpoints
from flashckpt.errors import DamagedError
from flashckpt.format.layout import PAGE, Layout
from flashckpt.format.metadata import Metadata
from flashckpt.memory.slot import Slot, Word
from flashckpt.persist.job import JobState, LeafSource, SealedSnapshot, StepOutcome, Void

WINDOW_BYTES = 64 << 20
assert WINDOW_BYTES % _native.BLOCK_BYTES == 0


class Stopped(Exception):
    """An audit was ended before its end: it says nothing."""


class Torn(Exception):
    """A snapshot (`snapshot`, where it is known) that nobody may use; `leaves`: (index, name) that differ."""

    snapshot: SealedSnapshot | None = None

    def __init__(self, message: str, leaves: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message)
        self.leaves = leaves


def torn(metadata: Metadata, leaves: list[int]) -> Torn:
    known = metadata.leaves
    named = tuple((index, known[index].name) for index in leaves)
    return Torn(f"{len(leaves)} leaves are not those of their boundary.", named)


def check_header(region: Slot, layout: Layout) -> None:
    """Raises Torn unless the image of a slot, or of a region of constants, begins as its layout says."""
    if os.pread(region.descriptor, layout.data_start, region.image_offset) != layout.header:
        raise Torn("An image does not begin with the header of its plan.")


def discard(slot: Slot, word: Word, found: Torn, attempt: str = "") -> StepOutcome:
    """Free a snapshot that nobody may use, and tell its trainer; unless it is gone already."""
    if not slot.free(word):
        return StepOutcome(JobState.VOID, Void.GONE, attempt)
    slot.set_torn(word.generation, [index for index, _ in found.leaves])
    return StepOutcome(
        JobState.VOID, Void.TORN, attempt, slot=slot.name, leaves=found.leaves, message=str(found)
    )


def audit(snapshot: SealedSnapshot, is_stopped: Callable[[], bool] = lambda: False) -> StepOutcome | bool:
    """Compare a sealed snapshot's bytes with its digests, without pinning it. True where they are those of
    its boundary, the outcome where it was discarded. False says nothing: what is overwritten meanwhile is
    judged by nobody, nor is what was not looked at to its end."""
    slot, attempt = snapshot.slot, ""
    word = slot.state()
    try:
        sealed = slot.sealed()
        if sealed is None or sealed.word != word or sealed.generation != snapshot.generation:
            return False
        attempt = str(sealed.attempt)
        metadata = slot.metadata(sealed)
        crashpoints.point("audit.begun")
        sources = snapshot.sources(metadata)
        if metadata.constants is not None and len(sources) == 1:
            return False  # not handed over yet, or gone: it is for whoever needs the bytes to say
        leaves = differing(metadata, sources, is_stopped)
    except Stopped:
        return False
    except DamagedError as error:
        return discard(slot, word, Torn(str(error)), attempt)
    if slot.state() != word:
        return False
    return discard(slot, word, torn(metadata, leaves), attempt) if leaves else True


def differing(
    metadata: Metadata, sources: Sequence[LeafSource], is_stopped: Callable[[], bool] = lambda: False
) -> list[int]:
    """Indexes, in the order of the table, of the leaves whose bytes do not have the digest of their boundary,
    or stand in none of these sources: the first is the snapshot's own slot. What is left to other ranks of
    the node is not looked at.

    May run while the slot is written again: then its result means nothing, and the word tells. Raises
    Stopped at the next window once `is_stopped`.
    """
    found = []
    holders = {index: each.region for each in sources for index in each.leaves}
    for each in sources[1:]:
        for index in each.region.not_held(metadata):
            del holders[index]
    image = metadata.image
    left = range(image.first_left, image.first_constant)
    for index, (leaf, start) in enumerate(zip(image.leaves, image.starts(), strict=True)):
        if index in left:
            continue
        holder = holders.get(index)
        if holder is None:
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
