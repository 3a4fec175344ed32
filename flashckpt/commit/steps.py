"""Reading of committed steps: the record of a commit, whether its files are there, its parts and leaves.

A step is listed if its record exists, and whole if every file that the record names is there with its length.
Never writes; see commit_step.py and collect.py. docs/commit.md numbers the order of writes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from flashckpt.errors import DamagedError, DivergedError, NoSuchStepError
from flashckpt.format.checked_json import TAIL_BYTES, checked, checksum_in
from flashckpt.format.layout import Leaf, Ranks, Replicas, count_of
from flashckpt.format.names import (
    FROZEN_FOLDER,
    PART,
    AttemptName,
    CommitName,
    SnapshotId,
    frozen_path,
    part_keeper,
)
from flashckpt.format.records import (
    CommitRecord,
    Contents,
    FileRecord,
    Part,
    PartHead,
    PartRecord,
    RankRecord,
)
from flashckpt.store.base import Entry, LengthError, Store

# ---- the parts of a snapshot: read and checked one by one, with one in memory at a time

# Parts of at most so many bytes in all are read whole before a record names them; of others only the heads.
_FEW_BYTES = 16 << 20
# The head of a part of eight ranks is a few KiB.
_HEAD_BYTES = 64 << 10


class StepParts:
    """The parts of a step, in the order of its record. One is in memory at a time: those of thousands of
    ranks take gigabytes. `heads` are the heads of all parts."""

    def __init__(self, heads: Sequence[PartHead], read: Callable[[int], Part]) -> None:
        """`read` returns the part at an index of `heads`, and raises if it is not the step's."""
        self.heads, self._read = heads, read
        self._places = {rank.rank: place for place, head in enumerate(heads) for rank in head.ranks}
        self._kept: tuple[int, Part] | None = None

    @classmethod
    def of(cls, parts: Iterable[Part]) -> StepParts:
        """Of parts that are in memory, and stay there."""
        held = tuple(parts)
        return cls([part.head() for part in held], held.__getitem__)

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[Part]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Part:
        if self._kept is None or self._kept[0] != place:
            self._kept = None  # before the read, so that two are never in memory
            self._kept = place, self._read(place)
        return self._kept[1]

    def of_rank(self, rank: int) -> Part | None:
        """The part that holds a rank, None if there is no such part."""
        place = self._places.get(rank)
        return None if place is None else self[place]


class KnownHeads:
    """The heads of one snapshot that were read, for a committer that polls until all parts are there. A part
    never changes and is read once. Heads of another snapshot replace them."""

    def __init__(self) -> None:
        self._folder = ""
        self._read: dict[tuple[str, int, float], tuple[PartHead, str]] = {}

    def of(self, store: Store, folder: str, entry: Entry, *, whole: bool) -> tuple[PartHead, str]:
        """What `read_head` returns for a part in a data folder."""
        if folder != self._folder:
            self._folder, self._read = folder, {}
        key = entry.name, entry.num_bytes, entry.modified_s
        if key not in self._read:
            self._read[key] = read_head(store, f"{folder}/{entry.name}", entry.num_bytes, whole=whole)
        return self._read[key]


def part_paths(store: Store, folder: str) -> list[str]:
    """Paths of the parts in a data folder."""
    return [f"{folder}/{entry.name}" for entry in part_entries(store, folder)]


def part_entries(store: Store, folder: str) -> list[Entry]:
    entries = store.list(folder)
    return [entry for entry in entries if not entry.is_folder and PART.fullmatch(entry.name)]


def are_few(parts: Sequence[Entry | PartRecord]) -> bool:
    return sum(part.num_bytes for part in parts) <= _FEW_BYTES


def read_head(store: Store, path: str, num_bytes: int, *, whole: bool) -> tuple[PartHead, str]:
    """The head of a part, and the checksum that ends it. `whole`: read and check every byte."""
    if not whole:
        try:
            first = store.read_bytes(path, 0, min(num_bytes, _HEAD_BYTES))
            head = PartHead.from_prefix(first, path)
            if head is not None and len(first) < num_bytes:
                first = store.read_bytes(path, num_bytes - TAIL_BYTES, TAIL_BYTES)
            if head is not None:
                return head, checksum_in(first, what=path)
        except LengthError as error:
            raise DamagedError(str(error), path=path) from error
    data = store.read(path, Part.MAX_BYTES)
    return Part.from_bytes(data, path).head(), checksum_in(data, what=path)


