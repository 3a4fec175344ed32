"""One step of one attempt: its part, its manifest, and whether it is committed. Owns the order of writes.

A step is committed when, and only when, its manifest exists and every file that it names is there with
the length that it says. Never deletes; see retention.py. The order is numbered in docs/commit.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from flashckpt import crashpoints
from flashckpt.commit.attempts import ranks_here, read_start, started_after, steps_begun, superseded_by
from flashckpt.commit.constants_files import buried_constants, missing_constants, missing_in
from flashckpt.commit.no_room import is_stand_in
from flashckpt.commit.replicas import check_alike, unlike
from flashckpt.commit.step_parts import (
    KnownHeads,
    StepParts,
    are_few,
    check_of,
    damaged,
    head_of,
    part_paths,
    read_head,
    read_heads,
    read_named,
    read_named_bytes,
    read_part,
)
from flashckpt.errors import DamagedError, NoSuchStepError, SupersededError
from flashckpt.format.layout import Leaf
from flashckpt.format.names import (
    ATTEMPTS,
    AttemptName,
    constants_path,
    manifest_path,
    part_keeper,
    step_attempt_folder,
)
from flashckpt.format.records import (
    Contents,
    FileRecord,
    Manifest,
    Part,
    PartHead,
    PartRecord,
    RankRecord,
    Tombstone,
    manifest_of,
)
from flashckpt.format.replicas import Ranks, count_of, has_rank, in_words
from flashckpt.store.base import Store

_IS_MISSING = "it is missing or has another length than was written"


class Committed(Enum):
    """What `commit` found. True only where the step is committed, by this call or before it."""

    YES = "committed"
    WAITING = "not all parts are there"
    BURIED = "a tombstone stands in the manifest's place"

    def __bool__(self) -> bool:
        return self is Committed.YES


class FileLeaf(NamedTuple):
    """A leaf with its place in a file, and its digest."""

    path: str
    contents: Contents
    leaf: Leaf
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A committed step, read and validated: its manifest and all its parts, or those of the ranks that were
    asked for. Of many ranks a part is read again where it is asked for: DamagedError where it is not there
    any more, or not as it was."""

    step: int
    attempt: AttemptName
    manifest: Manifest
    parts: StepParts = field(compare=False)
    store: Store = field(repr=False, compare=False)

    @property
    def world(self) -> int:
        """The ranks of its job, of which this folder may have some alone: see `Manifest.ranks`."""
        return self.manifest.world

    @property
    def boundary(self) -> int:
        return self.parts.heads[0].boundary

    def part_of(self, rank: int) -> Part:
        """The part that holds a rank. NoSuchStepError where the step has no such rank."""
        if (part := self.parts.of_rank(rank)) is None:
            raise _no_rank(self.manifest, rank)
        return part

    def rank(self, rank: int) -> RankRecord:
        """What a rank has of the step. NoSuchStepError where there is none."""
        return next(each for each in self.part_of(rank).ranks if each.rank == rank)

    def shard_path(self, rank: int) -> str:
        """The path in the store of a rank's shard."""
        return f"{step_attempt_folder(self.step, self.attempt)}/{self.rank(rank).shard.file}"

    def constants_path(self, rank: int) -> str | None:
        """The path in the store of a rank's constants shard, None where it has none."""
        constants = self.rank(rank).constants
        if constants is None:
            return None
        return constants_path(self.attempt, constants.shard.file)

    def files(self, rank: int) -> list[tuple[str, Contents]]:
        """A rank's shard, and its constants where it has any: each with its path in the store."""
        mine = self.rank(rank)
        files = [(self.shard_path(rank), mine.contents)]
        constants = self.constants_path(rank)
        if constants is not None and mine.constants is not None:
            files.append((constants, mine.constants))
        return files

    def part_bytes(self, place: int) -> bytes:
        """A part's file, as it stands, by its place in the manifest. DamagedError where it is another."""
        folder = step_attempt_folder(self.step, self.attempt)
        return read_named(self.store, folder, self.manifest.parts[place], self.manifest)

    def leaves(self, rank: int) -> list[FileLeaf]:
        """All leaves of a rank's state: those in its own files, then those that other ranks wrote for it.
        DamagedError where these have not written them."""
        found = self._written(rank)
        theirs: dict[int, dict[str, FileLeaf]] = {}
        for writer, leaf, digest in self.rank(rank).elsewhere():
            if writer not in theirs:
                theirs[writer] = {each.leaf.name: each for each in self._written(writer)}
            there = theirs[writer].get(leaf.name)
            if there is None or (there.leaf.content, there.digest) != (leaf.content, digest):
                path = step_attempt_folder(self.step, self.attempt)
                raise damaged(
                    path, f"rank {writer} has not written {leaf.name} as {rank} holds it", self.step
                )
            found.append(there)
        return found

    def _written(self, rank: int) -> list[FileLeaf]:
        files = {contents.shard.file: (path, contents) for path, contents in self.files(rank)}
        return [FileLeaf(*files[file], leaf, digest) for file, leaf, digest in self.rank(rank).counted()]


