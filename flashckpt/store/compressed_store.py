"""A store whose shards may be compressed. Callers see the names, lengths and ranges of the plain files.

Owns which file of the underlying store has a shard's bytes, the format of compressed shards, and whether a
shard is compressed: if that is faster. If a shard exists both plain and compressed with one length, the plain
file is read. If files of several lengths exist under one name, which only an error can cause, each is listed,
and the file with the recorded length is read. Every frame is unpacked again before it is sent, and digests
and checksums are computed from the unpacked bytes, so a commit compares the bytes that a reader will get.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import re
import struct
import sys
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, TypeVar

from flashckpt import _native
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.layout import DTYPES, Layout, Leaf
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.options import Compress
from flashckpt.store.base import (
    Capabilities,
    Entry,
    LengthError,
    MemoryRange,
    Store,
    Written,
    other_length,
)
from flashckpt.store.read_plan import ImageSums, add_pieces

_PIECE_BYTES = 8 << 20
"""Plain bytes that a thread reads and unpacks at once: a multiple of a frame."""
_FRAMES_AT_ONCE = 4
_AT_ONCE = 8
"""Concurrent requests where each takes a round trip."""
_FOLDERS = 8
_TABLES = 64

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class _File:
    """A compressed file in the underlying store. `is_alone`: no plain file of its length exists."""

    path: str
    num_bytes: int
    stored_bytes: int
    is_alone: bool


_Packed = dict[str, tuple[_File, ...]]
"""Compressed files of a folder, by plain name."""


class _Cache:
    """Compressed files of recently listed folders, and tables of some files. Thread-safe. A file never
    changes; if it was removed and written again, reading it detects a stale entry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: OrderedDict[str, _Packed] = OrderedDict()
        self._tables: OrderedDict[_File, Table] = OrderedDict()

    def folder(self, folder: str) -> _Packed | None:
        with self._lock:
            return self._folders.get(folder)

    def files(self, path: str) -> tuple[_File, ...]:
        """Compressed files that may be read instead of the plain file."""
        folder, _, name = path.rpartition("/")
        return tuple(each for each in (self.folder(folder) or {}).get(name, ()) if each.is_alone)

    def put(self, folder: str, files: _Packed) -> None:
        with self._lock:
            self._folders[folder] = files
            self._folders.move_to_end(folder)
            while len(self._folders) > _FOLDERS:
                self._folders.popitem(last=False)

    def forget(self, path: str) -> None:
        with self._lock:
            found = self._folders.pop(path.rpartition("/")[0], {})
            for each in (file for files in found.values() for file in files):
                self._tables.pop(each, None)

    def table(self, file: _File) -> Table | None:
        with self._lock:
            return self._tables.get(file)

    def put_table(self, file: _File, table: Table) -> None:
        with self._lock:
            self._tables[file] = table
            while len(self._tables) > _TABLES:
                self._tables.popitem(last=False)


