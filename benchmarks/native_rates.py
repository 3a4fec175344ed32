"""Rates of the native engine beside what they are measured against: memcpy, torch's copy_, the raw disk.

    python benchmarks/native_rates.py [--gib 1] [--repeats 5] [--folder build]

Variants of one group take turns, so that all see the same neighbours; the best of all turns is reported, with
its ratio to the group's first row. GiB/s. The folder must be on the disk that is to be measured.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashckpt import _native

CHUNK = 4 << 20


def u64(*values: int) -> array[int]:
    return array("Q", values)


def report(title: str, num_bytes: int, repeats: int, group: dict[str, Callable[[], object]]) -> None:
    best = dict.fromkeys(group, float("inf"))
    for _ in range(repeats):
        for name, call in group.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    print(f"\n{title}")
    first = best[next(iter(best))]
    for name, seconds in best.items():
        print(f"  {name:38s} {num_bytes / 2**30 / seconds:8.2f} GiB/s   x{first / seconds:5.2f}")


def torch_copy(to: torch.Tensor, source: torch.Tensor, threads: int) -> None:
    torch.set_num_threads(threads)
    to.copy_(source)


def memory_rates(num_bytes: int, repeats: int) -> None:
    source = np.random.default_rng(0).integers(0, 2**63, num_bytes // 8, dtype=np.int64)
    to = np.ones_like(source)
    a, b, out = source.ctypes.data, to.ctypes.data, u64(0)
    out_address = _native.address_of(out)
    tensors = torch.from_numpy(to), torch.from_numpy(source)
    args = u64(a), u64(b), u64(num_bytes), out_address
    report("one leaf, memory to memory", num_bytes, repeats, {
        "memcpy": lambda: ctypes.memmove(b, a, num_bytes),
        "torch copy_, 1 thread": lambda: torch_copy(*tensors, 1),
        "torch copy_, 2 threads": lambda: torch_copy(*tensors, 2),
        "copy_digest, 1 thread": lambda: _native.copy_digest(*args, 1),
        "copy_digest, 2 threads": lambda: _native.copy_digest(*args, 2),
        "digest, 1 thread": lambda: _native.digest(a, num_bytes),
        "digest, 2 threads": lambda: _native.digest_many(u64(a), u64(num_bytes), out_address, 2),
        "xxh3_128": lambda: _native.xxh3_128_at(a, num_bytes),
    })  # fmt: skip


def small_rates(repeats: int) -> None:
    sizes = np.random.default_rng(1).integers(64, 10_000, 10_000) * 4
    tensors = [torch.ones(int(size) // 4) for size in sizes]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    image = np.ones(int(sizes.sum()), np.uint8)
    ends = np.cumsum(sizes)
    sources = array("Q", [tensor.data_ptr() for tensor in tensors])
    places = array("Q", [int(end - size) + image.ctypes.data for end, size in zip(ends, sizes, strict=True)])
    args = sources, places, array("Q", sizes.tolist())
    digests = array("Q", bytes(80_000))
    address = _native.address_of(digests)

    def copy_each() -> None:
        torch.set_num_threads(1)
        for to, source in zip(copies, tensors, strict=True):
            to.copy_(source)

    report("10,000 small leaves", image.nbytes, repeats, {
        "torch copy_, one by one": copy_each,
        "copy_digest, 1 thread": lambda: _native.copy_digest(*args, address, 1),
        "copy_digest, 2 threads": lambda: _native.copy_digest(*args, address, 2),
    })  # fmt: skip


def each_chunk(num_bytes: int, workers: int, work: Callable[[int, memoryview], object]) -> None:
    """What a plain program would do: `workers` threads, each with one aligned buffer."""

    def run(first: int) -> None:
        buffer = memoryview(mmap.mmap(-1, CHUNK))
        buffer[:] = b"\x5a" * CHUNK
        for offset in range(first * CHUNK, num_bytes, workers * CHUNK):
            work(offset, buffer)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def raw_write(path: Path, num_bytes: int, workers: int) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    os.posix_fallocate(fd, 0, num_bytes)
    each_chunk(num_bytes, workers, lambda offset, buffer: os.pwrite(fd, buffer, offset))
    os.fdatasync(fd)
    os.close(fd)


def raw_read(path: Path, num_bytes: int, workers: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    each_chunk(num_bytes, workers, lambda offset, buffer: os.preadv(fd, [buffer], offset))
    os.close(fd)


def buffered_write(path: Path, region: mmap.mmap) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    view, done = memoryview(region), 0
    while done < len(view):
        done += os.write(fd, view[done : done + CHUNK])
    view.release()
    os.fdatasync(fd)
    os.close(fd)


def file_rates(folder: Path, num_bytes: int, repeats: int) -> None:
    fd = os.memfd_create("rates")
    os.ftruncate(fd, num_bytes)
    region = mmap.mmap(fd, num_bytes)
    for offset in range(0, num_bytes, 1 << 20):
        region[offset : offset + (1 << 20)] = os.urandom(1 << 16) * 16
    ours, raw, other = folder / "rates-ours", folder / "rates-raw", folder / "rates-buffered"
    leaves: dict[str, Any] = {"leaf_offsets": u64(0), "leaf_sizes": u64(num_bytes)}
    sums: list[bytes] = []

    def write(threads: int) -> None:
        ours.unlink(missing_ok=True)
        sums[:] = [_native.write_file(ours, fd, 0, num_bytes, threads=threads, **leaves)[1]]

    report("region to file", num_bytes, repeats, {
        "raw O_DIRECT, 2 in flight": lambda: raw_write(raw, num_bytes, 2),
        "raw O_DIRECT, 4 in flight": lambda: raw_write(raw, num_bytes, 4),
        "write and fdatasync, no audit": lambda: buffered_write(other, region),
        "write_file, threads=1": lambda: write(1),
        "write_file, threads=2": lambda: write(2),
    })  # fmt: skip
    address = _native.address_of(region)

    def read(copies: list[int], threads: int) -> None:
        plan = _native.FilePlan(
            num_bytes=num_bytes, chunk_bytes=CHUNK, checksums=sums[0], copies=u64(*copies),
            parts=u64(0, num_bytes, 0, 0), ranges=u64(), digests=_native.LeafDigests(u64(num_bytes)),
        )  # fmt: skip
        plan.read(ours, threads=threads)

    report("file to memory", num_bytes, repeats, {
        "raw O_DIRECT, 2 in flight": lambda: raw_read(raw, num_bytes, 2),
        "raw O_DIRECT, 4 in flight": lambda: raw_read(raw, num_bytes, 4),
        "FilePlan.read into memory, threads=1": lambda: read([0, address, num_bytes, 0], 1),
        "FilePlan.read into memory, threads=2": lambda: read([0, address, num_bytes, 0], 2),
        "FilePlan.read, compared alone, threads=2": lambda: read([], 2),
    })  # fmt: skip
    for path in (ours, raw, other):
        path.unlink()
    os.close(fd)


def watch_rates(repeats: int) -> None:
    owners = [torch.nn.Parameter(torch.ones(4)) for _ in range(10_000)]
    state = {str(i): owner for i, owner in enumerate(owners)}
    watch = _native.Watch([(state, name) for name in state], owners)
    out = array("Q", bytes(80_000))
    best = float("inf")
    for _ in range(max(repeats, 10)):
        start = time.perf_counter()
        watch.changed(out)
        best = min(best, time.perf_counter() - start)
    print(f"\nWatch over 10,000 leaves: {best * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    args = parser.parse_args()
    num_bytes = max(1, round(args.gib * 2**30 / CHUNK)) * CHUNK
    args.folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}, {num_bytes / 2**30:.2f} GiB a leaf, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    memory_rates(num_bytes, args.repeats)
    small_rates(args.repeats)
    watch_rates(args.repeats)
    file_rates(args.folder, num_bytes, args.repeats)


if __name__ == "__main__":
    main()
