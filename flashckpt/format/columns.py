"""Leaves as columns of JSON, and back. Owns the column form and every bound on a leaf; sees no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashckpt.format.fields import Fields
from flashckpt.format.layout import DTYPES, RESERVED, Box, Leaf

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
    """Leaves with their offsets. DamagedError unless they are whole, bounded, unique and in image order."""
    names = fields.items("names", MAX_LEAVES)
    dtypes, shapes = _dtype_column(fields, len(names)), fields.items("shapes", MAX_LEAVES)
    if len(shapes) != len(names):
        fields.refuse("its columns are of different lengths")
    strides, aliases = _sparse(fields, "strides", len(names)), _sparse(fields, "aliases", len(names))
    boxes = _sparse(fields, "boxes", len(names))
    leaves, offset, before = [], 0, (-1 << 30, "")
    for i, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or name == RESERVED:
            fields.refuse(f"leaf {i} has no name that can be")
        key = (-DTYPES[dtype][0], name)
        if key <= before:
            fields.refuse(f"leaf {name[:200]!r} is out of order or stands twice")
        whole = _sizes(fields, shape)
        stored, box = _box(fields, boxes[i], whole) if i in boxes else (whole, None)
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
        offset, before = offset + num_bytes, key
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
