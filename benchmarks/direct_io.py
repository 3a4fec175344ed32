"""The disk's own rate: O_DIRECT with several requests in flight, from and to plain memory. Owns nothing of a
checkpoint: no digest, no checksum, no copy. What is measured here is the limit that the others stand beside.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MIB = 2**20
# (requests in flight, bytes of one): the better of the two is the disk's rate. More did not help anywhere.
SHAPES = ((8, 4 * _MIB), (4, 16 * _MIB))


class DirectRefused(Exception):
    """The file system refuses O_DIRECT; there is no limit of this kind to compare with."""


def write_s(path: Path, num_bytes: int, shape: tuple[int, int]) -> float:
    """Seconds to create, allocate, write and sync a file of `num_bytes`, a multiple of 16 MiB."""
    began = time.perf_counter()
    handle = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
        _in_flight(shape, num_bytes, lambda block, offset: os.pwrite(handle, block, offset))
        os.fdatasync(handle)
    finally:
        os.close(handle)
    return time.perf_counter() - began


def read_s(path: Path, num_bytes: int, shape: tuple[int, int]) -> float:
    """Seconds to read the first `num_bytes` of a file."""
    began = time.perf_counter()
    handle = _open(path, os.O_RDONLY)
    try:
        _in_flight(shape, num_bytes, lambda block, offset: os.preadv(handle, [block], offset))
    finally:
        os.close(handle)
    return time.perf_counter() - began


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        raise DirectRefused(str(error)) from error


def _in_flight(shape: tuple[int, int], num_bytes: int, move: Callable[[memoryview, int], int]) -> None:
    """Each thread has one request under way, from memory of its own that no other thread touches."""
    requests, block_bytes = shape

    def worker(index: int) -> None:
        block = _memory(block_bytes)
        for offset in range(index * block_bytes, num_bytes, requests * block_bytes):
            wanted = min(block_bytes, num_bytes - offset)
            moved = move(memoryview(block)[:wanted], offset)
            if moved != wanted:
                raise OSError(f"a request of {wanted} bytes moved {moved}")

    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(worker, range(requests)))


def _memory(num_bytes: int) -> mmap.mmap:
    """Aligned to a page, and with bytes that no layer below can leave out."""
    block = mmap.mmap(-1, num_bytes)
    block[:] = os.urandom(_MIB) * (num_bytes // _MIB)
    return block
