"""Upload and download of a step through flashckpt's store and through raw clients, on one real S3 server.

    python -m benchmarks.stores [--gib 1] [--rounds 3] [--pages huge] [--s3fs-python PYTHON] [--json FILE]

Starts Ceph's gateway on loopback. The clients take turns, in another order in each round, each in a process
of its own; seconds are those of the transfer alone, by the clock and of CPU in all its threads, for each GiB.
The bytes lie in shared memory, in huge pages where the kernel gives them cheaply, as a slot does, unless
`--pages` says which. Those that are downloaded go into memory that the process has had before, where the
client can read into memory; what memory costs that is new, as a resume's is, stands beside. Then: what a
commit of a small step takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.stores import commits
from benchmarks.stores.clients import CLIENTS, LEAVES, PART_BYTES, UPLOADS_ONLY, Place, boto, layout_of
from flashckpt import _native
from flashckpt.memory import memory_budget
from tests.stores import s3_server as s3

_WAYS = ("upload", "download")
_STORED = "stored"
_LIMIT_S = 600.0
_ROOT = Path(__file__).resolve().parents[2]

Found = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", nargs="+", default=list(CLIENTS), choices=list(CLIENTS))
    parser.add_argument("--pages", default="slot", choices=["slot", "huge", "small"], help="of what is sent")
    parser.add_argument("--s3fs-python", default=sys.executable, help="of an environment that has s3fs")
    parser.add_argument("--json", type=Path, help="where every single figure is written")
    arguments = parser.parse_args()
    if lacking := s3.missing():
        sys.exit(f"no S3 server can be started here: {', '.join(lacking)} missing (see {s3.__name__})")
    leaf_bytes = max(1, round(arguments.gib * 2**30 / LEAVES / 4096)) * 4096
    num_bytes = layout_of(leaf_bytes).num_bytes
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as folder:
        server = s3.S3Server(Path(folder) / "ceph")
        try:
            bench = Bench(server, Path(memory), leaf_bytes, arguments.pages, arguments.s3fs_python)
            found = bench.measured(arguments.clients, arguments.rounds)
            small = commits.measured(server, bench.place, Path(memory) / "runtime")
        finally:
            server.close()
        machine = describe(Path(folder))
    _show(found, bench.lacking, num_bytes, arguments.rounds, machine)
    print(f"\n{bench.huge_share:.0%} of the memory that was sent came in huge pages")
    commits.show(small)
    if arguments.json:
        about = {"machine": machine, "num_bytes": num_bytes, "lacking": bench.lacking}
        about["huge_share"] = bench.huge_share
        arguments.json.write_text(json.dumps({**about, "transfers": found, "commits": small}, indent=1))


class Bench:
    """The bytes, where they go, and the turns. `lacking` says why a client has none, `huge_share` how much of
    the memory came in huge pages."""

    def __init__(
        self, server: s3.S3Server, memory: Path, leaf_bytes: int, pages: str, s3fs_python: str
    ) -> None:
        file, self._s3fs_python = memory / "bytes", s3fs_python
        self._memory = {"file": str(file), "leaf_bytes": leaf_bytes, "sums": str(memory / "sums")}
        before, num_bytes = _huge_bytes(), layout_of(leaf_bytes).num_bytes
        _fill(file, num_bytes, pages)
        self.huge_share = max(0.0, min(1.0, (_huge_bytes() - before) / num_bytes))
        self.lacking: dict[str, str] = {}
        self.place = Place(server.endpoint, s3.ACCESS_KEY, s3.SECRET_KEY, s3.REGION, "bench", _STORED)
        self._boto = boto(self.place)
        self._boto.create_bucket(Bucket=self.place.bucket)
        self._turn("flashckpt", "upload", self.place)

    def measured(self, clients: list[str], rounds: int) -> dict[str, Found]:
        found: dict[str, Found] = {way: {} for way in _WAYS}
        for number in range(rounds):
            at = number % len(clients)
            for client in clients[at:] + clients[:at]:
                for way in _WAYS[:1] if client in UPLOADS_ONLY else _WAYS:
                    if client not in self.lacking:
                        self._add(found[way], client, way, number)
        return found

    def _add(self, found: Found, client: str, way: str, number: int) -> None:
        # Flashckpt creates a name once.
        key = _STORED if way == "download" else f"{client.split(',')[0]}-{number}"
        seconds = self._turn(client, way, replace(self.place, key=key))
        if "lacking" in seconds:
            self.lacking[client] = seconds["lacking"]
            return
        if way == "upload":
            self._boto.delete_object(Bucket=self.place.bucket, Key=key)
        row = found.setdefault(client, {"wall_s": [], "cpu_s": []})
        for name, each in row.items():
            each.append(seconds[name])
        print(f"{way} {client}: {seconds['wall_s']:.2f} s, CPU {seconds['cpu_s']:.2f} s a GiB", flush=True)

    def _turn(self, client: str, way: str, place: Place) -> dict[str, Any]:
        job = {"client": client, "way": way, "place": asdict(place), "memory": self._memory}
        python = self._s3fs_python if client == "s3fs" else sys.executable
        command = [python, "-m", "benchmarks.stores.turn", json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, cwd=_ROOT)
        if done.returncode:
            sys.exit(f"{client}, {way}: {done.stderr}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result


def _fill(path: Path, num_bytes: int, pages: str) -> None:
    """Random bytes, in memory that is taken as that of a slot is, or in pages of one size."""
    with open(path, "w+b") as file:
        if pages == "slot":
            memory_budget.take(file.fileno(), num_bytes)
        elif pages == "huge" and not _native.allocate_huge(file.fileno(), 0, num_bytes):
            sys.exit("this kernel gives no huge pages for shared memory")
        random = np.random.default_rng(0)
        for start in range(0, num_bytes, PART_BYTES):
            os.pwrite(file.fileno(), random.bytes(min(PART_BYTES, num_bytes - start)), start)


def _huge_bytes() -> int:
    """Of all shared memory of the machine, which nothing else takes meanwhile."""
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(field[1]) << 10 for field in fields if field[0] in ("ShmemHugePages:", "FileHugePages:"))


def _show(
    found: dict[str, Found], lacking: dict[str, str], num_bytes: int, rounds: int, machine: dict[str, Any]
) -> None:
    print(
        f"\n{num_bytes / 2**30:.2f} GiB, medians of {rounds} (least to most), s a GiB; {machine['cores']} "
        f"cores {machine['processor']}, load {machine['load_average'][0]:.1f}\n"
    )
    print("| | " + " | ".join(f"{way}, clock | {way}, CPU" for way in _WAYS) + " |")
    print("| --- " * (1 + 2 * len(_WAYS)) + "|")
    for client in CLIENTS:
        if client in lacking:
            print(f"| {client} | cannot run here: {lacking[client]} |" + " |" * (2 * len(_WAYS) - 1))
        elif client in found[_WAYS[0]]:
            rows = [found[way].get(client) for way in _WAYS]
            cells = ["" if row is None else _cell(row[name]) for row in rows for name in ("wall_s", "cpu_s")]
            print(f"| {client} | " + " | ".join(cells) + " |")
    for way in _WAYS:
        if {"flashckpt", "obstore"} <= found[way].keys():
            _compare(way, found[way]["flashckpt"], found[way]["obstore"])


def _compare(way: str, ours: dict[str, list[float]], raw: dict[str, list[float]]) -> None:
    rate = [theirs / own for own, theirs in zip(ours["wall_s"], raw["wall_s"], strict=True)]
    cpu = [own / theirs for own, theirs in zip(ours["cpu_s"], raw["cpu_s"], strict=True)]
    print(
        f"\n{way}: flashckpt has {statistics.median(rate):.0%} of obstore's rate and takes "
        f"{statistics.median(cpu):.2f} × its CPU (medians of the rounds)"
    )


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
