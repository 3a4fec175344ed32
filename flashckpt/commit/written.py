"""The write of a shard whose bytes are not in memory all at once: from the bytes of one leaf after another,
with checksums and digests taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from flashckpt.format.layout import Layout
from flashckpt.format.records import CHUNK_BYTES, Contents
from flashckpt.store.base import Store
from flashckpt.store.read_plan import ImageSums


def write_image(
    store: Store,
    path: str,
    layout: Layout,
    leaves: Iterable[memoryview],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Contents:
    """Write a new shard, durably, and return its record. leaves: the bytes of each leaf of `layout`, in its
    order and row-major. After an error no such file exists."""
    sums = ImageSums(layout, CHUNK_BYTES)

    def chunks() -> Iterator[bytes]:
        buffer, done = bytearray(), 0
        for piece in chain([memoryview(layout.header)], leaves):
            while piece:
                part = piece[: CHUNK_BYTES - len(buffer)]
                buffer += part
                piece = piece[len(part) :]
                if len(buffer) == CHUNK_BYTES or done + len(buffer) == layout.num_bytes:
                    chunk = bytes(buffer)
                    sums.add(done, memoryview(chunk))
                    done += len(chunk)
                    yield chunk
                    buffer.clear()
                    progress(done, layout.num_bytes)

    store.write_parts(path, chunks(), layout.num_bytes)
    return Contents.of(path.rpartition("/")[2], layout, sums.checksums(), sums.digests())
