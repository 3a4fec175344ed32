"""A view of a store for a dry run: reads see the store and the changes made here, which stay in this process.

The changes are kept as an object store keeps files. Small files are kept whole. Of a shard only the length is
kept: its bytes are read and summed, as a real write does, and then dropped. Any thread may use it.
"""

from __future__ import annotations

import builtins
import errno
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from flashckpt import _native
from flashckpt.store.base import Capabilities, Entry, Store
from flashckpt.store.objects import ObjectStore

_SHARD = ".safetensors"


class OverlayStore(ObjectStore):
    """See Store in base.py."""

    def __init__(self, base: Store) -> None:
        self._base, self._changes = base, _Changes(base)
        super().__init__(self._changes)

    @property
    def capabilities(self) -> Capabilities:
        return self._base.capabilities

    def place(self) -> str:
        return self._base.place()

    def check(self) -> None:
        """Do nothing: whether the store takes writes shows only when it is written."""

    def brief(self) -> OverlayStore:
        return self

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        return True  # a line of the ledger, which no dry run reads

    def read_chunks(
        self, path: str, plan: _native.FilePlan, *, threads: int = 2, progress: int = 0, cancel: int = 0
    ) -> None:
        self._changes.check_stored(path)
        self._base.read_chunks(path, plan, threads=threads, progress=progress, cancel=cancel)

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        self._changes.check_stored(path)
        return self._base.descriptor(path, num_bytes)


class _Changes:
    """See ObjectClient in objects.py. `_files`: the bytes of each file that was written, the length of a
    shard, or None for a file of the store that was removed."""

    server, is_read_only = "", False

    def __init__(self, base: Store) -> None:
        self._base, self.url = base, base.url
        self._files: dict[str, bytes | int | None] = {}

    def brief(self) -> _Changes:
        return self

    def renew(self, options: Mapping[str, Any]) -> None:
        raise AssertionError("the store itself has the options")

    def put(self, key: str, data: memoryview, *, is_new: bool = False) -> bool:
        if is_new and self._is_file(key):
            return False
        self._files[key] = len(data) if key.endswith(_SHARD) else bytes(data)
        return True

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        self._files[key] = sum(map(len, parts))

    def get(self, key: str, max_bytes: int) -> bytes | int:
        if key not in self._files:
            return self._base.read(key, max_bytes)
        data = self._written(key)
        return data if isinstance(data, int) or len(data) <= max_bytes else len(data)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        if key not in self._files:
            return memoryview(self._base.read_bytes(key, start, stop - start))
        data = self._written(key)
        if isinstance(data, int):
            raise OSError(errno.ENODATA, "a dry run keeps no bytes of a shard", key)
        return memoryview(data)[start:stop]

    def size(self, key: str) -> int:
        folder, _, name = key.rpartition("/")
        for each in self.list(f"{folder}/" if folder else ""):
            if each.name == name and not each.is_folder:
                return each.num_bytes
        raise _missing(key)

    def list(self, prefix: str) -> builtins.list[Entry]:
        changed, now_s = dict(self._files), time.time()  # other threads write
        gone = {key for key, data in changed.items() if data is None}
        found = {
            each.name: each
            for each in self._base.list(prefix.rstrip("/"))
            if f"{prefix}{each.name}" not in gone
        }
        for key, data in changed.items():
            if data is None or not key.startswith(prefix):
                continue
            name, _, below = key[len(prefix) :].partition("/")
            num_bytes = data if isinstance(data, int) else len(data)
            found[name] = Entry(name, bool(below), 0 if below else num_bytes, now_s)
        return [*found.values()]

    def delete(self, keys: builtins.list[str]) -> None:
        for key in keys:
            if self._is_file(key) or not self.list(f"{key}/"):
                self._files[key] = None

    def check_stored(self, path: str) -> None:
        """OSError if a file was changed here."""
        if path in self._files:
            self._written(path)
            raise OSError(errno.ENODATA, "a dry run keeps no bytes of a shard", path)

    def _is_file(self, key: str) -> bool:
        return self._files[key] is not None if key in self._files else self._base.exists(key)

    def _written(self, key: str) -> bytes | int:
        if (data := self._files[key]) is None:
            raise _missing(key)
        return data


def _missing(key: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