def publish_part(store: Store, part: Part) -> bool:
    """Name the shards of a part, which are written, as its ranks'. False where this keeper's stands.

    DamagedError where a shard is missing or has another length.
    """
    folder = step_attempt_folder(part.step, part.attempt)
    shards, constants = _shard_rows([part.head()])
    _check_files(store, folder, shards, part.step)
    if lost := missing_constants(store, part.attempt, constants):
        raise damaged(lost[0], _IS_MISSING, part.step)
    crashpoints.point("part.checked")
    created = store.create(f"{folder}/{part.file}", part.to_bytes())
    crashpoints.point("part.linked")
    return created


def commit(
    store: Store,
    step: int,
    attempt: AttemptName,
    world: int,
    ranks: Ranks | None = None,
    *,
    seen: Store | None = None,
    is_copy: bool = False,
    known: KnownHeads | None = None,
) -> Committed:
    """Write the manifest once the parts cover every rank exactly once. Any number may call it at once.
    `ranks`: those that commit here, where others have folders of their own; None for all of `world`. `seen`:
    the look by which the parts were found just now; of the one part of all ranks the files need no other.
    `known`: heads that were read in an earlier call.
    `is_copy`: each node has committed its part elsewhere before it was copied here, so that an attempt which
    went on from this step, or from a later one, does not keep it out.

    A newer attempt may start between the last check and the manifest: before a commit is reported as one,
    `check_seen` must follow.

    SupersededError if a newer attempt has started, or the nodes have snapshots of different boundaries under
    this number, of which nobody makes one step; DivergedError where replicas are not alike; DamagedError
    where parts contradict each other or a shard is missing, also where there is a manifest.
    """
    look = store.at_once() if seen is None else seen
    found = read_manifest(look, step, attempt)
    if found is not None:
        # Constants may have come after the attempts were listed, and the manifest before the steps were.
        return _judge(look if seen is None else store.at_once(), found)
    rows, heads = read_heads(look, step_attempt_folder(step, attempt), step, attempt, world, known)
    if ranks is not None:
        # Of ranks that commit elsewhere something may have been copied here.
        pairs = zip(rows, heads, strict=True)
        mine = [pair for pair in pairs if all(has_rank(ranks, each.rank) for each in pair[1].ranks)]
        rows, heads = [row for row, _ in mine], [head for _, head in mine]
    if sum(len(head.ranks) for head in heads) < (world if ranks is None else count_of(ranks)):
        return Committed.WAITING
    manifest = replace(_manifest(step, attempt, world, rows, heads), ranks=ranks)
    _check_parts(look, manifest, rows, heads)
    # To read many parts takes a while.
    look, above = look if len(rows) == 1 else store.at_once(), store.at_once()
    _check_due(above, look, manifest, None if is_copy else heads[0].boundary)
    manifest = replace(manifest, compressed=stands_compressed(above, look, manifest))
    done = publish_manifest(store, manifest, manifest.to_bytes())
    if done and is_copy:
        check_seen(store.at_once(), step, attempt)
    return done


