"""A store whose shards may stand compressed: every name, length and range above it is that of the plain file.

Owns which file of the store below has a shard's bytes, and the reading of ranges out of frames. A shard that
stands both ways with one length is the same one twice: it is read as it is. Of files of several lengths,
which only an error puts under one name, each is listed, and that is read which has the length of the record.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import PAGE, Layout
from flashckpt.format.records import Contents
from flashckpt.options import Compress
from flashckpt.store.base import (
    Capabilities,
    Entry,
    LengthError,
    MemoryRange,
    Read,
    Store,
    Written,
    other_length,
)
from flashckpt.store.compressed_file import (
    Table,
    codec,
    compressed_name,
    damaged,
    may_be_compressed,
    plain_name,
    read_table,
)
from flashckpt.store.compression import Compression
from flashckpt.store.image_sums import ImageSums, each_piece

_PIECE_BYTES = 8 << 20
"""Plain bytes that a thread reads and unpacks at once: whole frames."""
_FRAMES_AT_ONCE = 4
_AT_ONCE = 8
"""Requests, where each takes a round trip."""
_FOLDERS = 8
_TABLES = 64

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class _File:
    """A compressed file in the store below. `is_alone`: no plain one of its length stands beside it."""

    path: str
    num_bytes: int
    stored_bytes: int
    is_alone: bool


_Packed = dict[str, tuple[_File, ...]]
"""Compressed files of a folder by the names of the plain ones."""


class _Memory:
    """Which compressed files some folders had when they were last listed, and the tables of some. Files of
    one name never change; where one was removed and made again, reading finds it out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: OrderedDict[str, _Packed] = OrderedDict()
        self._tables: OrderedDict[_File, Table] = OrderedDict()

    def folder(self, folder: str) -> _Packed | None:
        with self._lock:
            return self._folders.get(folder)

    def files(self, path: str) -> tuple[_File, ...]:
        """What may be read in a plain file's place."""
        folder, _, name = path.rpartition("/")
        return tuple(each for each in (self.folder(folder) or {}).get(name, ()) if each.is_alone)

    def put(self, folder: str, files: _Packed) -> None:
        with self._lock:
            self._folders[folder] = files
            self._folders.move_to_end(folder)
            while len(self._folders) > _FOLDERS:
                self._folders.popitem(last=False)

    def forget(self, path: str) -> None:
        with self._lock:
            found = self._folders.pop(path.rpartition("/")[0], {})
            for each in (file for files in found.values() for file in files):
                self._tables.pop(each, None)

    def table(self, file: _File) -> Table | None:
        with self._lock:
            return self._tables.get(file)

    def put_table(self, file: _File, table: Table) -> None:
        with self._lock:
            self._tables[file] = table
            while len(self._tables) > _TABLES:
                self._tables.popitem(last=False)


