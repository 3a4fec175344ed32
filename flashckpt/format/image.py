"""Reading an image's header without trusting it. Owns every check between a hostile file and leaves.

Nothing is allocated for what a length claims before the length was held against the file's own, and
against what the stock safetensors library reads. Never reads a leaf's bytes. See docs/format.md.
"""

from __future__ import annotations

import os
import stat
from typing import Any, NoReturn

from flashckpt.errors import DamagedError
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.columns import MAX_DIMENSIONS, MAX_LEAF_BYTES, MAX_NAME_CHARS, MAX_SIZE
from flashckpt.format.fields import MAX_INTEGER
from flashckpt.format.layout import DTYPES, PAGE, RESERVED, Layout, Leaf

# What the stock library reads at most.
MAX_HEADER_BYTES = 100_000_000
_PREFIX_BYTES = 8
_STORED = {stored: (dtype, size) for dtype, (size, stored) in DTYPES.items() if stored is not None}


def data_start(prefix: bytes, file_bytes: int, what: str) -> int:
    """Where the data of an image starts, in bytes, from its first eight bytes and its file's length."""
    if len(prefix) != _PREFIX_BYTES:
        _refuse(what, "it is shorter than the length of a header")
    start = _PREFIX_BYTES + int.from_bytes(prefix, "little")
    if start > file_bytes or start > _PREFIX_BYTES + MAX_HEADER_BYTES:
        _refuse(what, f"its header claims {start} bytes; the file has {file_bytes}")
    if start % PAGE:
        _refuse(what, f"its data starts at byte {start}, not on a page")
    return start


def parse_header(header: bytes, file_bytes: int, what: str) -> tuple[Leaf, ...]:
    """The leaves of an image, as stored, in order, from its header (length prefix included).

    What safetensors cannot spell comes back as `uint8`: the true dtype is in the part. DamagedError for
    holes, overlaps, leaves out of order, repeated names, sizes that cannot be, wrong padding.
    """
    start = data_start(header[:_PREFIX_BYTES], file_bytes, what)
    if start != len(header):
        _refuse(what, "its header is cut short")
    table = strict_loads(header[_PREFIX_BYTES:], what=what)
    text = header[_PREFIX_BYTES:].rstrip(b" ")
    if start - _PREFIX_BYTES - len(text) >= PAGE or not text.endswith(b"}"):
        _refuse(what, "its header is not padded with spaces to the next page")
    leaves, offset, before = [], 0, 1 << 30
    for name, entry in table.items():
        leaf = _leaf(name, entry, what)
        size = DTYPES[leaf.dtype][0]
        if leaf.offset != offset:
            _refuse(what, f"leaf {name[:200]!r} leaves a hole or overlaps the one before it")
        # A leaf that is stored as bytes may stand anywhere: its true element size is in the part.
        if leaf.dtype != "uint8" and size > before:
            _refuse(what, f"leaf {name[:200]!r} is out of order")
        before = min(before, size) if leaf.dtype != "uint8" else before
        leaves.append(leaf)
        offset += leaf.num_bytes
    if start + offset != file_bytes:
        _refuse(what, f"its leaves end at byte {start + offset}, the file at {file_bytes}")
    return tuple(leaves)


def read_header(path: str) -> tuple[bytes, int]:
    """The header of the image in a file, and the file's length in bytes. Links are not followed."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            _refuse(path, "it is not a regular file")
        start = data_start(os.pread(file, _PREFIX_BYTES, 0), status.st_size, path)
        return os.pread(file, start, 0), status.st_size
    finally:
        os.close(file)


def check_header(header: bytes, layout: Layout, what: str) -> None:
    """DamagedError unless the header is byte for byte the one that the layout has."""
    if header != layout.header:
        _refuse(what, "its header is not the one that its part describes")


def _leaf(name: str, entry: Any, what: str) -> Leaf:
    if not 0 < len(name) <= MAX_NAME_CHARS or name == RESERVED:
        _refuse(what, f"{name[:200]!r} is no name of a leaf")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(what, f"leaf {name[:200]!r} is not dtype, shape and offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _STORED:
        _refuse(what, f"leaf {name[:200]!r} has a dtype that is not known")
    begin, end = _whole(entry["data_offsets"], 2, MAX_INTEGER, what, exactly=True)
    shape = _whole(entry["shape"], MAX_DIMENSIONS, MAX_SIZE, what)
    leaf = Leaf(name=name, dtype=_STORED[entry["dtype"]][0], shape=shape, offset=begin)
    if leaf.num_bytes > MAX_LEAF_BYTES or end - begin != leaf.num_bytes:
        _refuse(what, f"leaf {name[:200]!r} has offsets that its shape does not fill")
    return leaf


def _whole(value: Any, count: int, high: int, what: str, *, exactly: bool = False) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > count or (exactly and len(value) != count):
        _refuse(what, "a shape or a pair of offsets has the wrong length")
    for number in value:
        if type(number) is not int or not 0 <= number <= high:
            _refuse(what, "a size or an offset is not a whole number that can be")
    return tuple(value)


def _refuse(what: str, why: str) -> NoReturn:
    raise DamagedError(
        f"{what} is damaged: {why}. Nothing of it was used. "
        "Run `flashckpt verify` on the run to see which steps are whole.",
        path=what,
    )
