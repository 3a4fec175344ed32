"""An object store whose objects are files beside each other: no folders, links, renames or appending."""

import builtins
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from flashckpt.store.base import Entry
from flashckpt.store.objects import ObjectStore


class FlatClient:
    """See ObjectClient in flashckpt/store/objects.py."""

    server, is_read_only = "", False

    def __init__(self, url: str) -> None:
        self.url, self._folder = url, unquote(url.partition("://")[2])

    def brief(self) -> "FlatClient":
        return self

    def renew(self, options: Mapping[str, Any]) -> None:
        raise AssertionError("it has no options")

    def put(self, key: str, data: memoryview, *, is_new: bool = False) -> bool:
        return self._write(key, [data], is_new=is_new)

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        self._write(key, parts, is_new=False)

    def _write(self, key: str, parts: Iterable[memoryview], *, is_new: bool) -> bool:
        os.makedirs(self._folder, exist_ok=True)
        upload = f"{self._folder}/.upload-{secrets.token_hex(8)}"
        try:
            with open(upload, "xb") as file:
                file.writelines(parts)
            if is_new:
                os.link(upload, self._file(key))
            else:
                os.replace(upload, self._file(key))
        except FileExistsError:
            return False
        finally:
            Path(upload).unlink(missing_ok=True)
        return True

    def get(self, key: str, max_bytes: int) -> memoryview | int:
        data = self.get_range(key, 0, max_bytes + 1)
        return data if len(data) <= max_bytes else self.size(key)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        with open(self._file(key), "rb") as file:
            file.seek(start)
            return memoryview(file.read(stop - start))

    def size(self, key: str) -> int:
        return os.stat(self._file(key)).st_size

    def list(self, prefix: str) -> builtins.list[Entry]:
        found: dict[str, Entry] = {}
        for file in os.listdir(self._folder) if os.path.isdir(self._folder) else ():
            key = unquote(file)
            if file.startswith(".upload-") or not key.startswith(prefix):
                continue
            name, is_folder, _ = key[len(prefix) :].partition("/")
            try:
                about = os.stat(f"{self._folder}/{file}")
            except FileNotFoundError:
                continue
            size, modified_s = (0, 0.0) if is_folder else (about.st_size, about.st_mtime)
            found[name] = Entry(name, bool(is_folder), size, modified_s)
        return [*found.values()]

    def delete(self, keys: builtins.list[str]) -> None:
        for key in keys:
            Path(self._file(key)).unlink(missing_ok=True)

    def _file(self, key: str) -> str:
        return f"{self._folder}/{quote(key, safe='')}"


class FlatStore(ObjectStore):
    delay_s = 0.0

    def __init__(self, url: str) -> None:
        super().__init__(FlatClient(url))