def head_of(data: bytes, path: str) -> PartHead:
    """The head of a part, given all its bytes. The rest is parsed only if the head is long."""
    return PartHead.from_prefix(data[:_HEAD_BYTES], path) or Part.from_bytes(data, path).head()


def read_part(store: Store, row: PartRecord, record: CommitRecord) -> Part:
    """Read a part that a commit record names. DamagedError."""
    folder = record.name.id.data_folder
    part = Part.from_bytes(read_named_bytes(store, folder, row, record.name.step), f"{folder}/{row.file}")
    check_of(part, record, f"{folder}/{row.file}")
    return part


def check_of(part: Part | PartHead, record: CommitRecord, path: str) -> None:
    """DamagedError if a part does not belong to the commit that names it."""
    name = record.name
    if (part.step, part.attempt, part.boundary, part.world) != (
        name.step,
        name.attempt,
        name.boundary,
        record.world,
    ):
        raise damaged(path, "it is a part of another step, attempt, boundary or world", name.step)


def read_named_bytes(store: Store, folder: str, row: PartRecord, step: int) -> bytes:
    """A part's bytes, with the length and the checksum of its row. DamagedError."""
    path = f"{folder}/{row.file}"
    try:
        data = store.read(path, row.num_bytes)
    except FileNotFoundError:
        raise damaged(path, "it is missing", step) from None
    if len(data) != row.num_bytes or checked(data, what=path) != row.checksum:
        raise damaged(path, "it is not the part that was written", step)
    return data


def damaged(path: str, why: str, step: int) -> DamagedError:
    return DamagedError(
        f"{path} is damaged: {why}. Nothing of it was used, older steps are untouched. "
        "Run `flashckpt verify` on the run to see which steps are whole.",
        step=step,
        path=path,
    )


# ---- replicas: the tables of ranks that hold the same leaves have one checksum in the heads of their parts

_SHOWN = 8

_Held = dict[str, dict[int, str]]
"""For a set of ranks, by checksum of their table: the ranks that have it, each with its part's file."""


def unlike(heads: Sequence[PartHead]) -> dict[Ranks, _Held]:
    """The sets of ranks in all parts of a step that do not all have the same table of replicas."""
    found: dict[Ranks, _Held] = defaultdict(lambda: defaultdict(dict))
    for head in heads:
        by_index = [found[ranks][checksum] for ranks, checksum in head.replicas]
        for rank in head.ranks:
            for index in rank.replicas:
                by_index[index][rank.rank] = head.file
    return {
        ranks: held
        for ranks, held in found.items()
        if len(held) > 1 or sum(map(len, held.values())) != count_of(ranks)
    }


def check_alike(store: Store, folder: str, heads: Sequence[PartHead]) -> None:
    """DivergedError unless all ranks of each set have the same table of replicas. `heads`: those of all parts
    in a step's folder. Only if checksums differ are the tables read, to name the leaves. DamagedError,
    OSError."""
    rows = [row for ranks, held in unlike(heads).items() for row in _rows(store, folder, ranks, held)]
    if not rows:
        return
    step = heads[0].step
    shown = "; ".join(f"rank {_words(map(str, of))}: {_words(names)}" for of, names in rows[:_SHOWN])
    raise DivergedError(
        f"Step {step} is not committed: replicas have diverged. All ranks of a set should hold the same "
        f"leaves, and these ranks differ from most ({shown}). Committed steps are untouched, and these "
        "leaves are kept by rank from now on. Find the rank that computes something else or whose memory "
        "is at fault, and resume from an earlier step.",
        step=step,
        leaves=tuple(sorted({name for _, names in rows for name in names})),
        ranks=tuple(sorted({rank for of, _ in rows for rank in of})),
    )


