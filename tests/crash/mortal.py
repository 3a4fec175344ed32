"""Storage that asks, before each call that changes something, whether its process still lives."""

from __future__ import annotations

import os
from abc import abstractmethod
from array import array
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

    def create(self, name: str, folder: int) -> int:
        self.live()
        return super().create(name, folder)

    def write(self, file: int, data: memoryview) -> int:
        self.live()
        return super().write(file, data)

    def write_shard(
        self, path: str, source: int, offset: int, num_bytes: int, **how: Any
    ) -> tuple[bytes, bytes, bool]:
        return written_by_calls(self, path, os.pread(source, num_bytes, offset), **how)

    def sync(self, file: int) -> None:
        self.live()

    def sync_folder(self, folder: int) -> None:
        self.live()

    def link(self, source: str, target: str, source_folder: int, target_folder: int) -> None:
        self.live()
        super().link(source, target, source_folder, target_folder)

    def rename(self, source: str, target: str, folder: int) -> None:
        self.live()
        super().rename(source, target, folder)

    def make_folder(self, name: str, folder: int) -> None:
        self.live()
        super().make_folder(name, folder)

    def remove(self, name: str, folder: int) -> None:
        self.live()
        super().remove(name, folder)

    def remove_folder(self, name: str, folder: int) -> None:
        self.live()
        super().remove_folder(name, folder)
