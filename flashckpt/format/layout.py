"""Leaves: their positions in an image, and their form as columns of JSON. Owns the order of an image and
every bound on a leaf. Never touches the bytes of leaves.

An image is the bytes of a standard safetensors file: eight bytes of header length, a JSON header padded with
spaces to a page, and the leaves' bytes without gaps, ordered so that every leaf is aligned as far as its size
allows. See docs/format.md.
"""

from __future__ import annotations

import json
import math
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from flashckpt._native import xxh3_128
from flashckpt.format.checked_json import compact
from flashckpt.format.forms import (
    HEX,
    OBJECT,
    Form,
    fields,
    integer,
    items,
    load_fields,
    named,
    optional,
    record,
    row,
    text,
)
from flashckpt.format.names import MAX_RANK

PAGE = 4096
ALIGNED = 512
"""Leaves whose size is a multiple of this start at a multiple of it in an image."""
RESERVED = "__metadata__"
"""Name that safetensors reserves; no leaf can have it."""

# torch's dtype name -> (bytes per element, safetensors' name). Dtypes without a safetensors name are stored
# as U8 with their number of bytes as the only dimension; the part records the true dtype.
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
    """Position of a slice in a larger tensor: the shape of that tensor, and the slice's first index in each
    dimension."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A stored tensor of the state, or a stored slice of a tensor.

    `shape`: of the stored tensor or slice, in elements. `stride`: of the live tensor, in elements; None if
    row-major (images always are). `box`: position in the larger tensor; None for a whole tensor. `offset`:
    from the first byte of the image's data. `aliases`: further names of the same tensor in the state.
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
        return DTYPES[self.dtype][0] * math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that it is, or is a slice of."""
        return self.shape if self.box is None else self.box.shape

    @property
    def content(self) -> tuple[object, ...]:
        """All fields except the position in an image."""
        return self.name, self.dtype, self.shape, self.stride, self.aliases, self.box