def _rows(store: Store, folder: str, ranks: Ranks, held: _Held) -> list[tuple[list[int], list[str]]]:
    """Ranks of a set that differ from most of it, with the names of the leaves that differ."""
    by_number = sorted(held.items(), key=lambda each: (-len(each[1]), min(each[1])))
    tables = [(sorted(of), _table(store, folder, ranks, *min(of.items()))) for _, of in by_number]
    (_, most), *others = tables
    rows = [(of, _differing(most, table)) for of, table in others]
    known = {rank for of, _ in tables for rank in of}
    missing = [rank for run in ranks for rank in run if rank not in known]
    if missing:
        rows.append((missing, sorted(leaf.name for leaf in most.leaves)))
    return rows


def _table(store: Store, folder: str, ranks: Ranks, rank: int, file: str) -> Replicas:
    path = f"{folder}/{file}"
    part = Part.from_bytes(store.read(path, Part.MAX_BYTES), path)
    [mine] = [each for each in part.ranks if each.rank == rank]
    [table] = [each for each in mine.replicas if each.ranks == ranks]
    return table


def _differing(one: Replicas, other: Replicas) -> list[str]:
    """Names of the leaves that differ between two tables."""
    rows = [
        {leaf.name: (leaf.content, digest, by) for leaf, digest, by in each.rows()} for each in (one, other)
    ]
    return sorted(name for name in rows[0].keys() | rows[1].keys() if rows[0].get(name) != rows[1].get(name))


def _words(each: Iterable[str]) -> str:
    every = list(each)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")


# ---- committed steps


class FileLeaf(NamedTuple):
    """A leaf with its place in a file, and its digest."""

    path: str
    contents: Contents
    leaf: Leaf
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A committed step, read and validated: its commit record and its parts, all or those of some ranks.
    Large parts are read again at each access: DamagedError if one is gone or has changed."""

    name: CommitName
    record: CommitRecord
    parts: StepParts = field(compare=False)
    store: Store = field(repr=False, compare=False)

    @property
    def step(self) -> int:
        return self.name.step

    @property
    def attempt(self) -> AttemptName:
        return self.name.attempt

    @property
    def boundary(self) -> int:
        return self.name.boundary

    @property
    def world(self) -> int:
        return self.record.world

    def part_of(self, rank: int) -> Part:
        """The part that holds a rank. NoSuchStepError if the step has no such rank."""
        if (part := self.parts.of_rank(rank)) is None:
            raise _no_rank(self.record, rank)
        return part

    def rank(self, rank: int) -> RankRecord:
        """Return the record of a rank. Raises NoSuchStepError for an unknown rank."""
        return next(each for each in self.part_of(rank).ranks if each.rank == rank)

    def shard_path(self, rank: int) -> str:
        """The path of a rank's shard in the store."""
        return f"{self.name.id.data_folder}/{self.rank(rank).shard.file}"

    def constants_path(self, rank: int) -> str | None:
        """The path of a rank's frozen instance in the store, None if it has none."""
        frozen = self.rank(rank).constants
        return None if frozen is None else frozen_path(frozen.shard.file)

    def files(self, rank: int) -> list[tuple[str, Contents]]:
        """A rank's shard, and its frozen instance if it has one, each with its path in the store."""
        mine = self.rank(rank)
        files = [(self.shard_path(rank), mine.contents)]
        constants = self.constants_path(rank)
        if constants is not None and mine.constants is not None:
            files.append((constants, mine.constants))
        return files

    def part_bytes(self, place: int) -> bytes:
        """The bytes of a part's file, by its index in the record. DamagedError if they have changed."""
        row = self.record.parts[place]
        return read_named_bytes(self.store, self.name.id.data_folder, row, self.step)

    def leaves(self, rank: int) -> list[FileLeaf]:
        """All leaves of a rank's state: those in its own files, then those that other ranks wrote for it.
        DamagedError if a rank has not written them."""
        found = self._written(rank)
        theirs: dict[int, dict[str, FileLeaf]] = {}
        for writer, leaf, digest in self.rank(rank).elsewhere():
            if writer not in theirs:
                theirs[writer] = {each.leaf.name: each for each in self._written(writer)}
            there = theirs[writer].get(leaf.name)
            if there is None or (there.leaf.content, there.digest) != (leaf.content, digest):
                why = f"rank {writer} has not written {leaf.name} as {rank} holds it"
                raise damaged(self.name.id.data_folder, why, self.step)
            found.append(there)
        return found

    def _written(self, rank: int) -> list[FileLeaf]:
        files = {contents.shard.file: (path, contents) for path, contents in self.files(rank)}
        return [FileLeaf(*files[file], leaf, digest) for file, leaf, digest in self.rank(rank).counted()]


