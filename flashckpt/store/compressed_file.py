"""Compressed shards of copies: how they are read and written, their format, and which shards are compressed.

A compressed shard has the name of the plain one with `.zst` behind it. Callers see the lengths and ranges of
the plain file: a plan reads it as any other. Every frame is unpacked again before it is sent, and digests and
checksums are computed from the unpacked bytes, so a commit compares the bytes that a reader will get.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from flashckpt import _native
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.layout import DTYPES, Layout, Leaf
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.options import Compress
from flashckpt.store.base import WRITE_THREADS, MemoryRange, Store, Written
from flashckpt.store.read_plan import ImageSums, add_pieces
from flashckpt.threads import results

_PIECE_BYTES = 8 << 20
"""Plain bytes that a thread reads and unpacks at once: a multiple of a frame."""


# ---- reading


def read_compressed(
    store: Store,
    path: str,
    stored_bytes: int,
    plan: _native.FilePlan,
    at_once: int,
) -> None:
    """Read the chunks that a plan of the plain file still needs from the compressed file at `path`, which has
    `stored_bytes`. `at_once`: how many pieces concurrently. DamagedError if the file is damaged, or is that
    of another plain length; otherwise as `Store.read_chunks`."""
    table = read_table(partial(store.read_bytes, path), path, stored_bytes, plan.num_bytes)

    def fetch(start: int, stop: int) -> memoryview:
        """Read whole frames in one request, and return the wanted bytes of them."""
        frames = range(start // FRAME_BYTES, count_of(stop))
        begin, first = frames.start * FRAME_BYTES, table.offsets[frames.start]
        data = memoryview(store.read_bytes(path, first, table.offsets[frames.stop] - first))
        plain = memoryview(bytearray(min(frames.stop * FRAME_BYTES, plan.num_bytes) - begin))
        for index in frames:
            frame = data[table.offsets[index] - first : table.offsets[index + 1] - first]
            place = index * FRAME_BYTES - begin
            try:
                codec().unpack(table.widths[index], frame, plain[place : place + FRAME_BYTES])
            except ValueError as error:
                raise damaged(path, f"frame {index} cannot be unpacked: {error}") from error
        return plain[start - begin : stop - begin]

    add_pieces(path, plan, _PIECE_BYTES, at_once, fetch)


# ---- writing: whether compression is worth it, and the threads that compress

log = logging.getLogger(__name__)

_SAMPLES = 8
_SAMPLE_BYTES = 1 << 20
_LEAST_BYTES = 4 << 20
"""`auto` sends shorter files plain: measuring them would cost more than compression saves."""
_GAIN = 0.9
"""`auto` compresses a shard if samples of it shrink below this share."""


def is_worth(how: Compress, store: Store, layout: Layout, source: MemoryRange) -> bool:
    """Whether to send a shard compressed. `auto`: to an object store, if samples of the shard shrink."""
    if how != "auto":
        return how == "zstd"
    if layout.num_bytes < _LEAST_BYTES or store.is_folder:
        return False
    ratio = _ratio(layout, source)
    log.info("a shard of %d bytes shrinks to %.0f %%", layout.num_bytes, 100 * ratio)
    return ratio < _GAIN


def write_compressed(
    store: Store, path: str, layout: Layout, source: MemoryRange, *, progress: int = 0
) -> tuple[Written, int]:
    """As `Store.write_shard`, compressed. Returns the length of the file, too."""
    num_bytes, widths, sums = layout.num_bytes, widths_of(layout), ImageSums(layout, FRAME_BYTES)
    if os.fstat(source.descriptor).st_size < source.offset + num_bytes:
        raise OSError(errno.EIO, "the memory region is shorter than the shard", path)
    sent = list[int]()

    def packed(start: int) -> bytes:
        plain, width = _read(source, start, min(FRAME_BYTES, num_bytes - start)), widths[start // FRAME_BYTES]
        frame = codec().pack(width, plain)
        codec().unpack(width, frame, plain)
        sums.add(start, plain)
        return frame

    def pieces() -> Iterator[bytes]:
        """The file's bytes. A frame counts as done when the next one is requested."""
        starts = range(0, num_bytes, FRAME_BYTES)
        frames = results("compress", (partial(packed, start) for start in starts), WRITE_THREADS)
        for start, frame in zip(starts, frames, strict=True):
            sent.append(len(frame))
            yield frame
            if progress:
                _native.fetch_add(progress, min(FRAME_BYTES, num_bytes - start))
        table = table_bytes(num_bytes, widths, sent)
        sent.append(len(table))
        yield table

    store.write_parts(path, pieces(), most_bytes(num_bytes))
    return Written(digests=sums.digests(), checksums=sums.checksums()), sum(sent)


