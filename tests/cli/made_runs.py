"""Runs for the shell to look at, made by the code that makes them; and how a shell command ended."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.format.names import EVENTS, AttemptName, SnapshotId
from flashckpt.format.owner import Owner
from flashckpt.format.records import Part
from flashckpt.restore.step_tensors import TensorSlice
from flashckpt.store.base import Store
from tests import run_view
from tests.restore.sharded import Held, record_of, whole

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
        """Commit a step of one rank, whose values depend on the step, its boundary too. Returns its shard."""
        part = self.publish(attempt, step, {0: leaves_of(step)}, 1)
        run_view.commit(self.store, part.id)
        return self.of(attempt, step) / part.ranks[0].shard.file

    def commit_nodes(self, attempt: AttemptName, step: int, *nodes: Sequence[int]) -> None:
        """Commit a step of these nodes' ranks."""
        world = sum(map(len, nodes))
        for ranks in nodes:
            self.publish_node(attempt, step, ranks, world)
        run_view.commit(self.store, SnapshotId(attempt, step))

    def publish_node(self, attempt: AttemptName, step: int, ranks: Sequence[int], world: int) -> None:
        self.publish(attempt, step, {rank: slices_of(step, rank, world) for rank in ranks}, world)

    def publish(
        self,
        attempt: AttemptName,
        step: int,
        held: Mapping[int, Sequence[Held]],
        world: int,
        environment: Mapping[str, Any] = ENVIRONMENT,
    ) -> Part:
        """Write what one node has of a step: the shards of these ranks and its part."""
        id, node = SnapshotId(attempt, step), min(held)
        ranks = tuple(
            record_of(self.store, id, rank, leaves, {"step": step, "rank": rank})
            for rank, leaves in held.items()
        )
        part = Part(id=id, step=step, world=world, node=node, ranks=ranks, environment=environment)
        run_view.publish(self.store, part)
        return part

    def tell(self, attempt: AttemptName, *lines: Mapping[str, Any] | str) -> None:
        """Make these the lines of the run's ledger for an attempt."""
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        path = self.folder / EVENTS / f"{attempt}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode(errors="surrogateescape"))

    def of(self, attempt: AttemptName, step: int) -> Path:
        """The folder of a checkpoint, or of a snapshot that the newest attempt writes."""
        return self.folder / run_view.folder_of(self.store, SnapshotId(attempt, step))


def held(name: str, tensor: np.ndarray, *aliases: str) -> Held:
    """A whole tensor."""
    return Held(name, tensor, whole(tensor), aliases)


def leaves_of(step: int) -> list[Held]:
    """What the one rank of a step has."""
    noise = np.random.default_rng(step)
    return [
        held("model.weight", noise.standard_normal((64, 3)).astype("float32"), "model.tied"),
        held("optimizer.state.weight.step", np.array(step, "float32")),
        held("model.bias", noise.standard_normal(64).astype("float16")),
    ]


def slices_of(step: int, rank: int, world: int) -> list[Held]:
    """What a rank has of a step: rows of one tensor, columns of another, the rest whole."""
    noise = np.random.default_rng(step)
    return [
        _slice("model.weight", noise.standard_normal((10, 3)).astype("float32"), 0, rank, world),
        _slice("model.head", noise.standard_normal((4, 8)).astype("float32"), 1, rank, world),
        held("model.bias", noise.standard_normal(3).astype("float32")),
        held("model.seen", np.array([step, rank], "int64")),
        held("optimizer.state.weight.step", np.array(step, "float32")),
    ]


def _slice(name: str, tensor: np.ndarray, dimension: int, rank: int, world: int) -> Held:
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    each = -(-tensor.shape[dimension] // world)
    start[dimension] = min(rank * each, tensor.shape[dimension])
    shape[dimension] = min(each, tensor.shape[dimension] - start[dimension])
    return Held(name, tensor, TensorSlice(tuple(start), tuple(shape)))


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Shell = Callable[..., Ended]
"""Runs the command with these arguments in a process of its own."""
