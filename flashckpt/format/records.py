"""What one node wrote of a snapshot: its part, with the shard, the leaves and the values of each rank. Owns
the encoding behind the head of a part (format/manifest.py); never opens a file. See docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flashckpt.format.catalogue import CHECKSUM, Folder
from flashckpt.format.checked_json import JsonRecord, dump
from flashckpt.format.forms import (
    HEX,
    OBJECT,
    Form,
    fields,
    integer,
    items,
    load_fields,
    optional,
    record,
    text,
)
from flashckpt.format.layout import (
    DIGESTS,
    LEAVES,
    PAGE,
    REPLICAS,
    Layout,
    Leaf,
    Replicas,
    check_constants,
    outdated,
)
from flashckpt.format.manifest import FROZEN, MAX_FILE_BYTES, SHARD, File, FrozenFile, PartHead, RankFiles
from flashckpt.format.names import MAX_RANK, SnapshotId

# A part begins with its head; a committer reads only the head. Leaves are encoded as columns, digests and
# checksums as one text each, so that ten thousand leaves take about a megabyte and parse in some tens of
# milliseconds. Offsets are not written, since they follow from the order.


CHUNK_BYTES = 4 << 20
# Values of all ranks of a part, as JSON. The columns of the leaves may use the rest of `Part.MAX_BYTES`.
MAX_VALUES_BYTES = 192 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A safetensors file, its leaves in image order, and the 64-bit digest of each leaf. `checksums` has 16
    bytes (XXH3-128) for each chunk of `chunk_bytes`."""

    file: str
    num_bytes: int
    data_start: int
    chunk_bytes: int = CHUNK_BYTES
    checksums: bytes = field(repr=False)
    leaves: tuple[Leaf, ...] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)

    @classmethod
    def of(cls, file: str, layout: Layout, checksums: bytes, digests: Iterable[int]) -> Contents:
        """The record of an image written as `file`."""
        return cls(
            file=file, num_bytes=layout.num_bytes, data_start=layout.data_start, checksums=checksums,
            leaves=layout.leaves, digests=tuple(digests),
        )  # fmt: skip

    def layout(self) -> Layout:
        """The layout, which follows from the leaves."""
        return Layout.ordered(self.leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's share of a step: its shard, the constants that several steps share, and the values.

    `base`: the folder of the file with the constants. `values`: JSON of the state that is not in tensors,
    opaque here.
    `replicas`: tables of the leaves that this rank and others declare identical; any of the ranks wrote them.
    """

    rank: int
    shard: Contents
    values: Mapping[str, Any] = field(repr=False)
    constants: Contents | None = None
    base: Folder | None = None
    replicas: tuple[Replicas, ...] = field(default=(), repr=False)

    @property
    def files(self) -> list[Contents]:
        """Its shard, and its file of constants if it has one."""
        return [self.shard] if self.constants is None else [self.shard, self.constants]

    def counted(self) -> list[tuple[str, Leaf, int]]:
        """Each leaf of the state in a file of this rank once, with file and digest. Skips outdated constants:
        if the shard or another rank has a constant too, it has changed since its file was written."""
        shard, constants = self.shard, self.constants
        rows = [(shard.file, *pair) for pair in zip(shard.leaves, shard.digests, strict=True)]
        if constants is not None:
            current = [*shard.leaves, *(leaf for _, leaf, _ in self.elsewhere())]
            stale = outdated(current, constants.leaves)
            pairs = enumerate(zip(constants.leaves, constants.digests, strict=True))
            rows += [(constants.file, *pair) for i, pair in pairs if i not in stale]
        return rows

    def elsewhere(self) -> list[tuple[int, Leaf, int]]:
        """The leaves of the state in other ranks' files: each with that rank and its digest."""
        rows = (row for table in self.replicas for row in table.rows())
        return [(by, leaf, digest) for leaf, digest, by in rows if by is not None and by != self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(JsonRecord):
    """One node's ranks in one snapshot. `node`: its lowest rank. `environment`: describes the software of the
    training process; opaque here."""

    KIND = "part"
    MAX_BYTES = PartHead.MAX_BYTES

    id: SnapshotId
    step: int
    world: int
    node: int
    ranks: tuple[RankRecord, ...]
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def head(self, tables: _Tables | None = None) -> PartHead:
        """The part's head. `tables`: those of its ranks, if the caller has them."""
        tables = tables or _Tables(self.ranks)
        return PartHead(
            id=self.id,
            step=self.step,
            world=self.world,
            node=self.node,
            ranks=tuple(_files_of(rank, tables.of(rank)) for rank in self.ranks),
            tables=tuple((table.ranks, checksum) for checksum, table in tables.by_checksum.items()),
        )

    def _dumped(self) -> bytes:
        tables = _Tables(self.ranks)
        replicas = tuple(tables.by_checksum.values())
        body = {"environment": self.environment, "replicas": replicas, "contents": self.ranks}
        rest = {key: _BODY[key].dump(value) for key, value in body.items()}
        return dump({"kind": self.KIND, **self.head(tables).to_dict()}, rest)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Part:
        head, body = PartHead.from_dict(found), load_fields(found, _BODY)
        text(CHECKSUM).load(found.get("head"))
        tables, contents = body["replicas"], body["contents"]
        if len(tables) != len(head.tables) or len(contents) != len(head.ranks):
            raise ValueError("its head does not match its ranks")
        rows = zip(contents, head.ranks, strict=True)
        ranks = tuple(_placed(each, files, tuple(tables[at] for at in files.tables)) for each, files in rows)
        part = cls(
            id=head.id,
            step=head.step,
            world=head.world,
            node=head.node,
            ranks=ranks,
            environment=body["environment"],
        )
        if part.head() != head:
            raise ValueError("its head does not match its ranks")
        sliced = (leaf.box for rank in ranks for each in rank.files for leaf in each.leaves)
        if part.world == 1 and any(sliced):
            raise ValueError("the only rank has a slice of a leaf, and no rank has the rest")
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


def _files_of(rank: RankRecord, tables: tuple[int, ...]) -> RankFiles:
    frozen = None
    if rank.constants is not None:
        assert rank.base is not None, rank.rank
        frozen = FrozenFile(rank.base, rank.constants.file, rank.constants.num_bytes)
    return RankFiles(rank.rank, File(rank.shard.file, rank.shard.num_bytes), frozen, tables)


def _placed(rank: RankRecord, files: RankFiles, replicas: tuple[Replicas, ...]) -> RankRecord:
    """The record of a rank, with what the head says of it."""
    if (rank.constants is None) != (files.frozen is None):
        raise ValueError("its head does not match its ranks")
    base = None if files.frozen is None else files.frozen.base
    placed = replace(rank, rank=files.rank, base=base, replicas=replicas)
    if rank.constants is not None:
        check_constants(rank.shard.leaves, rank.constants.leaves)
    _check_replicas(placed)
    return placed


def _check_replicas(rank: RankRecord) -> None:
    """Raise ValueError if a rank's files contradict its tables of replicas."""
    if not rank.replicas:
        return
    counted = rank.counted()
    own = {leaf.name: (leaf.content, digest) for _, leaf, digest in counted}
    names = {alias for _, leaf, _ in counted for alias in leaf.aliases} | own.keys()
    seen: set[str] = set()
    for leaf, digest, writer in (row for table in rank.replicas for row in table.rows()):
        shown, own_names = leaf.name[:200], (leaf.name, *leaf.aliases)
        if not seen.isdisjoint(own_names):
            raise ValueError(f"rank {rank.rank} has {shown!r} among its replicas twice")
        seen.update(own_names)
        if writer is None or writer == rank.rank:
            if own.get(leaf.name) != (leaf.content, digest):
                raise ValueError(f"rank {rank.rank} writes {shown!r}, but its files do not have it")
        elif not names.isdisjoint(own_names):
            raise ValueError(f"files of rank {rank.rank} have {shown!r}, which rank {writer} writes")


def _checked(**found: Any) -> Contents:
    """Raise ValueError unless the leaves fill the file, and each chunk and each leaf has its checksum."""
    file = Contents(**found)
    if file.data_start % PAGE or file.chunk_bytes % PAGE:
        raise ValueError("its data or its chunks do not start on pages")
    end = file.leaves[-1].offset + file.leaves[-1].num_bytes if file.leaves else 0
    if file.data_start + end != file.num_bytes:
        raise ValueError(f"its leaves take {end} bytes, its file has {file.num_bytes - file.data_start}")
    if len(file.checksums) != 16 * -(-file.num_bytes // file.chunk_bytes):
        raise ValueError("it has not one checksum for each chunk")
    if len(file.digests) != len(file.leaves):
        raise ValueError("it has not one digest for each leaf")
    return file


def _contents_of(pattern: re.Pattern[str]) -> Form[Contents]:
    return record(
        _checked,
        file=text(pattern),
        num_bytes=integer(PAGE, MAX_FILE_BYTES),
        data_start=integer(PAGE, MAX_FILE_BYTES),
        chunk_bytes=integer(PAGE, 16 << 20),
        checksums=HEX,
        leaves=LEAVES,
        digests=DIGESTS,
    )


_BODY = fields(
    environment=OBJECT,
    replicas=items(REPLICAS, MAX_RANK),
    contents=items(
        record(
            partial(RankRecord, rank=0),
            shard=_contents_of(SHARD),
            constants=optional(_contents_of(FROZEN)),
            values=OBJECT,
        ),
        MAX_RANK,
    ),
)
