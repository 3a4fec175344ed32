"""Digests and checksums of an image whose bytes come in pieces, for stores that no native engine reads.

Owns how a digest is put together from pieces. Compares nothing: what the sums should be, its caller knows.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right

from flashckpt import _native
from flashckpt.format.layout import Layout

_BLOCK = _native.BLOCK_BYTES


class LeafDigest:
    """The digest of `num_bytes` of a leaf, which come in any order and from several threads."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._hashes, self._lock = 0, threading.Lock()
        # Blocks of which two pieces each hold some bytes: what has come, and how much is missing.
        self._torn: dict[int, bytearray] = {}
        self._missing: dict[int, int] = {}

    def add(self, offset: int, data: memoryview) -> None:
        """Bytes that stand at `offset` of the leaf; each comes once."""
        first, last = -(-offset // _BLOCK), (offset + len(data)) // _BLOCK
        if offset + len(data) == self._num_bytes:
            last = -(-self._num_bytes // _BLOCK)
        if first >= last:
            self._add_torn(offset, data)
            return
        start, stop = first * _BLOCK - offset, min(last * _BLOCK - offset, len(data))
        hashes = _native.hash_blocks(_native.address_of(data) + start, stop - start, first)
        with self._lock:
            self._hashes += hashes
        self._add_torn(offset, data[:start])
        self._add_torn(offset + stop, data[stop:])

    def _add_torn(self, offset: int, data: memoryview) -> None:
        """Bytes of one or two blocks that stand in two pieces."""
        while data:
            block, start = divmod(offset, _BLOCK)
            size = min(_BLOCK, self._num_bytes - block * _BLOCK)
            here = data[: size - start]
            with self._lock:
                held = self._torn.setdefault(block, bytearray(size))
                held[start : start + len(here)] = here
                left = self._missing[block] = self._missing.get(block, size) - len(here)
                if not left:
                    self._hashes += _native.hash_blocks(_native.address_of(held), size, block)
                    del self._torn[block]
            offset, data = offset + len(here), data[len(here) :]

    def value(self) -> int:
        """Once all of it has come."""
        if self._torn:
            raise AssertionError("a leaf was digested before all of it had come")
        return _native.finish_digest(self._num_bytes, self._hashes % 2**64)


class ImageSums:
    """Of the image of a layout: 16 bytes for each chunk, and each leaf's digest. Pieces come in any order and
    from several threads, each byte once; a piece begins at a chunk, and ends at one or with the image."""

    def __init__(self, layout: Layout, chunk_bytes: int) -> None:
        self._layout, self._chunk_bytes = layout, chunk_bytes
        self._checksums = bytearray(16 * -(-layout.num_bytes // chunk_bytes))
        order = sorted(range(len(layout.leaves)), key=lambda index: layout.leaves[index].offset)
        # Leaves without bytes stand where the next one does, and have no piece.
        self._order = [index for index in order if layout.leaves[index].num_bytes]
        self._starts = [layout.data_start + layout.leaves[index].offset for index in self._order]
        self._digests = array("Q", [_native.finish_digest(0, 0)]) * len(layout.leaves)
        self._cut: dict[int, LeafDigest] = {}
        self._lock = threading.Lock()

    def add(self, offset: int, data: memoryview) -> None:
        """Bytes that stand at `offset` of the image."""
        for start in range(0, len(data), self._chunk_bytes):
            # A chunk at a time: the second look at it finds it in the cache.
            place, chunk = (
                16 * ((offset + start) // self._chunk_bytes),
                data[start : start + self._chunk_bytes],
            )
            self._checksums[place : place + 16] = _native.xxh3_128(chunk)
            self._add_chunk(offset + start, chunk)

    def _add_chunk(self, offset: int, data: memoryview) -> None:
        address, stop = _native.address_of(data), offset + len(data)
        for place in range(max(0, bisect_right(self._starts, offset) - 1), len(self._starts)):
            index, begin = self._order[place], self._starts[place]
            if begin >= stop:
                return
            num_bytes = self._layout.leaves[index].num_bytes
            end = begin + num_bytes
            if offset <= begin and end <= stop:
                self._digests[index] = _native.digest(address + begin - offset, num_bytes)
            elif end > offset:
                with self._lock:
                    leaf = self._cut.setdefault(index, LeafDigest(num_bytes))
                leaf.add(max(0, offset - begin), data[max(0, begin - offset) : end - offset])

    def checksums(self) -> bytes:
        return bytes(self._checksums)

    def digests(self) -> array[int]:
        """In the layout's order, once all pieces have come."""
        for index, leaf in self._cut.items():
            self._digests[index] = leaf.value()
        return self._digests
