"""The records of a run: what each says, and how it is read back. Never opens a file. See docs/format.md.

Parts are the only large ones: leaves stand in columns, digests and checksums as one text each, so that ten
thousand leaves are about a megabyte and parse in some tens of milliseconds. Offsets are not written: the
order rule fixes them.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from flashckpt.format.checked_json import FORMAT, Fields, JsonRecord, attempt_of, parse
from flashckpt.format.layout import (
    PAGE,
    Layout,
    Leaf,
    contradiction,
    leaf_columns,
    leaves_from_columns,
    outdated,
)
from flashckpt.format.names import (
    CONSTANTS,
    MAX_BOUNDARY,
    MAX_RANK,
    MAX_STEP,
    PART,
    SHARD,
    AttemptName,
    part_name,
)

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

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "attempt": str(self.attempt),
            "boundary": self.boundary,
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
            boundary=fields.integer("boundary", 0, MAX_BOUNDARY),
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


_RUN_ID = re.compile(r"[0-9a-f]{16}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_ENDED = re.compile(r"|closed|dead")
_MAX_RESTARTS = 10**9
_PART_ROW = ("file", "num_bytes", "checksum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(JsonRecord):
    """What makes a folder a run. `format` is the version it is written in; a newer one is refused."""

    KIND = "run"
    run_id: str
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    @classmethod
    def from_fields(cls, fields: Fields) -> Run:
        return cls(run_id=fields.text("run_id", pattern=_RUN_ID))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who claims an attempt: where its trainer's lock is, and which launch it belongs to.

    `runtime` is the runtime folder's path and `runtime_id` its device and inode: two containers of one
    machine have the same path for different folders. `lock` is empty for a deed that holds no lock.
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
    def of(cls, fields: Fields) -> Holder:
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
    """The taking of an attempt's number, before anything is read."""

    KIND = "claim"
    attempt: AttemptName
    holder: Holder

    def to_dict(self) -> dict[str, Any]:
        return {"attempt": str(self.attempt), "holder": asdict(self.holder)}

    @classmethod
    def from_fields(cls, fields: Fields) -> Claim:
        return cls(attempt=attempt_of(fields, "attempt"), holder=Holder.of(fields.within("holder")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(JsonRecord):
    """Where an attempt went on from: a step of another attempt, or nothing (`parent` None, step 0).

    `boundary` is the ordinal in the parent of the boundary that was taken up, on all ranks: of two snapshots
    with one step it says which. `before` is the lineage behind the
    parent, newest first: attempts, and up to which step theirs are visible. It stands here so that those of
    which nothing is left can go.
    """

    KIND = "start"
    MAX_BYTES = 16 << 20
    parent: AttemptName | None
    step: int
    world: int
    boundary: int = 0
    before: tuple[tuple[AttemptName, int], ...] = ()

    def took_up(self, attempt: AttemptName, step: int, boundary: int) -> bool:
        """Whether this content, on whatever rank, is what the attempt went on from: it counts as its own."""
        return (attempt, step, boundary) == (self.parent, self.step, self.boundary)

    def to_dict(self) -> dict[str, Any]:
        return {
            "parent": None if self.parent is None else str(self.parent),
            "step": self.step,
            "world": self.world,
            "boundary": self.boundary,
            "before": [[str(attempt), last_step] for attempt, last_step in self.before],
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Start:
        return cls(
            parent=attempt_of(fields, "parent") if fields.has("parent") else None,
            step=fields.integer("step", 0, MAX_STEP),
            world=fields.integer("world", 1, MAX_RANK),
            boundary=fields.integer("boundary", 0, MAX_BOUNDARY),
            before=_before(fields),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(JsonRecord):
    """A counter that moves on while a trainer lives; `ended` is "closed" or "dead" once it does not."""

    KIND = "alive"
    count: int
    ended: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "ended": self.ended}

    @classmethod
    def from_fields(cls, fields: Fields) -> Alive:
        return cls(count=fields.integer("count"), ended=fields.text("ended", pattern=_ENDED))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A shard as the manifest knows it: enough to judge by its length whether it is there."""

    file: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """A part as the manifest knows it. `checksum` is the XXH3-128 of the whole file, in hex."""

    file: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(JsonRecord):
    """A step's list of parts. It follows from the parts alone: two who commit at once write the same."""

    KIND = "manifest"
    MAX_BYTES = 256 << 20

    step: int
    attempt: AttemptName
    world: int
    parts: tuple[PartRecord, ...]
    shards: tuple[FileRecord, ...]
    constants: tuple[FileRecord, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "attempt": str(self.attempt),
            "world": self.world,
            "parts": [[part.file, part.num_bytes, part.checksum] for part in self.parts],
            "shards": [[shard.file, shard.num_bytes] for shard in self.shards],
            "constants": [[shard.file, shard.num_bytes] for shard in self.constants],
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Manifest:
        manifest = cls(
            step=fields.integer("step", 0, MAX_STEP),
            attempt=attempt_of(fields, "attempt"),
            world=fields.integer("world", 1, MAX_RANK),
            parts=tuple(map(_part_row, fields.rows("parts", *_PART_ROW, max_items=MAX_RANK))),
            shards=_file_rows(fields, "shards", SHARD),
            constants=_file_rows(fields, "constants", CONSTANTS),
        )
        files = [each.file for each in manifest.parts]
        files += [each.file for each in (*manifest.shards, *manifest.constants)]
        if not manifest.parts or len(set(files)) != len(files):
            fields.refuse("it names no part, or a file twice")
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone(JsonRecord):
    """Stands in a manifest's place before anything of its step is deleted."""

    KIND = "tombstone"
    step: int
    attempt: AttemptName

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "attempt": str(self.attempt)}

    @classmethod
    def from_fields(cls, fields: Fields) -> Tombstone:
        return cls(step=fields.integer("step", 0, MAX_STEP), attempt=attempt_of(fields, "attempt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark(JsonRecord):
    """A verification of this step failed on `host`. It puts the step last; it hides and deletes nothing."""

    KIND = "mark"
    step: int
    attempt: AttemptName
    host: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "attempt": str(self.attempt), "host": self.host, "reason": self.reason}

    @classmethod
    def from_fields(cls, fields: Fields) -> Mark:
        return cls(
            step=fields.integer("step", 0, MAX_STEP),
            attempt=attempt_of(fields, "attempt"),
            host=fields.text("host", max_chars=255),
            reason=fields.text("reason"),
        )


def manifest_of(data: bytes, what: str) -> Manifest | Tombstone:
    """What stands under a manifest's name. Raises DamagedError or FormatError."""
    fields = Fields(parse(data, what=what, max_bytes=Manifest.MAX_BYTES), what)
    kind = fields.text("kind")
    if kind == Tombstone.KIND:
        return Tombstone.from_fields(fields)
    if kind != Manifest.KIND:
        fields.refuse(f"it is a {kind[:20]!r} where a manifest should be")
    return Manifest.from_fields(fields)


def _before(fields: Fields) -> tuple[tuple[AttemptName, int], ...]:
    rows = fields.rows("before", "attempt", "step", max_items=MAX_RANK)
    found = [(attempt_of(row, "attempt"), row.integer("step", 0, MAX_STEP)) for row in rows]
    if any(older[0].number >= newer[0].number or older[1] > newer[1] for newer, older in pairwise(found)):
        fields.refuse("a lineage is out of order")
    return tuple(found)


def _part_row(row: Fields) -> PartRecord:
    return PartRecord(
        file=row.text("file", pattern=PART),
        num_bytes=row.integer("num_bytes", 1, Part.MAX_BYTES),
        checksum=row.text("checksum", pattern=_CHECKSUM),
    )


def _file_rows(fields: Fields, key: str, pattern: re.Pattern[str]) -> tuple[FileRecord, ...]:
    rows = fields.rows(key, "file", "num_bytes", max_items=MAX_RANK)
    return tuple(
        FileRecord(
            file=row.text("file", pattern=pattern), num_bytes=row.integer("num_bytes", 1, MAX_SHARD_BYTES)
        )
        for row in rows
    )
