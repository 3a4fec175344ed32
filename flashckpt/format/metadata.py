"""A slot's metadata: plan JSON | digest table | values JSON, in one block.

Owns the block's geometry and the plan's encoding. Works on bytes, validates all of them, and never touches a
region. See docs/memory.md.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.checked_json import compact, strict_loads
from flashckpt.format.forms import fields, integer, items, load_fields, row
from flashckpt.format.layout import (
    LEAVES,
    MAX_LEAVES,
    NO_LEAVES,
    RANKS,
    WRITERS,
    Layout,
    Leaf,
    Ranks,
    Replicas,
    SlotImage,
    check_constants,
    has_rank,
    image_order,
    names_of,
)

MAGIC = b"FLCKMETA"
VERSION = 4
HEADER = struct.Struct("<8sIIQQQ24x")
ALIGNMENT = 64
MAX_PLAN_BYTES = 1 << 30

_WHAT = "A slot's metadata"
Buffer = bytes | bytearray | memoryview


class Geometry(NamedTuple):
    """Starts of the parts of a block, in bytes from the block's start, and its length."""

    plan: int
    table: int
    values: int
    num_bytes: int


def geometry(plan_len: int, count: int, values_len: int) -> Geometry:
    """Compute the offsets in a block with `plan_len` bytes of plan, `count` digests and `values_len` bytes of
    values."""
    table = HEADER.size - (-plan_len // ALIGNMENT) * ALIGNMENT
    values = table + 8 * count
    return Geometry(HEADER.size, table, values, values + values_len)


def header(plan_len: int, count: int, values_len: int) -> bytes:
    """The first 64 bytes of a block."""
    return HEADER.pack(MAGIC, VERSION, 0, plan_len, count, values_len)


class ReplicaSet(NamedTuple):
    """Leaves of a snapshot that all of `ranks` declare identical. indexes: of the leaves in its digest table.
    writers: for each leaf the rank that writes it, None if each of `ranks` does. owners: for each leaf the
    rank of this node that has its bytes in its slot, None if each rank does."""

    ranks: Ranks
    indexes: tuple[int, ...]
    writers: tuple[int | None, ...]
    owners: tuple[int | None, ...]


_PLAN = fields(
    shard=LEAVES,
    kept=LEAVES,
    left=LEAVES,
    constants=LEAVES,
    sets=items(
        row(ReplicaSet, ranks=RANKS, indexes=items(integer()), writers=WRITERS, owners=WRITERS), MAX_LEAVES
    ),
)


def plan_bytes(image: SlotImage, sets: Sequence[ReplicaSet] = ()) -> bytes:
    """Encode the leaves of a slot as compact JSON columns, without offsets, which follow from the order."""
    leaves = [each.leaves for each in (image.shard, image.kept, image.left, image.constants)]
    values = zip(_PLAN.items(), (*leaves, sets), strict=True)
    return compact({key: form.dump(value) for (key, form), value in values})


@dataclass(slots=True)
class Metadata:
    """A decoded block. Holds copies, which stay valid when the slot is written again. `digests` are in the
    order of `leaves`."""

    image: SlotImage
    sets: tuple[ReplicaSet, ...]
    digests: array[int]
    values: bytes

    @property
    def constants_digests(self) -> array[int]:
        return self.digests[self.image.first_constant :]

    def replicas(self) -> tuple[Replicas, ...]:
        """The tables of replicas in a part's form."""
        return tuple(self._table(each) for each in self.sets)

    def divided(self) -> list[tuple[int, int]]:
        """(index, rank) of each leaf held by one rank for its whole node, in the order of names."""
        pairs = [pair for each in self.sets for pair in zip(each.indexes, each.owners, strict=True)]
        found = [(index, owner) for index, owner in pairs if owner is not None]
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
        """Each leaf of the state once, with its digest."""
        outdated = self.image.outdated
        pairs = enumerate(zip(self.leaves, self.digests, strict=True))
        return [pair for index, pair in pairs if index not in outdated]

    @classmethod
    def unpack(cls, buffer: Buffer) -> Metadata:
        """Decode a block. Raises DamagedError, or FormatError for another version."""
        try:
            return cls._unpacked(memoryview(buffer).cast("B"))
        except ValueError as error:
            raise DamagedError(
                f"{_WHAT} is damaged: {error}. This snapshot is neither used nor persisted; committed steps "
                "are not affected."
            ) from error

    @classmethod
    def _unpacked(cls, view: memoryview) -> Metadata:
        if len(view) < HEADER.size:
            raise ValueError("it is shorter than its header")
        magic, version, flags, plan_len, count, values_len = HEADER.unpack_from(view)
        if magic != MAGIC:
            raise ValueError("it does not begin with the magic bytes of metadata")
        if version != VERSION:
            raise FormatError(
                f"A slot's metadata has version {version}; this library reads {VERSION}. The slot was not "
                "changed. Use the version of flashckpt that wrote it."
            )
        if flags:
            raise ValueError("it has unknown flags")
        if plan_len > MAX_PLAN_BYTES or count > MAX_LEAVES or values_len > len(view):
            raise ValueError("its lengths are out of bounds")
        places = geometry(plan_len, count, values_len)
        if places.num_bytes > len(view):
            raise ValueError("it is longer than its memory")
        plan = load_fields(strict_loads(bytes(view[places.plan : places.plan + plan_len]), what=_WHAT), _PLAN)
        kept, left, constants = (
            Layout.ordered(plan[key]) if plan[key] else NO_LEAVES for key in ("kept", "left", "constants")
        )
        image = SlotImage(Layout.ordered(plan["shard"]), constants, kept, left)
        names = names_of(image.ordinary)
        if len(set(names)) != len(names):
            raise ValueError("it has a leaf twice that another rank writes or holds")
        if constants.leaves:
            check_constants(image.ordinary, constants.leaves)
        _check_sets(plan["sets"], image)
        if count != len(image.leaves):
            raise ValueError(f"it has {count} digests for {len(image.leaves)} leaves")
        digests = array("Q", bytes(view[places.table : places.values]))
        return cls(image, plan["sets"], digests, bytes(view[places.values : places.num_bytes]))


def _check_sets(sets: Sequence[ReplicaSet], image: SlotImage) -> None:
    shard, first = len(image.shard.leaves), image.first_constant
    seen = set(image.outdated)
    for each in sets:
        if not len(each.indexes) == len(each.writers) == len(each.owners) > 0:
            raise ValueError("a set of replicas is empty, or its columns are of different lengths")
        for index, writer, owner in zip(each.indexes, each.writers, each.owners, strict=True):
            if index >= len(image.leaves) or index in seen:
                raise ValueError("a replica is not one of its leaves, or is repeated")
            if not all(rank is None or has_rank(each.ranks, rank) for rank in (writer, owner)):
                raise ValueError("the writer or owner of a replica is not in its set of ranks")
            is_elsewhere = shard <= index < first
            if is_elsewhere and (writer is None or (owner is None and index >= image.first_left)):
                raise ValueError("a leaf is left to other ranks without the rank that has it")
            seen.add(index)
    if not seen.issuperset(range(shard, first)):
        raise ValueError("a leaf is left to another rank and is not a replica")
