"""Reading of checkpoints: the manifest, whether its files are there, parts and leaves.

A checkpoint is listed if the newest version of the catalogue has it, and whole if every file that its
manifest names is there with its length. Never writes; see commit_step.py. docs/commit.md numbers the order of
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from flashckpt._native import xxh3_128
from flashckpt.commit.view import HOME, View, ask
from flashckpt.errors import DamagedError, DivergedError, NoSuchStepError
from flashckpt.format.catalogue import Checkpoint, Folder
from flashckpt.format.checked_json import checked
from flashckpt.format.layout import Leaf, Ranks, Replicas
from flashckpt.format.manifest import COMPRESSED, Manifest, PartFile, PartHead, unlike
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.format.records import Contents, Part, RankRecord
from flashckpt.printable import listed
from flashckpt.store.base import Store

_Read = TypeVar("_Read", Part, PartHead)

# ---- the parts of a snapshot: each read and checked when it is needed

# The parts that were read last stay in memory, up to so many bytes of their files.
_FEW_BYTES = 128 << 20
# To compare parts of at most so many bytes they are read whole, which takes a second for 8 MiB.
_WHOLE_BYTES = 16 << 20
# Longer than the head of a part of eight ranks.
_HEAD_BYTES = 64 << 10


class StepParts:
    """The parts of a step, in the order of its record: those of thousands of ranks take gigabytes. `ranks`
    and `sizes`: of each part. `read` returns the part at an index, and raises if it is not the step's."""

    def __init__(
        self, ranks: Iterable[Iterable[int]], sizes: Sequence[int], read: Callable[[int], Part]
    ) -> None:
        self._places = {rank: place for place, of in enumerate(ranks) for rank in of}
        self._sizes, self._read = sizes, read
        self._kept: dict[int, Part] = {}

    @classmethod
    def of(cls, parts: Iterable[Part]) -> StepParts:
        """Of parts that are in memory, and stay there."""
        held = tuple(parts)
        return cls(((each.rank for each in part.ranks) for part in held), [0] * len(held), held.__getitem__)

    @property
    def ranks(self) -> list[int]:
        """The ranks of all parts, by part."""
        return list(self._places)

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Part]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Part:
        if place not in self._kept:
            # Before the read: the new part and those that stay are never too many.
            while self._kept and sum(map(self._sizes.__getitem__, (*self._kept, place))) > _FEW_BYTES:
                del self._kept[next(iter(self._kept))]
            self._kept[place] = self._read(place)
        return self._kept[place]

    def of_rank(self, rank: int) -> RankRecord | None:
        """The record of a rank, None if no part holds it."""
        place = self._places.get(rank)
        return None if place is None else next(each for each in self[place].ranks if each.rank == rank)


# ---- replicas: the tables of ranks that hold the same leaves have one checksum in the heads of their parts

_SHOWN = 8


def check_alike(store: Store, folder: str, heads: Mapping[str, PartHead]) -> None:
    """DivergedError, with ranks and leaves, unless all ranks of each set have the same table of replicas.
    `heads`: those of all parts in a snapshot's folder, by name. DamagedError, OSError."""
    rows = [row for ranks, held in unlike(heads).items() for row in _rows(store, folder, ranks, held)]
    if not rows:
        return
    step = next(iter(heads.values())).step
    shown = "; ".join(f"rank {listed([*map(str, of)])}: {listed(names)}" for of, names in rows[:_SHOWN])
    raise DivergedError(
        f"Step {step} is not committed: replicas have diverged. All ranks of a set should hold the same "
        f"leaves, and these ranks differ from most ({shown}). Committed steps are untouched, and these "
        "leaves are kept by rank from now on. Find the rank that computes something else or whose memory "
        "is at fault, and resume from an earlier step.",
        step=step,
        leaves=tuple(sorted({name for _, names in rows for name in names})),
        ranks=tuple(sorted({rank for of, _ in rows for rank in of})),
    )


def _rows(
    store: Store, folder: str, ranks: Ranks, held: Mapping[str, Mapping[int, str]]
) -> list[tuple[list[int], list[str]]]:
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


# ---- checkpoints


