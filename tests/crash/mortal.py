"""Storage that asks, before each call that changes something, whether its process still lives; and storage
whose process kills itself at its n-th call."""

from __future__ import annotations

import os
import signal
from abc import abstractmethod
from array import array
from collections.abc import Callable
from typing import Any

from flashckpt import _native
from flashckpt.store.local import System


def written_by_calls(
    system: System, path: str, image: bytes, *, leaf_offsets: array[int], leaf_sizes: array[int],
    chunk_bytes: int, **how: Any,
) -> tuple[bytes, bytes, bool]:  # fmt: skip
    """What the native engine does with a shard, by the calls of a system that is tested."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = system.create(os.path.basename(path), folder)
        try:
            rest = memoryview(image)
            while rest:
                rest = rest[system.write(file, rest) :]
            system.sync(file)
        finally:
            os.close(file)
    finally:
        os.close(folder)
    buffer = bytearray(image)
    address = _native.address_of(buffer)
    leaves = zip(leaf_offsets, leaf_sizes, strict=True)
    digests = array("Q", [_native.digest(address + offset, size) for offset, size in leaves])
    chunks = [image[start : start + chunk_bytes] for start in range(0, len(image), chunk_bytes)]
    return digests.tobytes(), b"".join(map(_native.xxh3_128, chunks)), True


class MortalSystem(System):
    """`live` is called first, and does not return where the process ends."""

    @abstractmethod
    def live(self) -> None: ...

    def write_shard(
        self, path: str, source: int, offset: int, num_bytes: int, **how: Any
    ) -> tuple[bytes, bytes, bool]:
        return written_by_calls(self, path, os.pread(source, num_bytes, offset), **how)

    def sync(self, file: int) -> None:
        self.live()

    def sync_folder(self, folder: int) -> None:
        self.live()


def _asking(name: str) -> Callable[..., Any]:
    def call(self: MortalSystem, *arguments: Any) -> Any:
        self.live()
        return getattr(System, name)(self, *arguments)

    return call


for _name in ("create", "write", "link", "rename", "make_folder", "remove", "remove_folder"):
    setattr(MortalSystem, _name, _asking(_name))


class KilledAtCall(MortalSystem):
    """Kills its process at the call number `last`: before it, or half way through a write."""

    def __init__(self, last: int) -> None:
        self.last, self.calls = last, 0

    def live(self) -> None:
        self.calls += 1
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, file: int, data: memoryview) -> int:
        if self.calls + 1 == self.last:
            System.write(self, file, data[: len(data) // 2])
        return super().write(file, data)
