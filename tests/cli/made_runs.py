"""Runs for the shell to look at, made by the code that makes them; and how a shell command ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt import _native
from flashckpt.format.layout import Box, Layout, Leaf
from flashckpt.format.manifest import shard_name
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.format.owner import Owner
from flashckpt.format.records import Part, RankRecord, ShardRecord
from flashckpt.store.base import Store
from tests import run_view

LEAVES = (
    Leaf(name="model.weight", dtype="float32", shape=(64, 3), aliases=("model.tied",)),
    Leaf(name="optimizer.state.weight.step", dtype="float32", shape=()),
    Leaf(name="model.bias", dtype="bfloat16", shape=(64,)),
)
ENVIRONMENT = {"torch": "2.13.0", "device": "cpu"}


@dataclass
class MadeRun:
    """A run in `folder`. Attempts that it starts are ended, as after a normal close."""

    folder: Path
    store: Store

    def attempt(
        self,
        parent: AttemptName | None = None,
        step: int = 0,
        *,
        owner: Owner | None = None,
        ended: bool = True,
        world: int = 1,
    ) -> AttemptName:
        snapshot = None if parent is None else SnapshotId(parent, step)
        name = run_view.begin(self.store, snapshot, step, world=world, owner=owner)
        if ended:
            run_view.end(self.store, name)
        return name

    def commit(self, attempt: AttemptName, step: int) -> Path:
        """Commit a step of one rank, with values that depend on the step, which is its boundary too. Returns
        its shard."""
        layout = Layout.of(LEAVES)
        data = bytes((index * 31 + step) % 251 for index in range(layout.num_bytes))
        pieces = {
            leaf.name: data[layout.data_start + leaf.offset :][: leaf.num_bytes] for leaf in layout.leaves
        }
        part = Part(
            id=SnapshotId(attempt, step),
            step=step,
            world=1,
            node=0,
            ranks=(self._write(attempt, step, 0, layout, pieces),),
            environment=ENVIRONMENT,
        )
        run_view.publish(self.store, part)
        run_view.commit(self.store, SnapshotId(attempt, step))
        return self.of(attempt, step) / part.ranks[0].shard.file

    def of(self, attempt: AttemptName, step: int) -> Path:
        """The folder of a checkpoint, or of a snapshot that the newest attempt writes."""
        return self.folder / run_view.folder_of(self.store, SnapshotId(attempt, step))

    def publish(self, attempt: AttemptName, step: int, ranks: Sequence[int], world: int) -> Part:
        """Write what one node has of a step of `world` ranks: their shards and its part."""
        records = []
        for rank in ranks:
            tensors = tensors_of(step)
            leaves = {leaf.name: leaf for leaf in leaves_of(rank, world)}
            pieces = {name: _cut(tensors[name], leaf).tobytes() for name, leaf in leaves.items()}
            pieces["model.seen"] = np.array([step, rank], "int64").tobytes()
            records.append(self._write(attempt, step, rank, Layout.of(leaves.values()), pieces))
        part = Part(
            id=SnapshotId(attempt, step),
            step=step,
            world=world,
            node=min(ranks),
            ranks=tuple(records),
            environment=ENVIRONMENT,
        )
        run_view.publish(self.store, part)
        return part

    def commit_nodes(self, attempt: AttemptName, step: int, *nodes: Sequence[int]) -> None:
        """Commit a step of these nodes' ranks."""
        world = sum(map(len, nodes))
        for ranks in nodes:
            self.publish(attempt, step, ranks, world)
        run_view.commit(self.store, SnapshotId(attempt, step))

    def _write(
        self, attempt: AttemptName, step: int, rank: int, layout: Layout, pieces: dict[str, bytes]
    ) -> RankRecord:
        image = bytearray(layout.header + b"".join(pieces[leaf.name] for leaf in layout.leaves))
        name = shard_name(rank, "5f2c")
        path = self.of(attempt, step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
        address = _native.address_of(image) + layout.data_start
        digests = tuple(_native.digest(address + leaf.offset, leaf.num_bytes) for leaf in layout.leaves)
        shard = ShardRecord.of(name, layout, _native.xxh3_128(image))
        values = {"step": step, "rank": rank}
        return RankRecord(rank=rank, shard=shard, leaves=layout.leaves, digests=digests, values=values)


def tensors_of(step: int) -> dict[str, np.ndarray]:
    """The whole tensors of a step of several ranks, each with values of its own; `model.seen` is every
    rank's own."""
    noise = np.random.default_rng(step)
    return {
        "model.weight": noise.standard_normal((10, 3)).astype("float32"),
        "model.head": noise.standard_normal((4, 8)).astype("float32"),
        "model.bias": noise.standard_normal(3).astype("float32"),
        "model.seen": np.zeros(2, "int64"),
        "optimizer.state.weight.step": np.array(step, "float32"),
    }


def leaves_of(rank: int, world: int) -> list[Leaf]:
    """What a rank has of them: rows of one, as FSDP2 divides them, columns of another, and the rest whole."""
    found = []
    for name, tensor in tensors_of(0).items():
        start, shape = [0] * tensor.ndim, list(tensor.shape)
        dimension = {"model.weight": 0, "model.head": 1}.get(name)
        if dimension is not None:
            each = -(-tensor.shape[dimension] // world)
            start[dimension] = min(rank * each, tensor.shape[dimension])
            shape[dimension] = min(each, tensor.shape[dimension] - start[dimension])
        box = Box(shape=tensor.shape, start=tuple(start)) if tuple(shape) != tensor.shape else None
        found.append(Leaf(name=name, dtype=str(tensor.dtype), shape=tuple(shape), box=box))
    return found


def _cut(tensor: np.ndarray, leaf: Leaf) -> np.ndarray:
    start = leaf.box.start if leaf.box is not None else (0,) * tensor.ndim
    return tensor[tuple(slice(at, at + size) for at, size in zip(start, leaf.shape, strict=True))]


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)
