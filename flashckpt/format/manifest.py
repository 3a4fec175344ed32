"""What one node wrote of a snapshot (the head of its part), and the manifest: the files of a checkpoint. Owns
their types and encoding; opens no file. See docs/format.md.

A shard or a frozen file is as a record says if it has the length that the record gives. Its bytes are
verified when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashckpt.format.catalogue import (
    CHECKSUM,
    RUN_ID,
    Folder,
    Lineage,
    check_lineage,
    is_count,
    lineage_rows,
)
from flashckpt.format.checked_json import MAX_INTEGER, Fields, JsonRecord, attempt_of, dump, parse_head
from flashckpt.format.layout import Ranks, has_rank, ranks_from_json, ranks_to_json
from flashckpt.format.names import MAX_RANK, MAX_STEP, SnapshotId

SHARD = re.compile(r"rank-[0-9]{5,7}-[0-9a-f]{4,32}\.safetensors")
FROZEN = re.compile(r"frozen-[0-9]{5,7}-[0-9a-f]{4,32}\.safetensors")
PART = re.compile(r"node-([0-9]{5,7})-[0-9a-f]{4,32}\.json")
MAX_FILE_BYTES = 1 << 50
COMPRESSED = ".zst"
"""The end of the names of compressed files, which a copy may have. The rest is the name of the plain file."""
_STORED_SHARD, _STORED_FROZEN = (re.compile(rf"{each.pattern}(\.zst)?") for each in (SHARD, FROZEN))


def shard_name(rank: int, nonce: str) -> str:
    """The name of a rank's shard. `nonce` begins with that of its keeper: no two keepers write one file."""
    return f"rank-{rank:05d}-{nonce}.safetensors"


def frozen_name(rank: int, nonce: str) -> str:
    """The name of a file with frozen leaves. No name is written twice in a run."""
    return f"frozen-{rank:05d}-{nonce}.safetensors"


def part_name(node: int, nonce: str) -> str:
    """The name of a part. `node`: the lowest rank of the node."""
    return f"node-{node:05d}-{nonce}.json"


def plain_name(name: str) -> str:
    """The name of a file before it was compressed."""
    return name.removesuffix(COMPRESSED)


class File(NamedTuple):
    """A file in the folder of its record, as it is stored."""

    name: str
    num_bytes: int


class FrozenFile(NamedTuple):
    """A file of frozen leaves, in the folder of the snapshot that wrote it."""

    base: Folder
    name: str
    num_bytes: int


class PartFile(NamedTuple):
    """A part, with the ranks of its node."""

    name: str
    num_bytes: int
    ranks: tuple[int, ...]


class RankFiles(NamedTuple):
    """The files of one rank, and the indexes of its tables of replicas in the part."""

    rank: int
    shard: File
    frozen: FrozenFile | None = None
    tables: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHead(JsonRecord):
    """What one node wrote of a snapshot: the first bytes of its part, which is written after its files.

    node: the lowest rank of the node. tables: of replicas, for each the ranks that hold its leaves and the
    table's checksum.
    """

    KIND = "part"
    MAX_BYTES = 256 << 20

    id: SnapshotId
    step: int
    world: int
    node: int
    ranks: tuple[RankFiles, ...]
    tables: tuple[tuple[Ranks, str], ...] = ()

    @property
    def files(self) -> list[File]:
        return [each.shard for each in self.ranks]

    @property
    def frozen(self) -> list[FrozenFile]:
        return [each.frozen for each in self.ranks if each.frozen is not None]

    def to_dict(self) -> dict[str, Any]:
        return {
            **_id_dict(self.id),
            "step": self.step,
            "world": self.world,
            "node": self.node,
            "files": [
                [
                    each.rank,
                    *each.shard,
                    None if each.frozen is None else _frozen_row(each.frozen),
                    list(each.tables),
                ]
                for each in self.ranks
            ],
            "tables": [[ranks_to_json(ranks), checksum] for ranks, checksum in self.tables],
        }

    def _dumped(self) -> bytes:
        return dump({"kind": self.KIND, **self.to_dict()}, {})

    @classmethod
    def from_prefix(cls, data: bytes, what: str) -> PartHead | None:
        """The head, from the first bytes of a part. None if they do not hold all of it. DamagedError."""
        found = parse_head(data, what=what)
        return None if found is None else cls.from_fields(Fields(found, what))

    @classmethod
    def from_fields(cls, fields: Fields) -> PartHead:
        if fields.text("kind") != cls.KIND:
            fields.refuse("it is not a part")
        world = fields.integer("world", 1, MAX_RANK)
        rows = fields.rows("tables", "ranks", "checksum", max_items=MAX_RANK)
        tables = [
            (ranks_from_json(row, "ranks", world), row.text("checksum", pattern=CHECKSUM)) for row in rows
        ]
        head = cls(
            id=_id_of(fields),
            step=fields.integer("step", 0, MAX_STEP),
            world=world,
            node=fields.integer("node", 0, world - 1),
            ranks=tuple(
                _rank_files(row, world, tables)
                for row in fields.rows(
                    "files", "rank", "shard", "num_bytes", "frozen", "tables", max_items=world
                )
            ),
            tables=tuple(tables),
        )
        ranks = [each.rank for each in head.ranks]
        if not ranks or min(ranks) != head.node or len(set(ranks)) != len(ranks):
            fields.refuse("it has no ranks, a rank twice, or the name of another node")
        if {index for each in head.ranks for index in each.tables} != set(range(len(tables))):
            fields.refuse("a table of replicas belongs to no rank")
        return head


