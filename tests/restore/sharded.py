"""Committed steps of several ranks, made here: tensors cut into boxes, in files with small chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from flashckpt import _native
from flashckpt.format.layout import Box, Layout, Leaf, Replicas, ranks_of
from flashckpt.format.manifest import shard_name
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.records import Contents, Part, RankRecord
from flashckpt.restore.step_tensors import TensorSlice
from flashckpt.store.base import Store
from tests import run_view
from tests.commit.runs import HOLDER, write_shard

CHUNK_BYTES = 4096


@dataclass
class Held:
    """What one rank has of a tensor. `writer`: of a declared replica, the rank whose file has it, and
    `members` the ranks that have it too: without them, all that have the same box."""

    name: str
    whole: np.ndarray
    region: TensorSlice
    aliases: tuple[str, ...] = ()
    writer: int | None = None
    members: tuple[int, ...] = ()

    @property
    def data(self) -> bytes:
        return taken(self.whole, self.region)


def whole(tensor: np.ndarray) -> TensorSlice:
    """All of a tensor."""
    return TensorSlice((0,) * tensor.ndim, tensor.shape)


def taken(whole: np.ndarray, region: TensorSlice) -> bytes:
    """The bytes of a box of a tensor, row-major."""
    index = tuple(slice(at, at + size) for at, size in zip(region.start, region.shape, strict=True))
    return np.ascontiguousarray(whole[index]).tobytes()


def leaf_of(held: Held) -> Leaf:
    whole = held.region.shape == held.whole.shape
    return Leaf(
        name=held.name,
        dtype=str(held.whole.dtype),
        shape=held.region.shape,
        aliases=held.aliases,
        box=None if whole else Box(shape=held.whole.shape, start=held.region.start),
    )


def digest(data: bytes) -> int:
    return _native.digest(_native.address_of(data or b"\0"), len(data))


def contents_of(file: str, held: Sequence[Held], chunk_bytes: int = CHUNK_BYTES) -> tuple[bytes, Contents]:
    """A file of these, and its record."""
    by_name = {each.name: each for each in held}
    layout = Layout.of(map(leaf_of, held))
    pieces = [by_name[leaf.name].data for leaf in layout.leaves]
    image = layout.header + b"".join(pieces)
    chunks = [image[i : i + chunk_bytes] for i in range(0, len(image), chunk_bytes)]
    found = Contents.of(file, layout, b"".join(map(_native.xxh3_128, chunks)), map(digest, pieces))
    return image, replace(found, chunk_bytes=chunk_bytes)


def begun(store: Store, world: int) -> AttemptName:
    run_view.make(store)
    return run_view.begin(store, world=world, owner=HOLDER)


def committed(
    store: Store,
    ranks: Sequence[Sequence[Held]],
    *,
    values: Sequence[Mapping[str, Any]] | None = None,
    ranks_a_part: int = 2,
    step: int = 7,
    attempt: AttemptName | None = None,
) -> run_view.Record:
    """A step of as many ranks as there are lists of what each has. `attempt`: a new one if not given."""
    world = len(ranks)
    attempt = begun(store, world) if attempt is None else attempt
    snapshot = SnapshotId(attempt, step)
    records = []
    for rank, held in enumerate(ranks):
        stored = [each for each in held if each.writer in (None, rank)]
        own = values[rank] if values is not None else {}
        records.append(record_of(store, snapshot, rank, stored, own, tables_of(rank, ranks)))
    for node in range(0, world, ranks_a_part):
        part = tuple(records[node : node + ranks_a_part])
        run_view.publish(store, Part(id=snapshot, step=step, world=world, node=node, ranks=part))
    run_view.commit(store, snapshot)
    return run_view.read(store, CommitName(step, attempt, step))


def record_of(
    store: Store,
    snapshot: SnapshotId,
    rank: int,
    held: Sequence[Held],
    values: Mapping[str, Any],
    replicas: tuple[Replicas, ...] = (),
) -> RankRecord:
    """Write the file of a rank. Returns its record."""
    image, contents = contents_of(shard_name(rank, "5f2c0a1b"), held)
    folder = run_view.folder_of(store, snapshot)
    write_shard(store, f"{folder}/{contents.file}", image, contents.layout())
    return RankRecord(
        rank=rank,
        shard=contents,
        values=values,
        replicas=replicas,
    )


def tables_of(rank: int, ranks: Sequence[Sequence[Held]]) -> tuple[Replicas, ...]:
    """What a rank holds like others by declaration."""
    held: dict[tuple[str, TensorSlice], list[int]] = {}
    for number, each in enumerate(ranks):
        for one in each:
            if one.writer is not None:
                held.setdefault((one.name, one.region), []).append(number)
    tables: dict[tuple[int, ...], list[Held]] = {}
    for one in ranks[rank]:
        if one.writer is not None:
            tables.setdefault(one.members or tuple(held[one.name, one.region]), []).append(one)
    return tuple(table_of(members, shared) for members, shared in tables.items())


def table_of(members: Sequence[int], shared: Sequence[Held]) -> Replicas:
    by_name = {each.name: each for each in shared}
    leaves = [replace(leaf, offset=-1) for leaf in Layout.of(map(leaf_of, shared)).leaves]
    return Replicas(
        ranks=ranks_of(members),
        leaves=tuple(leaves),
        digests=tuple(digest(by_name[leaf.name].data) for leaf in leaves),
        writers=tuple(by_name[leaf.name].writer for leaf in leaves),
    )


@dataclass
class Counted:
    """A store that notes what is read of shards (path, first byte, bytes), and which parts."""

    store: Store
    shards: list[tuple[str, int, int]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read(self, path: str, max_bytes: int) -> bytes:
        self.parts += [path] if "/node-" in path else []
        return self.store.read(path, max_bytes)

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        self.shards.append((path, offset, num_bytes))
        return self.store.read_bytes(path, offset, num_bytes)

    def read_chunks(self, path: str, plan: _native.FilePlan, **how: Any) -> None:
        for first, last in plan.left():
            start, stop = first * plan.chunk_bytes, min(last * plan.chunk_bytes, plan.num_bytes)
            self.shards.append((path, start, stop - start))
        self.store.read_chunks(path, plan, **how)


# Cutting tensors up


DTYPES = ["float64", "float32", "float16", "int16", "uint8", "bool", "complex128"]


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    """Of up to four dimensions, some of which are of no size."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    if draw(st.booleans()) and shape:
        shape[draw(st.integers(0, len(shape) - 1))] *= 40
    dtype = draw(st.sampled_from(DTYPES))
    seed = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    raw = seed.integers(0, 256, (*shape, np.dtype(dtype).itemsize), "uint8")
    return (raw[..., 0] & 1).astype("bool") if dtype == "bool" else raw.view(dtype)[..., 0].copy()


def partitions(shape: tuple[int, ...], count: int) -> st.SearchStrategy[list[TensorSlice]]:
    """Boxes, some of which may be empty, that together are a tensor of this shape."""

    @st.composite
    def cut(draw: st.DrawFn) -> list[TensorSlice]:
        boxes = [TensorSlice((0,) * len(shape), shape)]
        while len(boxes) < count and shape:
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            d = draw(st.integers(0, len(shape) - 1))
            at = draw(st.integers(0, box.shape[d]))
            low = TensorSlice(box.start, (*box.shape[:d], at, *box.shape[d + 1 :]))
            start = (*box.start[:d], box.start[d] + at, *box.start[d + 1 :])
            boxes += [low, TensorSlice(start, (*box.shape[:d], box.shape[d] - at, *box.shape[d + 1 :]))]
        return boxes

    return cut()
