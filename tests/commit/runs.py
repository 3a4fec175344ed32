"""Small real runs for the tests: shards with leaves in them, attempts, committed steps."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping

import numpy as np

from flashckpt import _native
from flashckpt.commit import commit_step, starting
from flashckpt.commit.attempts import open_run, started_after
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.steps import missing_files, missing_frozen, read_record, read_step
from flashckpt.errors import DamagedError
from flashckpt.format.checked_json import TAIL_BYTES
from flashckpt.format.layout import PAGE, Layout, Leaf
from flashckpt.format.names import (
    AttemptName,
    CommitName,
    SnapshotId,
    frozen_name,
    frozen_path,
    shard_name,
)
from flashckpt.format.records import (
    CHUNK_BYTES,
    CommitRecord,
    Contents,
    FileRecord,
    Owner,
    Part,
    RankRecord,
    ShardRecord,
)
from flashckpt.store.base import MemoryRange, Store
from flashckpt.store.local import LocalStore, System

HOLDER = Owner(boot_id="b", runtime="/r", runtime_id="1:2", lock="trainer-1", host="here", pid=1)


def leaves_of(step: int, rank: int = 0) -> dict[str, np.ndarray]:
    """A few leaves whose every byte depends on step and rank."""
    seed = np.random.default_rng(step * 1000 + rank)
    return {
        "model.weight": seed.standard_normal((7, 5)).astype("float32"),
        "model.bias": seed.integers(-9, 9, 5, "int64"),
        "model.mask": seed.integers(0, 2, (3, 3)).astype("bool"),
        "model.empty": np.zeros((0, 4), "float16"),
        "optimizer.step": np.array(step, "float32"),
    }


def image_of(leaves: Mapping[str, np.ndarray]) -> tuple[bytes, Layout, tuple[int, ...]]:
    """The image's bytes, its layout, and the digests of its leaves."""
    layout = Layout.of(Leaf(name=n, dtype=str(v.dtype), shape=v.shape) for n, v in leaves.items())
    pieces = [np.ascontiguousarray(leaves[leaf.name]).tobytes() for leaf in layout.leaves]
    digests = []
    for piece in pieces:
        buffer = bytearray(piece or b"\0")
        digests.append(_native.digest(_native.address_of(buffer), len(piece)))
    return layout.header + b"".join(pieces), layout, tuple(digests)


def contents_of(file: str, leaves: Mapping[str, np.ndarray]) -> tuple[bytes, Contents]:
    image, layout, digests = image_of(leaves)
    chunks = [image[i : i + CHUNK_BYTES] for i in range(0, len(image), CHUNK_BYTES)]
    shard = ShardRecord(
        file=file,
        num_bytes=len(image),
        data_start=layout.data_start,
        checksums=b"".join(_native.xxh3_128(chunk) for chunk in chunks),
    )
    return image, Contents(shard=shard, leaves=layout.leaves, digests=digests)


