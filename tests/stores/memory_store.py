"""Two stores in memory, the environment of the protocol's model checker.

Owns what one request does to the files, and nothing of the protocol. `apply` is a pure function from files
and a request to files and an answer; a `Server` carries requests out, or replays answers that were given
before.

`FolderStore` has the semantics of a local folder: exclusive creation, atomic replacement, links, folders
that must be there for a replacement. `object_store` is the package's own `ObjectStore` over a client whose
every request, and every page of a listing, is one request here.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from flashckpt import _native
from flashckpt.format.layout import Layout
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.store.base import (
    Capabilities,
    Entry,
    LengthError,
    MemoryRange,
    Store,
    Written,
    matching,
    split,
    too_long,
)
from flashckpt.store.objects import Found, ObjectStore
from tests.contracts.flat_store import FlatStore, _digests, _image

PAGE_KEYS = 4


class File(NamedTuple):
    data: bytes
    mark: str = ""


Files = Mapping[str, File | None]
"""By path; None is a folder, which only the store of folders has."""


class Request(NamedTuple):
    """`kind` is one of READS or of: create, replace, link, put, remove, delete."""

    kind: str
    path: str
    data: bytes = b""
    other: str = ""

    @property
    def is_read(self) -> bool:
        return self.kind in READS

    @property
    def is_listing(self) -> bool:
        return self.kind in ("list", "page")

    def __str__(self) -> str:
        after = f" after {self.other}" if self.kind == "page" and self.other else ""
        return f"{self.kind} {self.path}{after}"


READS = frozenset({"read", "stat", "list", "page"})
_MISSING = ("error", errno.ENOENT)


def apply(files: Files, request: Request) -> tuple[Files, Any]:
    """The files after a request, and its answer. The same mapping where nothing changed."""
    kind, path, data, other = request
    found = files.get(path)
    if kind == "read":
        return files, found if found is not None else _MISSING
    if kind == "stat":
        return files, (path in files, None if found is None else len(found.data))
    if kind == "list":
        return files, _listed(files, path)
    if kind == "page":
        return files, _page(files, path, other, "/" if data else "")
    if kind == "create":
        if path in files:
            return files, False
        return {**files, **_folders(files, path), path: File(data)}, True
    if kind == "replace":
        if path.rpartition("/")[0] not in files:
            return files, _MISSING
        return {**files, path: File(data)}, True
    if kind == "link":
        if found is None:
            return files, _MISSING
        if other in files:
            return files, False
        return {**files, **_folders(files, other), other: found}, True
    if kind == "put":
        if other and path in files:
            return files, False
        return {**files, path: File(data, other)}, True
    if (
        kind == "remove"
        and path in files
        and found is None
        and any(each.startswith(f"{path}/") for each in files)
    ):
        return files, False
    assert kind in ("remove", "delete"), kind
    return {each: file for each, file in files.items() if each != path} if path in files else files, True


def cut_short(files: Files, request: Request) -> Files | None:
    """The files where the process dies in the middle of a request: a temporary file. None where it is
    atomic."""
    if request.kind not in ("create", "replace"):
        return None
    folder, _, name = request.path.rpartition("/")
    if request.kind == "replace" and folder not in files:
        return None
    return {**files, **_folders(files, request.path), f"{folder}/.{name}.{'d' * 16}.tmp": File(b"")}


def _folders(files: Files, path: str) -> dict[str, None]:
    names = path.split("/")[:-1]
    return {"/".join(names[:depth]): None for depth in range(1, len(names) + 1)}


def _listed(files: Files, folder: str) -> tuple[tuple[str, bool, int], ...]:
    prefix = f"{folder}/"
    found = [
        (path[len(prefix) :], file is None, 0 if file is None else len(file.data))
        for path, file in files.items()
        if path.startswith(prefix) and "/" not in path[len(prefix) :]
    ]
    return tuple(sorted(found))


def _page(files: Files, prefix: str, after: str, delimiter: str) -> tuple[tuple[str, int, str], ...]:
    """The next names behind `after`, each to its end or to the delimiter: (name, bytes, version)."""
    names: dict[str, tuple[int, str]] = {}
    for path, file in files.items():
        if file is not None and path.startswith(prefix):
            inner, cut, _ = (
                path[len(prefix) :].partition(delimiter) if delimiter else (path[len(prefix) :], "", "")
            )
            if inner + cut > after:
                names[inner + cut] = (0, "") if cut else (len(file.data), version(file))
    return tuple((name, *names[name]) for name in sorted(names)[:PAGE_KEYS])


def version(file: File) -> str:
    return _native.xxh3_128(file.data).hex()


class Server(Protocol):
    def ask(self, request: Request) -> Any: ...


class LiveServer:
    """Carries requests out at once."""

    def __init__(self, files: Files | None = None) -> None:
        self.files: Files = dict(files or {})
        self._lock = threading.Lock()

    def ask(self, request: Request) -> Any:
        with self._lock:
            self.files, answer = apply(self.files, request)
            return answer


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _taken(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


class _Reads:
    """What FlatStore asks of its bucket to read a file."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store

    def get(self, key: str, start: int = 0, num_bytes: int = -1) -> bytes:
        data = self._store.read_file(key)
        return data[start:] if num_bytes < 0 else data[start : start + num_bytes]

    def head(self, key: str) -> int:
        return len(self._store.read_file(key))


