"""A slot's metadata: plan JSON | constants JSON | replicas JSON | digest table | values JSON, one block.

Owns the block's geometry and the plan's encoding. Never touches a region: it works on bytes that it is
given, and believes none of them. See docs/memory.md.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.checked_json import Fields, compact, strict_loads
from flashckpt.format.layout import (
    MAX_LEAVES,
    Layout,
    Leaf,
    SlotImage,
    contradiction,
    image_order,
    leaf_columns,
    leaves_from_columns,
)
from flashckpt.format.names import MAX_RANK
from flashckpt.format.replicas import Ranks, Replicas, has_rank, ranks_from_json, ranks_to_json

MAGIC = b"FLCKMETA"
VERSION = 3
HEADER = struct.Struct("<8sIIQQQQQ8x")
ALIGNMENT = 64
MAX_PLAN_BYTES = 1 << 30

_WHAT = "a slot's metadata"
Buffer = bytes | bytearray | memoryview


class Geometry(NamedTuple):
    """Where the parts of a block start, in bytes from the block's first, and how long it is."""

    plan: int
    constants: int
    replicas: int
    table: int
    values: int
    num_bytes: int


def geometry(
    plan_len: int, count: int, values_len: int, constants_len: int = 0, replicas_len: int = 0
) -> Geometry:
    """Offsets in a block with `plan_len` bytes of plan, `count` digests (those of constants included),
    `values_len` bytes of values, `constants_len` bytes of the constants' plan and `replicas_len` bytes of
    what is said of replicas."""
    constants = HEADER.size + _aligned(plan_len)
    replicas = constants + _aligned(constants_len)
    table = replicas + _aligned(replicas_len)
    values = table + 8 * count
    return Geometry(HEADER.size, constants, replicas, table, values, values + values_len)


def header(
    plan_len: int, count: int, values_len: int, constants_len: int = 0, replicas_len: int = 0
) -> bytes:
    """The 64 bytes that a block begins with."""
    return HEADER.pack(MAGIC, VERSION, 0, plan_len, count, values_len, constants_len, replicas_len)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def plan_bytes(layout: Layout) -> bytes:
    """The leaves of a layout as compact JSON, by columns. Offsets are not written: the order fixes them."""
    return json.dumps(leaf_columns(layout.leaves), separators=(",", ":")).encode("ascii")


def layout_of(data: Buffer) -> Layout:
    """The layout that `plan_bytes` wrote. Raises DamagedError for anything else."""
    return Layout.ordered(leaves_from_columns(Fields(strict_loads(bytes(data), what=_WHAT), _WHAT)))


class ReplicaSet(NamedTuple):
    """Leaves of a snapshot that `ranks` hold alike by declaration: by their indexes in its digest table, the
    one rank that writes each, or None where each of `ranks` does, and the one rank of this node that has its
    bytes in its slot, or None where each does."""

    ranks: Ranks
    indexes: tuple[int, ...]
    writers: tuple[int | None, ...]
    holders: tuple[int | None, ...]


def replicas_bytes(kept: Layout | None, left: Layout | None, sets: Sequence[ReplicaSet]) -> bytes:
    """What a slot says of replicas: the leaves in it that another rank writes, those that are left to other
    ranks of the node, and all sets. Nothing where there are none."""
    if not sets:
        return b""
    columns = [leaf_columns(each.leaves if each is not None else ()) for each in (kept, left)]
    rows = [[ranks_to_json(each.ranks), each.indexes, each.writers, each.holders] for each in sets]
    return compact({"kept": columns[0], "left": columns[1], "sets": rows})


