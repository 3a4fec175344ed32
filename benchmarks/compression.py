"""Shards that are compressed on their way, beside the same sent as they are: `python -m
benchmarks.compression`.

    python -m benchmarks.compression [--steps 300] [--mib 256] [--rounds 3] [--json FILE]

The bytes are those of a trained model: `examples/tiny_gpt` with AdamW after some hundred steps, in float32
and in bfloat16, its weights and both moments repeated until there are so many (a frame is compressed by
itself, and repeats nothing). They are sent, by the code that sends them to a bucket, to a client that takes
so many bytes a second and throws them away; and read back from memory, every byte checked.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.machine import describe
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.manifest import COMPRESSED
from flashckpt.format.records import Contents
from flashckpt.options import Compress
from flashckpt.store.base import Entry, MemoryRange, Store, Written
from flashckpt.store.compressed_file import is_worth, write_compressed
from flashckpt.store.local import LocalStore
from flashckpt.store.objects import ObjectStore, UploadRate
from flashckpt.store.read_plan import read_shard

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tiny_gpt"
_NAME = "shard-00000-00000000.safetensors"
_KINDS = {"weights": "w", "first moment": "m", "second moment": "v"}
_RATES = (0, 25, 50, 100, 200, 400, 800)
"""MB/s of the client; 0 is as fast as it can take them."""

State = dict[str, torch.Tensor]


def trained(dtype: torch.dtype, steps: int) -> State:
    """Weights and moments of the example after so many steps, under w., m. and v."""
    sys.path.insert(0, str(_EXAMPLE))
    from model import GPT  # type: ignore[import-not-found]
    from text import Windows, library_sources  # type: ignore[import-not-found]

    torch.manual_seed(1)
    model = GPT(context=128).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Windows(library_sources(256 * 1024), 128), batch_size=8, shuffle=True)
    done = 0
    while done < steps:
        for text, following in loader:
            loss = cross_entropy(model(text).flatten(0, 1).float(), following.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            if done == steps:
                break
    found: State = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        found |= {
            f"w.{name}": parameter.detach(),
            f"m.{name}": state["exp_avg"],
            f"v.{name}": state["exp_avg_sq"],
        }
    return found


class Shard:
    """An image of tensors in memory, again and again until it has so many bytes."""

    def __init__(self, state: State, num_bytes: int) -> None:
        size = sum(each.nbytes for each in state.values())
        turns = max(1, round(num_bytes / size))
        tensors = {f"{name}.{turn:04d}": each for turn in range(turns) for name, each in state.items()}
        leaves = [
            Leaf(name=name, dtype=str(each.dtype).removeprefix("torch."), shape=tuple(each.shape))
            for name, each in tensors.items()
        ]
        self.layout = Layout.of(leaves)
        descriptor = os.memfd_create("shard")
        os.write(descriptor, self.layout.header)
        for leaf in self.layout.leaves:
            data = tensors[leaf.name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
            os.pwrite(descriptor, data, self.layout.data_start + leaf.offset)
        self.range = MemoryRange(descriptor, 0)

    def contents(self, written: Written) -> Contents:
        return Contents.of(_NAME, self.layout, written.checksums, written.digests)


class Sink:
    """A bucket that forgets."""

    url, server, is_read_only = "sink://", "", False

    def brief(self) -> Sink:
        return self

    def renew(self, options: Mapping[str, Any]) -> None:
        raise AssertionError

    def put(self, key: str, data: memoryview, *, is_new: bool = False) -> bool:
        return True

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        for _ in parts:
            pass

    def get(self, key: str, max_bytes: int) -> bytes | memoryview | int:
        raise FileNotFoundError(key)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        raise FileNotFoundError(key)

    def size(self, key: str) -> int:
        raise FileNotFoundError(key)

    def list(self, prefix: str) -> builtins.list[Entry]:
        return []

    def delete(self, keys: builtins.list[str]) -> None:
        pass


@dataclass(frozen=True)
class Turn:
    seconds: float
    cpu_s: float
    stored_bytes: int


def write(store: Store, shard: Shard, how: Compress) -> tuple[str, Written, int]:
    """Write the shard as a copy does. Returns its name and length, too."""
    is_packed = is_worth(how, store, shard.layout, shard.range)
    name = _NAME + COMPRESSED if is_packed else _NAME
    store.remove(name)
    if is_packed:
        return name, *write_compressed(store, name, shard.layout, shard.range)
    return name, store.write_shard(name, shard.layout, shard.range), shard.layout.num_bytes


def timed(store: Store, shard: Shard, how: Compress) -> Turn:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    _, _, stored_bytes = write(store, shard, how)
    return Turn(time.perf_counter() - began_s, time.process_time() - began_cpu_s, stored_bytes)


def sent(shard: Shard, rate: int, how: Compress, rounds: int) -> dict[str, float]:
    """Medians."""
    store = ObjectStore(Sink(), UploadRate(rate * 10**6))
    turns = [timed(store, shard, how) for _ in range(rounds)]
    gib = shard.layout.num_bytes / 2**30
    return {
        "seconds": statistics.median(each.seconds for each in turns),
        "cpu_s_per_gib": statistics.median(each.cpu_s for each in turns) / gib,
        "ratio": turns[-1].stored_bytes / shard.layout.num_bytes,
    }


def read(shard: Shard, how: Compress, rounds: int) -> dict[str, float]:
    """From a folder in memory, into memory that was touched already."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = LocalStore(folder)
        name, written, _ = write(store, shard, how)
        contents, into = shard.contents(written), memoryview(bytearray(shard.layout.num_bytes))
        seconds, cpu = array("d"), array("d")
        for _ in range(rounds):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            found = read_shard(store, name, contents, into)
            seconds.append(time.perf_counter() - began_s)
            cpu.append(time.process_time() - began_cpu_s)
            assert not found.bad_chunks
            assert not found.wrong_leaves(contents)
    gib = shard.layout.num_bytes / 2**30
    return {"seconds": statistics.median(seconds), "cpu_s_per_gib": statistics.median(cpu) / gib}


