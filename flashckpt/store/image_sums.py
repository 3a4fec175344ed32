"""A file whose bytes come in pieces: several read at once, sums of an image, the digest of a leaf. For stores
that no native engine reads.
"""

from __future__ import annotations

import errno
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from flashckpt import _native
from flashckpt.format.layout import Layout
from flashckpt.format.parts import ShardRecord
from flashckpt.store.base import Read

_BLOCK = _native.BLOCK_BYTES


def each_piece(
    path: str,
    num_bytes: int,
    piece_bytes: int,
    at_once: int,
    read: Callable[[int, int], None],
    cancel: int = 0,
) -> None:
    """`read(start, stop)` for each piece, on threads. The first error ends it, once those under way are done.
    `cancel` as of `Store.read_ranges`."""
    under_way: deque[Future[None]] = deque()
    with ThreadPoolExecutor(at_once, thread_name_prefix="read") as pool:
        try:
            for start in range(0, num_bytes, piece_bytes):
                if cancel and _native.load(cancel):
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), path)
                if len(under_way) == 2 * at_once:
                    under_way.popleft().result()
                under_way.append(pool.submit(read, start, min(start + piece_bytes, num_bytes)))
            while under_way:
                under_way.popleft().result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


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
        self._chunk_bytes = chunk_bytes
        self._checksums = bytearray(16 * -(-layout.num_bytes // chunk_bytes))
        self._audit = _native.Audit(
            num_bytes=layout.num_bytes,
            chunk_bytes=chunk_bytes,
            leaf_offsets=array("Q", [layout.data_start + leaf.offset for leaf in layout.leaves]),
            leaf_sizes=array("Q", [leaf.num_bytes for leaf in layout.leaves]),
        )

    def add(self, offset: int, data: memoryview, into: memoryview | None = None) -> None:
        """Bytes that stand at `offset` of the image. With `into` they are copied there on the way, and the
        sums are those of the copy."""
        found, place = self._audit.add(offset, data, into), 16 * (offset // self._chunk_bytes)
        self._checksums[place : place + len(found)] = found

    def checksums(self) -> bytes:
        return bytes(self._checksums)

    def digests(self) -> array[int]:
        """In the layout's order, once all pieces have come."""
        return array("Q", self._audit.digests())

    def compared(self, shard: ShardRecord) -> Read:
        """Once all of it has come: what was read, and which chunks are not those of its record."""
        found, expected = self.checksums(), shard.checksums
        bad = [i for i in range(len(found) // 16) if found[16 * i :][:16] != expected[16 * i :][:16]]
        return Read(digests=self.digests(), bad_chunks=bad)