class CompressedStore:
    """See Store in base.py. `compression`: how to write shards, None for plain."""

    def __init__(
        self, store: Store, compression: Compression | None = None, cache: _Cache | None = None
    ) -> None:
        self._store, self._compression = store, compression
        self._cache = cache if cache is not None else _Cache()

    @property
    def below(self) -> Store:
        """The underlying store."""
        return self._store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def place(self) -> str:
        return self._store.place()

    def check(self) -> None:
        self._store.check()

    def brief(self) -> CompressedStore:
        return CompressedStore(self._store.brief(), self._compression, self._cache)

    def move_to(self, url: str) -> None:
        self._store.move_to(url)

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        return self._store.read(path, max_bytes)

    def create(self, path: str, data: bytes) -> bool:
        return self._store.create(path, data)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self._store.replace(path, data, durable=durable)

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        return self._store.append(path, data, max_bytes)

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        self._store.write_parts(path, parts, most_bytes)

    # Files that may be shards

    def copy(self, source: str, target: str) -> bool:
        def copy(file: _File) -> bool:
            return not self.exists(target) and self._store.copy(
                file.path, compressed_name(target, file.num_bytes)
            )

        return self._either(source, None, lambda: self._store.copy(source, target), copy)

    def list(self, folder: str) -> builtins.list[Entry]:
        return self._listed(folder)[0]

    def _listed(self, folder: str) -> tuple[builtins.list[Entry], _Packed]:
        """Return the entries of a folder and its compressed files. Concurrent calls may have cached an older
        listing, so callers use this return value and not the cache."""
        entries = self._store.list(folder)
        files = {(each.name, each.num_bytes) for each in entries if not each.is_folder}
        packed: _Packed = {}
        shown: builtins.list[Entry] = []
        for each in entries:
            plain = None if each.is_folder else plain_name(each.name)
            if plain is None:
                shown.append(each)
                continue
            name, num_bytes = plain
            path = f"{folder}/{each.name}" if folder else each.name
            file = _File(path, num_bytes, each.num_bytes, plain not in files)
            packed[name] = *packed.get(name, ()), file
            if file.is_alone:
                shown.append(Entry(name, False, num_bytes, each.modified_s, is_compressed=True))
        self._cache.put(folder, packed)
        return sorted(shown, key=lambda entry: entry.name) if packed else entries, packed

    def exists(self, path: str) -> bool:
        return self._store.exists(path) or bool(self._find(path))

    def remove(self, path: str) -> None:
        for each in self._files([path]):
            self._store.remove(each)

    def remove_files(self, paths: Iterable[str]) -> None:
        self._store.remove_files(self._files(paths))

    def _files(self, paths: Iterable[str]) -> Iterator[str]:
        """Yield each path and those of its compressed files. A listed folder is not listed again: the caller
        has listed or written the file that it removes."""
        for path in paths:
            yield path
            if may_be_compressed(path):
                folder, _, name = path.rpartition("/")
                packed = self._cache.folder(folder)
                if packed is None:
                    _, packed = self._listed(folder)
                for found in packed.get(name, ()):
                    yield found.path

    # Shards

    def write_shard(
        self, path: str, layout: Layout, source: MemoryRange, *, threads: int = 2, progress: int = 0
    ) -> Written:
        how = self._compression
        if how is None:
            return self._store.write_shard(path, layout, source, threads=threads, progress=progress)
        if not how.is_worth(layout, source, threads, is_remote=not self.capabilities.is_folder):
            began_s = time.monotonic()
            written = self._store.write_shard(path, layout, source, threads=threads, progress=progress)
            how.sent(layout.num_bytes, time.monotonic() - began_s)
            return written
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        written = how.write(self._store, path, layout, source, threads, progress)
        self._cache.forget(path)
        return written

    def read_chunks(
        self, path: str, plan: _native.FilePlan, *, threads: int = 2, progress: int = 0, cancel: int = 0
    ) -> None:
        def plain() -> None:
            self._store.read_chunks(path, plan, threads=threads, progress=progress, cancel=cancel)

        def compressed(file: _File) -> None:
            _check_length(path, file, plan.num_bytes)

            def fetch(start: int, stop: int) -> bytearray:
                data = bytearray(stop - start)
                self._unpack(path, file, start, memoryview(data))
                return data

            add_pieces(path, plan, _PIECE_BYTES, self._at_once(threads), fetch, progress, cancel)

        self._either(path, plan.num_bytes, plain, compressed)

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        def plain() -> bytes:
            return self._store.read_bytes(path, offset, num_bytes)

        def compressed(file: _File) -> bytes:
            if offset + num_bytes > file.num_bytes:
                raise other_length(path, file.num_bytes, offset + num_bytes)
            data = bytearray(num_bytes)
            self._unpack(path, file, offset, memoryview(data))
            return bytes(data)

        return self._either(path, None, plain, compressed)

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        def compressed(file: _File) -> int | None:
            _check_length(path, file, num_bytes)
            return None

        return self._either(path, num_bytes, lambda: self._store.descriptor(path, num_bytes), compressed)

    # ---- choice of the file

    def _find(self, path: str) -> tuple[_File, ...]:
        if not may_be_compressed(path):
            return ()
        folder, _, name = path.rpartition("/")
        return self._listed(folder)[1].get(name, ())

    def _either(
        self,
        path: str,
        num_bytes: int | None,
        plain: Callable[[], _Found],
        compressed: Callable[[_File], _Found],
    ) -> _Found:
        """Call `compressed` or `plain` for the file that exists, with length `num_bytes` if given. Cached
        entries may belong to a removed file; then list again."""
        known = self._cache.files(path)
        if files := tuple(each for each in known if num_bytes in (None, each.num_bytes)):
            try:
                return compressed(self._chosen(files, path, num_bytes))
            except (FileNotFoundError, DamagedError):
                self._cache.forget(path)
        try:
            return plain()
        except (FileNotFoundError, LengthError):
            if not (files := self._find(path)):
                raise
        return compressed(self._chosen(files, path, num_bytes))

    def _chosen(self, files: tuple[_File, ...], path: str, num_bytes: int | None) -> _File:
        """Choose the file of length `num_bytes`. If none has it, return any: reading it raises LengthError.
        Without a length, choose the only file with a valid table."""
        if len(files) == 1:
            return files[0]
        if num_bytes is not None:
            return next((each for each in files if each.num_bytes == num_bytes), files[0])
        sound = [each for each in files if self._has_table(each)]
        if len(sound) == 1:
            return sound[0]
        names = " and ".join(each.path.rpartition("/")[2] for each in files)
        raise DamagedError(
            f"{path} exists compressed with several lengths: {names}. None of them was used. "
            "`flashckpt show` prints the right length of each file of a step: remove the other files.",
            path=path,
        )

    def _has_table(self, file: _File) -> bool:
        """Whether the file has a valid table for the length in its name."""
        try:
            self._table(file)
        except DamagedError:
            return False
        return True

    # ---- reading

    def _table(self, file: _File) -> Table:
        table = self._cache.table(file)
        if table is None:
            table = read_table(
                lambda offset, num_bytes: self._store.read_bytes(file.path, offset, num_bytes),
                file.path, file.stored_bytes, file.num_bytes,
            )  # fmt: skip
            self._cache.put_table(file, table)
        return table

    def _unpack(self, path: str, file: _File, start: int, into: memoryview) -> None:
        """Read bytes of the plain file from `start`, a few frames per request."""
        table = self._table(file)
        frames = table.frames(start, start + len(into))
        for first in frames[::_FRAMES_AT_ONCE]:
            last = min(first + _FRAMES_AT_ONCE, frames.stop)
            begin = table.offsets[first]
            data = memoryview(self._store.read_bytes(file.path, begin, table.offsets[last] - begin))
            for index in range(first, last):
                frame = data[table.offsets[index] - begin : table.offsets[index + 1] - begin]
                _unpack_frame(path, table, index, frame, start, into)

    def _at_once(self, threads: int) -> int:
        return max(1, threads, 1 if self.capabilities.is_folder else _AT_ONCE)


