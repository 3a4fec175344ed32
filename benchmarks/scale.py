"""What thousands of ranks cost in records: part, manifest, commit, a resume's plan, the choice of a step,
retention; by the code that does it, each in a process of its own.

    python -m benchmarks.scale --ranks 1024 16384 --json docs/benchmarks/….json

A transformer of about 100 billion parameters with AdamW under FSDP2, eight ranks a node. There is no tensor
data: shards are files of the right length with nothing in them. The parts that are read are whole; of others,
what nothing here reads is a hole: their heads are made by the code that makes those of the whole ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt._native import xxh3_128
from flashckpt.catalogue.changes import Launch
from flashckpt.commit import attempts, commit_step, lineage, steps
from flashckpt.commit.attempts import local_owner
from flashckpt.commit.commit_step import KEEP_ALL
from flashckpt.commit.view import HOME, View, open_run
from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import Folder
from flashckpt.format.checked_json import TAIL_BYTES, dump
from flashckpt.format.layout import Box, Layout, Leaf
from flashckpt.format.manifest import PART, File, PartHead, part_name, shard_name
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.records import CHUNK_BYTES, Contents, Part, RankRecord
from flashckpt.options import Keep
from flashckpt.restore.step_tensors import StepRanks, TensorSlice
from flashckpt.store.local import LocalStore

RANKS_PER_NODE = 8
STEPS = (100, 200, 300, 400)
NONCE = "5f2c0a1b"
_REPEATS = 5
_HIDDEN, _KEYS, _INNER, _VOCABULARY, _LAYERS = 10240, 1280, 28672, 128256, 88


# ---- the model


def parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as a decoder of this size has them."""
    yield "tok_embeddings.weight", (_VOCABULARY, _HIDDEN)
    for layer in range(_LAYERS):
        at = f"layers.{layer}"
        yield f"{at}.attention.wq.weight", (_HIDDEN, _HIDDEN)
        yield f"{at}.attention.wk.weight", (_KEYS, _HIDDEN)
        yield f"{at}.attention.wv.weight", (_KEYS, _HIDDEN)
        yield f"{at}.attention.wo.weight", (_HIDDEN, _HIDDEN)
        yield f"{at}.feed_forward.w1.weight", (_INNER, _HIDDEN)
        yield f"{at}.feed_forward.w2.weight", (_HIDDEN, _INNER)
        yield f"{at}.feed_forward.w3.weight", (_INNER, _HIDDEN)
        yield f"{at}.attention_norm.weight", (_HIDDEN,)
        yield f"{at}.ffn_norm.weight", (_HIDDEN,)
    yield "norm.weight", (_HIDDEN,)
    yield "output.weight", (_VOCABULARY, _HIDDEN)