class FileLeaf(NamedTuple):
    """A leaf with its place in a file, and its digest."""

    path: str
    contents: Contents
    leaf: Leaf
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A checkpoint: its manifest, and its parts, which are read when they are needed: DamagedError if one is
    gone or contradicts the manifest. `places`: the paths of shards and frozen files, by their names in the
    parts."""

    name: CommitName
    manifest: Manifest
    places: Mapping[str, str] = field(repr=False, compare=False)
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
        return self.manifest.world

    def check(self) -> StepRecord:
        """Compare all parts with their checksums, and with each other. DamagedError."""
        are_few = sum(each.num_bytes for each in self.manifest.parts) <= _WHOLE_BYTES
        read = (lambda place: self.parts[place].head()) if are_few else self._head
        if unlike({place: read(place) for place in range(len(self.parts))}):
            raise damaged(self.folder, "its parts contradict each other about replicas", self.step)
        return self

    def _head(self, place: int) -> PartHead:
        """The head of a part, whose bytes were all compared with their checksum."""
        row, data = self.manifest.parts[place], self.part_bytes(place)
        head = PartHead.from_prefix(data[:_HEAD_BYTES], self.part_path(place))
        return self.parts[place].head() if head is None else _of_step(head, self.manifest, row)

    def rank(self, rank: int) -> RankRecord:
        """The record of a rank. NoSuchStepError if the step has no such rank."""
        if (found := self.parts.of_rank(rank)) is None:
            raise NoSuchStepError(
                f"step {self.step} was made by {self.world} ranks and has no rank {rank}. Nothing was "
                "changed. Run with as many ranks as made it.",
                step=self.step,
                rank=rank,
            )
        return found

    @property
    def folder(self) -> str:
        """The folder of its parts and shards."""
        return self.manifest.folder.path

    def shard_path(self, rank: int) -> str:
        """The path of a rank's shard in the store."""
        return self.places[self.rank(rank).shard.file]

    def files(self, rank: int) -> list[tuple[str, Contents]]:
        """A rank's shard, and its frozen file if it has one, each with its path in the store."""
        return [(self.places[each.file], each) for each in self.rank(rank).files]

    def part_path(self, place: int) -> str:
        """The path of a part, by its index in the manifest."""
        return f"{self.folder}/{self.manifest.parts[place].name}"

    def part_bytes(self, place: int) -> bytes:
        """The bytes of a part's file, by its index in the manifest. DamagedError if they have changed."""
        return read_named_bytes(self.store, self.manifest, self.manifest.parts[place])

    def leaves(self, rank: int) -> list[FileLeaf]:
        """All leaves of a rank's state: those in its own files, then those that other ranks wrote for it.
        DamagedError if a rank has not written them."""
        found = self.written(rank)
        theirs: dict[int, dict[str, FileLeaf]] = {}
        for writer, leaf, digest in self.rank(rank).elsewhere():
            if writer not in theirs:
                theirs[writer] = {each.leaf.name: each for each in self.written(writer)}
            there = theirs[writer].get(leaf.name)
            if there is None or (there.leaf.content, there.digest) != (leaf.content, digest):
                why = f"rank {writer} has not written {leaf.name} as {rank} holds it"
                raise damaged(self.folder, why, self.step)
            found.append(there)
        return found

    def written(self, rank: int) -> list[FileLeaf]:
        """The leaves of a rank's state in its own files."""
        files = {contents.file: (path, contents) for path, contents in self.files(rank)}
        return [FileLeaf(*files[file], leaf, digest) for file, leaf, digest in self.rank(rank).counted()]


def is_whole(view: View, name: CommitName) -> bool:
    """Whether a view has this checkpoint, its manifest is readable, and every file is there."""
    checkpoint = view.checkpoint(name.id)
    return checkpoint is not None and not isinstance(whole_or_why(view.store, checkpoint), str)


def whole_or_why(store: Store, checkpoint: Checkpoint) -> Manifest | str:
    """The manifest of a checkpoint whose files are all there, or why it is not whole."""
    return ask(store, HOME.whole_or_why(checkpoint))


def heads_at_rest(store: Store, folder: Folder) -> dict[str, PartHead]:
    """The heads of the parts in a folder, committed or not, by name; without those that cannot be read or
    are of another snapshot."""
    names = {each.name: each.num_bytes for each in store.list(folder.path) if not each.is_folder}
    return ask(store, HOME.heads(folder, names))