def compressing(store: Store, how: Compress) -> Store:
    """Return the store with shards written as `how` says."""
    if how == "none":
        return store
    return CompressedStore(below(store), Compression(how))


def below(store: Store) -> Store:
    """Return the underlying store, without compression."""
    return store.below if isinstance(store, CompressedStore) else store


def _unpack_frame(
    path: str, table: Table, index: int, frame: memoryview, start: int, into: memoryview
) -> None:
    """Unpack a frame's share of the bytes from `start` into `into`, whose first byte is that at `start`."""
    begin, end = table.frame_of(index)
    low, high = max(begin, start), min(end, start + len(into))
    is_whole = (low, high) == (begin, end)
    target = into[low - start : high - start] if is_whole else memoryview(bytearray(end - begin))
    try:
        codec().unpack(table.widths, begin, frame, target)
    except ValueError as error:
        raise damaged(path, f"frame {index} cannot be unpacked: {error}") from error
    if not is_whole:
        into[low - start : high - start] = target[low - begin : high - begin]


def _check_length(path: str, file: _File, num_bytes: int) -> None:
    if file.num_bytes != num_bytes:
        raise other_length(path, file.num_bytes, num_bytes)


# ---- writing: whether compression is faster, and the threads that compress

log = logging.getLogger(__name__)

_SAMPLES = 8
_SAMPLE_BYTES = 1 << 20
_LEAST_BYTES = 4 << 20
"""`auto` sends shorter files plain: measuring them would cost more than compression saves."""
_GAIN = 0.95
"""`auto` compresses if that takes at most this share of the plain time. Leaves a margin for measuring
errors."""