class FolderStore(FlatStore):
    """A local folder. A call is one request, but for the removal of several files, where each is one."""

    def __init__(self, server: Server, root: str) -> None:
        self.url, self._server, self._root = f"memory/{root}", server, root
        self._bucket = _Reads(self)  # type: ignore[assignment]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create=True, rename=True, is_shared=None, part_bytes=0)

    def _path(self, path: str) -> str:
        return "/".join([self._root, *split(path)])

    def _ask(self, kind: str, path: str, data: bytes = b"", other: str = "") -> Any:
        answer = self._server.ask(Request(kind, self._path(path), data, other))
        if answer == _MISSING:
            raise _missing(path)
        return answer

    def read_file(self, path: str) -> bytes:
        return bytes(self._ask("read", path).data)

    def read(self, path: str, max_bytes: int) -> bytes:
        data = self.read_file(path)
        if len(data) > max_bytes:
            raise too_long(path, len(data), max_bytes)
        return data

    def create(self, path: str, data: bytes) -> bool:
        return bool(self._ask("create", path, data))

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self._ask("replace", path, data)

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        try:
            before = self.read_file(path)
        except FileNotFoundError:
            return self.create(path, data)
        if before and len(before) + len(data) > max_bytes:
            return False
        self.replace(path, before + data)
        return True

    def copy(self, source: str, target: str) -> bool:
        return bool(self._ask("link", source, other=self._path(target)))

    def list(self, folder: str, named: re.Pattern[str] | None = None) -> builtins.list[Entry]:
        found = [Entry(name, is_folder, size, 1.0) for name, is_folder, size in self._ask("list", folder)]
        return matching(found, named)

    def exists(self, path: str) -> bool:
        return self._ask("stat", path)[1] is not None

    def remove(self, path: str) -> None:
        self._ask("remove", path)

    def remove_tree(self, path: str) -> None:
        for entry in self.list(path):
            (self.remove_tree if entry.is_folder else self.remove)(f"{path}/{entry.name}")
        self.remove(path)

    def write_shard(
        self, path: str, layout: Layout, source: MemoryRange, *, threads: int = 2, progress: int = 0
    ) -> Written:
        self._path(path)
        image = _image(source, layout.num_bytes)
        if progress:
            _native.fetch_add(progress, len(image))
        chunks = [image[start : start + CHUNK_BYTES] for start in range(0, len(image), CHUNK_BYTES)]
        if not self.create(path, bytes(image)):
            raise _taken(path)
        return Written(digests=_digests(image, layout), checksums=b"".join(map(_native.xxh3_128, chunks)))

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        if not self.create(path, b"".join(parts)):
            raise _taken(path)

    def view(self, path: str, num_bytes: int) -> memoryview:
        data = bytearray(self.read_file(path))
        if len(data) != num_bytes:
            raise LengthError(f"{len(data)} bytes, where {num_bytes} were written", path=path)
        return memoryview(data)


class MemoryClient:
    """See ObjectClient in flashckpt/store/objects.py. Each page of a listing is a request."""

    is_trainable, refusal, server = True, "", "memory"

    def __init__(self, server: Server, root: str) -> None:
        self.url, self._server, self._root = f"memory://{root}", server, root

    def brief(self) -> MemoryClient:
        return self

    def renew(self, options: Mapping[str, Any]) -> None:
        raise AssertionError("it has no options")

    def _ask(self, kind: str, key: str, data: bytes = b"", other: str = "") -> Any:
        answer = self._server.ask(Request(kind, f"{self._root}/{key}", data, other))
        if answer == _MISSING:
            raise _missing(key)
        return answer

    def put(self, key: str, data: memoryview, *, mark: str | None) -> str | None:
        file = File(bytes(data), mark or "")
        return version(file) if self._ask("put", key, *file) else None

    def mark(self, key: str) -> str:
        return str(self._ask("read", key).mark)

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        self._ask("put", key, b"".join(map(bytes, parts)))

    def get(self, key: str, max_bytes: int) -> tuple[bytes | memoryview | int, str]:
        file = self._ask("read", key)
        return (file.data if len(file.data) <= max_bytes else len(file.data)), version(file)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        return memoryview(self._ask("read", key).data)[start:stop]

    def size(self, key: str) -> int:
        size = self._ask("stat", key)[1]
        if size is None:
            raise _missing(key)
        return int(size)

    def _pages(self, prefix: str, delimiter: bytes) -> Iterator[tuple[str, int, str]]:
        after = ""
        while page := self._ask("page", prefix, delimiter, after):
            yield from page
            after = page[-1][0]
            if len(page) < PAGE_KEYS:
                return

    def list(self, prefix: str) -> builtins.list[Entry]:
        return [
            Entry(name.rstrip("/"), name.endswith("/"), size, 0.0 if name.endswith("/") else 1.0)
            for name, size, _ in self._pages(prefix, b"/")
        ]

    def keys(self, prefix: str) -> Iterator[str]:
        return (prefix + name for name, _, _ in self._pages(prefix, b""))

    def walk(self, prefix: str) -> Iterator[Found]:
        return (Found(prefix + name, size, 1.0, found) for name, size, found in self._pages(prefix, b""))

    def delete(self, keys: builtins.list[str]) -> None:
        for key in keys:
            self._ask("delete", key)


def object_store(server: Server, root: str) -> Store:
    return ObjectStore(MemoryClient(server, root))
