"""Leaves: where their bytes stand in an image, and their form as columns of JSON. Owns the order of an image
and every bound on a leaf; never touches bytes.

An image is the exact bytes of a stock safetensors file: eight bytes of header length, a JSON header
padded with spaces so that data starts on a page, and the leaves' bytes without holes, ordered so that every
leaf is aligned as far as its own size allows. See docs/format.md.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashckpt.format.checked_json import Fields

PAGE = 4096
ALIGNED = 512
"""Leaves whose size is a multiple of this begin at a multiple of it in an image."""
RESERVED = "__metadata__"
"""What safetensors keeps for itself: no leaf can have this name."""

# True dtype (torch's own name) -> bytes an element, safetensors' name or None where it has none:
# those are stored as U8 with their bytes as the only dimension, and the part keeps the true dtype.
DTYPES: dict[str, tuple[int, str | None]] = {
    "float64": (8, "F64"), "float32": (4, "F32"), "float16": (2, "F16"), "bfloat16": (2, "BF16"),
    "int64": (8, "I64"), "int32": (4, "I32"), "int16": (2, "I16"), "int8": (1, "I8"),
    "uint64": (8, "U64"), "uint32": (4, "U32"), "uint16": (2, "U16"), "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
    "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, None), "float8_e5m2fnuz": (1, None), "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
    "complex32": (4, None), "complex64": (8, None), "complex128": (16, None),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Where a piece lies in a larger tensor: the larger one's `shape`, and the piece's first index in each
    dimension."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of the state, or a box of one, as it is stored.

    `shape` and `stride` are in elements, of what is stored; `stride` is that of the live tensor, None where
    it is row-major (bytes in an image always are). `box` says where in a larger tensor this lies, None where
    it is the whole. `offset` counts from the first byte of the image's data. `aliases` are the further names
    under which the same tensor stands in the state.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()
    box: Box | None = None
    offset: int = -1

    @property
    def num_bytes(self) -> int:
        count = DTYPES[self.dtype][0]
        for size in self.shape:
            count *= size
        return count

    @property
    def content(self) -> tuple[object, ...]:
        """All of it but its place in an image."""
        return self.name, self.dtype, self.shape, self.stride, self.aliases, self.box


def image_order(leaf: Leaf) -> tuple[int, int, str]:
    """Sort key for the leaves of an image: by the largest power of two, up to ALIGNED, that divides the size,
    largest first; then by the size of an element, largest first; then by name.

    So each leaf begins at a multiple of that power of two, which its elements divide. By elements alone, the
    4-byte `step` tensors of an optimizer shift all that follows them, and kernels that write clones of
    what follows can store no unit larger than 4 bytes.
    """
    rest = leaf.num_bytes % ALIGNED
    return -(rest & -rest or ALIGNED), -DTYPES[leaf.dtype][0], leaf.name


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry of one image: leaves in image order, header bytes, sizes in bytes."""

    leaves: tuple[Leaf, ...]
    header: bytes = field(repr=False)
    data_start: int
    num_bytes: int

    @classmethod
    def of(cls, leaves: Iterable[Leaf]) -> Layout:
        """Order the leaves, give each its offset, write the header. Names must be unique."""
        return cls.ordered(sorted(leaves, key=image_order))

    @classmethod
    def ordered(cls, leaves: Iterable[Leaf]) -> Layout:
        """The same for leaves in the order in which they stand in an image that exists."""
        placed, offset = list[Leaf](), 0
        for leaf in leaves:
            placed.append(leaf if leaf.offset == offset else replace(leaf, offset=offset))
            offset += leaf.num_bytes
        header = header_bytes(placed)
        return cls(tuple(placed), header, len(header), len(header) + offset)