class Compression:
    """Compression of the shards of one store. `auto` compresses a shard if it then arrives earlier:

        max(1 / compression speed, ratio / store rate) < 0.95 / store rate

    Ratio and speed are measured on samples of the shard, with the same number of threads and under the
    current load. The store's rate is that of the latest shards, without time that the store spent waiting for
    bytes. While the rate is unknown, an object store counts as slower than any compression and a local store
    as faster."""

    def __init__(self, how: Compress) -> None:
        self._is_always = how == "zstd"
        self._rate = 0.0
        self._lock = threading.Lock()

    def is_worth(self, layout: Layout, source: MemoryRange, threads: int, *, is_remote: bool) -> bool:
        """Whether to compress a shard."""
        if self._is_always:
            return True
        rate = self._rate
        if layout.num_bytes < _LEAST_BYTES or not (rate or is_remote):
            return False
        ratio, speed = _measure(layout, source, threads)
        is_worth = ratio < _GAIN if not rate else max(rate / speed, ratio) < _GAIN
        log.info(
            "a shard of %d bytes is sent %s: compression to %.0f %% runs at %.0f MB/s with %d threads here; "
            "the store takes %s",
            layout.num_bytes, "compressed" if is_worth else "plain", 100 * ratio, speed / 1e6, threads,
            f"{rate / 1e6:.0f} MB/s" if rate else "an unknown rate",
        )  # fmt: skip
        return is_worth

    def sent(self, num_bytes: int, seconds: float) -> None:
        """Record that the store took `num_bytes` in `seconds`, without time spent waiting for bytes."""
        if num_bytes >= _LEAST_BYTES:
            found = num_bytes / max(seconds, 1e-6)
            with self._lock:
                self._rate = (self._rate + found) / 2 if self._rate else found

    def write(
        self, store: Store, path: str, layout: Layout, source: MemoryRange, threads: int, progress: int
    ) -> Written:
        """Like `Store.write_shard`, compressed."""
        num_bytes = layout.num_bytes
        if os.fstat(source.descriptor).st_size < source.offset + num_bytes:
            raise OSError(errno.EIO, "the memory region is shorter than the shard", path)
        shard, began_s = _Frames(layout, source, threads, progress), time.monotonic()
        store.write_parts(compressed_name(path, num_bytes), shard.parts(), most_bytes(num_bytes))
        self.sent(shard.sent_bytes, time.monotonic() - began_s - shard.waited_s)
        return Written(
            digests=shard.sums.digests(), checksums=shard.sums.checksums(), stored_bytes=shard.sent_bytes
        )


class _Frames:
    """A shard's frames, compressed a few at a time. `waited_s`: time that the sender waited for frames."""

    def __init__(self, layout: Layout, source: MemoryRange, threads: int, progress: int) -> None:
        self._num_bytes, self._source = layout.num_bytes, source
        self._widths, self.sums = Widths.of(layout), ImageSums(layout, FRAME_BYTES)
        self._threads, self._progress = max(1, threads), progress
        self.sent_bytes, self.waited_s = 0, 0.0

    def parts(self) -> Iterator[bytes]:
        """Yield the file's bytes. A frame counts as done when the next one is requested."""
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


def _measure(layout: Layout, source: MemoryRange, threads: int) -> tuple[float, float]:
    """Compress samples spread over the shard. Return the compressed share and the bytes a second."""
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
    """Copy a piece into this thread's memory. Reading raises an error where a mapping would give SIGBUS."""
    into, done = codec().plain[:num_bytes], 0
    while done < num_bytes:
        taken = os.preadv(source.descriptor, [into[done:]], source.offset + start + done)
        if not taken:
            raise OSError(errno.EIO, "the memory region is shorter than the shard")
        done += taken
    return into


# ---- the format of compressed shards: frames of byte planes, then a table of frames (docs/format.md)

FRAME_BYTES = CHUNK_BYTES
"""Plain bytes of each frame except the last."""
LARGEST_FRAME = FRAME_BYTES + (FRAME_BYTES >> 8) + 64
"""Longest possible frame: zstandard's bound and its header."""

_NAME = re.compile(r"(.+\.safetensors.*)\.([1-9][0-9]{0,15})\.zst")
_MAY_BE = ".safetensors"
_WIDTHS = 1, 8, 4, 2, 1
"""Element size in bytes in each part of an image: its header, then parts of its leaves."""
_MAGIC = b"flashpl1"
# A skippable frame holds the table, so zstandard's own tools can read the whole file.
_SKIPPED = struct.Struct("<II")
_SKIPPED_MAGIC = 0x184D2A5E
_TRAILER = struct.Struct("<8s5Q")
_CHECKSUM_BYTES = 16
_FIXED_BYTES = _SKIPPED.size + _TRAILER.size + _CHECKSUM_BYTES
_SIZE_BYTES = 4

# In byte planes single bytes repeat and longer strings hardly do. A small table of 7-byte matches is twice as
# fast as level 1 with the same ratio.
_HOW = {"strategy": 1, "window_log": 22, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7}


