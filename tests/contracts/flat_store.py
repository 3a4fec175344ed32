"""A store that behaves like an object store: no folders, links, renames or appending, exclusion only by
conditional create, listings in pages, shards sent in parts. Its objects are files.

`flat:///absolute/folder` names one, if the entry point that `installed` makes is on the import path. So
trainers, keepers and the shell of a test find it like a package's store.
"""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import secrets
from array import array
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from flashckpt import _native
from flashckpt.format.layout import Layout
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.store import ENTRY_POINTS
from flashckpt.store.base import (
    Capabilities,
    Entry,
    MemoryRange,
    Written,
    other_length,
    split,
    too_long,
)

PAGE_KEYS = 3
PART_BYTES = 1 << 20


def installed(folder: Path) -> str:
    """Make `folder` a folder of packages with this store, for PYTHONPATH and sys.path."""
    about = folder / "flat_store-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flat-store\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\nflat = tests.contracts.flat_store:FlatStore\n"
    )
    return str(folder)


class Bucket:
    """The server: objects under keys, and five requests. Each object is a file beside all others."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def put(self, key: str, parts: Iterable[bytes], *, only_if_new: bool = False) -> bool:
        os.makedirs(self.folder, exist_ok=True)
        name, upload = self._file(key), f"{self.folder}/.upload-{secrets.token_hex(8)}"
        try:
            with open(upload, "xb") as file:
                for part in parts:
                    assert len(part) <= PART_BYTES
                    file.write(part)
            if not only_if_new:
                os.replace(upload, name)
                return True
            os.link(upload, name)
        except FileExistsError:
            return False
        finally:
            Path(upload).unlink(missing_ok=True)
        return True

    def get(self, key: str, start: int = 0, num_bytes: int = -1) -> bytes:
        with open(self._file(key), "rb") as file:
            file.seek(start)
            return file.read(num_bytes)

    def head(self, key: str) -> int:
        return os.stat(self._file(key)).st_size

    def delete(self, key: str) -> None:
        Path(self._file(key)).unlink(missing_ok=True)

    def page(self, prefix: str, after: str, delimiter: str) -> list[tuple[str, int, float]]:
        """The next names after `after`, up to a limit, each complete or up to the delimiter."""
        names = {}
        try:
            files = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        for file in files:
            key = unquote(file)
            if file.startswith(".upload-") or not key.startswith(prefix):
                continue
            inner, cut, _ = (
                key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
            )
            if inner + cut > after:
                try:
                    found = os.stat(f"{self.folder}/{file}")
                except FileNotFoundError:
                    continue
                names[inner + cut] = found.st_size, found.st_mtime
        return [(name, *names[name]) for name in sorted(names)[:PAGE_KEYS]]

    def _file(self, key: str) -> str:
        return f"{self.folder}/{quote(key, safe='')}"


class FlatStore:
    """See Store in flashckpt/store/base.py."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._bucket = Bucket(unquote(url.partition("://")[2]))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create=True, is_folder=False)

    def brief(self) -> FlatStore:
        return self

    def place(self) -> str:
        return self.url

    def check(self) -> None:
        """Do nothing: a write reports a missing folder."""

    def move_to(self, url: str) -> None:
        raise AssertionError("it has no renames")

    def read(self, path: str, max_bytes: int) -> bytes:
        size = self._bucket.head(_key(path))
        if size > max_bytes:
            raise too_long(path, size, max_bytes)
        return self._bucket.get(_key(path))

    def create(self, path: str, data: bytes) -> bool:
        return self._bucket.put(_key(path), _parts(data), only_if_new=True)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self._bucket.put(_key(path), _parts(data))

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        try:
            before = self._bucket.get(_key(path))
        except FileNotFoundError:
            before = b""
        if before and len(before) + len(data) > max_bytes:
            return False
        return self._bucket.put(_key(path), _parts(before + data))

    def copy(self, source: str, target: str) -> bool:
        _key(source), _key(target)
        return False

    def list(self, folder: str) -> builtins.list[Entry]:
        prefix = f"{_key(folder)}/" if folder else ""
        entries, after = [], ""
        while page := self._bucket.page(prefix, after, "/"):
            after = page[-1][0]
            for name, size, when in page:
                is_folder = name.endswith("/")
                entries.append(Entry(name.rstrip("/"), is_folder, 0 if is_folder else size, when))
        return sorted(entries, key=lambda entry: entry.name)

    def exists(self, path: str) -> bool:
        try:
            self._bucket.head(_key(path))
        except FileNotFoundError:
            return False
        return True

    def remove(self, path: str) -> None:
        self._bucket.delete(_key(path))

    def remove_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.remove(path)

    def write_shard(
        self, path: str, layout: Layout, source: MemoryRange, *, threads: int = 2, progress: int = 0
    ) -> Written:
        key, image = _key(path), _image(source, layout.num_bytes)
        digests = _digests(image, layout)
        chunks = [image[start : start + CHUNK_BYTES] for start in range(0, len(image), CHUNK_BYTES)]
        if not self._bucket.put(key, _parts(image, progress), only_if_new=True):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return Written(digests=digests, checksums=b"".join(map(_native.xxh3_128, chunks)))

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        def cut() -> Iterable[bytes]:
            for part in parts:
                yield from _parts(part)

        if not self._bucket.put(_key(path), cut(), only_if_new=True):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def read_chunks(
        self, path: str, plan: _native.FilePlan, *, threads: int = 2, progress: int = 0, cancel: int = 0
    ) -> None:
        key = _key(path)
        if (size := self._bucket.head(key)) != plan.num_bytes:
            raise other_length(path, size, plan.num_bytes)
        for first, last in plan.left():
            for start in range(first * plan.chunk_bytes, last * plan.chunk_bytes, plan.chunk_bytes):
                if cancel and _native.load(cancel):
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), path)
                data = self._bucket.get(key, start, plan.chunk_bytes)
                plan.add(start, data)
                if progress:
                    _native.fetch_add(progress, len(data))

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        data = self._bucket.get(_key(path), offset, num_bytes)
        if len(data) != num_bytes:
            raise other_length(path, offset + len(data), offset + num_bytes)
        return data

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        return None


def _key(path: str) -> str:
    return "/".join(split(path))


def _parts(data: bytes | bytearray, progress: int = 0) -> Iterable[bytes]:
    for start in range(0, len(data), PART_BYTES):
        yield bytes(data[start : start + PART_BYTES])
        if progress:
            _native.fetch_add(progress, min(PART_BYTES, len(data) - start))


def _image(source: MemoryRange, num_bytes: int) -> bytearray:
    if os.fstat(source.descriptor).st_size < source.offset + num_bytes:
        raise OSError(errno.EIO, "the memory region is shorter than the shard")
    with mmap.mmap(source.descriptor, source.offset + num_bytes, prot=mmap.PROT_READ) as memory:
        return bytearray(memory[source.offset :])


def _digests(image: bytearray, layout: Layout) -> array[int]:
    address = _native.address_of(image) + layout.data_start
    return array("Q", [_native.digest(address + leaf.offset, leaf.num_bytes) for leaf in layout.leaves])