@dataclass(frozen=True, slots=True)
class SlotImage:
    """Where a snapshot's leaves stand: those of the shard in its slot's image; behind it, from a page on,
    those that are `kept` and that another rank writes; those that are `left` to other ranks of the node in
    their slots, each in the image of whoever holds it; and, where there are constants, those in the image of
    a region that all slots share. Starts are in bytes from the image that has them; of what is left, from
    that of a copy of all of it.

    A constant whose name is among the others too has changed since its region, or its file, was written: the
    bytes there count, those of the region are `outdated`, and only dead weight."""

    shard: Layout
    constants: Layout | None = None
    kept: Layout | None = None
    left: Layout | None = None

    @property
    def own(self) -> tuple[Leaf, ...]:
        """The leaves in the slot: the shard's, then those that are kept."""
        return self.shard.leaves + (self.kept.leaves if self.kept is not None else ())

    @property
    def first_left(self) -> int:
        """How many leaves the slot has, and so the index among `leaves` of the first that is left."""
        return len(self.shard.leaves) + (len(self.kept.leaves) if self.kept is not None else 0)

    @property
    def first_constant(self) -> int:
        """The index among `leaves` of the first constant."""
        return self.first_left + (len(self.left.leaves) if self.left is not None else 0)

    @property
    def num_bytes(self) -> int:
        """Of the slot's image."""
        return self._kept_start + (self.kept.num_bytes if self.kept is not None else 0)

    @property
    def _kept_start(self) -> int:
        return self.shard.num_bytes if self.kept is None else -(-self.shard.num_bytes // PAGE) * PAGE

    @property
    def ordinary(self) -> tuple[Leaf, ...]:
        """All but the constants: the slot's, then those that are left to other ranks."""
        return self.own + (self.left.leaves if self.left is not None else ())

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """In the order of the digest table: the ordinary ones, then the constants, outdated ones too."""
        return self.ordinary + (self.constants.leaves if self.constants is not None else ())

    @property
    def outdated(self) -> frozenset[int]:
        """Indexes among `leaves` of those that count no more."""
        if self.constants is None:
            return frozenset()
        first = self.first_constant
        return frozenset(first + i for i in outdated(self.ordinary, self.constants.leaves))

    @property
    def constants_bytes(self) -> int:
        """Bytes of the constants' image, 0 where there is none."""
        return self.constants.num_bytes if self.constants is not None else 0

    def starts(self) -> list[int]:
        """Where each leaf begins, in the order of `leaves`."""
        layouts = [(0, self.shard), (self._kept_start, self.kept), (0, self.left), (0, self.constants)]
        found = [(start + layout.data_start, layout) for start, layout in layouts if layout is not None]
        return [start + leaf.offset for start, layout in found for leaf in layout.leaves]


def outdated(shard: Iterable[Leaf], constants: Iterable[Leaf]) -> frozenset[int]:
    """Indexes of the constants that a shard has anew, under whichever of its names."""
    names = {name for leaf in shard for name in (leaf.name, *leaf.aliases)}
    return frozenset(index for index, leaf in enumerate(constants) if leaf.name in names)


def contradiction(shard: Sequence[Leaf], constants: Sequence[Leaf]) -> str:
    """Why these cannot be the shard and the constants of one snapshot, or nothing."""
    gone = outdated(shard, constants)
    if len(gone) == len(constants):
        return "its constants are none"
    names = {name for leaf in shard for name in (leaf.name, *leaf.aliases)}
    if any(not names.isdisjoint(leaf.aliases) for i, leaf in enumerate(constants) if i not in gone):
        return "a constant has a name that another leaf has"
    return ""


def header_bytes(leaves: Sequence[Leaf]) -> bytes:
    """The safetensors header of placed leaves, its length prefix included, padded to a page.

    ValueError for a leaf with the one name that safetensors keeps for itself.
    """
    table: dict[str, object] = {}
    for leaf in leaves:
        if leaf.name == RESERVED:
            raise ValueError(f"{RESERVED} cannot be a leaf's name: safetensors keeps it for itself")
        size, stored = DTYPES[leaf.dtype]
        end = leaf.offset + leaf.num_bytes
        shape = list(leaf.shape) if stored else [leaf.num_bytes]
        table[leaf.name] = {"dtype": stored or "U8", "shape": shape, "data_offsets": [leaf.offset, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length, b" ")


MAX_LEAVES = 10_000_000
MAX_NAME_CHARS = 4096
MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 48
MAX_LEAF_BYTES = 1 << 50


def leaf_columns(leaves: Sequence[Leaf]) -> dict[str, Any]:
    """Columns of leaves in image order. Strides, aliases and boxes are sparse: most leaves have none."""
    dtypes = sorted({leaf.dtype for leaf in leaves})
    index = {dtype: position for position, dtype in enumerate(dtypes)}
    return {
        "names": [leaf.name for leaf in leaves],
        "dtypes": dtypes,
        "dtype": [index[leaf.dtype] for leaf in leaves],
        "shapes": [list(leaf.shape if leaf.box is None else leaf.box.shape) for leaf in leaves],
        "strides": {str(i): list(leaf.stride) for i, leaf in enumerate(leaves) if leaf.stride is not None},
        "aliases": {str(i): list(leaf.aliases) for i, leaf in enumerate(leaves) if leaf.aliases},
        "boxes": {str(i): _ranges(leaf.shape, leaf.box) for i, leaf in enumerate(leaves) if leaf.box},
    }


def _ranges(shape: Sequence[int], box: Box) -> list[list[int]]:
    return [[start, start + size] for start, size in zip(box.start, shape, strict=True)]


def leaves_from_columns(fields: Fields) -> tuple[Leaf, ...]:
    """Leaves with their offsets. DamagedError unless they are whole, bounded, unique and each is aligned to
    its elements. The order is the writer's."""
    names = fields.items("names", MAX_LEAVES)
    dtypes, shapes = _dtype_column(fields, len(names)), fields.items("shapes", MAX_LEAVES)
    if len(shapes) != len(names):
        fields.refuse("its columns are of different lengths")
    strides, aliases = _sparse(fields, "strides", len(names)), _sparse(fields, "aliases", len(names))
    boxes = _sparse(fields, "boxes", len(names))
    leaves, offset = list[Leaf](), 0
    known: dict[Any, Any] = {}  # layers have the same shapes and boxes over and over: one object for each
    for i, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or name == RESERVED:
            fields.refuse(f"leaf {i} has no name that can be")
        if offset % DTYPES[dtype][0]:
            fields.refuse(f"leaf {name[:200]!r} is not aligned to its elements")
        whole = _sizes(fields, shape)
        stored, box = _box(fields, boxes[i], whole) if i in boxes else (whole, None)
        stored, box = known.setdefault(stored, stored), known.setdefault(box, box)
        leaf = Leaf(
            name=name,
            dtype=dtype,
            shape=stored,
            stride=_stride(fields, strides[i], shape) if i in strides else None,
            aliases=_aliases(fields, aliases[i]) if i in aliases else (),
            box=box,
            offset=offset,
        )
        num_bytes = leaf.num_bytes
        if num_bytes > MAX_LEAF_BYTES:
            fields.refuse(f"leaf {name[:200]!r} has more bytes than can be")
        leaves.append(leaf)
        offset += num_bytes
    _check_unique(fields, leaves)
    return tuple(leaves)


def _dtype_column(fields: Fields, count: int) -> list[str]:
    table, column = fields.items("dtypes", len(DTYPES)), fields.items("dtype", MAX_LEAVES)
    if len(column) != count:
        fields.refuse("its columns are of different lengths")
    for dtype in table:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            fields.refuse(f"dtype {str(dtype)[:40]!r} is not known")
    for position in column:
        if type(position) is not int or not 0 <= position < len(table):
            fields.refuse("a dtype is not in its table")
    return [table[position] for position in column]


def _sparse(fields: Fields, key: str, count: int) -> dict[int, Any]:
    column: dict[int, Any] = {}
    for text, value in fields.plain(key).items():
        if not (text.isascii() and text.isdigit() and len(text) < 10 and str(int(text)) == text):
            fields.refuse(f"{key!r} names no leaf by {text[:20]!r}")
        if int(text) >= count:
            fields.refuse(f"{key!r} names a leaf past the last")
        column[int(text)] = value
    return column


def _sizes(fields: Fields, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        fields.refuse(f"a shape is not a list of at most {MAX_DIMENSIONS} sizes")
    for size in value:
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            fields.refuse("a size is not a whole number that can be")
    return tuple(value)


def _stride(fields: Fields, value: object, shape: list[int]) -> tuple[int, ...]:
    stride = _sizes(fields, value)
    if len(stride) != len(shape):
        fields.refuse("a stride has another number of dimensions than its shape")
    return stride


def _box(fields: Fields, value: object, whole: tuple[int, ...]) -> tuple[tuple[int, ...], Box]:
    """The sizes of a box, and where it lies."""
    if not isinstance(value, list) or len(value) != len(whole):
        fields.refuse("a box has another number of dimensions than its tensor")
    ranges = [_sizes(fields, each) for each in value]
    if any(
        len(each) != 2 or not each[0] <= each[1] <= size for each, size in zip(ranges, whole, strict=True)
    ):
        fields.refuse("a box does not lie in its tensor")
    stored = tuple(stop - start for start, stop in ranges)
    if stored == whole:
        fields.refuse("a box that is the whole tensor is written as none")
    return stored, Box(shape=whole, start=tuple(start for start, _ in ranges))


def _aliases(fields: Fields, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        fields.refuse("aliases are not a list of names")
    for name in value:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            fields.refuse("an alias is not a name")
    return tuple(value)


def _check_unique(fields: Fields, leaves: Sequence[Leaf]) -> None:
    names = [leaf.name for leaf in leaves]
    for leaf in leaves:
        names.extend(leaf.aliases)
    if len(set(names)) != len(names):
        fields.refuse("a name stands twice")
    try:
        "".join(names).encode("utf-8")
    except UnicodeEncodeError:
        fields.refuse("a name is not Unicode text")


def digests_to_hex(digests: Sequence[int]) -> str:
    """16 hex digits for each, big-endian."""
    words = array("Q", digests)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes().hex()


def digests_of(data: bytes) -> tuple[int, ...]:
    """The digests that `digests_to_hex` wrote, from its bytes."""
    words = array("Q", data)
    if sys.byteorder == "little":
        words.byteswap()
    return tuple(words)