def read_record(store: Store, name: CommitName) -> CommitRecord | None:
    """Return the record of a commit, or None. Raises DamagedError."""
    try:
        record = CommitRecord.from_bytes(store.read(name.path, CommitRecord.MAX_BYTES), name.path)
    except FileNotFoundError:
        return None
    if record.name != name:
        raise DamagedError(
            f"{name.path} is damaged: it is the record of {record.name}. Nothing of it was used. Run "
            "`flashckpt verify` on the run to list the steps that are whole.",
            step=name.step,
            path=name.path,
        )
    return record


def missing_files(store: Store, record: CommitRecord) -> list[str]:
    """The files of a commit that are missing or have another length than the record says."""
    return missing_data(store, record) + missing_in(store, FROZEN_FOLDER, record.frozen)


def missing_data(store: Store, record: CommitRecord) -> list[str]:
    """The missing files of its data folder."""
    parts = [FileRecord(part.file, part.num_bytes) for part in record.parts]
    return missing_in(store, record.name.id.data_folder, [*parts, *record.shards])


def missing_in(store: Store, folder: str, files: Collection[FileRecord]) -> list[str]:
    """The files that are not in a folder with their lengths. One listing; none if `files` is empty."""
    if not files:
        return []
    there = {(entry.name, entry.num_bytes) for entry in store.list(folder) if not entry.is_folder}
    return [f"{folder}/{each.file}" for each in files if (each.file, each.num_bytes) not in there]


def missing_frozen(store: Store, files: Collection[FileRecord], *, is_final: bool = True) -> list[str]:
    """Frozen instances that are missing or have a tombstone. `is_final`: for the deciding check, list
    tombstones, then instances: a deletion removes the instance before its tombstone."""
    if not files:
        return []
    listed = store.at_once()
    names = [entry.name for entry in listed.list(FROZEN_FOLDER)]
    dying = [each.file for each in files if any(name.startswith(f"{each.file}.tombstone-") for name in names)]
    listed = store.at_once() if is_final else listed
    return [frozen_path(file) for file in dying] or missing_in(listed, FROZEN_FOLDER, files)


def is_whole(store: Store, name: CommitName) -> bool:
    """Whether the record of a listed step is readable and every file is there with its length."""
    with suppress(DamagedError):
        record = read_record(store, name)
        return record is not None and not missing_files(store, record)
    return False


def missing_ranks(store: Store, snapshot: SnapshotId, world: int) -> list[int]:
    """The ranks without a part at rest. DamagedError."""
    there = {rank.rank for head in heads_at_rest(store, snapshot) for rank in head.ranks}
    return [rank for rank in range(world) if rank not in there]


def heads_at_rest(store: Store, snapshot: SnapshotId) -> list[PartHead]:
    """The heads of a snapshot's parts at rest, committed or not. DamagedError."""
    folder = snapshot.data_folder
    found = []
    for entry in part_entries(store, folder):
        head, _ = read_head(store, f"{folder}/{entry.name}", entry.num_bytes, whole=False)
        if (head.attempt, head.boundary) != (snapshot.attempt, snapshot.boundary):
            path = f"{folder}/{entry.name}"
            raise damaged(path, "it is a part of another attempt or boundary", head.step)
        found.append(head)
    return found


def read_step(
    store: Store,
    name: CommitName,
    ranks: Collection[int] | None = None,
    *,
    with_writers: bool = False,
) -> StepRecord:
    """Read a committed step and validate its parts against its record. `ranks`: read only the parts that hold
    these. `with_writers`: also those of the ranks that wrote replicas for them.

    NoSuchStepError if it is not committed or has no such rank, DamagedError if a part contradicts the record.
    """
    record = read_record(store, name)
    if record is None:
        raise NoSuchStepError(
            f"step {name.step} of attempt {name.attempt} (boundary {name.boundary}) is not committed in "
            f"{store.url}. Nothing was changed. `flashckpt ls --all` lists the steps.",
            step=name.step,
            path=store.url,
        )
    if ranks is None:
        parts = _all_parts(store, record)
    else:
        parts = StepParts.of(_parts_of(store, record, ranks, with_writers=with_writers))
    heads = parts.heads
    if not _are_named(heads, record, all_parts=ranks is None):
        raise damaged(name.path, "it names other shards than its parts", name.step)
    _check_coverage(heads, record, all_parts=ranks is None)
    if ranks is None and unlike(heads):
        raise damaged(name.id.data_folder, "its parts contradict each other about replicas", name.step)
    return StepRecord(name=name, record=record, parts=parts, store=store)


