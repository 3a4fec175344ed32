"""Parts: one keeper's record of the shards it wrote for a step. Owns their JSON and its validation.

Leaves stand in columns, digests and checksums as one text each, so that ten thousand leaves are about
a megabyte and parse in some tens of milliseconds. Offsets are not written: the order rule fixes them.
See docs/format.md.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashckpt.format.checked_json import Fields, JsonRecord, attempt_of
from flashckpt.format.layout import (
    PAGE,
    Layout,
    Leaf,
    contradiction,
    leaf_columns,
    leaves_from_columns,
    outdated,
)
from flashckpt.format.names import CONSTANTS, MAX_RANK, MAX_STEP, SHARD, AttemptName, part_name

CHUNK_BYTES = 4 << 20
MAX_SHARD_BYTES = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One safetensors file. `checksums` holds 16 bytes (XXH3-128) for each chunk of `chunk_bytes`."""

    file: str
    num_bytes: int
    data_start: int
    chunk_bytes: int = CHUNK_BYTES
    checksums: bytes = field(repr=False)

    @classmethod
    def of(cls, file: str, layout: Layout, checksums: bytes) -> ShardRecord:
        """The record of an image that was written as `file`."""
        return cls(file=file, num_bytes=layout.num_bytes, data_start=layout.data_start, checksums=checksums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A file with its leaves, in image order, and the 64-bit digest of each."""

    shard: ShardRecord
    leaves: tuple[Leaf, ...] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)

    def layout(self) -> Layout:
        """Header and offsets, as they follow from the leaves."""
        return Layout.of(self.leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank has of a step: its shard, the constants of its attempt, and what is no tensor.

    `values` is opaque here: JSON of the non-tensor state. `digests` are in the order of `leaves`.
    """

    rank: int
    shard: ShardRecord
    leaves: tuple[Leaf, ...] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)
    values: Mapping[str, Any] = field(repr=False)
    constants: Contents | None = None

    @property
    def contents(self) -> Contents:
        return Contents(shard=self.shard, leaves=self.leaves, digests=self.digests)

    def layout(self) -> Layout:
        return Layout.of(self.leaves)

    def counted(self) -> list[tuple[str, Leaf, int]]:
        """The leaves of the state, each once, with its file and its digest. A constant that the shard has too
        has changed since its file was written: that file's bytes of it count no more."""
        rows = [(self.shard.file, *pair) for pair in zip(self.layout().leaves, self.digests, strict=True)]
        if self.constants is not None:
            gone = outdated(self.leaves, self.constants.leaves)
            pairs = enumerate(zip(self.constants.layout().leaves, self.constants.digests, strict=True))
            rows += [(self.constants.shard.file, *pair) for i, pair in pairs if i not in gone]
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(JsonRecord):
    """One keeper's ranks of one step. `environment` says with what it was computed; opaque here."""

    KIND = "part"
    MAX_BYTES = 256 << 20

    step: int
    attempt: AttemptName
    world: int
    keeper: int
    ranks: tuple[RankRecord, ...]
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def file(self) -> str:
        return part_name(self.keeper)

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "attempt": str(self.attempt),
            "world": self.world,
            "keeper": self.keeper,
            "environment": dict(self.environment),
            "ranks": [_rank_to_dict(rank) for rank in self.ranks],
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Part:
        world = fields.integer("world", 1, MAX_RANK)
        ranks = tuple(_rank_of(each, world) for each in fields.each("ranks", world))
        if not ranks or len({each.rank for each in ranks}) != len(ranks):
            fields.refuse("its ranks are none, or one stands twice")
        return cls(
            step=fields.integer("step", 0, MAX_STEP),
            attempt=attempt_of(fields, "attempt"),
            world=world,
            keeper=fields.integer("keeper", 0, MAX_RANK),
            ranks=ranks,
            environment=fields.plain("environment"),
        )


def _rank_to_dict(rank: RankRecord) -> dict[str, Any]:
    constants = None if rank.constants is None else _contents_to_dict(rank.constants)
    contents = _contents_to_dict(rank.contents)
    return {"rank": rank.rank, "shard": contents, "constants": constants, "values": dict(rank.values)}


def _contents_to_dict(contents: Contents) -> dict[str, Any]:
    shard = contents.shard
    assert len(contents.digests) == len(contents.leaves)
    return {
        "file": shard.file,
        "num_bytes": shard.num_bytes,
        "data_start": shard.data_start,
        "chunk_bytes": shard.chunk_bytes,
        "checksums": shard.checksums.hex(),
        "leaves": leaf_columns(contents.leaves),
        "digests": _digests_to_hex(contents.digests),
    }


def _rank_of(fields: Fields, world: int) -> RankRecord:
    rank = fields.integer("rank", 0, world - 1)
    contents = _contents_of(fields.within("shard"), constants=False)
    constants = _contents_of(fields.within("constants"), constants=True) if fields.has("constants") else None
    if constants is not None and (why := contradiction(contents.leaves, constants.leaves)):
        fields.refuse(why)
    leaves = contents.leaves + (constants.leaves if constants is not None else ())
    if world == 1 and any(leaf.box is not None for leaf in leaves):
        fields.refuse("the only rank has a box of a leaf, and nobody the rest")
    return RankRecord(
        rank=rank,
        shard=contents.shard,
        leaves=contents.leaves,
        digests=contents.digests,
        values=fields.plain("values"),
        constants=constants,
    )


def _contents_of(fields: Fields, *, constants: bool) -> Contents:
    num_bytes = fields.integer("num_bytes", PAGE, MAX_SHARD_BYTES)
    data_start = fields.integer("data_start", PAGE, num_bytes)
    chunk_bytes = fields.integer("chunk_bytes", PAGE, 1 << 30)
    if data_start % PAGE or chunk_bytes % PAGE:
        fields.refuse("its data or its chunks do not start on pages")
    leaves = leaves_from_columns(fields.within("leaves"))
    end = leaves[-1].offset + leaves[-1].num_bytes if leaves else 0
    if data_start + end != num_bytes:
        fields.refuse(f"its leaves take {end} bytes, its file has room for {num_bytes - data_start}")
    shard = ShardRecord(
        file=fields.text("file", pattern=CONSTANTS if constants else SHARD),
        num_bytes=num_bytes,
        data_start=data_start,
        chunk_bytes=chunk_bytes,
        checksums=fields.hex("checksums", 16 * -(-num_bytes // chunk_bytes)),
    )
    digests = _digests_of(fields.hex("digests", 8 * len(leaves)))
    return Contents(shard=shard, leaves=leaves, digests=digests)


def _digests_to_hex(digests: Sequence[int]) -> str:
    words = array("Q", digests)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes().hex()


def _digests_of(data: bytes) -> tuple[int, ...]:
    words = array("Q", data)
    if sys.byteorder == "little":
        words.byteswap()
    return tuple(words)