def lacking(heads: Mapping[str, PartHead], world: int) -> list[int]:
    """The ranks without a part among these."""
    there = {rank.rank for head in heads.values() for rank in head.ranks}
    return [rank for rank in range(world) if rank not in there]


def read_step(where: Store | View, name: CommitName) -> StepRecord:
    """Read a checkpoint. `where`: a store, or a view of it. NoSuchStepError if it is not committed;
    DamagedError."""
    view = where if isinstance(where, View) else View.of(where)
    return step_of(view.store, read_checkpoint(view.store, committed(view, name)))


def committed(view: View, name: CommitName) -> Checkpoint:
    """The checkpoint of this name. NoSuchStepError if the view has none."""
    checkpoint = view.checkpoint(name.id)
    if checkpoint is None or checkpoint.step != name.step:
        raise NoSuchStepError(
            f"step {name.step} of attempt {name.attempt} (boundary {name.boundary}) is not committed in "
            f"{view.store.url}, or retention has deleted it. No committed step was changed. `flashckpt ls "
            "--all` lists the steps.",
            step=name.step,
            path=view.store.url,
        )
    return checkpoint


def read_checkpoint(store: Store, checkpoint: Checkpoint) -> Manifest:
    """The manifest of a checkpoint. DamagedError, also if the file is gone."""
    path = checkpoint.manifest_path
    try:
        data = store.read(path, Manifest.MAX_BYTES)
    except FileNotFoundError:
        raise damaged(path, "it is missing", checkpoint.step) from None
    manifest = Manifest.from_bytes(data, path)
    if manifest.folder != checkpoint.folder or xxh3_128(data).hex()[:16] != checkpoint.manifest:
        raise damaged(path, "it is the manifest of another checkpoint", checkpoint.step)
    return manifest


def step_of(store: Store, manifest: Manifest) -> StepRecord:
    """The checkpoint of a manifest. Reads no part yet."""
    id, folder = manifest.folder.id, manifest.folder.path
    files = {(each.name, each.num_bytes) for each in manifest.shards}
    files |= {(each.name, each.num_bytes) for each in manifest.frozen}
    compressed = {name for name, _ in files if name.endswith(COMPRESSED)}

    def read(place: int) -> Part:
        row = manifest.parts[place]
        part = Part.from_bytes(read_named_bytes(store, manifest, row), f"{folder}/{row.name}")
        _of_step(part, manifest, row)
        named = {(each.file, each.num_bytes) for rank in part.ranks for each in rank.files}
        if not all(file + COMPRESSED in compressed for file, _ in named - files):
            raise damaged(folder, "its manifest names other files than its parts", manifest.step)
        return part

    return StepRecord(
        name=CommitName(manifest.step, id.attempt, id.boundary),
        manifest=manifest,
        places=manifest.places(),
        parts=StepParts(
            (each.ranks for each in manifest.parts), [each.num_bytes for each in manifest.parts], read
        ),
        store=store,
    )


def _of_step(part: _Read, manifest: Manifest, row: PartFile) -> _Read:
    """A part, or its head. DamagedError if it does not belong to the manifest that names it."""
    ranks = tuple(sorted(each.rank for each in part.ranks))
    found = part.id, part.step, part.world, ranks
    if found != (manifest.folder.id, manifest.step, manifest.world, row.ranks):
        path = f"{manifest.folder.path}/{row.name}"
        raise damaged(path, "it is a part of another step, attempt, boundary or world", manifest.step)
    return part


def read_named_bytes(store: Store, manifest: Manifest, row: PartFile) -> bytes:
    """A part's bytes, with the length of its row and a right checksum. DamagedError."""
    path = f"{manifest.folder.path}/{row.name}"
    try:
        data = store.read(path, row.num_bytes)
    except FileNotFoundError:
        raise damaged(path, "it is missing", manifest.step) from None
    checked(data, what=path)
    if len(data) != row.num_bytes:
        raise damaged(path, "it is not the part that was written", manifest.step)
    return data


def damaged(path: str, why: str, step: int) -> DamagedError:
    return DamagedError(
        f"{path} is damaged: {why}. Nothing of it was used, older steps are untouched. "
        "Run `flashckpt verify` on the run to see which steps are whole.",
        step=step,
        path=path,
    )
