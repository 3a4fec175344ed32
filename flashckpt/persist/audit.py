"""The audit of a snapshot: compares the bytes in a slot's image with the digests of its boundary.

Owns the windows through which the keeper reads an image: it maps at most 64 MiB, to keep its memory and its
OOM score small. Changes only the words of a slot whose snapshot is torn.
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
from flashckpt.persist.job import JobState, LeafSource, SealedSnapshot, StepOutcome

WINDOW_BYTES = 64 << 20
assert WINDOW_BYTES % _native.BLOCK_BYTES == 0


class Stopped(Exception):
    """An audit was stopped before its end, without a result."""


class Torn(Exception):
    """A snapshot must not be used. `leaves`: (index, name) of those that differ."""

    snapshot: SealedSnapshot | None = None

    def __init__(self, message: str, leaves: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message)
        self.leaves = leaves


class UnreadableError(OSError):
    """The image of the cached slot named `filename` cannot be read now. It may be later."""


def torn(metadata: Metadata, leaves: list[int]) -> Torn:
    known = metadata.leaves
    named = tuple((index, known[index].name) for index in leaves)
    return Torn(f"{len(leaves)} leaves are not those of their boundary.", named)


def check_header(region: Slot, layout: Layout) -> None:
    """Raise Torn unless the image of a region begins with the header of its layout."""
    if _bytes_of(region, region.image_offset, layout.data_start) != layout.header:
        raise Torn("An image does not begin with the header of its plan.")


def check_cached(region: Slot, metadata: Metadata, leaves: range) -> None:
    """Raise Torn unless these leaves of a cached region have their digests; skip a region in memory. After
    that the image may be mapped: a disk error shows here, and not as a SIGBUS."""
    if region.is_cached and (found := differing(metadata, [LeafSource(region, leaves)], only=leaves)):
        raise torn(metadata, found)


def discard(slot: Slot, word: Word, found: Torn) -> StepOutcome:
    """Free a torn snapshot and mark it for its trainer, unless it is gone already."""
    if not slot.free(word):
        return StepOutcome(JobState.GONE)
    slot.set_torn(word.generation, [index for index, _ in found.leaves])
    return StepOutcome(JobState.TORN, slot=slot.name, leaves=found.leaves, message=str(found))


def audit(snapshot: SealedSnapshot, is_stopped: Callable[[], bool] = lambda: False) -> StepOutcome | bool:
    """Compare a sealed snapshot's bytes with its digests, without pinning it. Returns True if they agree, the
    outcome if it was discarded, and False without a result: it was overwritten, or the audit stopped."""
    slot, word = snapshot.slot, snapshot.slot.state()
    try:
        sealed = slot.sealed()
        if sealed is None or sealed.word != word or sealed.generation != snapshot.generation:
            return False
        metadata = slot.metadata(sealed)
        crashpoints.point("audit.begun")
        sources = snapshot.sources(metadata)
        if metadata.image.constants.leaves and len(sources) == 1:
            return False  # the constants are not handed over yet, or gone: the writer decides
        leaves = differing(metadata, sources, is_stopped)
    except Stopped:
        return False
    except DamagedError as error:
        return discard(slot, word, Torn(str(error)))
    if slot.state() != word:
        return False
    return discard(slot, word, torn(metadata, leaves)) if leaves else True


def differing(
    metadata: Metadata,
    sources: Sequence[LeafSource],
    is_stopped: Callable[[], bool] = lambda: False,
    *,
    only: range | None = None,
) -> list[int]:
    """Indexes, in the order of the table, of the leaves whose bytes do not have the digest of their boundary,
    or that none of these sources has; the first source is the snapshot's own slot. Skips leaves that other
    ranks of the node hold, and those not in `only`.

    If the slot is overwritten meanwhile, which its word shows, the result means nothing. Raises Stopped at
    the next window once `is_stopped`.
    """
    found = []
    owners = {index: each.region for each in sources for index in each.leaves}
    for each in sources[1:]:
        for index in each.region.not_held(metadata):
            del owners[index]
    image = metadata.image
    left = range(image.first_left, image.first_constant)
    for index, (leaf, start) in enumerate(zip(image.leaves, image.starts(), strict=True)):
        if index in left or (only is not None and index not in only):
            continue
        owner = owners.get(index)
        if owner is None:
            found.append(index)
            continue
        offset = owner.image_offset + start
        if _digest_of(owner, offset, leaf.num_bytes, is_stopped) != metadata.digests[index]:
            found.append(index)
    return found


def unlike(metadata: Metadata, digests: Sequence[int], first: int = 0) -> list[int]:
    """Indexes of the leaves, from `first` on, whose digests differ from those in the table."""
    return [index for index, now in enumerate(digests, first) if metadata.digests[index] != now]


def _bytes_of(region: Slot, offset: int, num_bytes: int) -> bytes:
    """Bytes of an image. Raises UnreadableError if the disk of a cached one fails."""
    data = b""
    try:
        while len(data) < num_bytes and (
            piece := os.pread(region.image_descriptor, num_bytes - len(data), offset)
        ):
            data, offset = data + piece, offset + len(piece)
    except OSError as error:
        raise UnreadableError(
            error.errno, f"{region.name} cannot be read: {error.strerror}", region.name
        ) from error
    return data


def _digest_of(region: Slot, offset: int, num_bytes: int, is_stopped: Callable[[], bool]) -> int:
    """The digest of a range of a region, in windows of whole blocks."""
    hashes = 0
    for done in range(0, num_bytes, WINDOW_BYTES):
        if is_stopped():
            raise Stopped
        length = min(WINDOW_BYTES, num_bytes - done)
        hashes += _hashes(region, offset + done, length, done // _native.BLOCK_BYTES)
    return _native.finish_digest(num_bytes, hashes % 2**64)


def _hashes(region: Slot, offset: int, length: int, first_block: int) -> int:
    if region.is_cached:
        data = _bytes_of(region, offset, length)
        return _native.hash_blocks(_native.address_of(data), len(data), first_block)
    begin = offset // PAGE * PAGE
    with mmap.mmap(
        region.descriptor, offset - begin + length, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin
    ) as window:
        return _native.hash_blocks(_native.address_of(window) + offset - begin, length, first_block)