def may_be_compressed(path: str) -> bool:
    """Whether the name allows a compressed file; readers search for a compressed file only then."""
    return _MAY_BE in path.rpartition("/")[2]


def compressed_name(name: str, num_bytes: int) -> str:
    """The name of the compressed form of the file `name` with `num_bytes` plain bytes."""
    return f"{name}.{num_bytes}.zst"


def plain_name(name: str) -> tuple[str, int] | None:
    """The plain name and length for the name of a compressed file; None for any other name."""
    match = _NAME.fullmatch(name) if name.endswith(".zst") else None
    return (match[1], int(match[2])) if match is not None else None


def _width(leaf: Leaf) -> int:
    return min(DTYPES[leaf.dtype][0], 8)  # complex128 is a pair of 8 bytes


@dataclass(frozen=True, slots=True)
class Widths:
    """Element sizes in a file. `stops`: the end of the part for each of _WIDTHS."""

    stops: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout) -> Widths:
        """Find the stops that give most bytes the width of their elements. Widths only fall along a file,
        while an image may have each width several times (`image_order`)."""
        end = layout.data_start
        # For each width as the last so far: number of bytes with their own width, and the stops before it.
        best = [(0, (end,) * place) for place in range(1, len(_WIDTHS))]
        for width, leaves in groupby(layout.leaves, key=_width):
            for place in range(1, len(best)):
                fitting, stops = best[place - 1]
                best[place] = max(best[place], (fitting, (*stops, end)))
            num_bytes = sum(leaf.num_bytes for leaf in leaves)
            best = [
                (fitting + (num_bytes if each == width else 0), stops)
                for each, (fitting, stops) in zip(_WIDTHS[1:], best, strict=True)
            ]
            end += num_bytes
        _, stops = max(best, key=itemgetter(0))  # the widest among equals
        return cls(stops + (end,) * (len(_WIDTHS) - len(stops)))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of a range with one element size: start and stop relative to `start`, and the
        size."""
        begin = start
        for end, width in zip(self.stops, _WIDTHS, strict=True):
            if begin < (last := min(end, stop)):
                yield begin - start, last - start, width
                begin = last


@dataclass(frozen=True, slots=True)
class Table:
    """Positions of the frames in a compressed file. `offsets` has one entry more than there are frames."""

    num_bytes: int
    widths: Widths
    offsets: array[int]

    def frames(self, start: int, stop: int) -> range:
        """Indices of the frames that hold a range of the plain file."""
        return range(start // FRAME_BYTES, -(-stop // FRAME_BYTES) if stop > start else start // FRAME_BYTES)

    def frame_of(self, index: int) -> tuple[int, int]:
        """Start and stop of a frame in the plain file."""
        return index * FRAME_BYTES, min((index + 1) * FRAME_BYTES, self.num_bytes)


def count_of(num_bytes: int) -> int:
    """Number of frames of a file with `num_bytes` plain bytes."""
    return -(-num_bytes // FRAME_BYTES)


def most_bytes(num_bytes: int) -> int:
    """Longest possible compressed file for `num_bytes` plain bytes."""
    return num_bytes + count_of(num_bytes) * (LARGEST_FRAME - FRAME_BYTES + _SIZE_BYTES) + _FIXED_BYTES


def table_bytes(num_bytes: int, widths: Widths, sizes: array[int]) -> bytes:
    """The bytes after the frames. `sizes` (array("I")): compressed lengths of the frames."""
    data = _little(sizes).tobytes()
    data = _SKIPPED.pack(_SKIPPED_MAGIC, len(data) + _FIXED_BYTES - _SKIPPED.size) + data
    data += _TRAILER.pack(_MAGIC, num_bytes, *widths.stops[:-1])
    return data + _native.xxh3_128(data)


def read_table(read: Callable[[int, int], bytes], path: str, stored_bytes: int, num_bytes: int) -> Table:
    """Read the table of a compressed file of `stored_bytes`, whose name promises `num_bytes` plain bytes.
    `read(offset, num_bytes)` returns bytes of the file; it is called once, for the table. Raises DamagedError
    if the table is invalid."""
    size = _SIZE_BYTES * count_of(num_bytes) + _FIXED_BYTES
    if stored_bytes < size:
        raise damaged(path, f"{stored_bytes} bytes, and its table alone has {size}")
    data = read(stored_bytes - size, size)
    if _native.xxh3_128(memoryview(data)[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
        raise damaged(path, "its table does not have its checksum")
    magic, found_bytes, *stops = _TRAILER.unpack_from(data, size - _TRAILER.size - _CHECKSUM_BYTES)
    if (*_SKIPPED.unpack_from(data), magic) != (_SKIPPED_MAGIC, size - _SKIPPED.size, _MAGIC):
        raise damaged(path, "its table is invalid")
    widths = Widths((*stops, num_bytes))
    if found_bytes != num_bytes or any(after < before for before, after in pairwise(widths.stops)):
        raise damaged(path, "its table is that of another file")
    sizes = array("I")
    sizes.frombytes(memoryview(data)[_SKIPPED.size :][: size - _FIXED_BYTES])
    offsets = array("Q", accumulate(_little(sizes), initial=0))
    if offsets[-1] + size != stored_bytes or any(not 0 < each <= LARGEST_FRAME for each in sizes):
        raise damaged(path, "its table does not match its frames")
    return Table(num_bytes, widths, offsets)


class Codec:
    """Packs and unpacks frames. Owns buffers of three frames for one thread (see `codec`) and reuses them:
    touching new memory would take a third of the time. `plain`: a buffer for a chunk to pack."""

    def __init__(self) -> None:
        self._library = library = _zstandard()
        how = library.ZstdCompressionParameters(**_HOW, write_content_size=True, write_checksum=False)
        self._compressor = library.ZstdCompressor(compression_params=how)
        self._decompressor = library.ZstdDecompressor()
        self.plain, self._split, self._joined = (memoryview(bytearray(FRAME_BYTES)) for _ in range(3))

    def pack(self, widths: Widths, start: int, plain: memoryview) -> bytes:
        """Return the frame of the plain file's bytes at `start`."""
        planes = self._split[: len(plain)]
        for begin, end, width in widths.runs(start, start + len(plain)):
            _native.split_planes(plain[begin:end], width, planes[begin:end])
        frame: bytes = self._compressor.compress(planes)
        return frame

    def unpack(self, widths: Widths, start: int, frame: memoryview | bytes, into: memoryview) -> None:
        """Unpack a frame, whose bytes belong at `start` of the plain file, into memory of exactly their
        length. Raises ValueError, and leaves the memory unchanged, if the frame is invalid."""
        planes = self._joined[: len(into)]
        try:
            about = self._library.get_frame_parameters(frame)
            # Check before unpacking: a few bytes may claim any length.
            if about.content_size != len(into) or about.dict_id or about.window_size > LARGEST_FRAME:
                raise ValueError(f"it does not hold {len(into)} bytes")
            if _end_of(frame, self._library.frame_header_size(frame), about.has_checksum) != len(frame):
                raise ValueError("it does not end where its table says")
            found = self._decompressor.stream_reader(frame).readinto(planes)
        except self._library.ZstdError as error:
            raise ValueError(str(error)) from error
        if found != len(into):
            raise ValueError(f"it has {found} bytes instead of {len(into)}")
        for begin, end, width in widths.runs(start, start + len(into)):
            _native.join_planes(planes[begin:end], width, into[begin:end])


def _end_of(frame: memoryview | bytes, at: int, has_checksum: bool) -> int:
    """Find a frame's end by the headers of its blocks, the first at `at`; 0 if they exceed the frame."""
    is_last = False
    while not is_last:
        if at + 3 > len(frame):
            return 0
        header = int.from_bytes(frame[at : at + 3], "little")
        is_last, is_one_byte = bool(header & 1), header >> 1 & 3 == 1
        at += 3 + (1 if is_one_byte else header >> 3)
    return at + (4 if has_checksum else 0)


_local = threading.local()


def codec() -> Codec:
    """This thread's codec. Raises RunError if zstandard is not installed."""
    found: Codec | None = getattr(_local, "codec", None)
    if found is None:
        found = _local.codec = Codec()
    return found


def damaged(path: str, why: str) -> DamagedError:
    """The error of reading a damaged compressed file."""
    return DamagedError(f"its compressed file is damaged: {why}", path=path)


def _little(sizes: array[int]) -> array[int]:
    if sys.byteorder == "big":
        sizes = sizes[:]
        sizes.byteswap()
    return sizes


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise RunError(
            "Shards of this run are compressed, and the package zstandard is not installed. Nothing was "
            "changed. Install it: pip install zstandard."
        ) from error
    return zstandard