def _check_parts(
    look: Store, manifest: Manifest, rows: Sequence[PartRecord], heads: Sequence[PartHead]
) -> None:
    """That the parts are of one content, with every byte of them. Raises as `commit` does."""
    folder = step_attempt_folder(manifest.step, manifest.attempt)
    if not have_one_boundary(heads):
        raise SupersededError(
            f"the nodes have different snapshots of step {manifest.step} of attempt {manifest.attempt}, "
            "which are no step together: it is never committed. Other steps are untouched.",
            step=manifest.step,
            path=folder,
        )
    check_alike(look, folder, heads)
    if not are_few(rows):
        for row in rows:
            read_named_bytes(look, folder, row, manifest.step)


def _check_due(above: Store, look: Store, manifest: Manifest, boundary: int | None) -> None:
    """The last looks before a manifest, at attempts by `above` and at steps by `look`: its files are there,
    and no attempt has started that goes on without it. `boundary`: None for a copy. Raises as `commit` does.
    """
    step, attempt = manifest.step, manifest.attempt
    folder = step_attempt_folder(step, attempt)
    _check_files(look, folder, manifest.shards, step)
    if manifest.constants:
        above.list(ATTEMPTS)  # so that one listing has them, and the attempts that have started
        check_constants(above, manifest)
    if boundary is None:
        check_seen(above, step, attempt)
        return
    newer = superseded_by(above, attempt, step, boundary)
    if newer is not None:
        raise SupersededError(
            f"attempt {newer} has started; step {step} of attempt {attempt} is not committed. Committed "
            "steps are untouched. End this process.",
            step=step,
            path=folder,
        )


def stands_compressed(above: Store, look: Store, manifest: Manifest) -> bool:
    """Whether any of its shards, by `look`, or of its constants, by `above`, stands compressed alone: a
    reader that knows nothing of such files would miss it."""
    own = step_attempt_folder(manifest.step, manifest.attempt)
    paths = set(manifest.paths())
    return any(
        each.is_compressed and f"{folder}/{each.name}" in paths
        for folder in {path.rpartition("/")[0] for path in paths}
        for each in (look if folder == own else above).list(folder)
    )


def check_seen(store: Store, step: int, attempt: AttemptName) -> None:
    """SupersededError where an attempt that has started since went on without this step."""
    newer = started_after(store, attempt)
    begun = None if newer is None else read_start(store, newer)
    if begun is None or any(
        each == attempt and step <= last for each, last in ((begun.parent, begun.step), *begun.before)
    ):
        return
    raise SupersededError(
        f"attempt {newer} has started before step {step} of attempt {attempt} was committed, and went on "
        "without it: no resume sees it. Other steps are untouched. End this process.",
        step=step,
        path=step_attempt_folder(step, attempt),
    )


def publish_manifest(store: Store, manifest: Manifest, data: bytes) -> Committed:
    """Create a manifest, whose parts and files are there; `data` is its file. DamagedError as of `commit`."""
    crashpoints.point("manifest.checked")
    if store.create(manifest_path(manifest.step, manifest.attempt), data):
        crashpoints.point("manifest.linked")
        return _stands(store.at_once(), manifest)
    found = read_manifest(store, manifest.step, manifest.attempt)
    return Committed.WAITING if found is None else _judge(store, found)


def look(store: Store, step: int, attempt: AttemptName) -> Committed:
    """Whether another has committed the step, by its manifest alone: who wrote it has seen all files."""
    found = read_manifest(store, step, attempt)
    if isinstance(found, Manifest):
        return Committed.YES
    return Committed.WAITING if found is None else Committed.BURIED


def missing_ranks(store: Store, step: int, attempt: AttemptName, world: int) -> list[int]:
    """The ranks that commit here and of which no part of a step is at rest."""
    _, heads = read_heads(store, step_attempt_folder(step, attempt), step, attempt, world)
    there = {rank.rank for head in heads for rank in head.ranks}
    here = ranks_here(store, attempt) or (range(world),)
    return [rank for run in here for rank in run if rank not in there]


