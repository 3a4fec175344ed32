"""The records of a run: run, claim, start, life sign, commit record, tombstone, quarantine, and the part that
each keeper writes of a step. Never opens a file. See docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from flashckpt.format.checked_json import Fields, JsonRecord, attempt_of, dump, parse_head
from flashckpt.format.layout import (
    PAGE,
    Layout,
    Leaf,
    Ranks,
    Replicas,
    contradiction,
    digests_of,
    digests_to_hex,
    has_rank,
    leaf_columns,
    leaves_from_columns,
    outdated,
    ranks_from_json,
    ranks_to_json,
)
from flashckpt.format.names import (
    FROZEN,
    MAX_BOUNDARY,
    MAX_RANK,
    MAX_STEP,
    PART,
    SHARD,
    AttemptName,
    CommitName,
    SnapshotId,
    frozen_writer,
    part_name,
)
from flashckpt.printable import escaped

_RUN_ID = re.compile(r"[0-9a-f]{16}")
_ENDED = re.compile(r"|closed|dead")
_MAX_RESTARTS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(JsonRecord):
    """The file that makes a folder a run."""

    KIND = "run"
    run_id: str

    def to_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    @classmethod
    def from_fields(cls, fields: Fields) -> Run:
        return cls(run_id=fields.text("run_id", pattern=_RUN_ID))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that claims an attempt: the place of its trainer's lock, and its launch.

    `runtime`: path of the runtime folder. `runtime_id`: its device and inode, since containers of one machine
    may have the same path for different folders. `lock`: empty for an operation that holds no lock.
    """

    boot_id: str
    runtime: str
    runtime_id: str
    lock: str
    host: str
    pid: int
    job_id: str = ""
    restart_count: int = 0

    @classmethod
    def of(cls, fields: Fields) -> Owner:
        return cls(
            boot_id=fields.text("boot_id", max_chars=64),
            runtime=fields.text("runtime"),
            runtime_id=fields.text("runtime_id", max_chars=64),
            lock=fields.text("lock", max_chars=255),
            host=fields.text("host", max_chars=255),
            pid=fields.integer("pid"),
            job_id=fields.text("job_id"),
            restart_count=fields.integer("restart_count", 0, _MAX_RESTARTS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(JsonRecord):
    """Claims an attempt's number, before the process reads anything."""

    KIND = "claim"
    attempt: AttemptName
    owner: Owner

    def to_dict(self) -> dict[str, Any]:
        return {"attempt": str(self.attempt), "holder": asdict(self.owner)}

    @classmethod
    def from_fields(cls, fields: Fields) -> Claim:
        return cls(attempt=attempt_of(fields, "attempt"), owner=Owner.of(fields.within("holder")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(JsonRecord):
    """The start of an attempt. `parent`: the committed step or the snapshot in memory from which it resumed,
    None for a fresh start. `step`: the parent's step number. `before`: the lineage before the parent, newest
    first: attempts, each with its last visible boundary. `again`: the attempts in a row before this one that
    resumed from the same parent and were not closed in order."""

    KIND = "start"
    MAX_BYTES = 16 << 20
    parent: SnapshotId | None
    step: int
    world: int
    before: tuple[SnapshotId, ...] = ()
    again: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "parent": None if self.parent is None else str(self.parent.attempt),
            "boundary": 0 if self.parent is None else self.parent.boundary,
            "step": self.step,
            "world": self.world,
            "before": [[str(each.attempt), each.boundary] for each in self.before],
            **({"again": self.again} if self.again else {}),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Start:
        parent = None
        if fields.has("parent"):
            parent = SnapshotId(attempt_of(fields, "parent"), fields.integer("boundary", 0, MAX_BOUNDARY))
        rows = fields.rows("before", "attempt", "boundary", max_items=MAX_RANK)
        start = cls(
            parent=parent,
            step=fields.integer("step", 0, MAX_STEP),
            world=fields.integer("world", 1, MAX_RANK),
            before=tuple(
                SnapshotId(attempt_of(row, "attempt"), row.integer("boundary", 0, MAX_BOUNDARY))
                for row in rows
            ),
            again=fields.integer("again") if fields.has("again") else 0,
        )
        if any(newer.attempt.number <= older.attempt.number for newer, older in pairwise(start.ancestors)):
            fields.refuse("a lineage is out of order")
        return start

    @property
    def ancestors(self) -> tuple[SnapshotId, ...]:
        """The parent and the lineage before it, newest first."""
        return () if self.parent is None else (self.parent, *self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(JsonRecord):
    """A counter that grows while a trainer lives. `ended`: "closed" or "dead" after its end."""

    KIND = "alive"
    count: int
    ended: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "ended": self.ended}

    @classmethod
    def from_fields(cls, fields: Fields) -> Alive:
        return cls(count=fields.integer("count"), ended=fields.text("ended", pattern=_ENDED))


class PartRecord(NamedTuple):
    """A part in a commit record. `checksum`: the checksum at the end of the part's file, in hex."""

    file: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord(JsonRecord):
    """The parts and files of a committed step. Its bytes depend only on the parts, so all keepers that commit
    a step write the same bytes. `frozen`: instances in frozen/, which other steps may share."""

    KIND = "commit"
    MAX_BYTES = 256 << 20

    name: CommitName
    world: int
    parts: tuple[PartRecord, ...]
    shards: tuple[FileRecord, ...]
    frozen: tuple[FileRecord, ...] = ()

    def data_paths(self) -> list[str]:
        """The paths of its shards, then of its parts."""
        folder = self.name.id.data_folder
        files = [*(shard.file for shard in self.shards), *(part.file for part in self.parts)]
        return [f"{folder}/{file}" for file in files]

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.name.step,
            "attempt": str(self.name.attempt),
            "boundary": self.name.boundary,
            "world": self.world,
            "parts": [[part.file, part.num_bytes, part.checksum] for part in self.parts],
            "shards": [[shard.file, shard.num_bytes] for shard in self.shards],
            "frozen": [[shard.file, shard.num_bytes] for shard in self.frozen],
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> CommitRecord:
        columns = _columns(fields, "parts", 3)
        _check_texts(fields, "parts", columns[0], PART)
        _check_sizes(fields, "parts", columns[1], Part.MAX_BYTES)
        _check_texts(fields, "parts", columns[2], CHECKSUM)
        parts = map(PartRecord._make, zip(*columns, strict=True))
        record = cls(
            name=_name_of(fields),
            world=fields.integer("world", 1, MAX_RANK),
            parts=tuple(parts),
            shards=_file_rows(fields, "shards", SHARD),
            frozen=_file_rows(fields, "frozen", FROZEN),
        )
        files = [part.file for part in record.parts]
        files += [each.file for each in (*record.shards, *record.frozen)]
        if not record.parts or len(set(files)) != len(files):
            fields.refuse("it names no parts, or a file twice")
        if len(record.shards) != record.world:
            fields.refuse("it does not name one shard for each rank")
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone(JsonRecord):
    """Exists while the files of a snapshot are being deleted, in stores without links. Only its name
    matters."""

    KIND = "tombstone"
    id: SnapshotId

    def to_dict(self) -> dict[str, Any]:
        return {"attempt": str(self.id.attempt), "boundary": self.id.boundary}

    @classmethod
    def from_fields(cls, fields: Fields) -> Tombstone:
        boundary = fields.integer("boundary", 0, MAX_BOUNDARY)
        return cls(id=SnapshotId(attempt_of(fields, "attempt"), boundary))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine(JsonRecord):
    """A verification of this step failed on `host`. A resume on that host tries it last."""

    KIND = "quarantine"
    name: CommitName
    host: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.name.step,
            "attempt": str(self.name.attempt),
            "boundary": self.name.boundary,
            "host": self.host,
            "reason": self.reason,
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Quarantine:
        return cls(
            name=_name_of(fields),
            host=escaped(fields.text("host", max_chars=255)),
            reason=escaped(fields.text("reason")),
        )


def _name_of(fields: Fields) -> CommitName:
    return CommitName(
        fields.integer("step", 0, MAX_STEP),
        attempt_of(fields, "attempt"),
        fields.integer("boundary", 0, MAX_BOUNDARY),
    )


def newest_of(attempt: AttemptName) -> SnapshotId:
    """An upper bound for every boundary of an attempt."""
    return SnapshotId(attempt, MAX_BOUNDARY)


# Each rank reads the record of all ranks, so a row must cost only a microsecond or two and no extra object.


def _columns(fields: Fields, key: str, count: int) -> list[tuple[Any, ...]]:
    """Transpose a list of rows with `count` items each into columns."""
    rows = fields.items(key, MAX_RANK)
    if any(type(row) is not list or len(row) != count for row in rows):
        fields.refuse(f"a row of {key!r} does not have {count} items")
    return list(zip(*rows, strict=True)) if rows else [()] * count


def _check_texts(fields: Fields, key: str, texts: Sequence[Any], pattern: re.Pattern[str]) -> None:
    matches = pattern.fullmatch
    for text in texts:
        if type(text) is not str or matches(text) is None:
            fields.refuse(f"{key!r} has {str(text)[:80]!r}, which is not a valid name")


def _check_sizes(fields: Fields, key: str, sizes: Sequence[Any], high: int) -> None:
    if any(type(size) is not int or not 1 <= size <= high for size in sizes):
        fields.refuse(f"a length in {key!r} is not a whole number from 1 to {high}")


def _file_rows(fields: Fields, key: str, pattern: re.Pattern[str]) -> tuple[FileRecord, ...]:
    files, sizes = _columns(fields, key, 2)
    _check_texts(fields, key, files, pattern)
    _check_sizes(fields, key, sizes, MAX_SHARD_BYTES)
    return tuple(map(FileRecord._make, zip(files, sizes, strict=True)))


# Parts: the ranks of one keeper in a step, with their files and leaves
#
# A part begins with its head; a committer reads only the head. Leaves are encoded as columns, digests and
# checksums as one text each, so that ten thousand leaves take about a megabyte and parse in some tens of
# milliseconds. Offsets are not written, since they follow from the order.


CHUNK_BYTES = 4 << 20
MAX_SHARD_BYTES = 1 << 50
# Values of all ranks of a part, as JSON. The columns of the leaves may use the rest of `Part.MAX_BYTES`.
MAX_VALUES_BYTES = 192 << 20
CHECKSUM = re.compile(r"[0-9a-f]{32}")


class FileRecord(NamedTuple):
    """A file in a commit record or in the head of a part. The file is complete if it has this length."""

    file: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """A safetensors file. `checksums` has 16 bytes (XXH3-128) for each chunk of `chunk_bytes`."""

    file: str
    num_bytes: int
    data_start: int
    chunk_bytes: int = CHUNK_BYTES
    checksums: bytes = field(repr=False)

    @classmethod
    def of(cls, file: str, layout: Layout, checksums: bytes) -> ShardRecord:
        """The record of an image written as `file`."""
        return cls(file=file, num_bytes=layout.num_bytes, data_start=layout.data_start, checksums=checksums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A file, its leaves in image order, and the 64-bit digest of each leaf."""

    shard: ShardRecord
    leaves: tuple[Leaf, ...] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)

    def layout(self) -> Layout:
        """The layout, which follows from the leaves."""
        return Layout.ordered(self.leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's share of a step: its shard, the constants that several steps share, and the values.

    `values`: JSON of the state that is not in tensors, opaque here. `digests`: in the order of `leaves`.
    `replicas`: tables of the leaves that this rank and others declare identical; any of the ranks wrote them.
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
        """Each leaf of the state in a file of this rank once, with file and digest. Skips outdated constants:
        if the shard or another rank has a constant too, it has changed since its file was written."""
        rows = [(self.shard.file, *pair) for pair in zip(self.layout().leaves, self.digests, strict=True)]
        if self.constants is not None:
            current = [*self.leaves, *(leaf for _, leaf, _ in self.elsewhere())]
            stale = outdated(current, self.constants.leaves)
            pairs = enumerate(zip(self.constants.layout().leaves, self.constants.digests, strict=True))
            rows += [(self.constants.shard.file, *pair) for i, pair in pairs if i not in stale]
        return rows

    def elsewhere(self) -> list[tuple[int, Leaf, int]]:
        """The leaves of the state in other ranks' files: each with that rank and its digest."""
        rows = (row for table in self.replicas for row in table.rows())
        return [(by, leaf, digest) for leaf, digest, by in rows if by is not None and by != self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The files of one rank, and the indexes of its tables of replicas in the part."""

    rank: int
    shard: FileRecord
    constants: FileRecord | None
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHead:
    """The first bytes of a part, with all that a committer needs. `replicas`: for each table the ranks that
    hold its leaves, and the table's checksum."""

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
        """Parse the head from a part's first bytes; return None if they do not hold the whole head. Raises
        DamagedError or FormatError."""
        found = parse_head(data, what=what)
        return None if found is None else cls.of(Fields(found, what))

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "attempt": str(self.attempt),
            "boundary": self.boundary,
            "world": self.world,
            "keeper": self.keeper,
            "files": [
                [each.rank, *each.shard, *(each.constants or ("", 0)), list(each.replicas)]
                for each in self.ranks
            ],
            "replicas": [[ranks_to_json(ranks), checksum] for ranks, checksum in self.replicas],
        }

    @classmethod
    def of(cls, fields: Fields) -> PartHead:
        if fields.text("kind") != Part.KIND:
            fields.refuse("it is not a part")
        world = fields.integer("world", 1, MAX_RANK)
        rows = fields.rows("replicas", "ranks", "checksum", max_items=MAX_RANK)
        tables = [
            (ranks_from_json(row, "ranks", world), row.text("checksum", pattern=CHECKSUM)) for row in rows
        ]
        files = [
            _rank_files(row, world, tables) for row in fields.rows("files", *_FILES_ROW, max_items=world)
        ]
        if not files or len({each.rank for each in files}) != len(files):
            fields.refuse("it has no ranks, or a rank twice")
        if {index for each in files for index in each.replicas} != set(range(len(tables))):
            fields.refuse("a table of replicas belongs to no rank")
        attempt = attempt_of(fields, "attempt")
        for file in (each.constants.file for each in files if each.constants is not None):
            writer = frozen_writer(file)
            if writer is None or writer[0].number > attempt.number:
                fields.refuse(f"{file!r} was not written by {attempt} or an older attempt")
        return cls(
            step=fields.integer("step", 0, MAX_STEP),
            attempt=attempt,
            boundary=fields.integer("boundary", 0, MAX_BOUNDARY),
            world=world,
            keeper=fields.integer("keeper", 0, MAX_RANK),
            ranks=tuple(files),
            replicas=tuple(tables),
        )


_FILES_ROW = ("rank", "shard", "shard_bytes", "frozen", "frozen_bytes", "replicas")


def _rank_files(row: Fields, world: int, tables: Sequence[tuple[Ranks, str]]) -> RankFiles:
    rank, indexes = row.integer("rank", 0, world - 1), tuple(row.items("replicas", len(tables)))
    for index in indexes:
        if type(index) is not int or not 0 <= index < len(tables) or not has_rank(tables[index][0], rank):
            row.refuse(f"rank {rank} has a table of replicas whose ranks do not include it")
    if len({tables[index][0] for index in indexes}) != len(indexes):
        row.refuse(f"rank {rank} has two tables for one set of ranks")
    constants = None
    if row.text("frozen"):
        constants = _file_record(row, "frozen", "frozen_bytes", FROZEN)
    shard = _file_record(row, "shard", "shard_bytes", SHARD)
    return RankFiles(rank=rank, shard=shard, constants=constants, replicas=indexes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(JsonRecord):
    """One keeper's ranks in one step. `boundary`: index of the boundary in the attempt, the same in all parts
    of a step. `environment`: describes the software of the training process; opaque here."""

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

    def head(self) -> PartHead:
        """The part's head."""
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
        """The head, and the rest."""
        tables = _Tables(self.ranks)
        return self._head(tables).to_dict(), {
            "environment": dict(self.environment),
            "tables": [table.to_dict() for table in tables.by_checksum.values()],
            "ranks": [
                {
                    "shard": _contents_to_dict(rank.contents),
                    "frozen": None if rank.constants is None else _contents_to_dict(rank.constants),
                    "values": dict(rank.values),
                }
                for rank in self.ranks
            ],
        }

    def _dumped(self) -> bytes:
        head, body = self._halves()
        return dump({"kind": self.KIND, **head}, body)

    @classmethod
    def from_fields(cls, fields: Fields) -> Part:
        head = PartHead.of(fields)
        tables = [Replicas.of(each, head.world) for each in fields.each("tables", MAX_RANK)]
        contents = fields.each("ranks", head.world)
        if len(tables) != len(head.replicas) or len(contents) != len(head.ranks):
            fields.refuse("its head does not match its ranks")
        ranks = [
            _rank_of(each, files.rank, head.world, tuple(tables[index] for index in files.replicas))
            for each, files in zip(contents, head.ranks, strict=True)
        ]
        part = cls(
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
            fields.refuse("its head does not match its ranks")
        return part


class _Tables:
    """The distinct tables of a part's ranks, in order of first use."""

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


def _rank_of(fields: Fields, rank: int, world: int, replicas: tuple[Replicas, ...]) -> RankRecord:
    contents = _contents_of(fields.within("shard"), SHARD)
    constants = _contents_of(fields.within("frozen"), FROZEN) if fields.has("frozen") else None
    if constants is not None and (why := contradiction(contents.leaves, constants.leaves)):
        fields.refuse(why)
    leaves = contents.leaves + (constants.leaves if constants is not None else ())
    if world == 1 and any(leaf.box is not None for leaf in leaves):
        fields.refuse("the only rank has a slice of a leaf, and no rank has the rest")
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
    """Why a rank's files contradict its tables of replicas; empty if they agree."""
    if not rank.replicas:
        return ""
    own = {leaf.name: (leaf.content, digest) for _, leaf, digest in rank.counted()}
    names = {alias for _, leaf, _ in rank.counted() for alias in leaf.aliases} | own.keys()
    seen: set[str] = set()
    for leaf, digest, writer in (row for table in rank.replicas for row in table.rows()):
        if not seen.isdisjoint(own_names := (leaf.name, *leaf.aliases)):
            return f"rank {rank.rank} has {leaf.name[:200]!r} among its replicas twice"
        seen.update(own_names)
        if writer is None or writer == rank.rank:
            if own.get(leaf.name) != (leaf.content, digest):
                return f"rank {rank.rank} writes {leaf.name[:200]!r}, but its files do not have it"
        elif not names.isdisjoint(own_names):
            return f"files of rank {rank.rank} have {leaf.name[:200]!r}, which rank {writer} writes"
    return ""


def _contents_of(fields: Fields, name: re.Pattern[str]) -> Contents:
    num_bytes = fields.integer("num_bytes", PAGE, MAX_SHARD_BYTES)
    data_start = fields.integer("data_start", PAGE, num_bytes)
    chunk_bytes = fields.integer("chunk_bytes", PAGE, 16 << 20)
    if data_start % PAGE or chunk_bytes % PAGE:
        fields.refuse("its data or its chunks do not start on pages")
    leaves = leaves_from_columns(fields.within("leaves"))
    end = leaves[-1].offset + leaves[-1].num_bytes if leaves else 0
    if data_start + end != num_bytes:
        fields.refuse(f"its leaves take {end} bytes, its file has room for {num_bytes - data_start}")
    shard = ShardRecord(
        file=fields.text("file", pattern=name),
        num_bytes=num_bytes,
        data_start=data_start,
        chunk_bytes=chunk_bytes,
        checksums=fields.hex("checksums", 16 * -(-num_bytes // chunk_bytes)),
    )
    digests = digests_of(fields.hex("digests", 8 * len(leaves)))
    return Contents(shard=shard, leaves=leaves, digests=digests)


def _file_record(row: Fields, file: str, num_bytes: str, pattern: re.Pattern[str]) -> FileRecord:
    """Read a file's name and length from the keys `file` and `num_bytes`."""
    return FileRecord(
        file=row.text(file, pattern=pattern), num_bytes=row.integer(num_bytes, 1, MAX_SHARD_BYTES)
    )
