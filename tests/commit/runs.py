"""Small real runs for the tests: shards with leaves in them, attempts, committed steps."""

import itertools
import os
from collections.abc import Mapping

import numpy as np

from flashckpt import _native
from flashckpt.commit import commit_step
from flashckpt.commit.commit_step import KEEP_ALL, Outcome
from flashckpt.commit.steps import read_step, whole_or_why
from flashckpt.commit.view import View, open_run
from flashckpt.format.catalogue import Folder
from flashckpt.format.checked_json import TAIL_BYTES
from flashckpt.format.layout import PAGE, Layout, Leaf
from flashckpt.format.manifest import File, frozen_name, shard_name
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.owner import Owner
from flashckpt.format.records import CHUNK_BYTES, Contents, Part, RankRecord
from flashckpt.options import Keep
from flashckpt.store.base import MemoryRange, Store
from flashckpt.store.local import LocalStore, System
from tests import run_view

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
    return image, Contents.of(file, layout, b"".join(map(_native.xxh3_128, chunks)), digests)


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


_files = itertools.count(1)


def folder_of(store: Store, id: SnapshotId) -> Folder:
    """The folder of a checkpoint, or of a snapshot that the newest attempt writes."""
    view = View.of(store)
    checkpoint = view.checkpoint(id)
    return Folder(view.catalogue.writer, id) if checkpoint is None else checkpoint.folder


def part_of(
    store: Store,
    step: int,
    attempt: AttemptName,
    ranks: tuple[int, ...] = (0,),
    *,
    world: int = 1,
    node: int | None = None,
    nonce: str = "",
    constants: bool = False,
    boundary: int | None = None,
) -> Part:
    """Write the shards of a part; the part itself is not written."""
    name, records = name_of(step, attempt, boundary), []
    folder = folder_of(store, name.id)
    for rank in ranks:
        file = shard_name(rank, nonce or f"5f2c0a1b{next(_files):04x}")
        image, contents = contents_of(file, leaves_of(step, rank))
        write_shard(store, f"{folder.path}/{contents.file}", image, contents.layout())
        base, frozen = constants_of(store, folder, rank) if constants else (None, None)
        records.append(
            RankRecord(
                rank=rank,
                shard=contents,
                values={"step": step, "rank": rank},
                constants=frozen,
                base=base,
            )
        )
    node = min(ranks) if node is None else node
    return Part(id=name.id, step=step, world=world, node=node, ranks=tuple(records))


def constants_of(store: Store, folder: Folder, rank: int) -> tuple[Folder, Contents]:
    """The frozen file of a rank: that which a visible step names, else one in this folder, written unless it
    is there."""
    leaves, view = {"frozen.weight": np.arange(8, dtype="float64") + rank}, View.of(store)
    image, contents = contents_of(frozen_name(rank, "5f2c0a1b"), leaves)
    for each in view.newest_first():
        record = read_step(view, each)
        found = record.rank(rank).constants if rank < record.world else None
        file = next((f for f in record.manifest.frozen if found and f.name == found.file), None)
        is_same = found is not None and file is not None and found.digests == contents.digests
        if is_same and store.exists(f"{file.base.path}/{file.name}"):
            return file.base, found
    path = f"{folder.path}/{contents.file}"
    if not store.exists(path):
        write_shard(store, path, image, contents.layout())
    return folder, contents


def put(store: Store, part: Part, nonce: str = "") -> File:
    """Write a part whose shards are written."""
    folder = folder_of(store, part.id)
    return commit_step.publish_part(store, folder, part, nonce or f"5f2c0a1b{next(_files):04x}")


def publish(store: Store, step: int, attempt: AttemptName, **how: object) -> Part:
    part = part_of(store, step, attempt, **how)  # type: ignore[arg-type]
    put(store, part)
    return part


def commit(store: Store, step: int, attempt: AttemptName, *, keep: Keep = KEEP_ALL, **how: object) -> Outcome:
    """Shard, part and commit of a step; with one part, so of one rank unless `ranks` and `world` say more."""
    return commit_published(store, publish(store, step, attempt, **how).id, keep)


def commit_published(store: Store, id: SnapshotId, keep: Keep = KEEP_ALL) -> Outcome:
    """Commit a snapshot whose parts are published."""
    return commit_step.commit(View.of(store), folder_of(store, id), keep)


def new_run(path: object, system: System | None = None) -> LocalStore:
    store = LocalStore(os.fspath(path), system)  # type: ignore[arg-type]
    open_run(store, create=True)
    return store


def attempt_at(store: Store, parent: CommitName | None = None, *, world: int = 1) -> AttemptName:
    """Begin an attempt that resumes from `parent`."""
    id, step = (None, 0) if parent is None else (parent.id, parent.step)
    return run_view.begin(store, id, step, world=world, owner=HOLDER)


def newest_of(store: Store, step: int) -> CommitName:
    """The newest visible commit of a step number."""
    return next(each for each in View.of(store).newest_first() if each.step == step)


def is_whole(store: Store, step: int, attempt: AttemptName, boundary: int | None = None) -> bool:
    """Whether every byte of a committed step of these runs is the one that was written."""
    record = read_step(store, name_of(step, attempt, boundary))
    for part in record.parts:
        for rank in part.ranks:
            image, contents = contents_of(rank.shard.file, leaves_of(step, rank.rank))
            found = store.read_bytes(record.shard_path(rank.rank), 0, rank.shard.num_bytes)
            if found != image or contents != rank.shard:
                return False
            assert dict(rank.values) == {"step": step, "rank": rank.rank}
    return True


def of_format(version: int, data: bytes) -> bytes:
    """The bytes of a record without a head as another format of the library would have written them."""
    head = data[:-TAIL_BYTES].replace(b'"format":1', b'"format":%d' % version)
    return head + b',"checksum":"' + _native.xxh3_128(head).hex().encode() + b'"}\n'


def half_steps(store: Store) -> list[str]:
    """What is wrong with checkpoints: one cannot be read, or names files that are not there."""
    faults, view = [], View.of(store)
    for each in view.catalogue.checkpoints:
        why = whole_or_why(store, each)
        if isinstance(why, str) and each in View.of(store).catalogue.checkpoints:
            faults.append(why)
    return faults
