"""A slot's metadata: plan JSON | digest table | values JSON, in one contiguous block.

Owns the block's geometry and the plan's encoding. Never touches a region: it works on bytes that it is
given, and believes none of them. See docs/memory.md.
"""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.layout import DTYPES, Leaf, Layout, header_bytes

MAGIC = b"FLCKMETA"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQ24x")
ALIGNMENT = 64

Buffer = bytes | bytearray | memoryview

MAX_PLAN_BYTES = 256 << 20
MAX_LEAVES = 1 << 20
MAX_DIMENSIONS = 64
MAX_NAME_BYTES = 4096
MAX_SIZE = 1 << 56

_COLUMNS = ("name", "dtype", "shape", "stride", "aliases", "offset")


class Geometry(NamedTuple):
    """Where the parts of a block start, in bytes from the block's first, and how long it is."""

    plan: int
    table: int
    values: int
    num_bytes: int


def geometry(plan_len: int, count: int, values_len: int) -> Geometry:
    """Offsets of a block with a plan of `plan_len` bytes, `count` digests and `values_len` bytes of values."""
    table = HEADER.size + -(-plan_len // ALIGNMENT) * ALIGNMENT
    values = table + 8 * count
    return Geometry(HEADER.size, table, values, values + values_len)


def header(plan_len: int, count: int, values_len: int) -> bytes:
    """The 64 bytes that a block begins with."""
    return HEADER.pack(MAGIC, VERSION, 0, plan_len, count, values_len)


def plan_bytes(layout: Layout) -> bytes:
    """The leaves of a layout as compact JSON, by columns."""
    columns = {
        "name": [leaf.name for leaf in layout.leaves],
        "dtype": [leaf.dtype for leaf in layout.leaves],
        "shape": [leaf.shape for leaf in layout.leaves],
        "stride": [leaf.stride for leaf in layout.leaves],
        "aliases": [leaf.aliases for leaf in layout.leaves],
        "offset": [leaf.offset for leaf in layout.leaves],
    }
    return json.dumps(columns, separators=(",", ":"), ensure_ascii=False).encode()


def layout_of(data: Buffer) -> Layout:
    """The layout that `plan_bytes` wrote. Raises DamagedError for anything else."""
    plan = _parsed(bytes(data))
    columns = [plan.get(key) for key in _COLUMNS]
    if len(plan) != len(_COLUMNS) or not all(isinstance(column, list) for column in columns):
        _damaged("its columns are not those of a plan")
    lists: list[list[Any]] = [column for column in columns if isinstance(column, list)]
    count = len(lists[0])
    if count > MAX_LEAVES or any(len(column) != count for column in lists):
        _damaged("its columns differ in length")
    leaves = tuple(_leaf(*row) for row in zip(*lists, strict=True))
    end = _end_of(leaves)
    text = header_bytes(leaves)
    return Layout(leaves, text, len(text), len(text) + end)


@dataclass(slots=True)
class Metadata:
    """One block, unpacked: copies, which stay valid when the slot is written again."""

    layout: Layout
    digests: array[int]
    values: bytes

    @classmethod
    def unpack(cls, buffer: Buffer) -> Metadata:
        """Read a block from its first byte. Raises DamagedError (FormatError for a newer version)."""
        view = memoryview(buffer).cast("B")
        if len(view) < HEADER.size:
            _damaged("it is shorter than its header")
        magic, version, _, plan_len, count, values_len = HEADER.unpack_from(view)
        if magic != MAGIC:
            _damaged("it does not begin as metadata does")
        if version != VERSION:
            raise FormatError(
                f"A slot's metadata has version {version}; this library reads version {VERSION}. "
                "The slot was left as it is. Use the version of flashckpt that wrote it."
            )
        if plan_len > MAX_PLAN_BYTES or count > MAX_LEAVES or values_len > len(view):
            _damaged("its lengths are out of bounds")
        places = geometry(plan_len, count, values_len)
        if places.num_bytes > len(view):
            _damaged("it is longer than the room it has")
        layout = layout_of(view[places.plan : places.plan + plan_len])
        if count != len(layout.leaves):
            _damaged(f"it has {count} digests for {len(layout.leaves)} leaves")
        digests = array("Q", bytes(view[places.table : places.values]))
        return cls(layout, digests, bytes(view[places.values : places.num_bytes]))


def _parsed(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_PLAN_BYTES:
        _damaged("it is too long")
    try:
        plan = json.loads(data, parse_constant=_damaged)
    except (ValueError, RecursionError) as error:
        raise DamagedError(_message("it is no JSON")) from error
    if not isinstance(plan, dict):
        _damaged("it is no object")
    return plan


def _leaf(name: Any, dtype: Any, shape: Any, stride: Any, aliases: Any, offset: Any) -> Leaf:
    if not isinstance(aliases, list) or not all(_is_name(each) for each in (name, *aliases)):
        _damaged("a leaf's name is none")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _damaged(f"leaf {name!r} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or not (stride is None or _are_sizes(stride) and len(stride) == len(shape)):
        _damaged(f"leaf {name!r} has an impossible shape")
    if not _is_size(offset):
        _damaged(f"leaf {name!r} has an impossible offset")
    return Leaf(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        stride=None if stride is None else tuple(stride),
        aliases=tuple(aliases),
        offset=offset,
    )


def _end_of(leaves: tuple[Leaf, ...]) -> int:
    end, names = 0, set()
    for leaf in leaves:
        num_bytes = leaf.num_bytes
        if leaf.offset != end or num_bytes > MAX_SIZE or leaf.offset % DTYPES[leaf.dtype][0]:
            _damaged(f"leaf {leaf.name!r} does not begin where the one before it ends")
        end += num_bytes
        names.add(leaf.name)
    if len(names) != len(leaves):
        _damaged("a name stands twice")
    return end


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_BYTES


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_DIMENSIONS and all(_is_size(each) for each in value)


def _message(reason: str) -> str:
    return (
        f"A slot's metadata is damaged: {reason}. Nothing of this snapshot is used or persisted; "
        "committed steps are not touched."
    )


def _damaged(reason: str) -> NoReturn:
    raise DamagedError(_message(reason))