def steps_of_boundary(store: Store, step: int, attempt: AttemptName, world: int) -> dict[int, int]:
    """As which step each rank whose part is at rest counts the boundary of this one, which is not committed:
    ranks that do so differently wait for each other for ever."""
    found: dict[int, dict[int, int]] = {}
    for each in steps_begun(store):
        if store.exists(manifest_path(each, attempt)):
            continue
        for head in read_heads(store, step_attempt_folder(each, attempt), each, attempt, world)[1]:
            found.setdefault(head.boundary, {}).update({rank.rank: each for rank in head.ranks})
    return next((ranks for ranks in found.values() if step in ranks.values()), {})


def check_has_all(record: StepRecord) -> None:
    """NoSuchStepError, with the ranks that are missing, for a step of which this folder has some ranks alone:
    for who wants more than what one rank saved."""
    ranks, absent = record.manifest.ranks, record.manifest.absent
    if ranks is not None:
        raise NoSuchStepError(
            f"{record.store.url} is one node's own disk: of step {record.step}, made by {record.world} "
            f"ranks, it has {in_words(ranks)}; on the disks of other nodes: {in_words(absent)}. Nothing "
            "was changed. Such a step is gone on from by the same ranks, each where its folder is. For "
            "anything else train into a folder that all nodes share.",
            step=record.step,
            path=record.store.url,
        )


def _stands(store: Store, manifest: Manifest) -> Committed:
    """Judges the manifest that was just created. Its name was free also where the step was buried meanwhile
    and its tombstone has gone: all that the step had went before that, and this manifest goes as well."""
    try:
        return _judge(store, manifest)
    except DamagedError:
        folder = step_attempt_folder(manifest.step, manifest.attempt)
        if not any(store.exists(f"{folder}/{part.file}") for part in manifest.parts):
            store.remove(manifest_path(manifest.step, manifest.attempt))
            store.remove(folder)
        raise


def is_committed(store: Store, step: int, attempt: AttemptName) -> bool:
    """Whether a manifest is there, whole, and all its files with their lengths. Parts are not read."""
    try:
        found = read_manifest(store, step, attempt)
    except DamagedError:
        return False
    return isinstance(found, Manifest) and not missing_files(store, found)


def read_manifest(store: Store, step: int, attempt: AttemptName) -> Manifest | Tombstone | None:
    """What stands under the manifest's name. DamagedError where it is not of this step and attempt."""
    path = manifest_path(step, attempt)
    try:
        data = store.read(path, Manifest.MAX_BYTES)
    except FileNotFoundError:
        return None
    if is_stand_in(data):
        return Tombstone(step=step, attempt=attempt)
    found = manifest_of(data, path)
    if (found.step, found.attempt) != (step, attempt):
        raise damaged(path, f"it is that of step {found.step} of attempt {found.attempt}", step)
    return found


def constants_of_parts(store: Store, folder: str) -> set[str]:
    """The constants shards that the parts in a step's folder name, as they do. DamagedError for a part that
    is none."""
    found: set[str] = set()
    for path in part_paths(store, folder):
        with suppress(FileNotFoundError):
            ranks = Part.from_bytes(store.read(path, Part.MAX_BYTES), path).ranks
            found |= {rank.constants.shard.file for rank in ranks if rank.constants is not None}
    return found


def missing_files(store: Store, manifest: Manifest) -> list[str]:
    """The files that a manifest names and that are not there, or have another length."""
    folder = step_attempt_folder(manifest.step, manifest.attempt)
    named = [FileRecord(file=part.file, num_bytes=part.num_bytes) for part in manifest.parts]
    missing = missing_in(store, folder, [*named, *manifest.shards])
    return missing + missing_constants(store, manifest.attempt, manifest.constants)