@dataclass(slots=True)
class Metadata:
    """One block, unpacked: copies, which stay valid when the slot is written again. `digests` are those
    of `leaves`: the layout's, those that are `kept` beside it, those that are `left` to other ranks of the
    node, then the constants', whose bytes stand in another region."""

    layout: Layout
    digests: array[int]
    values: bytes
    constants: Layout | None = None
    kept: Layout | None = None
    sets: tuple[ReplicaSet, ...] = ()
    left: Layout | None = None

    @property
    def image(self) -> SlotImage:
        return SlotImage(self.layout, self.constants, self.kept, self.left)

    @property
    def constants_digests(self) -> array[int]:
        return self.digests[self.image.first_constant :]

    def replicas(self) -> tuple[Replicas, ...]:
        """The tables of replicas as a part has them."""
        return tuple(self._table(each) for each in self.sets)

    def divided(self) -> list[tuple[int, int]]:
        """Of each leaf that one rank holds for all of its node: the index, in the order of names, and that
        rank."""
        pairs = [pair for each in self.sets for pair in zip(each.indexes, each.holders, strict=True)]
        found = [(index, holder) for index, holder in pairs if holder is not None]
        leaves = self.leaves
        return sorted(found, key=lambda pair: leaves[pair[0]].name)

    def _table(self, each: ReplicaSet) -> Replicas:
        leaves = self.leaves
        pairs = zip(each.indexes, each.writers, strict=True)
        rows = [(leaves[index], self.digests[index], writer) for index, writer in pairs]
        rows.sort(key=lambda row: image_order(row[0]))
        return Replicas(
            ranks=each.ranks,
            leaves=tuple(replace(leaf, offset=-1) for leaf, _, _ in rows),
            digests=tuple(digest for _, digest, _ in rows),
            writers=tuple(writer for _, _, writer in rows),
        )

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
        magic, version, flags, plan_len, count, values_len, constants_len, replicas_len = HEADER.unpack_from(
            view
        )
        if magic != MAGIC:
            _damaged("it does not begin as metadata does")
        if version != VERSION:
            raise FormatError(
                f"A slot's metadata has version {version}; this library reads {VERSION}. The slot was left "
                "as it is. Use the version of flashckpt that wrote it."
            )
        if flags:
            _damaged("it has flags, and none is known")
        longest = max(plan_len, constants_len, replicas_len)
        if longest > MAX_PLAN_BYTES or count > MAX_LEAVES or values_len > len(view):
            _damaged("its lengths are out of bounds")
        places = geometry(plan_len, count, values_len, constants_len, replicas_len)
        if places.num_bytes > len(view):
            _damaged("it is longer than the room it has")
        layout = layout_of(view[places.plan : places.plan + plan_len])
        said = _said_of_replicas(view[places.replicas : places.replicas + replicas_len])
        kept, left = (None, None) if said is None else _others_of(said, layout)
        constants = None
        if constants_len:
            ordinary = SlotImage(layout, None, kept, left).ordinary
            constants = _constants_of(view[places.constants : places.constants + constants_len], ordinary)
        digests = array("Q", bytes(view[places.table : places.values]))
        values = bytes(view[places.values : places.num_bytes])
        found = cls(layout, digests, values, constants, kept, left=left)
        found.sets = () if said is None else _sets_of(said, found.image)
        if count != len(found.leaves):
            _damaged(f"it has {count} digests for {len(found.leaves)} leaves")
        return found


def _constants_of(data: Buffer, ordinary: tuple[Leaf, ...]) -> Layout:
    constants = layout_of(data)
    if why := contradiction(ordinary, constants.leaves):
        _damaged(why)
    return constants


def _said_of_replicas(data: Buffer) -> Fields | None:
    return Fields(strict_loads(bytes(data), what=_WHAT), _WHAT) if len(data) else None


def _others_of(said: Fields, layout: Layout) -> tuple[Layout | None, Layout | None]:
    """The leaves that other ranks write: those that are kept here, those that are left to them."""
    names = {name for leaf in layout.leaves for name in (leaf.name, *leaf.aliases)}
    found: list[Layout | None] = []
    for key in ("kept", "left"):
        leaves = leaves_from_columns(said.within(key))
        of_these = {name for leaf in leaves for name in (leaf.name, *leaf.aliases)}
        if not names.isdisjoint(of_these):
            _damaged("a leaf that another rank writes or holds stands in it twice")
        names |= of_these
        found.append(Layout.ordered(leaves) if leaves else None)
    return found[0], found[1]


def _sets_of(said: Fields, image: SlotImage) -> tuple[ReplicaSet, ...]:
    leaves, shard, first = image.leaves, len(image.shard.leaves), image.first_constant
    seen, found = set(image.outdated), []
    for row in said.rows("sets", "ranks", "indexes", "writers", "holders", max_items=MAX_LEAVES):
        ranks = ranks_from_json(row, "ranks", MAX_RANK)
        indexes, *others = (row.items(key, MAX_LEAVES) for key in ("indexes", "writers", "holders"))
        if not indexes or any(len(each) != len(indexes) for each in others):
            _damaged("a set of replicas is empty, or its columns are of different lengths")
        for index, writer, holder in zip(indexes, *others, strict=True):
            if type(index) is not int or not 0 <= index < len(leaves) or index in seen:
                _damaged("a replica is no leaf of it, or stands twice")
            for rank in (writer, holder):
                if rank is not None and (type(rank) is not int or not has_rank(ranks, rank)):
                    _damaged("a replica is written or held by a rank that does not have it")
            if (
                writer is None
                and shard <= index < first
                or holder is None
                and image.first_left <= index < first
            ):
                _damaged("a leaf is left to a rank that has no name")
            seen.add(index)
        found.append(ReplicaSet(ranks, tuple(indexes), *map(tuple, others)))
    if not seen.issuperset(range(shard, first)):
        _damaged("a leaf is left to another rank, and is no replica")
    return tuple(found)


def _damaged(reason: str) -> NoReturn:
    raise DamagedError(
        f"A slot's metadata is damaged: {reason}. Nothing of this snapshot is used or persisted; "
        "committed steps are not touched."
    )
