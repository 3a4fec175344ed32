"""A bucket in the memory of one process, for tests that need no server."""

import builtins
import errno
import os
from collections.abc import Iterable, Mapping
from typing import Any

from flashckpt.store.base import Entry


class MemoryClient:
    """See ObjectClient in flashckpt/store/objects.py. `listed`: the prefix of each name in a listing."""

    url, server, is_read_only = "memory://bucket", "", False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.listed: list[str] = []

    def brief(self) -> "MemoryClient":
        return self

    def renew(self, options: Mapping[str, Any]) -> None:
        raise AssertionError("it has no options")

    def put(self, key: str, data: memoryview, *, is_new: bool = False) -> bool:
        if is_new and key in self.objects:
            return False
        self.objects[key] = bytes(data)
        return True

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        self.objects[key] = b"".join(map(bytes, parts))

    def get(self, key: str, max_bytes: int) -> bytes | int:
        data = self._data(key)
        return data if len(data) <= max_bytes else len(data)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        return memoryview(self._data(key))[start:stop]

    def size(self, key: str) -> int:
        return len(self._data(key))

    def list(self, prefix: str) -> builtins.list[Entry]:
        found: dict[str, Entry] = {}
        for key in [key for key in [*self.objects] if key.startswith(prefix)]:
            name, is_folder, _ = key[len(prefix) :].partition("/")
            found[name] = Entry(name, bool(is_folder), 0 if is_folder else len(self.objects[key]), 1.0)
        self.listed += [prefix] * len(found)
        return [*found.values()]

    def delete(self, keys: builtins.list[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def _data(self, key: str) -> bytes:
        if key not in self.objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return self.objects[key]
