"""A slot's metadata: plan JSON | constants JSON | digest table | values JSON, in one contiguous block.

Owns the block's geometry and the plan's encoding. Never touches a region: it works on bytes that it is
given, and believes none of them. See docs/memory.md.
"""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.checked_json import Fields, strict_loads
from flashckpt.format.layout import (
    MAX_LEAVES,
    Layout,
    Leaf,
    SlotImage,
    contradiction,
    header_bytes,
    leaf_columns,
    leaves_from_columns,
)

MAGIC = b"FLCKMETA"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQQ16x")
ALIGNMENT = 64
MAX_PLAN_BYTES = 1 << 30

_WHAT = "a slot's metadata"
Buffer = bytes | bytearray | memoryview


class Geometry(NamedTuple):
    """Where the parts of a block start, in bytes from the block's first, and how long it is."""

    plan: int
    constants: int
    table: int
    values: int
    num_bytes: int


def geometry(plan_len: int, count: int, values_len: int, constants_len: int = 0) -> Geometry:
    """Offsets in a block with `plan_len` bytes of plan, `count` digests (those of constants included),
    `values_len` bytes of values and `constants_len` bytes of the constants' plan."""
    constants = HEADER.size + _aligned(plan_len)
    table = constants + _aligned(constants_len)
    values = table + 8 * count
    return Geometry(HEADER.size, constants, table, values, values + values_len)


def header(plan_len: int, count: int, values_len: int, constants_len: int = 0) -> bytes:
    """The 64 bytes that a block begins with."""
    return HEADER.pack(MAGIC, VERSION, 0, plan_len, count, values_len, constants_len)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def plan_bytes(layout: Layout) -> bytes:
    """The leaves of a layout as compact JSON, by columns. Offsets are not written: the order fixes them."""
    return json.dumps(leaf_columns(layout.leaves), separators=(",", ":")).encode("ascii")


def layout_of(data: Buffer) -> Layout:
    """The layout that `plan_bytes` wrote. Raises DamagedError for anything else."""
    leaves = leaves_from_columns(Fields(strict_loads(bytes(data), what=_WHAT), _WHAT))
    text = header_bytes(leaves)
    end = leaves[-1].offset + leaves[-1].num_bytes if leaves else 0
    return Layout(leaves, text, len(text), len(text) + end)


@dataclass(slots=True)
class Metadata:
    """One block, unpacked: copies, which stay valid when the slot is written again. `digests` are those
    of `leaves`: the layout's, then the constants', whose bytes stand in another region."""

    layout: Layout
    digests: array[int]
    values: bytes
    constants: Layout | None = None

    @property
    def image(self) -> SlotImage:
        return SlotImage(self.layout, self.constants)

    @property
    def constants_digests(self) -> array[int]:
        return self.digests[len(self.layout.leaves) :]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.image.leaves

    def counted(self) -> list[tuple[Leaf, int]]:
        """The leaves of the state, each once, with their digests."""
        outdated = self.image.outdated
        pairs = enumerate(zip(self.leaves, self.digests, strict=True))
        return [pair for index, pair in pairs if index not in outdated]

    @classmethod
    def unpack(cls, buffer: Buffer) -> Metadata:
        """Read a block from its first byte. Raises DamagedError (FormatError for another version)."""
        view = memoryview(buffer).cast("B")
        if len(view) < HEADER.size:
            _damaged("it is shorter than its header")
        magic, version, flags, plan_len, count, values_len, constants_len = HEADER.unpack_from(view)
        if magic != MAGIC:
            _damaged("it does not begin as metadata does")
        if version != VERSION:
            raise FormatError(
                f"A slot's metadata has version {version}; this library reads {VERSION}. The slot was left "
                "as it is. Use the version of flashckpt that wrote it."
            )
        if flags:
            _damaged("it has flags, and none is known")
        if max(plan_len, constants_len) > MAX_PLAN_BYTES or count > MAX_LEAVES or values_len > len(view):
            _damaged("its lengths are out of bounds")
        places = geometry(plan_len, count, values_len, constants_len)
        if places.num_bytes > len(view):
            _damaged("it is longer than the room it has")
        layout = layout_of(view[places.plan : places.plan + plan_len])
        constants = None
        if constants_len:
            constants = _constants_of(view[places.constants : places.constants + constants_len], layout)
        digests = array("Q", bytes(view[places.table : places.values]))
        values = bytes(view[places.values : places.num_bytes])
        found = cls(layout, digests, values, constants)
        if count != len(found.leaves):
            _damaged(f"it has {count} digests for {len(found.leaves)} leaves")
        return found


def _constants_of(data: Buffer, layout: Layout) -> Layout:
    constants = layout_of(data)
    if why := contradiction(layout.leaves, constants.leaves):
        _damaged(why)
    return constants


def _damaged(reason: str) -> NoReturn:
    raise DamagedError(
        f"A slot's metadata is damaged: {reason}. Nothing of this snapshot is used or persisted; "
        "committed steps are not touched."
    )