class CompressedStore:
    """See Store in base.py. `compression`: how shards are written, None where as they are."""

    def __init__(
        self, store: Store, compression: Compression | None = None, memory: _Memory | None = None
    ) -> None:
        self._store, self._compression = store, compression
        self._memory = memory if memory is not None else _Memory()

    @property
    def below(self) -> Store:
        """The store whose files these are."""
        return self._store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def place(self) -> str:
        return self._store.place()

    def check(self) -> None:
        self._store.check()

    def at_once(self, recent: str = "") -> CompressedStore:
        return CompressedStore(self._store.at_once(recent), self._compression, self._memory)

    def brief(self) -> CompressedStore:
        return CompressedStore(self._store.brief(), self._compression, self._memory)

    def move_to(self, url: str) -> None:
        self._store.move_to(url)

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        return self._store.read(path, max_bytes)

    def fetch(self, paths: Iterable[str], max_bytes: int) -> None:
        self._store.fetch(paths, max_bytes)

    def create(self, path: str, data: bytes) -> bool:
        return self._store.create(path, data)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self._store.replace(path, data, durable=durable)

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        return self._store.append(path, data, max_bytes)

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        self._store.write_parts(path, parts, most_bytes)

    # What may be a shard

    def copy(self, source: str, target: str) -> bool:
        def copy(file: _File) -> bool:
            return not self.exists(target) and self._store.copy(
                file.path, compressed_name(target, file.num_bytes)
            )

        return self._either(source, None, lambda: self._store.copy(source, target), copy)

    def list(self, folder: str, named: re.Pattern[str] | None = None) -> builtins.list[Entry]:
        # Shards alone stand compressed, and no pattern matches their names.
        return self._listed(folder)[0] if named is None else self._store.list(folder, named)

    def _listed(self, folder: str) -> tuple[builtins.list[Entry], _Packed]:
        """What is in a folder, and what of it stands compressed. Others may list at once, and an older look:
        what was found is not to be taken out of the memory again."""
        entries = self._store.list(folder)
        files = {(each.name, each.num_bytes) for each in entries if not each.is_folder}
        packed: _Packed = {}
        shown: builtins.list[Entry] = []
        for each in entries:
            plain = None if each.is_folder else plain_name(each.name)
            if plain is None:
                shown.append(each)
                continue
            name, num_bytes = plain
            path = f"{folder}/{each.name}" if folder else each.name
            file = _File(path, num_bytes, each.num_bytes, plain not in files)
            packed[name] = *packed.get(name, ()), file
            if file.is_alone:
                shown.append(Entry(name, False, num_bytes, each.modified_s, is_compressed=True))
        self._memory.put(folder, packed)
        return sorted(shown, key=lambda entry: entry.name) if packed else entries, packed

    def exists(self, path: str) -> bool:
        return self._store.exists(path) or bool(self._find(path))

    def remove(self, path: str) -> None:
        for each in self._files([path]):
            self._store.remove(each)

    def remove_files(self, paths: Iterable[str]) -> None:
        self._store.remove_files(self._files(paths))

    def remove_tree(self, path: str) -> None:
        self._store.remove_tree(path)

    def _files(self, paths: Iterable[str]) -> Iterator[str]:
        """These, and what stands compressed in their places. A folder that was listed is not listed again:
        who removes a file has seen it there, or has made it."""
        for path in paths:
            yield path
            if may_be_compressed(path):
                folder, _, name = path.rpartition("/")
                packed = self._memory.folder(folder)
                if packed is None:
                    _, packed = self._listed(folder)
                for found in packed.get(name, ()):
                    yield found.path

    # Shards

    def write_shard(
        self, path: str, layout: Layout, source: MemoryRange, *, threads: int = 2, progress: int = 0
    ) -> Written:
        how = self._compression
        if how is None:
            return self._store.write_shard(path, layout, source, threads=threads, progress=progress)
        if not how.is_worth(layout, source, threads, is_remote=self.capabilities.part_bytes > 0):
            began_s = time.monotonic()
            written = self._store.write_shard(path, layout, source, threads=threads, progress=progress)
            how.sent(layout.num_bytes, time.monotonic() - began_s)
            return written
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        written = how.write(self._store, path, layout, source, threads, progress)
        self._memory.forget(path)
        return written

    def read_ranges(
        self,
        path: str,
        contents: Contents,
        into: memoryview | None,
        *,
        threads: int = 2,
        progress: int = 0,
        cancel: int = 0,
    ) -> Read:
        def plain() -> Read:
            return self._store.read_ranges(
                path, contents, into, threads=threads, progress=progress, cancel=cancel
            )

        def compressed(file: _File) -> Read:
            return self._read_all(path, file, contents, into, threads, progress, cancel)

        return self._either(path, contents.shard.num_bytes, plain, compressed)

    def read_bytes(self, path: str, offset: int, num_bytes: int, file_bytes: int | None = None) -> bytes:
        def plain() -> bytes:
            return self._store.read_bytes(path, offset, num_bytes, file_bytes)

        def compressed(file: _File) -> bytes:
            if file_bytes is not None:
                _check_length(path, file, file_bytes)
            if offset + num_bytes > file.num_bytes:
                raise other_length(path, file.num_bytes, offset + num_bytes)
            data = bytearray(num_bytes)
            self._unpack(path, file, offset, memoryview(data))
            return bytes(data)

        folder = path.rpartition("/")[0]
        if file_bytes is not None and may_be_compressed(path) and self._memory.folder(folder) is None:
            # A piece of a plain file of another length tells nothing of that.
            self._listed(folder)
        return self._either(path, file_bytes, plain, compressed)

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        def compressed(file: _File) -> int | None:
            _check_length(path, file, num_bytes)
            return None

        return self._either(path, num_bytes, lambda: self._store.descriptor(path, num_bytes), compressed)

    def view(self, path: str, num_bytes: int) -> memoryview:
        def compressed(file: _File) -> memoryview:
            _check_length(path, file, num_bytes)
            memory = memoryview(_native.Mapping(-(-max(1, num_bytes) // PAGE) * PAGE))[:num_bytes]
            each_piece(
                path, num_bytes, _PIECE_BYTES, self._at_once(2),
                lambda start, stop: self._unpack(path, file, start, memory[start:stop]),
            )  # fmt: skip
            return memory

        return self._either(path, num_bytes, lambda: self._store.view(path, num_bytes), compressed)

    # ---- which file it is

    def _find(self, path: str) -> tuple[_File, ...]:
        if not may_be_compressed(path):
            return ()
        folder, _, name = path.rpartition("/")
        return self._listed(folder)[1].get(name, ())

    def _either(
        self,
        path: str,
        num_bytes: int | None,
        plain: Callable[[], _Found],
        compressed: Callable[[_File], _Found],
    ) -> _Found:
        """What is done with a file as it stands, with this length, if one is given. What was known of it may
        be of one that was removed."""
        known = self._memory.files(path)
        if files := tuple(each for each in known if num_bytes in (None, each.num_bytes)):
            try:
                return compressed(self._chosen(files, path, num_bytes))
            except (FileNotFoundError, DamagedError):
                self._memory.forget(path)
        try:
            return plain()
        except (FileNotFoundError, LengthError):
            if not (files := self._find(path)):
                raise
        return compressed(self._chosen(files, path, num_bytes))

    def _chosen(self, files: tuple[_File, ...], path: str, num_bytes: int | None) -> _File:
        """That of this length, if one is given, or any, whose length is then found to be another."""
        if len(files) == 1:
            return files[0]
        if num_bytes is not None:
            return next((each for each in files if each.num_bytes == num_bytes), files[0])
        sound = [each for each in files if self._has_table(each)]
        if len(sound) == 1:
            return sound[0]
        names = " and ".join(each.path.rpartition("/")[2] for each in files)
        raise DamagedError(
            f"{path} stands there compressed with several lengths: {names}. Nothing of them was used. "
            "`flashckpt show` says the length of each file of a step: remove the other.",
            path=path,
        )

    def _has_table(self, file: _File) -> bool:
        """Whether it is a compressed file of the length that its name says."""
        try:
            self._table(file)
        except DamagedError:
            return False
        return True

    # ---- reading

    def _table(self, file: _File) -> Table:
        table = self._memory.table(file)
        if table is None:
            table = read_table(
                lambda offset, num_bytes: self._store.read_bytes(file.path, offset, num_bytes),
                file.path, file.stored_bytes, file.num_bytes,
            )  # fmt: skip
            self._memory.put_table(file, table)
        return table

    def _unpack(self, path: str, file: _File, start: int, into: memoryview) -> None:
        """Bytes of the plain file from `start` on; a few frames a request."""
        table = self._table(file)
        frames = table.frames(start, start + len(into))
        for first in frames[::_FRAMES_AT_ONCE]:
            last = min(first + _FRAMES_AT_ONCE, frames.stop)
            begin = table.offsets[first]
            data = memoryview(self._store.read_bytes(file.path, begin, table.offsets[last] - begin))
            for index in range(first, last):
                frame = data[table.offsets[index] - begin : table.offsets[index + 1] - begin]
                _unpack_frame(path, table, index, frame, start, into)

    def _read_all(
        self, path: str, file: _File, contents: Contents, into: memoryview | None,
        threads: int, progress: int, cancel: int,
    ) -> Read:  # fmt: skip
        shard = contents.shard
        _check_length(path, file, shard.num_bytes)
        sums = ImageSums(contents.layout(), shard.chunk_bytes)

        def read(start: int, stop: int) -> None:
            data = memoryview(bytearray(stop - start)) if into is None else into[start:stop]
            self._unpack(path, file, start, data)
            sums.add(start, data)
            if progress:
                _native.fetch_add(progress, stop - start)

        piece = max(1, _PIECE_BYTES // shard.chunk_bytes) * shard.chunk_bytes
        each_piece(path, shard.num_bytes, piece, self._at_once(threads), read, cancel)
        return sums.compared(shard)

    def _at_once(self, threads: int) -> int:
        return max(1, threads, _AT_ONCE if self.capabilities.part_bytes else 1)


def compressing(store: Store, how: Compress) -> Store:
    """The same store, to which shards are written as `how` says."""
    if how == "none":
        return store
    return CompressedStore(below(store), Compression(how))


def below(store: Store) -> Store:
    """The store whose files they are, whatever they are read by."""
    return store.below if isinstance(store, CompressedStore) else store


def _unpack_frame(
    path: str, table: Table, index: int, frame: memoryview, start: int, into: memoryview
) -> None:
    """What a frame has of the bytes from `start` on."""
    begin, end = table.frame_of(index)
    low, high = max(begin, start), min(end, start + len(into))
    is_whole = (low, high) == (begin, end)
    room = into[low - start : high - start] if is_whole else memoryview(bytearray(end - begin))
    try:
        codec().unpack(table.widths, begin, frame, room)
    except ValueError as error:
        raise damaged(path, f"frame {index} cannot be unpacked: {error}") from error
    if not is_whole:
        into[low - start : high - start] = room[low - begin : high - begin]


def _check_length(path: str, file: _File, num_bytes: int) -> None:
    if file.num_bytes != num_bytes:
        raise other_length(path, file.num_bytes, num_bytes)
