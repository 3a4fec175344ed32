"""Writing shards compressed, where they arrive earlier so. Owns when that is, and the threads that compress.

Every frame is unpacked again before it is sent, and digests and checksums are those of the bytes that came
out: what a reader will get was compared with the record of its step before anybody counts on it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from flashckpt import _native
from flashckpt.format.layout import Layout
from flashckpt.options import Compress
from flashckpt.store.base import MemoryRange, Store, Written
from flashckpt.store.compressed_file import (
    FRAME_BYTES,
    Widths,
    codec,
    compressed_name,
    count_of,
    most_bytes,
    table_bytes,
)
from flashckpt.store.image_sums import ImageSums

log = logging.getLogger(__name__)

_SAMPLES = 8
_SAMPLE_BYTES = 1 << 20
_LEAST_BYTES = 4 << 20
"""A shorter file is sent as it is, by `auto`: what is gained is less than what is measured."""
_GAIN = 0.95
"""So much of the time without it, at most, is worth it: what was measured is not exact."""


class Compression:
    """For what is written to one store. `auto` compresses a shard where it is there earlier so:

        max(1 / speed of compressing, ratio / rate of the store) < 0.95 / rate of the store

    Ratio and speed are measured on a few pieces of the shard, with as many threads as will do it and beside
    whatever else the machine does; the rate is that of the last shards, by what the store took while it
    waited for nothing. Of a store of which none is known yet an object store is taken for slower than any
    compressing, a local one for faster."""

    def __init__(self, how: Compress) -> None:
        self._is_always = how == "zstd"
        self._rate = 0.0
        self._lock = threading.Lock()

    def is_worth(self, layout: Layout, source: MemoryRange, threads: int, *, is_remote: bool) -> bool:
        """Whether a shard is to be compressed."""
        if self._is_always:
            return True
        rate = self._rate
        if layout.num_bytes < _LEAST_BYTES or not (rate or is_remote):
            return False
        ratio, speed = _measured(layout, source, threads)
        is_worth = ratio < _GAIN if not rate else max(rate / speed, ratio) < _GAIN
        log.info(
            "a shard of %d bytes is sent %s: compressed it has %.0f %% of them, at %.0f MB/s with %d threads "
            "here; the store takes %s",
            layout.num_bytes, "compressed" if is_worth else "plain", 100 * ratio, speed / 1e6, threads,
            f"{rate / 1e6:.0f} MB/s" if rate else "nobody knows how much",
        )  # fmt: skip
        return is_worth

    def sent(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went in so much time, in which the store waited for nothing."""
        if num_bytes >= _LEAST_BYTES:
            found = num_bytes / max(seconds, 1e-6)
            with self._lock:
                self._rate = (self._rate + found) / 2 if self._rate else found

    def write(
        self, store: Store, path: str, layout: Layout, source: MemoryRange, threads: int, progress: int
    ) -> Written:
        """As `Store.write_shard`: `path` compressed."""
        num_bytes = layout.num_bytes
        if os.fstat(source.descriptor).st_size < source.offset + num_bytes:
            raise OSError(errno.EIO, "the region ends before the bytes that are to be written", path)
        shard, began_s = _Frames(layout, source, threads, progress), time.monotonic()
        store.write_parts(compressed_name(path, num_bytes), shard.parts(), most_bytes(num_bytes))
        self.sent(shard.sent_bytes, time.monotonic() - began_s - shard.waited_s)
        return Written(
            digests=shard.sums.digests(), checksums=shard.sums.checksums(), stored_bytes=shard.sent_bytes
        )


class _Frames:
    """A shard's frames, compressed a few at a time. `waited_s`: for how long who sends them had to wait."""

    def __init__(self, layout: Layout, source: MemoryRange, threads: int, progress: int) -> None:
        self._num_bytes, self._source = layout.num_bytes, source
        self._widths, self.sums = Widths.of(layout), ImageSums(layout, FRAME_BYTES)
        self._threads, self._progress = max(1, threads), progress
        self.sent_bytes, self.waited_s = 0, 0.0

    def parts(self) -> Iterator[bytes]:
        """The file's bytes. What was taken is counted as done with the next."""
        sizes, under_way = array("I"), deque[Future[bytes]]()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="compress") as pool:
            try:
                for index in range(count_of(self._num_bytes) + self._threads):
                    if index < count_of(self._num_bytes):
                        under_way.append(pool.submit(self._frame, index))
                    if index >= self._threads:
                        frame = self._next(under_way)
                        sizes.append(len(frame))
                        yield frame
                        self._count(index - self._threads)
            finally:
                for each in under_way:
                    each.cancel()
        yield (table := table_bytes(self._num_bytes, self._widths, sizes))
        self.sent_bytes = sum(sizes) + len(table)

    def _next(self, under_way: deque[Future[bytes]]) -> bytes:
        began_s = time.monotonic()
        frame = under_way.popleft().result()
        self.waited_s += time.monotonic() - began_s
        return frame

    def _frame(self, index: int) -> bytes:
        start = index * FRAME_BYTES
        plain = _read(self._source, start, min(FRAME_BYTES, self._num_bytes - start))
        frame = codec().pack(self._widths, start, plain)
        codec().unpack(self._widths, start, frame, plain)
        self.sums.add(start, plain)
        return frame

    def _count(self, index: int) -> None:
        if self._progress:
            num_bytes = min(FRAME_BYTES, self._num_bytes - index * FRAME_BYTES)
            _native.fetch_add(self._progress, num_bytes)


def _measured(layout: Layout, source: MemoryRange, threads: int) -> tuple[float, float]:
    """Of a few pieces, spread over the shard: how much is left of them, and the bytes a second that as many
    threads compress."""
    widths, threads = Widths.of(layout), max(1, threads)
    last = max(0, layout.num_bytes - _SAMPLE_BYTES) // _SAMPLE_BYTES
    starts = sorted({_SAMPLE_BYTES * (last * i // (_SAMPLES - 1)) for i in range(_SAMPLES)})

    def pack(start: int) -> tuple[int, int]:
        plain = _read(source, start, min(_SAMPLE_BYTES, layout.num_bytes - start))
        frame = codec().pack(widths, start, plain)
        codec().unpack(widths, start, frame, plain)
        return len(plain), len(frame)

    with ThreadPoolExecutor(threads, thread_name_prefix="compress") as pool:
        list(pool.map(lambda start: codec(), range(threads)))
        began_s = time.monotonic()
        rows = list(pool.map(pack, starts))
        seconds = max(time.monotonic() - began_s, 1e-6)
    plain_bytes = sum(plain for plain, _ in rows)
    return sum(packed for _, packed in rows) / plain_bytes, plain_bytes / seconds


def _read(source: MemoryRange, start: int, num_bytes: int) -> memoryview:
    """A copy of a piece, in this thread's memory: where a disk gives no more it is an error, and in a mapping
    a SIGBUS."""
    into, done = codec().plain[:num_bytes], 0
    while done < num_bytes:
        taken = os.preadv(source.descriptor, [into[done:]], source.offset + start + done)
        if not taken:
            raise OSError(errno.EIO, "the region ends before the bytes that are to be written")
        done += taken
    return into