def _ratio(layout: Layout, source: MemoryRange) -> float:
    """The share of their length to which samples spread over a shard shrink."""
    widths = widths_of(layout)
    last = max(0, layout.num_bytes - _SAMPLE_BYTES) // _SAMPLE_BYTES
    starts = sorted({_SAMPLE_BYTES * (last * i // (_SAMPLES - 1)) for i in range(_SAMPLES)})
    plain_bytes = packed_bytes = 0
    for start in starts:
        plain = _read(source, start, min(_SAMPLE_BYTES, layout.num_bytes - start))
        plain_bytes += len(plain)
        packed_bytes += len(codec().pack(widths[start // FRAME_BYTES], plain))
    return packed_bytes / plain_bytes


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

_MAGIC = b"flashpl1"
# A skippable frame holds the table, so zstandard's own tools can read the whole file.
_SKIPPED = struct.Struct("<II")
_SKIPPED_MAGIC = 0x184D2A5E
_TRAILER = struct.Struct("<8sQ")
_CHECKSUM_BYTES = 16
_FIXED_BYTES = _SKIPPED.size + _TRAILER.size + _CHECKSUM_BYTES
# A row of the table: the length of a frame, and in the highest two bits the binary logarithm of its width.
_ROW_BYTES, _WIDTH_SHIFT = 4, 30

# In byte planes single bytes repeat and longer strings hardly do. A small table of 7-byte matches is twice as
# fast as level 1 with the same ratio.
_HOW = {"strategy": 1, "window_log": 22, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7}


def _width(leaf: Leaf) -> int:
    return min(DTYPES[leaf.dtype][0], 8)  # complex128 is a pair of 8 bytes


def widths_of(layout: Layout) -> list[int]:
    """For each frame of a file, the element size in bytes (1, 2, 4 or 8) of most of its bytes."""
    found = [Counter[int]() for _ in range(count_of(layout.num_bytes))]
    for leaf in layout.leaves:
        start, stop = layout.data_start + leaf.offset, layout.data_start + leaf.offset + leaf.num_bytes
        for index in range(start // FRAME_BYTES, count_of(stop)):
            begin = index * FRAME_BYTES
            found[index][_width(leaf)] += min(stop, begin + FRAME_BYTES) - max(start, begin)
    return [max(each, key=each.__getitem__, default=1) for each in found]


class Table(NamedTuple):
    """The frames of a compressed file: the element size of each, and their positions. `offsets` has one entry
    more than there are frames."""

    widths: list[int]
    offsets: list[int]


def count_of(num_bytes: int) -> int:
    """Number of frames of a file with `num_bytes` plain bytes."""
    return -(-num_bytes // FRAME_BYTES)


def most_bytes(num_bytes: int) -> int:
    """Longest possible compressed file for `num_bytes` plain bytes."""
    return num_bytes + count_of(num_bytes) * (LARGEST_FRAME - FRAME_BYTES + _ROW_BYTES) + _FIXED_BYTES


def table_bytes(num_bytes: int, widths: Sequence[int], sizes: Iterable[int]) -> bytes:
    """The bytes after the frames, which have these element sizes and compressed lengths."""
    rows = (
        (width.bit_length() - 1) << _WIDTH_SHIFT | size for width, size in zip(widths, sizes, strict=True)
    )
    data = array("I", rows).tobytes()
    data = _SKIPPED.pack(_SKIPPED_MAGIC, len(data) + _FIXED_BYTES - _SKIPPED.size) + data
    data += _TRAILER.pack(_MAGIC, num_bytes)
    return data + _native.xxh3_128(data)


def read_table(read: Callable[[int, int], bytes], path: str, stored_bytes: int, num_bytes: int) -> Table:
    """Read the table of a compressed file of `stored_bytes`, which has `num_bytes` plain bytes.
    `read(offset, num_bytes)` returns bytes of the file; it is called once, for the table. Raises DamagedError
    if the table is invalid."""
    size = _ROW_BYTES * count_of(num_bytes) + _FIXED_BYTES
    if stored_bytes < size:
        raise damaged(path, f"{stored_bytes} bytes, and its table alone has {size}")
    data = read(stored_bytes - size, size)
    if _native.xxh3_128(memoryview(data)[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
        raise damaged(path, "its table does not have its checksum")
    magic, found_bytes = _TRAILER.unpack_from(data, size - _TRAILER.size - _CHECKSUM_BYTES)
    if (*_SKIPPED.unpack_from(data), magic) != (_SKIPPED_MAGIC, size - _SKIPPED.size, _MAGIC):
        raise damaged(path, "its table is invalid")
    if found_bytes != num_bytes:
        raise damaged(path, "its table is that of another file")
    rows = array("I")
    rows.frombytes(memoryview(data)[_SKIPPED.size :][: size - _FIXED_BYTES])
    sizes = [row & (1 << _WIDTH_SHIFT) - 1 for row in rows]
    offsets = [*accumulate(sizes, initial=0)]
    if offsets[-1] + size != stored_bytes or any(not 0 < each <= LARGEST_FRAME for each in sizes):
        raise damaged(path, "its table does not match its frames")
    return Table([1 << (row >> _WIDTH_SHIFT) for row in rows], offsets)


class Codec:
    """Packs and unpacks frames. Owns buffers of three frames for one thread (see `codec`) and reuses them:
    touching new memory would take a third of the time. `plain`: a buffer for a chunk to pack."""

    def __init__(self) -> None:
        self._library = library = _zstandard()
        how = library.ZstdCompressionParameters(**_HOW, write_content_size=True, write_checksum=False)
        self._compressor = library.ZstdCompressor(compression_params=how)
        self._decompressor = library.ZstdDecompressor()
        self.plain, self._split, self._joined = (memoryview(bytearray(FRAME_BYTES)) for _ in range(3))

    def pack(self, width: int, plain: memoryview) -> bytes:
        """Return the frame of a chunk, whose elements have `width` bytes."""
        planes = self._split[: len(plain)]
        _native.split_planes(plain, width, planes)
        frame: bytes = self._compressor.compress(planes)
        return frame

    def unpack(self, width: int, frame: memoryview | bytes, into: memoryview) -> None:
        """Unpack a frame into memory of exactly the length of its chunk. Raises ValueError, and leaves the
        memory unchanged, if the frame is invalid."""
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
        _native.join_planes(planes, width, into)


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


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise RunError(
            "Shards of this run are compressed, and the package zstandard is not installed. Nothing was "
            "changed. Install it: pip install zstandard."
        ) from error
    return zstandard