def write_shard(store: Store, path: str, image: bytes, layout: Layout) -> None:
    """Write an image from memory of its own, as a keeper writes that of a slot."""
    descriptor = os.memfd_create("image")
    try:
        os.ftruncate(descriptor, -(-len(image) // PAGE) * PAGE)
        os.pwrite(descriptor, image, 0)
        store.write_shard(path, layout, MemoryRange(descriptor, 0))
    finally:
        os.close(descriptor)


def name_of(step: int, attempt: AttemptName, boundary: int | None = None) -> CommitName:
    """The commit of a step of these runs: its boundary is its step, unless another is given."""
    return CommitName(step, attempt, step if boundary is None else boundary)


def part_of(
    store: Store,
    step: int,
    attempt: AttemptName,
    ranks: tuple[int, ...] = (0,),
    *,
    world: int = 1,
    keeper: int = 0,
    nonce: str = "5f2c0a1b",
    constants: bool = False,
    boundary: int | None = None,
) -> Part:
    """Write the shards of a part; the part itself is not written."""
    name, records = name_of(step, attempt, boundary), []
    for rank in ranks:
        image, contents = contents_of(shard_name(rank, nonce), leaves_of(step, rank))
        write_shard(store, f"{name.id.data_folder}/{contents.shard.file}", image, contents.layout())
        records.append(
            RankRecord(
                rank=rank,
                shard=contents.shard,
                leaves=contents.leaves,
                digests=contents.digests,
                values={"step": step, "rank": rank},
                constants=constants_of(store, attempt, rank) if constants else None,
            )
        )
    return Part(
        step=step,
        attempt=attempt,
        boundary=name.boundary,
        world=world,
        keeper=keeper,
        ranks=tuple(records),
    )


def constants_of(store: Store, attempt: AttemptName, rank: int) -> Contents:
    """The frozen instance of a rank: that which a visible step names, else one of this attempt, written
    unless it is there."""
    leaves = {"frozen.weight": np.arange(8, dtype="float64") + rank}
    image, contents = contents_of(frozen_name(attempt, rank, "5f2c0a1b"), leaves)
    for each in Catalogue.of(store).newest_first():
        found = read_step(store, each, {rank}).rank(rank).constants if rank < _world_of(store, each) else None
        if found is not None and found.digests == contents.digests and _is_there(store, found):
            return found
    path = frozen_path(contents.shard.file)
    if not store.exists(path):
        write_shard(store, path, image, contents.layout())
    return contents


def _is_there(store: Store, found: Contents) -> bool:
    return not missing_frozen(store, [FileRecord(found.shard.file, found.shard.num_bytes)])


def _world_of(store: Store, name: CommitName) -> int:
    record = read_record(store, name)
    return 0 if record is None else record.world


def publish(store: Store, step: int, attempt: AttemptName, **how: object) -> Part:
    part = part_of(store, step, attempt, **how)  # type: ignore[arg-type]
    commit_step.publish_part(store, part)
    return part


def commit(store: Store, step: int, attempt: AttemptName, **how: object) -> commit_step.Outcome:
    """Shard, part and record of a step; with one part, so of one rank unless `ranks` and `world` say more."""
    part = publish(store, step, attempt, **how)
    return commit_step.commit(store, SnapshotId(attempt, part.boundary), part.world)


def new_run(path: object, system: System | None = None) -> LocalStore:
    store = LocalStore(os.fspath(path), system)  # type: ignore[arg-type]
    open_run(store, create=True)
    return store


def attempt_at(store: Store, parent: CommitName | None = None, *, world: int = 1) -> AttemptName:
    """Claim and start an attempt that resumes from `parent`."""
    name, catalogue = starting.claim(store, HOLDER)
    step = 0 if parent is None else parent.step
    starting.start(store, name, None if parent is None else parent.id, step, world, catalogue)
    return name


def newest_of(store: Store, step: int) -> CommitName:
    """The newest visible commit of a step number."""
    return next(each for each in Catalogue.of(store).visible()[::-1] if each.step == step)


def is_whole(store: Store, step: int, attempt: AttemptName, boundary: int | None = None) -> bool:
    """Whether every byte of a committed step of these runs is the one that was written."""
    record = read_step(store, name_of(step, attempt, boundary))
    for part in record.parts:
        for rank in part.ranks:
            image, contents = contents_of(rank.shard.file, leaves_of(step, rank.rank))
            found = store.read_bytes(record.shard_path(rank.rank), 0, rank.shard.num_bytes)
            if found != image or contents != rank.contents:
                return False
            assert dict(rank.values) == {"step": step, "rank": rank.rank}
    return True


def of_format(version: int, data: bytes) -> bytes:
    """The bytes of a record without a head as another format of the library would have written them."""
    head = data[:-TAIL_BYTES].replace(b'"format":1', b'"format":%d' % version)
    return head + b',"checksum":"' + _native.xxh3_128(head).hex().encode() + b'"}\n'


def u64(values: tuple[int, ...]) -> array[int]:
    return array("Q", values)


def half_steps(store: Store) -> list[str]:
    """What is wrong with commit records: one cannot be read, or names files that are not there. It is no
    fault if a snapshot with a tombstone lacks files, nor if one of an attempt that another has followed has
    no part left: its committer was killed before it found that a deletion had removed everything."""
    faults = []
    catalogue = Catalogue.of(store)
    for each in catalogue.commits:
        try:
            found = read_record(store, each)
        except DamagedError as error:
            faults.append(str(error))
            continue
        missing = missing_files(store, found) if found is not None else []
        if found is not None and missing and not _is_removed(store, found):
            faults.append(f"a record names what is not there: {missing}")
    return faults


def _is_removed(store: Store, record: CommitRecord) -> bool:
    folder = record.name.id.data_folder
    has_part = any(store.exists(f"{folder}/{part.file}") for part in record.parts)
    return not has_part and started_after(store, record.name.attempt) is not None
