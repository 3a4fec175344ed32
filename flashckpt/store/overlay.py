"""A view of a store for a dry run: reads see the store and the changes made here, which stay in this process.

Small files are kept whole. Of a shard only the length is kept: its bytes are read and summed, as a real write
does, and then dropped. Any thread may use it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashckpt import _native
from flashckpt.format.layout import Layout
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.store.base import (
    Capabilities,
    Entry,
    MemoryRange,
    Store,
    Written,
    other_length,
    split,
    too_long,
)
from flashckpt.store.read_plan import ImageSums

_PIECE_BYTES = 16 << 20


@dataclass
class _Changes:
    """`files`: the bytes of each file that was written, or the length of a shard. `removed`: paths of the
    store that are gone."""

    files: dict[str, bytes | int] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)

    def put(self, path: str, data: bytes | int) -> None:
        self.files[_key(path)] = data


class OverlayStore:
    """See Store in base.py."""

    def __init__(self, base: Store, changes: _Changes | None = None) -> None:
        self._base, self._changes = base, changes or _Changes()

    @property
    def url(self) -> str:
        return self._base.url

    @property
    def capabilities(self) -> Capabilities:
        return self._base.capabilities

    def place(self) -> str:
        return self._base.place()

    def check(self) -> None:
        """Do nothing: whether the store takes writes shows only when it is written."""

    def brief(self) -> OverlayStore:
        return OverlayStore(self._base.brief(), self._changes)

    def move_to(self, url: str) -> None:
        raise AssertionError("a dry run does not follow a run that moves")

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        data = self._found(path)
        if data is None:
            return self._base.read(path, max_bytes)
        if len(data) > max_bytes:
            raise too_long(path, len(data), max_bytes)
        return data

    def create(self, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        self._changes.put(path, data)
        return True

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self._changes.put(path, data)

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        before = self.read(path, max_bytes) if self.exists(path) else b""
        if before and len(before) + len(data) > max_bytes:
            return False
        self._changes.put(path, before + data)
        return True

    def list(self, folder: str) -> list[Entry]:
        key, now_s = _key(folder), time.time()
        prefix = f"{key}/" if key else ""
        entries = {
            entry.name: entry
            for entry in self._base.list(folder)
            if f"{prefix}{entry.name}" not in self._changes.removed
        }
        for path, data in list(self._changes.files.items()):  # other threads write
            if not path.startswith(prefix):
                continue
            name, _, below = path[len(prefix) :].partition("/")
            num_bytes = data if isinstance(data, int) else len(data)
            entries[name] = Entry(name, bool(below), 0 if below else num_bytes, now_s)
        return sorted(entries.values(), key=lambda entry: entry.name)

    def exists(self, path: str) -> bool:
        return self._base.exists(path) if not self._is_changed(path) else _key(path) in self._changes.files

    def remove(self, path: str) -> None:
        key = _key(path)
        if key in self._changes.files or self._base.exists(path) or not self.list(path):
            self._changes.files.pop(key, None)
            self._changes.removed.add(key)

    def remove_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.remove(path)

    # Shards

    def write_shard(
        self,
        path: str,
        layout: Layout,
        source: MemoryRange,
        *,
        threads: int = 2,
        progress: int = 0,
        replaces: bool = False,
    ) -> Written:
        if not replaces:
            self._check_new(path)
        sums, num_bytes = ImageSums(layout, CHUNK_BYTES), layout.num_bytes
        piece = memoryview(bytearray(min(num_bytes, _PIECE_BYTES)))
        for start in range(0, num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, num_bytes - start)
            # Not mapped: a disk that fails would be a SIGBUS.
            done = 0
            while done < size:
                got = os.preadv(source.descriptor, [piece[done:size]], source.offset + start + done)
                if not got:
                    raise OSError(errno.EIO, "the memory region is shorter than the shard", path)
                done += got
            sums.add(start, piece[:size])
            if progress:
                _native.fetch_add(progress, size)
        self._changes.put(path, num_bytes)
        return Written(digests=sums.digests(), checksums=sums.checksums())

    def write_parts(
        self, path: str, parts: Iterable[bytes], most_bytes: int, *, replaces: bool = False
    ) -> None:
        if not replaces:
            self._check_new(path)
        self._changes.put(path, sum(map(len, parts)))

    def read_chunks(
        self, path: str, plan: _native.FilePlan, *, threads: int = 2, progress: int = 0, cancel: int = 0
    ) -> None:
        self._check_stored(path)
        self._base.read_chunks(path, plan, threads=threads, progress=progress, cancel=cancel)

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        data = self._found(path)
        if data is None:
            return self._base.read_bytes(path, offset, num_bytes)
        if offset + num_bytes > len(data):
            raise other_length(path, len(data), offset + num_bytes)
        return data[offset : offset + num_bytes]

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        self._check_stored(path)
        return self._base.descriptor(path, num_bytes)

    # Changes

    def _is_changed(self, path: str) -> bool:
        key = _key(path)
        return key in self._changes.files or key in self._changes.removed

    def _found(self, path: str) -> bytes | None:
        """The bytes of a file that was written here; None for a file of the store."""
        data = self._changes.files.get(_key(path))
        if isinstance(data, int):
            raise OSError(errno.ENODATA, "a dry run keeps no bytes of a shard", path)
        if data is None and self._is_changed(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return data

    def _check_new(self, path: str) -> None:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _check_stored(self, path: str) -> None:
        if self._found(path) is not None:
            raise OSError(errno.ENODATA, "a dry run reads shards of the store alone", path)


def _key(path: str) -> str:
    return "/".join(split(path))
