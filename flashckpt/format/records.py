"""The small records of a run, and the manifest: what each says, and how it is read back. Never opens a file.
What a step holds is in parts.py. See docs/format.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from flashckpt.format.checked_json import (
    COMPRESSED_FORMAT,
    FORMAT,
    OLDER_CONSTANTS_FORMAT,
    SOME_RANKS_FORMAT,
    Fields,
    JsonRecord,
    attempt_of,
    parse,
)
from flashckpt.format.names import (
    CONSTANTS,
    MAX_BOUNDARY,
    MAX_RANK,
    MAX_STEP,
    PART,
    SHARD,
    AttemptName,
    constants_path,
    is_of_older,
    step_attempt_folder,
)
from flashckpt.format.parts import (
    CHECKSUM,
    CHUNK_BYTES,
    MAX_SHARD_BYTES,
    Contents,
    FileRecord,
    Part,
    PartHead,
    RankRecord,
    ShardRecord,
    check_owners,
    constants_pattern,
)
from flashckpt.format.replicas import (
    Ranks,
    count_of,
    has_rank,
    place_in,
    ranks_from_json,
    ranks_of,
    ranks_to_json,
)
from flashckpt.printable import escaped

__all__ = [
    "CHUNK_BYTES",
    "Alive",
    "Buried",
    "Claim",
    "Contents",
    "FileRecord",
    "Holder",
    "Manifest",
    "Mark",
    "Part",
    "PartHead",
    "PartRecord",
    "RankRecord",
    "Run",
    "ShardRecord",
    "Start",
    "Tombstone",
    "manifest_of",
]

_RUN_ID = re.compile(r"[0-9a-f]{16}")
_ENDED = re.compile(r"|closed|dead")
_MAX_RESTARTS = 10**9


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
    which nothing is left can go. `ranks` are those that commit in this folder, where the others have folders
    of their own; None for all of `world`.
    """

    KIND = "start"
    MAX_BYTES = 16 << 20
    parent: AttemptName | None
    step: int
    world: int
    boundary: int = 0
    before: tuple[tuple[AttemptName, int], ...] = ()
    ranks: Ranks | None = None

    @property
    def written_format(self) -> int:
        return FORMAT if self.ranks is None else SOME_RANKS_FORMAT

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
            **_ranks_to_dict(self.ranks),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Start:
        world = fields.integer("world", 1, MAX_RANK)
        return cls(
            parent=attempt_of(fields, "parent") if fields.has("parent") else None,
            step=fields.integer("step", 0, MAX_STEP),
            world=world,
            boundary=fields.integer("boundary", 0, MAX_BOUNDARY),
            before=_before(fields),
            ranks=_some_ranks(fields, world),
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


class PartRecord(NamedTuple):
    """A part as the manifest knows it. `checksum`, in hex, is the one that ends the part's file; in a
    manifest of the first format the XXH3-128 of the whole file."""

    file: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(JsonRecord):
    """A step's list of parts. It follows from the parts alone: two who commit at once write the same.
    `format` is the version that it is written in. `ranks` are those whose parts it lists, where the others
    have folders of their own; None for all of `world`. `compressed`: some of its files stand so where it
    does; a step has the same content in both places."""

    KIND = "manifest"
    MAX_BYTES = 256 << 20

    step: int
    attempt: AttemptName
    world: int
    parts: tuple[PartRecord, ...]
    shards: tuple[FileRecord, ...]
    constants: tuple[FileRecord, ...] = ()
    format: int = field(default=FORMAT, compare=False)
    ranks: Ranks | None = None
    compressed: bool = field(default=False, compare=False)

    @property
    def written_format(self) -> int:
        if self.compressed:
            return COMPRESSED_FORMAT
        if any(is_of_older(each.file) for each in self.constants):
            return OLDER_CONSTANTS_FORMAT
        return FORMAT if self.ranks is None else SOME_RANKS_FORMAT

    @property
    def rank_count(self) -> int:
        """Of how many ranks it lists the parts."""
        return self.world if self.ranks is None else count_of(self.ranks)

    def has(self, rank: int) -> bool:
        """Whether it lists a rank's part."""
        return 0 <= rank < self.world if self.ranks is None else has_rank(self.ranks, rank)

    def place(self, rank: int) -> int:
        """The place of a rank's shard in `shards`."""
        return rank if self.ranks is None else place_in(self.ranks, rank)

    def paths(self) -> list[str]:
        """The paths in the store of all shards and constants shards that it names."""
        folder = step_attempt_folder(self.step, self.attempt)
        constants = [constants_path(self.attempt, each.file) for each in self.constants]
        return [f"{folder}/{each.file}" for each in self.shards] + constants

    @property
    def absent(self) -> Ranks:
        """The ranks of the job whose parts are in other folders."""
        if self.ranks is None:
            return ()
        return ranks_of(rank for rank in range(self.world) if not self.has(rank))

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "attempt": str(self.attempt),
            "world": self.world,
            "parts": [[part.file, part.num_bytes, part.checksum] for part in self.parts],
            "shards": [[shard.file, shard.num_bytes] for shard in self.shards],
            "constants": [[shard.file, shard.num_bytes] for shard in self.constants],
            **_ranks_to_dict(self.ranks),
            **({"compressed": True} if self.compressed else {}),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Manifest:
        world = fields.integer("world", 1, MAX_RANK)
        manifest = cls(
            step=fields.integer("step", 0, MAX_STEP),
            attempt=attempt_of(fields, "attempt"),
            world=world,
            parts=_part_rows(fields),
            shards=_file_rows(fields, "shards", SHARD),
            constants=_file_rows(fields, "constants", constants_pattern(fields)),
            format=fields.version,
            ranks=_some_ranks(fields, world),
            compressed=fields.version >= COMPRESSED_FORMAT and fields.has("compressed"),
        )
        check_owners(fields, manifest.attempt, (each.file for each in manifest.constants))
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
class Buried(JsonRecord):
    """Constants shards of an attempt that are about to go: no step is committed any more that names one of
    them. It goes after they have gone."""

    KIND = "buried"
    MAX_BYTES = 64 << 20
    attempt: AttemptName
    files: tuple[str, ...]

    @property
    def written_format(self) -> int:
        return OLDER_CONSTANTS_FORMAT

    def to_dict(self) -> dict[str, Any]:
        return {"attempt": str(self.attempt), "files": list(self.files)}

    @classmethod
    def from_fields(cls, fields: Fields) -> Buried:
        files = fields.items("files", MAX_RANK)
        _check_texts(fields, "files", files, CONSTANTS)
        return cls(attempt=attempt_of(fields, "attempt"), files=tuple(files))


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
            # Only shown, also in logs.
            host=escaped(fields.text("host", max_chars=255)),
            reason=escaped(fields.text("reason")),
        )


