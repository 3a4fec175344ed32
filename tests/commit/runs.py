"""Small real runs for the tests: shards with leaves in them, attempts, committed steps."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping

import numpy as np

from flashckpt import _native
from flashckpt.commit import attempts as attempts_module
from flashckpt.commit import constants as constants_module
from flashckpt.commit import lineage
from flashckpt.commit import steps as steps_module
from flashckpt.commit.attempts import open_run
from flashckpt.errors import DamagedError
from flashckpt.format.layout import PAGE, Layout, Leaf
from flashckpt.format.names import (
    AttemptName,
    attempt_folder,
    constants_name,
    shard_name,
    step_attempt_folder,
)
from flashckpt.format.records import (
    CHUNK_BYTES,
    Contents,
    Holder,
    Manifest,
    Part,
    RankRecord,
    ShardRecord,
)
from flashckpt.store.base import MemoryRange, Store
from flashckpt.store.local import LocalStore, System

HOLDER = Holder(boot_id="b", runtime="/r", runtime_id="1:2", lock="trainer-1", host="here", pid=1)


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
    boundary: int = 1,
) -> Part:
    """Write the shards of a part; the part itself is not written."""
    records = []
    for rank in ranks:
        image, contents = contents_of(shard_name(rank, nonce), leaves_of(step, rank))
        folder = step_attempt_folder(step, attempt)
        write_shard(store, f"{folder}/{contents.shard.file}", image, contents.layout())
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
        step=step, attempt=attempt, boundary=boundary, world=world, keeper=keeper, ranks=tuple(records)
    )


def constants_of(store: Store, attempt: AttemptName, rank: int) -> Contents:
    """The constants shard of a rank: that which the newest steps name, else one of this attempt, written
    unless it is there."""
    file = constants_name(rank, 1)
    image, contents = contents_of(file, {"frozen.weight": np.arange(8, dtype="float64") + rank})
    for _, found in constants_module.named(store, attempt, rank):
        if found.digests == contents.digests and constants_module.is_there(store, attempt, found):
            return found
    path = f"{attempt_folder(attempt)}/{file}"
    if not store.exists(path):
        write_shard(store, path, image, contents.layout())
    return contents


def publish(store: Store, step: int, attempt: AttemptName, **how: object) -> Part:
    part = part_of(store, step, attempt, **how)  # type: ignore[arg-type]
    steps_module.publish_part(store, part)
    return part


def commit(store: Store, step: int, attempt: AttemptName, **how: object) -> steps_module.Committed:
    """Shard, part, manifest of a step of one rank."""
    publish(store, step, attempt, **how)
    return steps_module.commit(store, step, attempt, world=1)


def new_run(path: object, system: System | None = None) -> LocalStore:
    store = LocalStore(os.fspath(path), system)  # type: ignore[arg-type]
    open_run(store, create=True)
    return store


def attempt_at(store: Store, parent: AttemptName | None = None, step: int = 0) -> AttemptName:
    """Claim and start an attempt that goes on from `step` of `parent`."""
    name = attempts_module.claim(store, HOLDER)
    attempts_module.start(store, name, parent, step, world=1)
    return name


def is_whole(store: Store, step: int, attempt: AttemptName) -> bool:
    """Whether every byte of a committed step of these runs is the one that was written."""
    record = steps_module.read_step(store, step, attempt)
    for part in record.parts:
        for rank in part.ranks:
            image, contents = contents_of(rank.shard.file, leaves_of(step, rank.rank))
            found = store.read_bytes(record.shard_path(rank.rank), 0, rank.shard.num_bytes)
            if found != image or contents != rank.contents:
                return False
            assert dict(rank.values) == {"step": step, "rank": rank.rank}
    return True


def u64(values: tuple[int, ...]) -> array[int]:
    return array("Q", values)


def half_steps(store: Store) -> list[str]:
    """What is wrong with manifests: one cannot be read, or names files that are not there. No fault is one of
    which no part is there, of an attempt that another has followed: whoever committed it was killed before it
    saw that the step had been buried and removed meanwhile."""
    faults = []
    for each in lineage.everything(store):
        try:
            found = steps_module.read_manifest(store, each.step, each.attempt)
        except DamagedError as error:
            faults.append(str(error))
            continue
        missing = steps_module.missing_files(store, found) if isinstance(found, Manifest) else []
        if missing and not _is_removed(store, found):  # type: ignore[arg-type]
            faults.append(f"a manifest names what is not there: {missing}")
    return faults


def _is_removed(store: Store, manifest: Manifest) -> bool:
    folder = step_attempt_folder(manifest.step, manifest.attempt)
    has_part = any(store.exists(f"{folder}/{part.file}") for part in manifest.parts)
    return not has_part and attempts_module.started_after(store, manifest.attempt) is not None