def rows_of(shape: tuple[int, ...], rank: int, world: int) -> tuple[int, int]:
    """The rows of a tensor that FSDP2 gives a rank, perhaps none: the first, and how many."""
    rows = -(-shape[0] // world)
    start = min(rank * rows, shape[0])
    return start, min(rows, shape[0] - start)


def leaves_of(rank: int, world: int) -> list[Leaf]:
    """What a rank holds: its rows of each parameter and of the parameter's two averages, and the optimizer's
    counts of steps."""
    found = []
    for name, shape in parameters():
        start, count = rows_of(shape, rank, world)
        box = Box(shape=shape, start=(start, *[0] * (len(shape) - 1)))
        state = f"optimizer.state.{name}"
        for leaf in (f"model.{name}", f"{state}.exp_avg", f"{state}.exp_avg_sq"):
            found.append(Leaf(name=leaf, dtype="float32", shape=(count, *shape[1:]), box=box))
        found.append(Leaf(name=f"{state}.step", dtype="float32", shape=()))
    return found


# ---- the run


def layout_of(rank: int, world: int) -> Layout:
    return Layout.of(leaves_of(rank, world))


def rank_record(rank: int, world: int) -> RankRecord:
    layout = layout_of(rank, world)
    checksums = bytes(16 * -(-layout.num_bytes // CHUNK_BYTES))
    # A count of steps is alike on all ranks.
    own = [(rank * 1_000_003 if leaf.box else 0) + i for i, leaf in enumerate(layout.leaves)]
    digests = [number * 0x9E3779B97F4A7C15 % 2**64 for number in own]
    shard = Contents.of(shard_name(rank, NONCE), layout, checksums, digests)
    values = {"progress": {"step": 100, "epoch": 3, "loader": {"position": 123_456, "seed": 5}}}
    return RankRecord(rank=rank, shard=shard, values=values)


def part_of(node: int, world: int, step: int, attempt: AttemptName) -> Part:
    ranks = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
    return Part(
        id=SnapshotId(attempt, step),
        step=step,
        world=world,
        node=ranks[0],
        ranks=tuple(rank_record(rank, world) for rank in ranks),
        environment={"torch": "2.13.0", "device": "cuda"},
    )


def name_of(step: int, attempt: AttemptName) -> CommitName:
    return CommitName(step, attempt, step)


class Simulation:
    """A run of one attempt in `folder`, with STEPS of `world` ranks of which all parts are there."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world, self.nodes = folder, world, world // RANKS_PER_NODE
        self.store = LocalStore(str(folder))

    def make(self) -> None:
        view, highest = attempts.settle(open_run(self.store, create=True))
        name, launch = attempts.next_attempt(highest), Launch(world=self.world, owner=local_owner())
        view.after(HOME.begin(view.catalogue, name, (), launch, after=view.catalogue.writer))
        for step in STEPS:
            self._make_step(step, name)

    @property
    def attempt(self) -> AttemptName:
        attempt = View.of(self.store).attempt
        assert attempt is not None
        return attempt

    def name(self, step: int) -> CommitName:
        return name_of(step, self.attempt)

    def commit(self, step: int) -> bool:
        return bool(commit_step.commit(View.of(self.store), self.folder_of(step), KEEP_ALL))

    def take_back(self, step: int) -> None:
        """Undo the newest commit."""
        catalogue = View.of(self.store).catalogue
        assert catalogue.checkpoints[-1].step == step
        self.store.remove(catalogue.path)
        self.store.remove(catalogue.checkpoints[-1].manifest_path)

    def folder_of(self, step: int) -> Folder:
        return Folder(self.attempt, SnapshotId(self.attempt, step))

    def _make_step(self, step: int, attempt: AttemptName) -> None:
        folder = self.folder / self.folder_of(step).path
        folder.mkdir(parents=True)
        sample = part_of(0, self.world, step, attempt)
        length = len(sample.to_bytes())
        sizes = _Sizes(self.world)
        whole = {0, self.nodes // 2, self.nodes - 1}
        for rank in range(self.world):
            with (folder / shard_name(rank, NONCE)).open("xb") as shard:
                shard.truncate(sizes.of(rank))
        for node in range(self.nodes):
            part = part_of(node, self.world, step, attempt) if node in whole else None
            head = self._head(sample.head(), node, sizes)
            assert part is None or part.head() == head, "a head is made as the code makes it"
            with (folder / part_name(head.node, NONCE)).open("xb") as file:
                if part is not None:
                    file.write(part.to_bytes())
                else:
                    _write_hollow(file.fileno(), head, length)

    def fill(self, step: int, operation: Callable[[], object]) -> None:
        """Make those parts of a committed step whole that a operation reads."""
        while True:
            try:
                operation()
            except DamagedError as error:
                file = str(error.path).rpartition("/")[2]
                found = PART.fullmatch(file)
                assert found, file
                part = part_of(int(found[1]) // RANKS_PER_NODE, self.world, step, self.attempt)
                (self.folder / self.folder_of(step).path / file).write_bytes(part.to_bytes())
                self.take_back(step)
                assert self.commit(step)
            else:
                return

    def _head(self, sample: PartHead, node: int, sizes: _Sizes) -> PartHead:
        """Of another node than the sample's, which has as many ranks and leaves."""
        first = node * RANKS_PER_NODE
        ranks = []
        for files in sample.ranks:
            rank = first + files.rank
            ranks.append(files._replace(rank=rank, shard=File(shard_name(rank, NONCE), sizes.of(rank))))
        return replace(sample, node=first, ranks=tuple(ranks))


class _Sizes:
    """Lengths of shards, of which there are few."""

    def __init__(self, world: int) -> None:
        self._world, self._known = world, dict[tuple[int, ...], int]()
        self._shapes = {shape for _, shape in parameters()}

    def of(self, rank: int) -> int:
        rows = tuple(rows_of(shape, rank, self._world)[1] for shape in self._shapes)
        if rows not in self._known:
            self._known[rows] = layout_of(rank, self._world).num_bytes
        return self._known[rows]


def _write_hollow(file: int, head: PartHead, length: int) -> None:
    """A part whose body is a hole: what its head is followed by, and its tail, are there."""
    data = dump({"kind": Part.KIND, **head.to_dict()}, {})
    body = data[:-TAIL_BYTES].ljust(length - TAIL_BYTES, b"\0")
    checksum, wanted = (xxh3_128(each).hex().encode() for each in (data[:-TAIL_BYTES], body))
    tail = data[-TAIL_BYTES:].replace(checksum, wanted)
    os.pwrite(file, data[:-TAIL_BYTES], 0)
    os.pwrite(file, tail, length - TAIL_BYTES)


# ---- what is measured


def write_part(run: Simulation) -> Callable[[], object]:
    """What a node does for a step: the part of its eight ranks is made, and published."""
    part, store = part_of(0, run.world, STEPS[0], run.attempt), run.store
    folder = run.folder_of(part.step)

    def operation() -> None:
        store.remove(f"{folder.path}/{part_name(part.node, NONCE)}")
        assert commit_step.publish_part(store, folder, part, NONCE)

    return operation


def commit(run: Simulation) -> Callable[[], object]:
    """What the one that commits does, once."""

    def operation() -> None:
        run.take_back(STEPS[-1])
        assert run.commit(STEPS[-1])

    return operation


def plan(run: Simulation) -> Callable[[], object]:
    """What a rank does to know what to read of a step: its own part, and where each leaf stands."""
    name, rank = run.name(STEPS[-1]), run.world - 3

    def operation() -> None:
        record = steps.read_step(run.store, name)
        [(_, contents)] = record.files(rank)
        assert len(contents.layout().leaves) == len(leaves_of(rank, run.world))

    return operation


def reshard(run: Simulation) -> Callable[[], object]:
    """What a rank of half as many does to know what to read of whom: the pieces of all its boxes."""
    name, world, rank = run.name(STEPS[-1]), run.world // 2, run.world // 4 - 3
    leaves = [leaf for leaf in leaves_of(rank, world) if leaf.num_bytes]
    wanted = [(leaf.name, TensorSlice.of(leaf)) for leaf in leaves]

    def operation() -> None:
        record = steps.read_step(run.store, name)
        ranks = StepRanks(record, rank, world)
        ranks.look_for([name for name, _ in wanted])
        found = ranks.find(wanted)
        assert sum(region.num_elements for parts in found for _, region in parts) == sum(
            region.num_elements for _, region in wanted
        )

    return operation


def read_manifest(run: Simulation) -> Callable[[], object]:
    """Of that, the manifest."""
    name = run.name(STEPS[-1])
    return lambda: steps.read_checkpoint(run.store, steps.committed(View.of(run.store), name))


def candidates(run: Simulation) -> Callable[[], object]:
    """What rank 0 does to know which steps there are."""

    def operation() -> None:
        assert len(lineage.next_start(View.of(run.store)).candidates) >= 2

    return operation


def prune(run: Simulation) -> Callable[[], object]:
    """Retention after a commit: two of four steps go, with all their files."""

    def operation() -> None:
        view, gone = commit_step.retain(View.of(run.store), Keep(last=2))
        commit_step.collect(run.store, view.catalogue)
        assert len(gone) == len(STEPS) - 2

    return operation


_MEASURED = {
    operation.__name__: operation
    for operation in (write_part, commit, read_manifest, plan, reshard, candidates, prune)
}
_ONCE = {"prune"}


def measure(folder: Path, world: int, name: str) -> dict[str, float]:
    """In this process: median of a few times, and the most memory that the process ever had."""
    run = Simulation(folder, world)
    operation, seconds = _MEASURED[name](run), list[float]()
    cpu_seconds, queued_seconds = list[float](), list[float]()
    before = _peak_bytes()
    for _ in range(1 if name in _ONCE else _REPEATS):
        began, cpu_began, queued_began = time.perf_counter(), time.process_time(), _queued_s()
        operation()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
        queued_seconds.append(_queued_s() - queued_began)
    peak = _peak_bytes()
    return {
        "seconds": round(statistics.median(seconds), 4),
        "slowest_seconds": round(max(seconds), 4),
        "cpu_seconds": round(statistics.median(cpu_seconds), 4),
        "queued_seconds": round(statistics.median(queued_seconds), 4),
        "peak_bytes": peak,
        "grown_bytes": peak - before,
    }


def _queued_s() -> float:
    """How long this thread was ready and had no core: what is left of the clock's seconds is waiting for
    storage."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _peak_bytes() -> int:
    """Of this process since it was started; what getrusage says may be its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def _in_a_process(folder: Path, world: int, name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale", "--measure", name, "--ranks", str(world)]
    done = subprocess.run([*command, "--folder", str(folder)], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def simulate(world: int, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The figures of these names for so many ranks."""
    began = time.perf_counter()
    run = Simulation(folder, world)
    run.make()
    for step in STEPS:
        assert run.commit(step)
    if reshard.__name__ in names:
        run.fill(STEPS[-1], reshard(run))
    first, made = View.of(run.store).catalogue.checkpoints[0], run.folder / run.folder_of(STEPS[0]).path
    files = {
        "part": made / part_name(0, NONCE),
        "manifest": run.folder / first.manifest_path,
        "shard": made / shard_name(0, NONCE),
    }
    found: dict[str, Any] = {f"{each}_bytes": file.stat().st_size for each, file in files.items()}
    found |= {"ranks": world, "parts": run.nodes, "making_seconds": round(time.perf_counter() - began, 1)}
    return found | {name: _in_a_process(folder, world, name) for name in names}


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--folder", type=Path, help="where the runs are made; in memory if left out")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--only", nargs="+", choices=_MEASURED, default=list(_MEASURED), help="these figures")
    parser.add_argument("--measure", choices=_MEASURED, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.folder, arguments.ranks[0], arguments.measure)))
        return
    rows = []
    for world in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder or "/dev/shm") as folder:
            rows.append(simulate(world, Path(folder) / "run", arguments.only))
        print(_line(rows[-1]), flush=True)
    if arguments.json:
        parameters_count = sum(math.prod(shape) for _, shape in parameters())
        about = {
            "parameters": parameters_count,
            "leaves": len(leaves_of(0, 8)),
            "python": platform.python_version(),
        }
        about |= {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    cells = [f"{row['ranks']:6,} ranks", f"manifest {row['manifest_bytes'] / 2**20:.2f} MiB"]
    for name in (name for name in _MEASURED if name in row):
        each = row[name]
        times = (
            f"{each['seconds']:.3f} s ({each['cpu_seconds']:.3f} of CPU, {each['queued_seconds']:.3f} queued)"
        )
        cells.append(f"{name} {times}, {row[name]['peak_bytes'] / 2**20:.0f} MiB")
    return " | ".join(cells)


if __name__ == "__main__":
    main()
