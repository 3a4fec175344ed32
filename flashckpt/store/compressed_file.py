"""A shard as a compressed file: its chunks as frames of zstandard, each with its numbers in byte planes, and
a checked table of them behind. See docs/format.md, "Compressed shards".

Owns the bytes of such a file in both directions, their bounds, and how it is named. Opens nothing, and
compares no plain byte with its checksum: who reads a shard does that, whatever way its bytes came.
"""

from __future__ import annotations

import re
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

from flashckpt import _native
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.layout import DTYPES, Layout, Leaf
from flashckpt.format.records import CHUNK_BYTES

FRAME_BYTES = CHUNK_BYTES
"""Plain bytes of a frame, but for the last one."""
LARGEST_FRAME = FRAME_BYTES + (FRAME_BYTES >> 8) + 64
"""No chunk becomes longer than that: zstandard's bound, and its header."""

_NAME = re.compile(r"(.+\.safetensors.*)\.([1-9][0-9]{0,15})\.zst")
_MAY_BE = ".safetensors"
_WIDTHS = 1, 8, 4, 2, 1
"""Bytes of the numbers in each part of an image: its header, then parts of its leaves."""
_MAGIC = b"flashpl1"
# A frame that every reader of zstandard skips, so that the whole file is one for its tools.
_SKIPPED = struct.Struct("<II")
_SKIPPED_MAGIC = 0x184D2A5E
_TRAILER = struct.Struct("<8s5Q")
_CHECKSUM_BYTES = 16
_FIXED_BYTES = _SKIPPED.size + _TRAILER.size + _CHECKSUM_BYTES
_SIZE_BYTES = 4

# Of numbers in planes single bytes repeat, hardly any texts: with a small table of those of seven bytes it is
# twice as fast as level 1, and loses nothing.
_HOW = {"strategy": 1, "window_log": 22, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7}


def may_be_compressed(path: str) -> bool:
    """Whether a file of this name may stand compressed, as its spelling goes: no other one is looked for."""
    return _MAY_BE in path.rpartition("/")[2]


def compressed_name(name: str, num_bytes: int) -> str:
    """How the file `name` of so many bytes is called where it stands compressed."""
    return f"{name}.{num_bytes}.zst"


def plain_name(name: str) -> tuple[str, int] | None:
    """The name and the length of the file that stands compressed under `name`. None where that is no such
    name."""
    match = _NAME.fullmatch(name) if name.endswith(".zst") else None
    return (match[1], int(match[2])) if match is not None else None


def _width(leaf: Leaf) -> int:
    return min(DTYPES[leaf.dtype][0], 8)  # complex128 are pairs of 8