def _all_parts(store: Store, record: CommitRecord) -> StepParts:
    """All parts. Those of a large step are compared with their checksums here and parsed at each access."""

    def read(place: int) -> Part:
        return read_part(store, record.parts[place], record)

    if are_few(record.parts):
        return StepParts.of(map(read, range(len(record.parts))))
    folder, heads = record.name.id.data_folder, []
    for row in record.parts:
        path = f"{folder}/{row.file}"
        head = head_of(read_named_bytes(store, folder, row, record.name.step), path)
        check_of(head, record, path)
        heads.append(head)
    return StepParts(heads, read)


def _parts_of(
    store: Store, record: CommitRecord, ranks: Collection[int], *, with_writers: bool
) -> tuple[Part, ...]:
    """The parts that hold these ranks. A part is named by its lowest rank, and the ranks of a node are mostly
    consecutive: the last part that begins at or before a rank is read first."""
    rows = sorted(record.parts, key=lambda row: part_keeper(row.file))
    found: dict[str, Part] = {}
    held: dict[int, RankRecord] = {}

    def find(wanted: int) -> None:
        if not 0 <= wanted < record.world:
            raise _no_rank(record, wanted)
        behind = bisect_right(rows, wanted, key=lambda row: part_keeper(row.file))
        for row in rows[:behind][::-1] + rows[behind:]:
            if row.file not in found:
                part = read_part(store, row, record)
                if any(rank.rank == wanted for rank in part.ranks):
                    found[row.file] = part
                    held.update((rank.rank, rank) for rank in part.ranks)
                    return
        raise _no_rank(record, wanted)

    for wanted in sorted(ranks):
        if wanted not in held:
            find(wanted)
    writers = {by for rank in ranks for by, _, _ in held[rank].elsewhere()} if with_writers else set()
    for wanted in sorted(writers):
        if wanted not in held:
            find(wanted)
    return tuple(found.values())


def _are_named(heads: Sequence[PartHead], record: CommitRecord, *, all_parts: bool) -> bool:
    """Whether a record names the files of these parts. It lists shards in the order of ranks."""
    shards, frozen = file_rows(heads)
    if all_parts:
        return (shards, frozen) == (record.shards, record.frozen)
    ranks = sorted(rank.rank for head in heads for rank in head.ranks)
    return (
        all(0 <= rank < record.world for rank in ranks)
        and all(record.shards[rank] == shard for rank, shard in zip(ranks, shards, strict=True))
        and set(record.frozen).issuperset(frozen)
    )


def file_rows(heads: Sequence[PartHead]) -> tuple[tuple[FileRecord, ...], tuple[FileRecord, ...]]:
    """Shards and frozen instances in the order of ranks, as a record has them."""
    ranks = sorted((rank for head in heads for rank in head.ranks), key=lambda rank: rank.rank)
    frozen = (rank.constants for rank in ranks)
    return tuple(rank.shard for rank in ranks), tuple(each for each in frozen if each is not None)


def _check_coverage(heads: Sequence[PartHead], record: CommitRecord, *, all_parts: bool) -> None:
    ranks = [rank.rank for head in heads for rank in head.ranks]
    is_whole = not all_parts or sorted(ranks) == list(range(record.world))
    if len(set(ranks)) != len(ranks) or not is_whole:
        folder = record.name.id.data_folder
        raise damaged(folder, "its parts do not cover every rank exactly once", record.name.step)


def _no_rank(record: CommitRecord, rank: int) -> NoSuchStepError:
    return NoSuchStepError(
        f"step {record.name.step} was made by {record.world} ranks and has no rank {rank}. Nothing was "
        "changed. Run with as many ranks as made it.",
        step=record.name.step,
        rank=rank,
    )
