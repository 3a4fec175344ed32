"""Runs for the shell to look at, made by the code that makes them; and how a shell command ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashckpt import _native
from flashckpt.commit import attempts, steps
from flashckpt.commit.holder import here
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.names import AttemptName, shard_name, step_attempt_folder
from flashckpt.format.records import Holder, Part, RankRecord, ShardRecord
from flashckpt.store.base import Store

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
        holder: Holder | None = None,
        ended: bool = True,
    ) -> AttemptName:
        name = attempts.claim(self.store, holder or here())
        attempts.start(self.store, name, parent, step, 1)
        if ended:
            attempts.mark_ended(self.store, name, "closed")
        return name

    def commit(self, attempt: AttemptName, step: int) -> Path:
        """Commit a step of one rank, with values that depend on the step. Returns its shard."""
        layout = Layout.of(LEAVES)
        image = bytearray(layout.num_bytes)
        image[: layout.data_start] = layout.header
        for index in range(layout.data_start, layout.num_bytes):
            image[index] = (index * 31 + step) % 251
        folder = step_attempt_folder(step, attempt)
        name = shard_name(0, "5f2c")
        path = self.folder / folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(image)
        address = _native.address_of(image) + layout.data_start
        digests = tuple(_native.digest(address + leaf.offset, leaf.num_bytes) for leaf in layout.leaves)
        shard = ShardRecord(
            file=name, num_bytes=len(image), data_start=layout.data_start, checksums=_native.xxh3_128(image)
        )
        rank = RankRecord(rank=0, shard=shard, leaves=layout.leaves, digests=digests, values={})
        part = Part(step=step, attempt=attempt, world=1, keeper=0, ranks=(rank,), environment=ENVIRONMENT)
        assert steps.publish_part(self.store, part)
        assert steps.commit(self.store, step, attempt, 1)
        return path


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)