def check_constants(store: Store, manifest: Manifest) -> None:
    """DamagedError where constants shards that a manifest is to name are about to go, are missing, or have
    another length. To be asked once its parts stand: who writes later that some go finds these."""
    # In this order: what is to go is gone before the record of it is.
    if going := buried_constants(store, manifest.attempt, (each.file for each in manifest.constants)):
        raise damaged(going[0].path, going[0].why, manifest.step)
    if lost := missing_constants(store, manifest.attempt, manifest.constants):
        raise damaged(lost[0], _IS_MISSING, manifest.step)


def boundary_of(store: Store, step: int, attempt: AttemptName) -> int | None:
    """The boundary that a committed step is of. None where its records do not say."""
    with suppress(DamagedError, FileNotFoundError):
        manifest = read_manifest(store, step, attempt)
        if isinstance(manifest, Manifest):
            row = manifest.parts[0]
            path = f"{step_attempt_folder(step, attempt)}/{row.file}"
            return read_head(store, path, row.num_bytes, whole=False)[0].boundary
    return None


def read_step(
    store: Store,
    step: int,
    attempt: AttemptName,
    ranks: Collection[int] | None = None,
    *,
    with_writers: bool = False,
) -> StepRecord:
    """A committed step with all its parts, validated against its manifest; with `ranks` only with those parts
    that hold one of these, however many others there are; `with_writers`: and with those of the ranks that
    wrote replicas for them.

    NoSuchStepError where it is not committed or has no such rank, DamagedError where a part is not what the
    manifest says.
    """
    manifest = read_manifest(store, step, attempt)
    if not isinstance(manifest, Manifest):
        raise NoSuchStepError(
            f"step {step} of attempt {attempt} is not committed in {store.url}. Nothing was changed. "
            "`flashckpt ls --all` shows what there is.",
            step=step,
            path=store.url,
        )
    folder = step_attempt_folder(step, attempt)
    if ranks is None:
        parts = _all_parts(store, folder, manifest)
    else:
        parts = StepParts.of(_parts_of(store, folder, manifest, ranks, with_writers=with_writers))
    heads = parts.heads
    if not _are_named(heads, manifest, all_parts=ranks is None):
        raise damaged(f"{folder}/manifest.json", "it names other shards than its parts", step)
    _check_coverage(folder, heads, manifest if ranks is None else None, step)
    if ranks is None and unlike(heads):
        raise damaged(folder, "its parts do not say the same of their replicas", step)
    return StepRecord(step=step, attempt=attempt, manifest=manifest, parts=parts, store=store)


def _all_parts(store: Store, folder: str, manifest: Manifest) -> StepParts:
    """Those of a large step are compared with their checksums here, and looked into when they are asked
    for."""

    def read(place: int) -> Part:
        return read_part(store, folder, manifest.parts[place], manifest)

    if are_few(manifest.parts):
        return StepParts.of(map(read, range(len(manifest.parts))))
    heads = []
    for row in manifest.parts:
        data, path = read_named(store, folder, row, manifest), f"{folder}/{row.file}"
        head = head_of(data, path)
        check_of(head, manifest, path)
        heads.append(head)
    return StepParts(heads, read)


def _parts_of(
    store: Store, folder: str, manifest: Manifest, ranks: Collection[int], *, with_writers: bool
) -> tuple[Part, ...]:
    """The parts that hold these ranks. A part is named by the lowest of its ranks, and a node's mostly follow
    one another: the last part that begins at or before a rank is looked at first."""
    rows = sorted(manifest.parts, key=lambda row: part_keeper(row.file))
    found: dict[str, Part] = {}
    held: dict[int, RankRecord] = {}

    def find(wanted: int) -> None:
        if not manifest.has(wanted):
            raise _no_rank(manifest, wanted)
        behind = bisect_right(rows, wanted, key=lambda row: part_keeper(row.file))
        for row in rows[:behind][::-1] + rows[behind:]:
            if row.file not in found:
                part = read_part(store, folder, row, manifest)
                if any(rank.rank == wanted for rank in part.ranks):
                    found[row.file] = part
                    held.update((rank.rank, rank) for rank in part.ranks)
                    return
        raise _no_rank(manifest, wanted)

    for wanted in sorted(ranks):
        if wanted not in held:
            find(wanted)
    writers = {by for rank in ranks for by, _, _ in held[rank].elsewhere()} if with_writers else set()
    for wanted in sorted(writers):
        if wanted not in held:
            find(wanted)
    return tuple(found.values())