def manifest_of(data: bytes, what: str) -> Manifest | Tombstone:
    """What stands under a manifest's name. Raises DamagedError or FormatError."""
    obj, version = parse(data, what=what, max_bytes=Manifest.MAX_BYTES)
    fields = Fields(obj, what, version)
    kind = fields.text("kind")
    if kind == Tombstone.KIND:
        return Tombstone.from_fields(fields)
    if kind != Manifest.KIND:
        fields.refuse(f"it is a {kind[:20]!r} where a manifest should be")
    return Manifest.from_fields(fields)


def _ranks_to_dict(ranks: Ranks | None) -> dict[str, Any]:
    return {} if ranks is None else {"ranks": ranks_to_json(ranks)}


def _some_ranks(fields: Fields, world: int) -> Ranks | None:
    """The ranks that a folder has, where it has some alone."""
    if fields.version < SOME_RANKS_FORMAT or (fields.version > SOME_RANKS_FORMAT and not fields.has("ranks")):
        return None
    ranks = ranks_from_json(fields, "ranks", world, least=1)
    if count_of(ranks) >= world:
        fields.refuse("a folder of all ranks says that it has some alone")
    return ranks


def _before(fields: Fields) -> tuple[tuple[AttemptName, int], ...]:
    rows = fields.rows("before", "attempt", "step", max_items=MAX_RANK)
    found = [(attempt_of(row, "attempt"), row.integer("step", 0, MAX_STEP)) for row in rows]
    if any(older[0].number >= newer[0].number or older[1] > newer[1] for newer, older in pairwise(found)):
        fields.refuse("a lineage is out of order")
    return tuple(found)


# A manifest of many ranks is read by each of them: a row costs a microsecond or two, and no object besides.


def _columns(fields: Fields, key: str, count: int) -> list[tuple[Any, ...]]:
    """The columns of a list of rows, each `count` long."""
    rows = fields.items(key, MAX_RANK)
    if any(type(row) is not list or len(row) != count for row in rows):
        fields.refuse(f"a row of {key!r} has not {count} items")
    return list(zip(*rows, strict=True)) if rows else [()] * count


def _check_texts(fields: Fields, key: str, texts: Sequence[Any], pattern: re.Pattern[str]) -> None:
    matches = pattern.fullmatch
    for text in texts:
        if type(text) is not str or matches(text) is None:
            fields.refuse(f"{key!r} has {str(text)[:80]!r}, which is no such name")


def _check_sizes(fields: Fields, key: str, sizes: Sequence[Any], high: int) -> None:
    if any(type(size) is not int or not 1 <= size <= high for size in sizes):
        fields.refuse(f"a length in {key!r} is not a whole number from 1 to {high}")


def _part_rows(fields: Fields) -> tuple[PartRecord, ...]:
    files, sizes, checksums = _columns(fields, "parts", 3)
    _check_texts(fields, "parts", files, PART)
    _check_sizes(fields, "parts", sizes, Part.MAX_BYTES)
    _check_texts(fields, "parts", checksums, CHECKSUM)
    return tuple(map(PartRecord._make, zip(files, sizes, checksums, strict=True)))


def _file_rows(fields: Fields, key: str, pattern: re.Pattern[str]) -> tuple[FileRecord, ...]:
    files, sizes = _columns(fields, key, 2)
    _check_texts(fields, key, files, pattern)
    _check_sizes(fields, key, sizes, MAX_SHARD_BYTES)
    return tuple(map(FileRecord._make, zip(files, sizes, strict=True)))
