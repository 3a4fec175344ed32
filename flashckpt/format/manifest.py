"""What one node wrote of a snapshot (the head of its part), and the manifest: the files of a checkpoint. Owns
their types and encoding; opens no file. See docs/format.md.

A shard or a frozen file is as a record says if it has the length that the record gives. Its bytes are
verified when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from flashckpt.format.catalogue import CHECKSUM, FOLDER, RUN_ID, Folder, Lineage, check_lineage
from flashckpt.format.checked_json import JsonRecord, dump, parse_head
from flashckpt.format.forms import ID, Form, fields, integer, items, optional, pair, row, text
from flashckpt.format.layout import RANKS, Ranks, count_of, has_rank
from flashckpt.format.names import MAX_RANK, MAX_STEP, SnapshotId

SHARD = re.compile(r"rank-[0-9]{5,7}-[0-9a-f]{4,32}\.safetensors")
FROZEN = re.compile(r"frozen-[0-9]{5,7}-[0-9a-f]{4,32}\.safetensors")
PART = re.compile(r"node-([0-9]{5,7})-[0-9a-f]{4,32}\.json")
MAX_FILE_BYTES = 1 << 50
K = TypeVar("K")
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


_LENGTH = integer(1, MAX_FILE_BYTES)


def _file_of(pattern: re.Pattern[str]) -> Form[File]:
    return row(File, name=text(pattern), num_bytes=_LENGTH)


def _frozen_of(pattern: re.Pattern[str]) -> Form[FrozenFile]:
    return row(FrozenFile, base=FOLDER, name=text(pattern), num_bytes=_LENGTH)


_RANK_FILES: Form[RankFiles] = row(
    RankFiles,
    rank=integer(),
    shard=_file_of(SHARD),
    frozen=optional(_frozen_of(FROZEN)),
    tables=items(integer()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHead(JsonRecord):
    """What one node wrote of a snapshot: the first bytes of its part, which is written after its files.

    node: the lowest rank of the node. tables: of replicas, for each the ranks that hold its leaves and the
    table's checksum.
    """

    KIND = "part"
    MAX_BYTES = 256 << 20
    FORMS = fields(
        id=ID,
        step=integer(0, MAX_STEP),
        world=integer(1, MAX_RANK),
        node=integer(0, MAX_RANK),
        ranks=items(_RANK_FILES, MAX_RANK),
        tables=items(pair(RANKS, text(CHECKSUM)), MAX_RANK),
    )

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

    def _dumped(self) -> bytes:
        return dump({"kind": self.KIND, **self.to_dict()}, {})

    @classmethod
    def from_prefix(cls, data: bytes, what: str) -> PartHead | None:
        """The head, from the first bytes of a part. None if they do not hold all of it. DamagedError."""
        found = parse_head(data, what=what)
        return None if found is None else cls.from_parsed(found, what)

    def check(self) -> None:
        ranks = [each.rank for each in self.ranks]
        if not ranks or min(ranks) != self.node or len(set(ranks)) != len(ranks):
            raise ValueError("it has no ranks, a rank twice, or the name of another 'node'")
        highest = max([*ranks, *(of[-1][-1] for of, _ in self.tables)])
        if highest >= self.world:
            raise ValueError(f"it names rank {highest}, and its world is {self.world}")
        for each in self.ranks:
            sets = [self.tables[index][0] for index in each.tables if index < len(self.tables)]
            if len(sets) != len(each.tables) or not all(has_rank(of, each.rank) for of in sets):
                raise ValueError(f"rank {each.rank} has a table of replicas whose ranks do not include it")
            if len(set(sets)) != len(sets):
                raise ValueError(f"rank {each.rank} has two tables for one set of ranks")
        if {index for each in self.ranks for index in each.tables} != set(range(len(self.tables))):
            raise ValueError("a table of replicas belongs to no rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(JsonRecord):
    """The files of a checkpoint. Written once all parts and their files are there.

    parts: one for each node. shards: in the same folder. frozen: in their bases. run_id and lineage (of the
    attempt that captured the snapshot) are for `flashckpt recover`, which rebuilds a catalogue from
    manifests.
    """

    KIND = "manifest"
    MAX_BYTES = 256 << 20
    FORMS = fields(
        folder=FOLDER,
        step=integer(0, MAX_STEP),
        world=integer(1, MAX_RANK),
        run_id=text(RUN_ID),
        lineage=items(ID),
        parts=items(row(PartFile, name=text(PART), num_bytes=_LENGTH, ranks=items(integer())), MAX_RANK),
        shards=items(_file_of(_STORED_SHARD), MAX_RANK),
        frozen=items(_frozen_of(_STORED_FROZEN), MAX_RANK),
    )

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

    @property
    def leaf_bytes(self) -> int:
        """Of its shards and frozen files."""
        return sum(each.num_bytes for each in self.shards) + sum(each.num_bytes for each in self.frozen)

    def check(self) -> None:
        check_lineage(self.folder.id.attempt, self.lineage)
        names = [each.name for each in self.parts] + [each.name for each in self.shards]
        if len(set(names)) != len(names) or len(self.shards) != self.world:
            raise ValueError("it names a file twice, or not one shard for each rank")
        if sorted(rank for part in self.parts for rank in part.ranks) != list(range(self.world)):
            raise ValueError("its parts do not hold each rank once")


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


def unlike(heads: Mapping[K, PartHead]) -> dict[Ranks, dict[str, dict[int, K]]]:
    """The sets of ranks, in the parts of all nodes, that do not all have the same table of replicas. For each
    set, by checksum of their table: the ranks that have it, each with the key of its part."""
    found: dict[Ranks, dict[str, dict[int, K]]] = {}
    for key, head in heads.items():
        for rank in head.ranks:
            for ranks, checksum in (head.tables[index] for index in rank.tables):
                found.setdefault(ranks, {}).setdefault(checksum, {})[rank.rank] = key
    return {
        ranks: held
        for ranks, held in found.items()
        if len(held) > 1 or sum(map(len, held.values())) != count_of(ranks)
    }
