"""What a step holds, part by part: the ranks of one keeper, their files, their leaves. Never opens a file.

A part begins with its head, which is all that whoever commits reads of it. Leaves stand in columns, digests
and checksums as one text each, so that ten thousand leaves are about a megabyte and parse in some tens of
milliseconds. Offsets are not written: the order rule fixes them. See docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from flashckpt.format.checked_json import (
    FORMAT,
    OLDER_CONSTANTS_FORMAT,
    Fields,
    JsonRecord,
    attempt_of,
    dump,
    parse_head,
)
from flashckpt.format.layout import (
    PAGE,
    Layout,
    Leaf,
    contradiction,
    digests_of,
    digests_to_hex,
    leaf_columns,
    leaves_from_columns,
    outdated,
)
from flashckpt.format.names import (
    CONSTANTS,
    MAX_BOUNDARY,
    MAX_RANK,
    MAX_STEP,
    NAMED_CONSTANTS,
    SHARD,
    AttemptName,
    is_of_older,
    owner_of,
    part_name,
)
from flashckpt.format.replicas import Ranks, Replicas, has_rank, ranks_from_json, ranks_to_json

CHUNK_BYTES = 4 << 20
MAX_SHARD_BYTES = 1 << 50
# The values of all ranks of one part, as JSON. The rest of `Part.MAX_BYTES` is for the columns of its leaves.
MAX_VALUES_BYTES = 192 << 20
CHECKSUM = re.compile(r"[0-9a-f]{32}")


class FileRecord(NamedTuple):
    """A shard as manifests and heads of parts know it: enough to judge by its length whether it is there."""

    file: str
    num_bytes: int


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
        return Layout.ordered(self.leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank has of a step: its shard, the constants that many steps share, and what is no tensor.

    `values` is opaque here: JSON of the non-tensor state. `digests` are in the order of `leaves`. `replicas`
    are the tables of what it holds like other ranks by declaration, whoever wrote it.
    """

    rank: int
    shard: ShardRecord
    leaves: tuple[Leaf, ...] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)
    values: Mapping[str, Any] = field(repr=False)
    constants: Contents | None = None
    replicas: tuple[Replicas, ...] = field(default=(), repr=False)

    @property
    def contents(self) -> Contents:
        return Contents(shard=self.shard, leaves=self.leaves, digests=self.digests)

    def layout(self) -> Layout:
        return Layout.ordered(self.leaves)

    def counted(self) -> list[tuple[str, Leaf, int]]:
        """The leaves of the state that stand in files of this rank, each once, with its file and its digest.
        A constant that the shard has too, or that another rank writes now, has changed since its file was
        written: that file's bytes of it count no more."""
        rows = [(self.shard.file, *pair) for pair in zip(self.layout().leaves, self.digests, strict=True)]
        if self.constants is not None:
            anew = [*self.leaves, *(leaf for _, leaf, _ in self.elsewhere())]
            gone = outdated(anew, self.constants.leaves)
            pairs = enumerate(zip(self.constants.layout().leaves, self.constants.digests, strict=True))
            rows += [(self.constants.shard.file, *pair) for i, pair in pairs if i not in gone]
        return rows

    def elsewhere(self) -> list[tuple[int, Leaf, int]]:
        """The other leaves of the state: each with the rank whose files have it, and its digest."""
        rows = (row for table in self.replicas for row in table.rows())
        return [(by, leaf, digest) for leaf, digest, by in rows if by is not None and by != self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The files of one rank, and which of its part's tables of replicas it has, by their indexes."""

    rank: int
    shard: FileRecord
    constants: FileRecord | None
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHead:
    """What a part begins with, and all that whoever commits has to know of it. `replicas` has for each table
    the ranks that hold its leaves, and the table's checksum."""

    step: int
    attempt: AttemptName
    boundary: int
    world: int
    keeper: int
    ranks: tuple[RankFiles, ...]
    replicas: tuple[tuple[Ranks, str], ...] = ()

    @property
    def file(self) -> str:
        return part_name(self.keeper)

    @classmethod
    def from_prefix(cls, data: bytes, what: str) -> PartHead | None:
        """Of a part's first bytes. None where they do not hold it, or the part is of the first format.
        Raises DamagedError or FormatError."""
        found = parse_head(data, what=what)
        return None if found is None else cls.of(Fields(found[0], what, found[1]))

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "attempt": str(self.attempt),
            "boundary": self.boundary,
            "world": self.world,
            "keeper": self.keeper,
            "files": [[*_file_columns(each), list(each.replicas)] for each in self.ranks],
            "replicas": [[ranks_to_json(ranks), checksum] for ranks, checksum in self.replicas],
        }

    @classmethod
    def of(cls, fields: Fields) -> PartHead:
        if fields.text("kind") != Part.KIND:
            fields.refuse("it is no part")
        world = fields.integer("world", 1, MAX_RANK)
        rows = fields.rows("replicas", "ranks", "checksum", max_items=MAX_RANK)
        tables = [
            (ranks_from_json(row, "ranks", world), row.text("checksum", pattern=CHECKSUM)) for row in rows
        ]
        files = [
            _rank_files(row, world, tables) for row in fields.rows("files", *_FILES_ROW, max_items=world)
        ]
        if {index for each in files for index in each.replicas} != set(range(len(tables))):
            fields.refuse("a table of replicas is no rank's")
        attempt = attempt_of(fields, "attempt")
        check_owners(fields, attempt, (each.constants.file for each in files if each.constants is not None))
        return cls(
            step=fields.integer("step", 0, MAX_STEP),
            attempt=attempt,
            boundary=fields.integer("boundary", 0, MAX_BOUNDARY),
            world=world,
            keeper=fields.integer("keeper", 0, MAX_RANK),
            ranks=_unique_ranks(fields, files),
            replicas=tuple(tables),
        )


