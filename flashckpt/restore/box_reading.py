"""Parts of a shard: of a leaf, or of a box in it, the chunks that hold it are read, and no others.

Every chunk has the checksum of its shard's record before a byte of it is used, and a whole leaf its digest.
A whole shard is read in one pass instead: see step_image.py, and verification of commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Leaf
from flashckpt.format.records import Contents
from flashckpt.store.base import LengthError, Store
from flashckpt.store.image_sums import LeafDigest

_KEPT_CHUNKS = 4
Box = Sequence[tuple[int, int]]
"""For each dimension of a leaf the first index and the one behind the last."""


class BoxReader:
    """Reads from one shard. Leaves are best asked for in their order: the last few chunks are kept."""

    def __init__(self, store: Store, path: str, contents: Contents) -> None:
        self._store, self._path, self._contents = store, path, contents
        self._digests = {
            leaf.name: digest for leaf, digest in zip(contents.leaves, contents.digests, strict=True)
        }
        self._kept: dict[int, memoryview] = {}

    def leaf(self, leaf: Leaf) -> bytearray:
        """All bytes of one of `contents.layout().leaves`. Raises as `box` does."""
        data = self.box(leaf, [(0, size) for size in leaf.shape])
        self.check(leaf, _native.digest(_native.address_of(data), leaf.num_bytes))
        return data

    def check(self, leaf: Leaf, digest: int) -> None:
        """Raise DamagedError where this is not the digest that such a leaf had when it was captured."""
        if digest != self._digests[leaf.name]:
            raise self._damaged(f"{leaf.name} is not what was captured")

    def box(self, leaf: Leaf, box: Box) -> bytearray:
        """The bytes of a box of such a leaf, row-major. DamagedError where they are missing or not what was
        written, OSError."""
        begin = self._contents.shard.data_start + leaf.offset
        data = bytearray(max(1, math.prod(stop - start for start, stop in box) * _item_bytes(leaf)))
        done = 0
        for offset, num_bytes in _runs(leaf, box):
            for piece in self._range(begin + offset, num_bytes):
                data[done : done + len(piece)] = piece
                done += len(piece)
        return data

    def pieces(self, leaf: Leaf) -> Iterator[memoryview]:
        """All bytes of such a leaf, a chunk at a time. Raises as `box` does, and after the last piece
        DamagedError where their digest is another."""
        digest, done = LeafDigest(leaf.num_bytes), 0
        for piece in self._range(self._contents.shard.data_start + leaf.offset, leaf.num_bytes):
            digest.add(done, piece)
            done += len(piece)
            yield piece
        self.check(leaf, digest.value())

    def _range(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        chunk_bytes = self._contents.shard.chunk_bytes
        while num_bytes:
            index, start = divmod(offset, chunk_bytes)
            piece = self._chunk(index)[start : start + num_bytes]
            yield piece
            offset, num_bytes = offset + len(piece), num_bytes - len(piece)

    def _chunk(self, index: int) -> memoryview:
        if index not in self._kept:
            if len(self._kept) == _KEPT_CHUNKS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[index] = memoryview(self._read(index))
        return self._kept[index]

    def _read(self, index: int) -> bytes:
        shard = self._contents.shard
        start = index * shard.chunk_bytes
        try:
            num_bytes = min(shard.chunk_bytes, shard.num_bytes - start)
            data = self._store.read_bytes(self._path, start, num_bytes, shard.num_bytes)
        except FileNotFoundError:
            raise self._damaged("it is missing") from None
        except LengthError as error:
            raise self._damaged(f"it has {error}") from error
        if _native.xxh3_128(data) != shard.checksums[16 * index : 16 * index + 16]:
            raise self._damaged(f"chunk {index} does not have its checksum")
        return data

    def _damaged(self, why: str) -> DamagedError:
        where = f"{self._store.url}/{self._path}"
        return DamagedError(f"{where} is damaged: {why}. Nothing was loaded or written.", path=where)


def _item_bytes(leaf: Leaf) -> int:
    return leaf.num_bytes // math.prod(leaf.shape) if leaf.num_bytes else 0


def _runs(leaf: Leaf, box: Box) -> Iterator[tuple[int, int]]:
    """The ranges of a leaf's bytes that a box takes, in order: first byte and length."""
    if any(start >= stop for start, stop in box) or not leaf.num_bytes:
        return
    # From the last dimension on, as long as the box takes all of it, a run is longer.
    inner, dimension = _item_bytes(leaf), len(leaf.shape)
    while dimension and box[dimension - 1] == (0, leaf.shape[dimension - 1]):
        dimension -= 1
        inner *= leaf.shape[dimension]
    if not dimension:
        yield 0, inner
        return
    *outer, (first, behind) = box[:dimension]
    strides = [inner]
    for size in reversed(leaf.shape[1:dimension]):
        strides.insert(0, strides[0] * size)
    places = [0]
    for (start, stop), stride in zip(outer, strides, strict=False):
        places = [place + index * stride for place in places for index in range(start, stop)]
    for place in places:
        yield place + first * inner, (behind - first) * inner