def _are_named(heads: Sequence[PartHead], manifest: Manifest, *, all_parts: bool) -> bool:
    """Whether a manifest names the files of these parts: in it, shards stand in the order of ranks."""
    shards, constants = _shard_rows(heads)
    if all_parts:
        return (shards, constants) == (manifest.shards, manifest.constants)
    ranks = sorted(rank.rank for head in heads for rank in head.ranks)
    return (
        len(manifest.shards) == manifest.rank_count
        and all(map(manifest.has, ranks))
        and all(
            manifest.shards[manifest.place(rank)] == shard for rank, shard in zip(ranks, shards, strict=True)
        )
        and set(manifest.constants).issuperset(constants)
    )


def have_one_boundary(parts: Sequence[PartHead]) -> bool:
    """Whether parts are of one content: two boundaries may have one step."""
    return len({part.boundary for part in parts}) < 2


def _judge(store: Store, found: Manifest | Tombstone) -> Committed:
    if not isinstance(found, Manifest):
        return Committed.BURIED
    missing = missing_files(store, found)
    if missing:
        # Who is told that it is committed lets go of what may be the only whole copy.
        raise damaged(missing[0], "it was committed, and is missing or has another length now", found.step)
    return Committed.YES


def _manifest(
    step: int, attempt: AttemptName, world: int, rows: Sequence[PartRecord], heads: Sequence[PartHead]
) -> Manifest:
    shards, constants = _shard_rows(heads)
    ordered = sorted(rows, key=lambda row: row.file)
    return Manifest(
        step=step, attempt=attempt, world=world, parts=tuple(ordered), shards=shards, constants=constants
    )


def _shard_rows(heads: Sequence[PartHead]) -> tuple[tuple[FileRecord, ...], tuple[FileRecord, ...]]:
    """Shards and constants shards in the order of ranks: no other order may enter a manifest."""
    ranks = sorted((rank for head in heads for rank in head.ranks), key=lambda rank: rank.rank)
    constants = (rank.constants for rank in ranks)
    return tuple(rank.shard for rank in ranks), tuple(each for each in constants if each is not None)


def _check_coverage(folder: str, parts: Sequence[PartHead], manifest: Manifest | None, step: int) -> None:
    """`manifest`: None where not all its parts were read."""
    if not have_one_boundary(parts):
        raise damaged(folder, "its parts are of different boundaries", step)
    ranks = [rank.rank for part in parts for rank in part.ranks]
    is_whole = manifest is None or (len(ranks) == manifest.rank_count and all(map(manifest.has, ranks)))
    if len(set(ranks)) != len(ranks) or not is_whole:
        raise damaged(folder, "its parts do not cover every rank exactly once", step)


def _check_files(store: Store, folder: str, files: Sequence[FileRecord], step: int) -> None:
    missing = missing_in(store, folder, files)
    if missing:
        raise damaged(missing[0], _IS_MISSING, step)


def _no_rank(manifest: Manifest, rank: int) -> NoSuchStepError:
    if manifest.ranks is not None and rank < manifest.world:
        return NoSuchStepError(
            f"step {manifest.step} of this folder, a node's own disk, has {in_words(manifest.ranks)} and not "
            f"rank {rank} of {manifest.world}. Nothing was changed. Run rank {rank} where its folder is.",
            step=manifest.step,
            rank=rank,
        )
    return NoSuchStepError(
        f"step {manifest.step} was made by {manifest.world} ranks and has no rank {rank}. Nothing was "
        "changed. Run with as many ranks as made it.",
        step=manifest.step,
        rank=rank,
    )