def image_order(leaf: Leaf, group: int = 0) -> tuple[int, int, int, str]:
    """Sort key for the leaves of an image: by the largest power of two, up to ALIGNED, that divides the size,
    largest first; then by group; then by element size, largest first; then by name.

    So each leaf starts at a multiple of that power of two, and is aligned to its elements. Ordered by element
    size alone, an optimizer's 4-byte `step` tensors would misalign all later leaves, and kernels that write
    clones of these could store at most 4 bytes at a time.
    """
    rest = leaf.num_bytes % ALIGNED
    return -(rest & -rest or ALIGNED), group, -DTYPES[leaf.dtype][0], leaf.name


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry of one image: leaves in image order, header bytes, sizes in bytes."""

    leaves: tuple[Leaf, ...]
    header: bytes = field(repr=False)
    data_start: int
    num_bytes: int

    @classmethod
    def of(cls, leaves: Iterable[Leaf], groups: Mapping[str, int] = MappingProxyType({})) -> Layout:
        """Order the leaves, assign offsets and write the header. Names must be unique. groups: name -> the
        group of a leaf, 0 unless named: leaves of one alignment are ordered by group."""
        return cls.ordered(sorted(leaves, key=lambda leaf: image_order(leaf, groups.get(leaf.name, 0))))

    @classmethod
    def ordered(cls, leaves: Iterable[Leaf]) -> Layout:
        """Like `of`, for leaves in the order of an existing image."""
        placed, offset = list[Leaf](), 0
        for leaf in leaves:
            placed.append(leaf if leaf.offset == offset else replace(leaf, offset=offset))
            offset += leaf.num_bytes
        header = header_bytes(placed)
        return cls(tuple(placed), header, len(header), len(header) + offset)


NO_LEAVES = Layout((), b"", 0, 0)
"""The layout of an image without leaves: no file has it."""


@dataclass(frozen=True, slots=True)
class SlotImage:
    """Positions of a snapshot's leaves.

    shard: leaves in the slot's image that this rank writes. kept: leaves in the slot, after the shard from a
    page boundary, that another rank writes. left: leaves in the slots of other ranks of the node. constants:
    leaves in a region that all slots share. Starts are in bytes from the start of the image that holds the
    leaf; for `left`, of an image with all of these leaves.

    A constant whose name is also among the other leaves has changed since its region or file was written. The
    other leaf is valid; the constant's bytes in the region are `outdated` and unused."""

    shard: Layout
    constants: Layout = NO_LEAVES
    kept: Layout = NO_LEAVES
    left: Layout = NO_LEAVES

    @property
    def own(self) -> tuple[Leaf, ...]:
        """The leaves in the slot: shard, then kept."""
        return self.shard.leaves + self.kept.leaves

    @property
    def ordinary(self) -> tuple[Leaf, ...]:
        """All leaves except constants: the slot's leaves, then `left`."""
        return self.own + self.left.leaves

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves in the order of the digest table: ordinary leaves, then constants, also outdated
        ones."""
        return self.ordinary + self.constants.leaves

    @property
    def first_left(self) -> int:
        """The number of leaves in the slot; the index in `leaves` of the first leaf of `left`."""
        return len(self.shard.leaves) + len(self.kept.leaves)

    @property
    def first_constant(self) -> int:
        """The index in `leaves` of the first constant."""
        return self.first_left + len(self.left.leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slot's image."""
        return self._kept_start + self.kept.num_bytes if self.kept.leaves else self.shard.num_bytes

    @property
    def _kept_start(self) -> int:
        return -(-self.shard.num_bytes // PAGE) * PAGE

    @property
    def outdated(self) -> frozenset[int]:
        """Indexes in `leaves` of outdated constants."""
        first = self.first_constant
        return frozenset(first + i for i in outdated(self.ordinary, self.constants.leaves))

    def starts(self) -> list[int]:
        """The start of each leaf, in the order of `leaves`."""
        places = (0, self.shard), (self._kept_start, self.kept), (0, self.left), (0, self.constants)
        return [start + layout.data_start + leaf.offset for start, layout in places for leaf in layout.leaves]


def names_of(leaves: Iterable[Leaf]) -> list[str]:
    """All names of leaves, with their aliases."""
    return [name for leaf in leaves for name in (leaf.name, *leaf.aliases)]


def outdated(shard: Iterable[Leaf], constants: Iterable[Leaf]) -> frozenset[int]:
    """Indexes of constants whose name is a name or an alias of a leaf in `shard`."""
    names = set(names_of(shard))
    return frozenset(index for index, leaf in enumerate(constants) if leaf.name in names)


def check_constants(shard: Sequence[Leaf], constants: Sequence[Leaf]) -> None:
    """Raise ValueError if these cannot be the shard and the constants of one snapshot."""
    stale = outdated(shard, constants)
    if len(stale) == len(constants):
        raise ValueError("all its constants are outdated")
    names = set(names_of(shard))
    if any(not names.isdisjoint(leaf.aliases) for i, leaf in enumerate(constants) if i not in stale):
        raise ValueError("a constant has a name that another leaf has")


def header_bytes(
    leaves: Iterable[Leaf], *, alignment: int = PAGE, metadata: Mapping[str, str] | None = None
) -> bytes:
    """The safetensors header of leaves with offsets, with its length prefix, padded to a multiple of
    `alignment`.

    Raises ValueError for a leaf with the name that safetensors reserves.
    """
    table: dict[str, object] = {} if metadata is None else {RESERVED: metadata}
    for leaf in leaves:
        if leaf.name == RESERVED:
            raise ValueError(f"{RESERVED} cannot be a leaf's name: safetensors reserves it")
        size, stored = DTYPES[leaf.dtype]
        end = leaf.offset + leaf.num_bytes
        shape = list(leaf.shape) if stored else [leaf.num_bytes]
        table[leaf.name] = {"dtype": stored or "U8", "shape": shape, "data_offsets": [leaf.offset, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // alignment) * alignment - 8
    return length.to_bytes(8, "little") + text.ljust(length, b" ")


MAX_LEAVES = 10_000_000
MAX_NAME_CHARS = 4096
MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 48
MAX_LEAF_BYTES = 1 << 50


def leaf_columns(leaves: Sequence[Leaf]) -> dict[str, Any]:
    """Encode leaves in image order as columns. Columns that most leaves do not need are sparse."""
    dtypes = sorted({leaf.dtype for leaf in leaves})
    index = {dtype: position for position, dtype in enumerate(dtypes)}
    return {
        "names": [leaf.name for leaf in leaves],
        "dtypes": dtypes,
        "dtype": [index[leaf.dtype] for leaf in leaves],
        "shapes": [list(leaf.whole_shape) for leaf in leaves],
        "strides": {str(i): list(leaf.stride) for i, leaf in enumerate(leaves) if leaf.stride is not None},
        "aliases": {str(i): list(leaf.aliases) for i, leaf in enumerate(leaves) if leaf.aliases},
        "boxes": {str(i): _ranges(leaf.shape, leaf.box) for i, leaf in enumerate(leaves) if leaf.box},
    }


def _ranges(shape: Sequence[int], box: Box) -> list[list[int]]:
    return [[start, start + size] for start, size in zip(box.start, shape, strict=True)]


def leaves_of(found: Any) -> tuple[Leaf, ...]:
    """Decode columns: leaves in the written order, with offsets. Raises ValueError unless all are complete,
    bounded, unique and aligned to their elements."""
    columns = load_fields(OBJECT.load(found), _COLUMNS)
    names, dtypes, shapes, table = (columns[key] for key in ("names", "dtype", "shapes", "dtypes"))
    strides, aliases, boxes = (_sparse(columns[key], len(names)) for key in ("strides", "aliases", "boxes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError("its columns are of different lengths")
    leaves, offset = list[Leaf](), 0
    known: dict[Any, Any] = {}  # layers repeat shapes and boxes: share one object for each
    for i, (name, number, whole) in enumerate(zip(names, dtypes, shapes, strict=True)):
        if name == RESERVED or number >= len(table):
            raise ValueError(f"leaf {i} has no valid name or no dtype")
        dtype = table[number]
        if offset % DTYPES[dtype][0]:
            raise ValueError(f"leaf {name[:200]!r} is not aligned to its elements")
        stored, box = _box(boxes[i], whole) if i in boxes else (whole, None)
        stored, box = known.setdefault(stored, stored), known.setdefault(box, box)
        leaf = Leaf(
            name=name,
            dtype=dtype,
            shape=stored,
            stride=_SIZES.load(strides[i]) if i in strides else None,
            aliases=_ALIASES.load(aliases[i]) if i in aliases else (),
            box=box,
            offset=offset,
        )
        if leaf.stride is not None and len(leaf.stride) != len(whole):
            raise ValueError("a stride has another number of dimensions than its shape")
        if leaf.num_bytes > MAX_LEAF_BYTES or (i in aliases and not leaf.aliases):
            raise ValueError(f"leaf {name[:200]!r} has more than {MAX_LEAF_BYTES} bytes, or no aliases")
        leaves.append(leaf)
        offset += leaf.num_bytes
    every = names_of(leaves)
    if len(set(every)) != len(every):
        raise ValueError("a name is repeated")
    "".join(every).encode("utf-8")  # UnicodeEncodeError is a ValueError
    return tuple(leaves)


_SIZES = items(integer(0, MAX_SIZE), MAX_DIMENSIONS)
_NAME = text(re.compile(r".+", re.DOTALL), max_chars=MAX_NAME_CHARS)
_ALIASES = items(_NAME)
_COLUMNS = fields(
    names=items(_NAME, MAX_LEAVES),
    dtypes=items(named(lambda dtype: dtype if dtype in DTYPES else None, "a dtype"), len(DTYPES)),
    dtype=items(integer(), MAX_LEAVES),
    shapes=items(_SIZES, MAX_LEAVES),
    strides=OBJECT,
    aliases=OBJECT,
    boxes=OBJECT,
)
LEAVES: Form[tuple[Leaf, ...]] = Form(leaf_columns, leaves_of)


def _sparse(column: Mapping[str, Any], count: int) -> dict[int, Any]:
    for key in column:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key):
            raise ValueError(f"{key[:20]!r} is not the index of a leaf")
        if int(key) >= count:
            raise ValueError("a column names a leaf past the last")
    return {int(key): value for key, value in column.items()}


def _box(found: Any, whole: tuple[int, ...]) -> tuple[tuple[int, ...], Box]:
    """Decode a box: its sizes and its position."""
    ranges = items(_SIZES).load(found)
    if len(ranges) != len(whole):
        raise ValueError("a box has another number of dimensions than its tensor")
    if any(
        len(each) != 2 or not each[0] <= each[1] <= size for each, size in zip(ranges, whole, strict=True)
    ):
        raise ValueError("a box does not lie in its tensor")
    stored = tuple(stop - start for start, stop in ranges)
    if stored == whole:
        raise ValueError("a box covers its whole tensor")
    return stored, Box(shape=whole, start=tuple(start for start, _ in ranges))


def digests_to_hex(digests: Sequence[int]) -> str:
    """Encode digests as 16 hex digits each, big-endian."""
    words = array("Q", digests)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes().hex()


def _digests_of(found: Any) -> tuple[int, ...]:
    words = array("Q", HEX.load(found))
    if sys.byteorder == "little":
        words.byteswap()
    return tuple(words)


DIGESTS: Form[tuple[int, ...]] = Form(digests_to_hex, _digests_of)


# Replicas: leaves that a set of ranks declares identical. Does not compare ranks: see commit


# Replaces the names of leaves where they are too many. No leaf has this name.
EVERY = ""
Ranks = tuple[range, ...]
"""A set of ranks as ascending ranges that do not overlap."""


def ranks_of(members: Iterable[int]) -> Ranks:
    """Build a set of ranks. Equal sets have equal ranges."""
    runs: list[range] = []
    for rank in sorted(set(members)):
        last = runs[-1] if runs else None
        if last is None or (len(last) > 1 and rank - last[-1] != last.step):
            runs.append(range(rank, rank + 1))
        else:
            runs[-1] = range(last[0], rank + 1, rank - last[-1])
    return tuple(runs)


def has_rank(ranks: Ranks, rank: int) -> bool:
    return any(rank in run for run in ranks)


def count_of(ranks: Ranks) -> int:
    return sum(map(len, ranks))


def _ranks_of_rows(found: Any) -> Ranks:
    """Raises ValueError unless there are at least two ranks, in order."""
    runs: Ranks = _RUNS.load(found)
    for place, run in enumerate(runs):
        is_odd = not run or run.stop != run[-1] + 1 or (len(run) == 1 and run.step != 1)
        if is_odd or (place and run.start <= runs[place - 1][-1]):
            raise ValueError("a set of ranks is out of order")
    if count_of(runs) < 2:
        raise ValueError("a set of ranks has fewer than 2")
    return runs


_RANK = integer(0, MAX_RANK)
_RUNS = items(
    row(lambda start, stop, step: range(start, stop, step), start=_RANK, stop=_RANK, step=integer(1)),
    MAX_RANK,
)
RANKS: Form[Ranks] = Form(_RUNS.dump, _ranks_of_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Leaves, in image order, that all of `ranks` hold with the same bytes, and the digest of each.

    `writers`: for each leaf the rank whose files (shard or constants) have its bytes, None if the files of
    each of `ranks` have them. Leaves have no offsets here.
    """

    ranks: Ranks
    leaves: tuple[Leaf, ...] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)
    writers: tuple[int | None, ...] = field(repr=False)

    def rows(self) -> Iterable[tuple[Leaf, int, int | None]]:
        """Each leaf with its digest and its writer."""
        return zip(self.leaves, self.digests, self.writers, strict=True)

    def checksum(self) -> str:
        """XXH3-128, in hex, of the table as a part encodes it. Ranks with equal tables get equal
        checksums."""
        return xxh3_128(compact(REPLICAS.dump(self))).hex()


def _replicas(
    ranks: Ranks, leaves: tuple[Leaf, ...], digests: tuple[int, ...], writers: tuple[int | None, ...]
) -> Replicas:
    if not len(leaves) == len(digests) == len(writers) > 0:
        raise ValueError("a table of replicas is empty, or its columns are of different lengths")
    if not all(writer is None or has_rank(ranks, writer) for writer in writers):
        raise ValueError("the writer of a replica is not in its set of ranks")
    leaves = tuple(replace(leaf, offset=-1) for leaf in leaves)
    return Replicas(ranks=ranks, leaves=leaves, digests=digests, writers=writers)


WRITERS: Form[tuple[int | None, ...]] = items(optional(integer()))
REPLICAS: Form[Replicas] = record(_replicas, ranks=RANKS, leaves=LEAVES, digests=DIGESTS, writers=WRITERS)