_FILES_ROW = ("rank", "shard", "shard_bytes", "constants", "constants_bytes", "replicas")


def _file_columns(each: RankFiles) -> list[Any]:
    constants = each.constants or FileRecord(file="", num_bytes=0)
    return [each.rank, each.shard.file, each.shard.num_bytes, constants.file, constants.num_bytes]


def _rank_files(row: Fields, world: int, tables: Sequence[tuple[Ranks, str]]) -> RankFiles:
    rank, indexes = row.integer("rank", 0, world - 1), tuple(row.items("replicas", len(tables)))
    for index in indexes:
        if type(index) is not int or not 0 <= index < len(tables) or not has_rank(tables[index][0], rank):
            row.refuse(f"rank {rank} has replicas that are not its own")
    if len({tables[index][0] for index in indexes}) != len(indexes):
        row.refuse(f"rank {rank} has two tables for one set of ranks")
    constants = None
    if row.text("constants"):
        constants = file_record(row, "constants", "constants_bytes", constants_pattern(row))
    shard = file_record(row, "shard", "shard_bytes", SHARD)
    return RankFiles(rank=rank, shard=shard, constants=constants, replicas=indexes)


class _HasRank(Protocol):
    @property
    def rank(self) -> int: ...


_R = TypeVar("_R", bound=_HasRank)