def measured(dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Any]:
    state, rounds = trained(dtype, arguments.steps), arguments.rounds
    name, found = str(dtype).removeprefix("torch."), dict[str, Any]()
    for kind, letter in _KINDS.items():
        part = {key: each for key, each in state.items() if key.startswith(f"{letter}.")}
        found[kind] = sent(Shard(part, 64 << 20), 0, "zstd", 1)["ratio"]
        print(f"{name:9} {kind:14} {100 * found[kind]:.1f} % of the bytes")
    shard = Shard(state, arguments.mib << 20)
    mb = shard.layout.num_bytes / 1e6
    for rate in _RATES:
        rows = {how: sent(shard, rate, how, rounds) for how in get_args(Compress)}
        found[f"sent at {rate} MB/s"] = rows
        told = ", ".join(
            f"{how} {row['seconds']:.2f} s ({mb / row['seconds']:.0f} MB/s, CPU "
            f"{row['cpu_s_per_gib']:.2f} s/GiB, {100 * row['ratio']:.0f} %)"
            for how, row in rows.items()
        )
        print(f"{name:9} {mb:.0f} MB to a client of {rate or 'any'} MB/s: {told}")
    ways: tuple[Compress, ...] = ("none", "zstd")
    for how in ways:
        row = found[f"read {how}"] = read(shard, how, rounds)
        print(
            f"{name:9} read and checked, {how}: {mb / row['seconds']:.0f} MB/s, "
            f"CPU {row['cpu_s_per_gib']:.2f} s/GiB"
        )
    os.close(shard.range.descriptor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where every figure is written")
    arguments = parser.parse_args()
    found = {str(dtype): measured(dtype, arguments) for dtype in (torch.float32, torch.bfloat16)}
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": describe(Path("/dev/shm")), "figures": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