@dataclass(frozen=True, slots=True)
class Widths:
    """How long the numbers are where in a file: `stops` are the ends of its parts, one for each of
    _WIDTHS."""

    stops: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout) -> Widths:
        """The stops that give as many bytes as possible the width of their elements: widths only fall along a
        file, and an image may have each of them several times (`image_order`)."""
        end = layout.data_start
        # For each width as the newest: bytes that have their own one so far, and the stops before it.
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
        _, stops = max(best, key=itemgetter(0))  # of equals the widest
        return cls(stops + (end,) * (len(_WIDTHS) - len(stops)))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The pieces of a range that have numbers of one length: first byte and the one behind the last,
        counted from `start`, and the length."""
        begin = start
        for end, width in zip(self.stops, _WIDTHS, strict=True):
            if begin < (last := min(end, stop)):
                yield begin - start, last - start, width
                begin = last


@dataclass(frozen=True, slots=True)
class Table:
    """Where in a compressed file its frames stand: `offsets` has one more than there are frames."""

    num_bytes: int
    widths: Widths
    offsets: array[int]

    def frames(self, start: int, stop: int) -> range:
        """The frames that have bytes of a range of the plain file."""
        return range(start // FRAME_BYTES, -(-stop // FRAME_BYTES) if stop > start else start // FRAME_BYTES)

    def frame_of(self, index: int) -> tuple[int, int]:
        """The plain bytes of a frame: the first, and the one behind the last."""
        return index * FRAME_BYTES, min((index + 1) * FRAME_BYTES, self.num_bytes)


def count_of(num_bytes: int) -> int:
    """The frames of a file of so many plain bytes."""
    return -(-num_bytes // FRAME_BYTES)


def most_bytes(num_bytes: int) -> int:
    """No file of so many plain bytes becomes longer than that."""
    return num_bytes + count_of(num_bytes) * (LARGEST_FRAME - FRAME_BYTES + _SIZE_BYTES) + _FIXED_BYTES


def table_bytes(num_bytes: int, widths: Widths, sizes: array[int]) -> bytes:
    """What stands behind the frames: `sizes` (array("I")) are their compressed lengths."""
    data = _little(sizes).tobytes()
    data = _SKIPPED.pack(_SKIPPED_MAGIC, len(data) + _FIXED_BYTES - _SKIPPED.size) + data
    data += _TRAILER.pack(_MAGIC, num_bytes, *widths.stops[:-1])
    return data + _native.xxh3_128(data)


def read_table(read: Callable[[int, int], bytes], path: str, stored_bytes: int, num_bytes: int) -> Table:
    """The table of a compressed file of `stored_bytes`, whose name says that it has `num_bytes` plain ones.
    `read` gives bytes from an offset on. DamagedError where it is not one, and nothing was read but that many
    bytes as the table of such a file has."""
    size = _SIZE_BYTES * count_of(num_bytes) + _FIXED_BYTES
    if stored_bytes < size:
        raise damaged(path, f"{stored_bytes} bytes, and its table alone has {size}")
    data = read(stored_bytes - size, size)
    if _native.xxh3_128(memoryview(data)[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
        raise damaged(path, "its table does not have its checksum")
    magic, found_bytes, *stops = _TRAILER.unpack_from(data, size - _TRAILER.size - _CHECKSUM_BYTES)
    if (*_SKIPPED.unpack_from(data), magic) != (_SKIPPED_MAGIC, size - _SKIPPED.size, _MAGIC):
        raise damaged(path, "its table is none")
    widths = Widths((*stops, num_bytes))
    if found_bytes != num_bytes or any(after < before for before, after in pairwise(widths.stops)):
        raise damaged(path, "its table is that of another file")
    sizes = array("I")
    sizes.frombytes(memoryview(data)[_SKIPPED.size :][: size - _FIXED_BYTES])
    offsets = array("Q", accumulate(_little(sizes), initial=0))
    if offsets[-1] + size != stored_bytes or any(not 0 < each <= LARGEST_FRAME for each in sizes):
        raise damaged(path, "its frames are not where its table says")
    return Table(num_bytes, widths, offsets)


class Codec:
    """Chunks to frames and back. Its memory, of three frames, is that of one thread (see `codec`), and is
    kept: what is asked for anew is touched anew, which takes a third of the time. `plain` is room for a
    chunk, for whoever has one to pack."""

    def __init__(self) -> None:
        self._library = library = _zstandard()
        how = library.ZstdCompressionParameters(**_HOW, write_content_size=True, write_checksum=False)
        self._compressor = library.ZstdCompressor(compression_params=how)
        self._decompressor = library.ZstdDecompressor()
        self.plain, self._split, self._joined = (memoryview(bytearray(FRAME_BYTES)) for _ in range(3))

    def pack(self, widths: Widths, start: int, plain: memoryview) -> bytes:
        """The frame of the bytes that stand at `start` of a file."""
        planes = self._split[: len(plain)]
        for begin, end, width in widths.runs(start, start + len(plain)):
            _native.split_planes(plain[begin:end], width, planes[begin:end])
        frame: bytes = self._compressor.compress(planes)
        return frame

    def unpack(self, widths: Widths, start: int, frame: memoryview | bytes, into: memoryview) -> None:
        """Put the bytes of a frame, which stand at `start` of a file, into memory of just their length.
        ValueError, in words, where it is not one of so many bytes: then nothing was put there."""
        planes = self._joined[: len(into)]
        try:
            about = self._library.get_frame_parameters(frame)
            # Before anything is unpacked: a few bytes may claim to be any number.
            if about.content_size != len(into) or about.dict_id or about.window_size > LARGEST_FRAME:
                raise ValueError(f"it is not of {len(into)} bytes")
            if _end_of(frame, self._library.frame_header_size(frame), about.has_checksum) != len(frame):
                raise ValueError("it does not end where its table says")
            found = self._decompressor.stream_reader(frame).readinto(planes)
        except self._library.ZstdError as error:
            raise ValueError(str(error)) from error
        if found != len(into):
            raise ValueError(f"it has {found} bytes, where {len(into)} should be")
        for begin, end, width in widths.runs(start, start + len(into)):
            _native.join_planes(planes[begin:end], width, into[begin:end])


def _end_of(frame: memoryview | bytes, at: int, has_checksum: bool) -> int:
    """Where a frame ends, by what its blocks say, from the first one on; 0 where they do not end in it."""
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
    """That of this thread. RunError where zstandard is not installed."""
    found: Codec | None = getattr(_local, "codec", None)
    if found is None:
        found = _local.codec = Codec()
    return found


def damaged(path: str, why: str) -> DamagedError:
    """What the reading of a compressed file raises."""
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