def _unique_ranks(fields: Fields, ranks: Sequence[_R]) -> tuple[_R, ...]:
    if not ranks or len({each.rank for each in ranks}) != len(ranks):
        fields.refuse("its ranks are none, or one stands twice")
    return tuple(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(JsonRecord):
    """One keeper's ranks of one step. `boundary` is that of the attempt that captured it: parts of one step
    have one boundary. `environment` says with what it was computed; opaque here."""

    KIND = "part"
    MAX_BYTES = 256 << 20

    step: int
    attempt: AttemptName
    world: int
    keeper: int
    ranks: tuple[RankRecord, ...]
    boundary: int = 0
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def file(self) -> str:
        return part_name(self.keeper)

    @property
    def written_format(self) -> int:
        constants = (rank.constants.shard.file for rank in self.ranks if rank.constants is not None)
        return OLDER_CONSTANTS_FORMAT if any(map(is_of_older, constants)) else FORMAT

    def head(self) -> PartHead:
        """What it begins with."""
        return self._head(_Tables(self.ranks))

    def _head(self, tables: _Tables) -> PartHead:
        return PartHead(
            step=self.step,
            attempt=self.attempt,
            boundary=self.boundary,
            world=self.world,
            keeper=self.keeper,
            ranks=tuple(_files_of(rank, tables.of(rank)) for rank in self.ranks),
            replicas=tuple((table.ranks, checksum) for checksum, table in tables.by_checksum.items()),
        )

    def to_dict(self) -> dict[str, Any]:
        head, body = self._halves()
        return {**head, **body}

    def _halves(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a committer reads, and the rest."""
        tables = _Tables(self.ranks)
        return self._head(tables).to_dict(), {
            "environment": dict(self.environment),
            "tables": [table.to_dict() for table in tables.by_checksum.values()],
            "ranks": [_rank_to_dict(rank) for rank in self.ranks],
        }

    def _dumped(self) -> bytes:
        head, body = self._halves()
        return dump({"kind": self.KIND, **head}, body, version=self.written_format)

    @classmethod
    def from_fields(cls, fields: Fields) -> Part:
        return _first_part(fields) if fields.version == 1 else _part(fields)


class _Tables:
    """The tables of a part's ranks: each once, in the order in which they are first named."""

    def __init__(self, ranks: Sequence[RankRecord]) -> None:
        self.by_checksum: dict[str, Replicas] = {}
        checksums: dict[int, str] = {}
        for table in (table for rank in ranks for table in rank.replicas):
            if id(table) not in checksums:
                checksums[id(table)] = table.checksum()
                self.by_checksum.setdefault(checksums[id(table)], table)
        places = {checksum: place for place, checksum in enumerate(self.by_checksum)}
        self._places = {key: places[checksum] for key, checksum in checksums.items()}

    def of(self, rank: RankRecord) -> tuple[int, ...]:
        """The indexes of a rank's tables."""
        return tuple(self._places[id(table)] for table in rank.replicas)


def _files_of(rank: RankRecord, replicas: tuple[int, ...]) -> RankFiles:
    shard, constants = rank.shard, rank.constants.shard if rank.constants is not None else None
    return RankFiles(
        rank=rank.rank,
        shard=FileRecord(file=shard.file, num_bytes=shard.num_bytes),
        constants=None
        if constants is None
        else FileRecord(file=constants.file, num_bytes=constants.num_bytes),
        replicas=replicas,
    )


def _part(fields: Fields) -> Part:
    head = PartHead.of(fields)
    tables = [Replicas.of(each, head.world) for each in fields.each("tables", MAX_RANK)]
    contents = fields.each("ranks", head.world)
    if len(tables) != len(head.replicas) or len(contents) != len(head.ranks):
        fields.refuse("its head is not that of its ranks")
    ranks = [
        _rank_of(each, files.rank, head.world, tuple(tables[index] for index in files.replicas))
        for each, files in zip(contents, head.ranks, strict=True)
    ]
    part = Part(
        step=head.step,
        attempt=head.attempt,
        boundary=head.boundary,
        world=head.world,
        keeper=head.keeper,
        ranks=tuple(ranks),
        environment=fields.plain("environment"),
    )
    fields.text("head", pattern=CHECKSUM)
    if part.head() != head:
        fields.refuse("its head is not that of its ranks")
    return part


def _first_part(fields: Fields) -> Part:
    """A part of the first format, which has neither head nor tables."""
    world = fields.integer("world", 1, MAX_RANK)
    each = fields.each("ranks", world)
    ranks = [_rank_of(fields, fields.integer("rank", 0, world - 1), world) for fields in each]
    return Part(
        step=fields.integer("step", 0, MAX_STEP),
        attempt=attempt_of(fields, "attempt"),
        boundary=fields.integer("boundary", 0, MAX_BOUNDARY),
        world=world,
        keeper=fields.integer("keeper", 0, MAX_RANK),
        ranks=_unique_ranks(fields, ranks),
        environment=fields.plain("environment"),
    )


def _rank_to_dict(rank: RankRecord) -> dict[str, Any]:
    constants = None if rank.constants is None else _contents_to_dict(rank.constants)
    return {"shard": _contents_to_dict(rank.contents), "constants": constants, "values": dict(rank.values)}


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
        "digests": digests_to_hex(contents.digests),
    }


def _rank_of(fields: Fields, rank: int, world: int, replicas: tuple[Replicas, ...] = ()) -> RankRecord:
    contents = _contents_of(fields.within("shard"), constants=False)
    constants = _contents_of(fields.within("constants"), constants=True) if fields.has("constants") else None
    if constants is not None and (why := contradiction(contents.leaves, constants.leaves)):
        fields.refuse(why)
    leaves = contents.leaves + (constants.leaves if constants is not None else ())
    if world == 1 and any(leaf.box is not None for leaf in leaves):
        fields.refuse("the only rank has a box of a leaf, and nobody the rest")
    found = RankRecord(
        rank=rank,
        shard=contents.shard,
        leaves=contents.leaves,
        digests=contents.digests,
        values=fields.plain("values"),
        constants=constants,
        replicas=replicas,
    )
    if why := _misplaced(found):
        fields.refuse(why)
    return found


def _misplaced(rank: RankRecord) -> str:
    """Why a rank's files are not those that its tables of replicas say, or nothing."""
    if not rank.replicas:
        return ""
    own = {leaf.name: (leaf.content, digest) for _, leaf, digest in rank.counted()}
    names = {alias for _, leaf, _ in rank.counted() for alias in leaf.aliases} | own.keys()
    seen: set[str] = set()
    for leaf, digest, writer in (row for table in rank.replicas for row in table.rows()):
        if not seen.isdisjoint(mine := (leaf.name, *leaf.aliases)):
            return f"rank {rank.rank} has {leaf.name[:200]!r} among its replicas twice"
        seen.update(mine)
        if writer is None or writer == rank.rank:
            if own.get(leaf.name) != (leaf.content, digest):
                return f"rank {rank.rank} writes {leaf.name[:200]!r}, and its files do not have that"
        elif not names.isdisjoint(mine):
            return f"rank {rank.rank} has {leaf.name[:200]!r}, which rank {writer} writes"
    return ""


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
        file=fields.text("file", pattern=constants_pattern(fields) if constants else SHARD),
        num_bytes=num_bytes,
        data_start=data_start,
        chunk_bytes=chunk_bytes,
        checksums=fields.hex("checksums", 16 * -(-num_bytes // chunk_bytes)),
    )
    digests = digests_of(fields.hex("digests", 8 * len(leaves)))
    return Contents(shard=shard, leaves=leaves, digests=digests)


def constants_pattern(fields: Fields) -> re.Pattern[str]:
    """How a record of this version may name constants shards."""
    return NAMED_CONSTANTS if fields.version >= OLDER_CONSTANTS_FORMAT else CONSTANTS


def check_owners(fields: Fields, attempt: AttemptName, constants: Iterable[str]) -> None:
    """DamagedError where constants shards, named so by a record of `attempt`, are of none before it."""
    for name in filter(is_of_older, constants):
        try:
            owner_of(attempt, name)
        except ValueError as error:
            fields.refuse(str(error))


def file_record(row: Fields, file: str, num_bytes: str, pattern: re.Pattern[str]) -> FileRecord:
    """A file by its name and its length, under these keys."""
    return FileRecord(
        file=row.text(file, pattern=pattern), num_bytes=row.integer(num_bytes, 1, MAX_SHARD_BYTES)
    )