def _rank_files(row: Fields, world: int, tables: Sequence[tuple[Ranks, str]]) -> RankFiles:
    rank, indexes = row.integer("rank", 0, world - 1), tuple(row.items("tables", len(tables)))
    for index in indexes:
        if type(index) is not int or not 0 <= index < len(tables) or not has_rank(tables[index][0], rank):
            row.refuse(f"rank {rank} has a table of replicas whose ranks do not include it")
    if len({tables[index][0] for index in indexes}) != len(indexes):
        row.refuse(f"rank {rank} has two tables for one set of ranks")
    return RankFiles(
        rank=rank,
        shard=File(row.text("shard", pattern=SHARD), row.integer("num_bytes", 1, MAX_FILE_BYTES)),
        frozen=_frozen_file(row, row.items("frozen"), FROZEN) if row.has("frozen") else None,
        tables=indexes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(JsonRecord):
    """The files of a checkpoint. Written once all parts and their files are there.

    parts: one for each node. shards: in the same folder. frozen: in their bases. run_id and lineage (of the
    attempt that captured the snapshot) are for `flashckpt recover`, which rebuilds a catalogue from
    manifests.
    """

    KIND = "manifest"
    MAX_BYTES = 256 << 20

    folder: Folder
    step: int
    world: int
    parts: tuple[PartFile, ...] = field(repr=False)
    shards: tuple[File, ...] = field(repr=False)
    frozen: tuple[FrozenFile, ...] = field(default=(), repr=False)
    run_id: str = ""
    lineage: Lineage = ()

    @property
    def bases(self) -> frozenset[Folder]:
        return frozenset(each.base for each in self.frozen)

    def files(self) -> dict[Folder, dict[str, int]]:
        """The lengths of all files by name, for each folder."""
        own = {each.name: each.num_bytes for each in self.parts}
        found = {self.folder: own | {each.name: each.num_bytes for each in self.shards}}
        for each in self.frozen:
            found.setdefault(each.base, {})[each.name] = each.num_bytes
        return found

    def places(self) -> dict[str, str]:
        """The paths of shards and frozen files, by their names in the parts: a copy may have compressed
        them."""
        found = {plain_name(each.name): f"{self.folder.path}/{each.name}" for each in self.shards}
        return found | {plain_name(each.name): f"{each.base.path}/{each.name}" for each in self.frozen}

    def paths(self) -> dict[str, int]:
        """The lengths of all files by path."""
        return {
            f"{folder.path}/{name}": num_bytes
            for folder, files in self.files().items()
            for name, num_bytes in files.items()
        }

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(self.paths().values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "writer": str(self.folder.writer),
            **_id_dict(self.folder.id),
            "step": self.step,
            "world": self.world,
            "run_id": self.run_id,
            "lineage": lineage_rows(self.lineage),
            "parts": [[each.name, each.num_bytes, list(each.ranks)] for each in self.parts],
            "shards": [list(each) for each in self.shards],
            "frozen": [_frozen_row(each) for each in self.frozen],
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Manifest:
        world = fields.integer("world", 1, MAX_RANK)
        lineage = fields.rows("lineage", "attempt", "boundary", max_items=MAX_RANK)
        parts = [
            PartFile(*_file(fields, row, PART), _ranks(fields, row, world))
            for row in _rows(fields, "parts", 3)
        ]
        manifest = cls(
            folder=Folder(attempt_of(fields, "writer"), _id_of(fields)),
            step=fields.integer("step", 0, MAX_STEP),
            world=world,
            run_id=fields.text("run_id", pattern=RUN_ID),
            lineage=tuple(
                SnapshotId(attempt_of(row, "attempt"), row.integer("boundary", 0, MAX_INTEGER))
                for row in lineage
            ),
            parts=tuple(parts),
            shards=tuple(File(*_file(fields, row, _STORED_SHARD)) for row in _rows(fields, "shards", 2)),
            frozen=tuple(
                _frozen_file(fields, row, _STORED_FROZEN) for row in fields.items("frozen", MAX_RANK)
            ),
        )
        check_lineage(fields, manifest.folder.id.attempt, manifest.lineage)
        names = [each.name for each in parts] + [each.name for each in manifest.shards]
        if len(set(names)) != len(names) or len(manifest.shards) != world:
            fields.refuse("it names a file twice, or not one shard for each rank")
        if sorted(rank for part in parts for rank in part.ranks) != list(range(world)):
            fields.refuse("its parts do not hold each rank once")
        return manifest


def manifest_of(folder: Folder, parts: Iterable[tuple[File, PartHead]]) -> Manifest:
    """The manifest of a snapshot that has these parts."""
    found = sorted(parts, key=lambda each: each[1].node)
    return Manifest(
        folder=folder,
        step=found[0][1].step,
        world=found[0][1].world,
        parts=tuple(PartFile(*file, tuple(sorted(each.rank for each in head.ranks))) for file, head in found),
        shards=tuple(each for _, head in found for each in head.files),
        frozen=tuple(sorted({each for _, head in found for each in head.frozen})),
    )


def are_alike(heads: Iterable[PartHead]) -> bool:
    """Whether all ranks that hold the same leaves have the same table of replicas: `heads` are those of all
    nodes."""
    held: dict[Ranks, dict[int, str]] = {}
    for head in heads:
        for rank in head.ranks:
            for index in rank.tables:
                ranks, checksum = head.tables[index]
                held.setdefault(ranks, {})[rank.rank] = checksum
    return all(
        len(set(by_rank.values())) == 1 and len(by_rank) == sum(map(len, ranks))
        for ranks, by_rank in held.items()
    )


def _id_dict(id: SnapshotId) -> dict[str, Any]:
    return {"attempt": str(id.attempt), "boundary": id.boundary}


def _id_of(fields: Fields) -> SnapshotId:
    return SnapshotId(attempt_of(fields, "attempt"), fields.integer("boundary"))


def _frozen_row(file: FrozenFile) -> list[Any]:
    return [str(file.base.writer), file.base.name, file.name, file.num_bytes]


def _frozen_file(fields: Fields, row: Any, pattern: re.Pattern[str]) -> FrozenFile:
    if type(row) is not list or len(row) != 4:
        fields.refuse("a frozen file is not a list of 4 items")
    writer = attempt_of(Fields({"writer": row[0]}, fields.what), "writer")
    base = Folder.parse(writer, row[1]) if isinstance(row[1], str) else None
    if base is None:
        fields.refuse("a frozen file is in no folder of a snapshot")
    return FrozenFile(base, *_file(fields, row[2:], pattern))


def _rows(fields: Fields, key: str, length: int) -> list[list[Any]]:
    rows: list[list[Any]] = fields.items(key, MAX_RANK)
    if any(type(row) is not list or len(row) != length for row in rows):
        fields.refuse(f"a row of {key!r} does not have {length} items")
    return rows


def _file(fields: Fields, row: list[Any], pattern: re.Pattern[str]) -> tuple[str, int]:
    name, num_bytes = row[:2]
    if not isinstance(name, str) or pattern.fullmatch(name) is None:
        fields.refuse(f"{str(name)[:80]!r} is not the name of such a file")
    if not is_count(num_bytes, MAX_FILE_BYTES) or not num_bytes:
        fields.refuse(f"the length of {name!r} is not a whole number from 1 to {MAX_FILE_BYTES}")
    return name, num_bytes


def _ranks(fields: Fields, row: list[Any], world: int) -> tuple[int, ...]:
    if type(row[2]) is not list or not all(is_count(rank, world - 1) for rank in row[2]):
        fields.refuse("a part has ranks beyond the world")
    return tuple(row[2])
