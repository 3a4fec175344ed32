"""What the protocol asks of a store, and the loop that carries it out on stores that exist.

A function of the protocol is a generator. It yields one request at a time and is sent the answer, so that a
test can put the requests of several processes in every order, and fail or delay each of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from flashckpt.errors import DamagedError, RunError
from flashckpt.format.checked_json import JsonRecord
from flashckpt.format.manifest import File, PartHead
from flashckpt.format.names import DATA
from flashckpt.store.base import LOST_BYTES, Store, write_once

_T = TypeVar("_T")
Steps = Generator["Request", Any, _T]
"""A process: it yields requests, is sent their answers, and returns a value."""

_HEAD_BYTES = 64 << 10
"""The head of a part of eight ranks has a few KiB."""


@dataclass(frozen=True, slots=True)
class Request:
    """`store`: the name of a store, "home" or "mirror". Every request may raise OSError, with its effect
    unknown: it may also take effect later."""

    store: str


@dataclass(frozen=True, slots=True)
class Create(Request):
    """Create a file that is durable before its name is seen. The answer is whether it was done; False if the
    name is taken, perhaps by this request, if the store sent it twice."""

    path: str
    record: JsonRecord


@dataclass(frozen=True, slots=True)
class Put(Request):
    """Write a file durably. Other processes use its name for the same bytes alone. FileExistsError if another
    file has it."""

    path: str
    record: JsonRecord


@dataclass(frozen=True, slots=True)
class Read(Request):
    """The answer is the record, or None if the file does not exist. For a part it is the head; `num_bytes` is
    the length of the part. DamagedError, FormatError."""

    path: str
    kind: type[JsonRecord]
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Files(Request):
    """The answer has the length of each file of a folder by name, and shows every file that was there all the
    time."""

    folder: str


@dataclass(frozen=True, slots=True)
class Folders(Request):
    """The answer is a tuple with the names of the folders in a folder."""

    folder: str


@dataclass(frozen=True, slots=True)
class Has(Request):
    """The answer is whether a file has this length. A listing may be old, and the answer is not."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Delete(Request):
    """Delete files of a folder, in any order, and the folder if it is empty then. Those that are not there
    are passed over."""

    folder: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Copy(Request):
    """Copy a file to another store. The answer is the file as it is stored there: `.zst` is behind its name
    if it was compressed. None if the source does not exist."""

    path: str
    target: str
    target_path: str
    num_bytes: int


class Stores:
    """Carries requests out. `copy` copies a file between two stores."""

    def __init__(
        self, stores: Mapping[str, Store], *, copy: Callable[[Store, Store, Copy], File | None] | None = None
    ) -> None:
        self._stores, self._copy = stores, copy

    def run(self, steps: Steps[_T]) -> _T:
        """Run a process to its end. Raises what the stores raise, and what the process raises."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = self._carry_out(request)
                except (OSError, DamagedError) as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as ended:
            return cast(_T, ended.value)

    def _carry_out(self, request: Request) -> Any:
        store = self._stores[request.store]
        if isinstance(request, Delete):
            return _delete(store, request)
        if isinstance(request, Copy):
            assert self._copy is not None
            return self._copy(store, self._stores[request.target], request)
        if isinstance(request, (Create, Put)):
            return _write(store, request)
        try:
            return _look(store, request)
        except OSError as error:
            if error.errno in LOST_BYTES:
                raise DamagedError(f"{_path(request)}: {error}", path=_path(request)) from error
            raise
        except RunError as error:
            # A link in place of a folder, or another format: of a snapshot it concerns that snapshot alone.
            if _path(request).startswith(f"{DATA}/"):
                raise DamagedError(str(error), path=_path(request)) from error
            raise


def _look(store: Store, request: Request) -> Any:
    if isinstance(request, Read):
        return _read(store, request)
    if isinstance(request, Files):
        return {each.name: each.num_bytes for each in store.list(request.folder) if not each.is_folder}
    if isinstance(request, Folders):
        return tuple(each.name for each in store.list(request.folder) if each.is_folder)
    assert isinstance(request, Has), request
    return _has_file(store, request.path, request.num_bytes)


def _path(request: Request) -> str:
    return request.path if isinstance(request, (Read, Has)) else getattr(request, "folder", "")


def _write(store: Store, request: Create | Put) -> bool:
    """Create a file, once it is sure that it can be read back."""
    data, kind = request.record.to_bytes(), type(request.record)
    if kind.from_bytes(data, request.path) != request.record:
        raise ValueError(f"{request.path} would not be read back as it is written")
    if isinstance(request, Create):
        return store.create(request.path, data)
    write_once(store, request.path, data)
    return True


def _read(store: Store, request: Read) -> JsonRecord | None:
    with suppress(FileNotFoundError):
        if issubclass(request.kind, PartHead):  # the part may be much longer
            first = store.read_bytes(request.path, 0, min(request.num_bytes, _HEAD_BYTES))
            if (head := PartHead.from_prefix(first, request.path)) is not None:
                return head
        return request.kind.from_bytes(store.read(request.path, request.kind.MAX_BYTES), request.path)
    return None


def _has_file(store: Store, path: str, num_bytes: int) -> bool:
    """Whether a file has this length, although a listing made just now does not show it. Opens a local file:
    NFS then asks the server. Listings of object stores are never old."""
    if not store.is_folder:
        return False
    try:
        file = store.descriptor(path, num_bytes)
    except (FileNotFoundError, DamagedError):
        return False
    if file is not None:
        os.close(file)
    return file is not None


def _delete(store: Store, request: Delete) -> None:
    if request.names:
        store.remove_files(f"{request.folder}/{name}" for name in request.names)
    if store.is_folder and request.folder.startswith(f"{DATA}/"):
        store.remove(request.folder)
