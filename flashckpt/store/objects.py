"""A run on an object store: keys instead of folders, no renames or links, one object created at a time.

Owns what the store contract means in requests: which are made, in which order, how many bytes each. What a
request is to a server, and how its errors are told apart, is its client's: see obstore_client.py,
fsspec_client.py.
"""

from __future__ import annotations

import builtins
import errno
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

from flashckpt import _native
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.layout import PAGE, Layout
from flashckpt.format.records import CHUNK_BYTES, Contents
from flashckpt.store.base import (
    Capabilities,
    Entry,
    MemoryRange,
    Read,
    Written,
    matching,
    other_length,
    split,
    too_long,
)
from flashckpt.store.image_sums import ImageSums, each_piece
from flashckpt.store.listing import LARGEST_RECENT, Found, Listing, RecentObjects
from flashckpt.store.upload_rate import UploadRate

log = logging.getLogger(__name__)

PART_BYTES = 16 << 20
"""Of an upload, and of a ranged read: whole chunks. Larger where a shard would have too many of them."""
COMPRESSED_PART_BYTES = 8 << 20
"""Of what is made while it is sent: parts on their way are memory of this process."""
_MOST_PARTS = 10_000
_AT_ONCE = 8
_TRIES = 8
_MOST_WALKED = 1000
_DELAY_S = 30.0
"""Several writes, each tried for as long as a brief client tries: servers refuse for many seconds a key that
is written too often."""
RECENT_S = 2.0
"""So old the listing of a folder may be for who says that it need not be newer."""


class ObjectClient(Protocol):
    """Requests to one bucket. Keys are '/'-separated. Each tries again what may succeed later, for as long
    as its policy says, and then raises OSError: FileNotFoundError for a missing object alone, PermissionError
    where it is refused, ENOSPC where the bucket is full, ENODEV where it is missing, EREMOTEIO for the rest:
    EIO says that a disk has lost bytes (`LOST_BYTES`), and a server that is in trouble says nothing of them.

    An UncertainError says that a `put` may have been done."""

    @property
    def url(self) -> str:
        """As a user would name it; without credentials."""

    @property
    def server(self) -> str:
        """Which one it is, where the URL alone does not say: the same bucket's name on another is another."""

    @property
    def refusal(self) -> str:
        """Why no run is trained there; empty where one may be."""

    def brief(self) -> ObjectClient:
        """One like it that tries for some seconds only."""

    def renew(self, options: Mapping[str, Any]) -> None:
        """Requests from now on are made with these options, those of what `brief` has given, too. OptionError
        for what cannot be, and then nothing has changed."""

    def put(self, key: str, data: memoryview, *, mark: str | None) -> str | None:
        """One request; the version of what stands there now, empty where the server names none. With a mark,
        only where there is no such object: None where there is one; an object so made carries the mark."""

    def mark(self, key: str) -> str:
        """The mark that an object carries, empty where it carries none."""

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        """One object in parts, a few of them at once; nothing is there where it fails."""

    def get(self, key: str, max_bytes: int) -> tuple[bytes | memoryview | int, str]:
        """A whole object, or its length where that is larger; and its version, or nothing."""

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        """Fewer bytes where the object ends before, none where it ends before `start`."""

    def size(self, key: str) -> int: ...

    def list(self, prefix: str) -> builtins.list[Entry]:
        """What is below a prefix (empty, or with '/' at its end), to the next '/'; all pages of it."""

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with it."""

    def walk(self, prefix: str) -> Iterator[Found]:
        """All objects below a prefix, with '/' at its end; page by page."""

    def delete(self, keys: builtins.list[str]) -> None:
        """Those that are there."""


class UncertainError(OSError):
    """The answer to a request was lost: it may have been done."""


class ObjectStore:
    """See Store in base.py."""

    def __init__(self, client: ObjectClient, rate: UploadRate | None = None) -> None:
        self._client, self._rate, self._recent = client, rate or UploadRate(), RecentObjects()
        # By top folder: when it was last walked, and what was found.
        self._walked: dict[str, tuple[float, Listing]] = {}
        self._brief: ObjectStore | None = None

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def client(self) -> ObjectClient:
        return self._client

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_create=True,  # see check
            rename=False,
            is_shared=True,
            part_bytes=PART_BYTES,
            appends=False,
            delay_s=_DELAY_S,
        )

    def at_once(self, recent: str = "") -> ObjectStore:
        return _Look(self, recent)

    def brief(self) -> ObjectStore:
        if self._brief is None:
            brief = ObjectStore(self._client.brief(), self._rate)
            brief._recent, brief._walked, brief._brief = self._recent, self._walked, brief
            self._brief = brief
        return self._brief

    def place(self) -> str:
        return f"{self.url} {self._client.server}".rstrip()

    def check(self) -> None:
        """Some servers take the condition of a creation and ignore it: two would commit one step."""
        if self._client.refusal:
            raise RunError(
                f"{self.url}: no run is trained there, since {self._client.refusal}. Nothing was changed. "
                "What is there can be read. Use another storage for the run.",
                path=self.url,
            )
        key = f"probe-{secrets.token_hex(8)}"
        try:
            if not self._create(key, memoryview(b"1")) or self._create(key, memoryview(b"2")):
                raise RunError(
                    f"{self.url}: this server overwrites what is to be created (it ignores the condition, "
                    "If-None-Match on S3), so a commit there could overwrite another's. Nothing was changed. "
                    "Use another storage for the run.",
                    path=self.url,
                )
        finally:
            self._remove_probe(key)

    def _remove_probe(self, key: str) -> None:
        try:
            self._client.delete([key])
        except PermissionError as error:
            log.warning(
                "%s: with these credentials nothing may be deleted there (%s): what is to be kept no longer "
                "stays, and so does %s. Give them that right, if it is to go.",
                self.url, error.strerror, key,
            )  # fmt: skip
        except OSError:
            pass  # it is debris, which goes with the next attempt

    def move_to(self, url: str) -> None:
        raise AssertionError("a run on an object store does not move")

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        key = _key(path)
        found, version = self._client.get(key, max_bytes)
        if isinstance(found, int):
            raise too_long(path, found, max_bytes)
        data = bytes(found)
        self._recent.put(key, version, data)
        return data

    def fetch(self, paths: Iterable[str], max_bytes: int) -> None:
        """Nothing: what was read is found again only where a look has listed it."""

    def create(self, path: str, data: bytes) -> bool:
        self._rate.count(len(data))
        return self._create(_key(path), memoryview(data))

    def _create(self, key: str, data: memoryview) -> bool:
        """The mark tells an object of ours, of a try whose answer was lost, from another's of the same bytes:
        of two who claim one number, one alone may go on."""
        mark, is_uncertain = secrets.token_hex(8), False
        for attempt in range(_TRIES):
            try:
                version = self._client.put(key, data, mark=mark)
                if version is not None:
                    if len(data) <= LARGEST_RECENT:
                        self._recent.put(key, version, bytes(data))
                    self._made(Found(key, len(data), version=version))
                    return True
                # The client tries again by itself, too.
                return self._client.mark(key) == mark
            except UncertainError:
                is_uncertain = True
                if attempt + 1 == _TRIES:
                    raise
            except FileNotFoundError:
                # It was there, and somebody has removed it: ours, too, may have been that one.
                if is_uncertain or attempt + 1 == _TRIES:
                    raise OSError(errno.EREMOTEIO, "it was removed while it was made", key) from None
        raise AssertionError("an object was made for longer than it is tried")

    def _made(self, found: Found) -> None:
        """Told of what was created."""

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self._rate.count(len(data))
        self._client.put(_key(path), memoryview(data), mark=None)

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        try:
            before, _ = self._client.get(_key(path), max(0, max_bytes - len(data)))
        except FileNotFoundError:
            before = b""
        if isinstance(before, int):
            return False
        self._rate.count(len(before) + len(data))
        self._client.put(_key(path), memoryview(bytes(before) + data), mark=None)
        return True

    def copy(self, source: str, target: str) -> bool:
        _key(source), _key(target)
        return False

    def list(self, folder: str, named: re.Pattern[str] | None = None) -> builtins.list[Entry]:
        found = self._client.list(f"{_key(folder)}/" if folder else "")
        return sorted(matching(found, named), key=lambda entry: entry.name)

    def exists(self, path: str) -> bool:
        try:
            self._client.size(_key(path))
        except FileNotFoundError:
            return False
        return True

    def remove(self, path: str) -> None:
        self._client.delete([_key(path)])

    def remove_files(self, paths: Iterable[str]) -> None:
        if keys := [_key(path) for path in paths]:
            self._client.delete(keys)

    def remove_tree(self, path: str) -> None:
        key = _key(path)
        self._client.delete([key, *self._client.keys(f"{key}/")])

    # Shards

    def write_shard(
        self, path: str, layout: Layout, source: MemoryRange, *, threads: int = 2, progress: int = 0
    ) -> Written:
        key, num_bytes = _key(path), layout.num_bytes
        if os.fstat(source.descriptor).st_size < source.offset + num_bytes:
            raise OSError(errno.EIO, "the region ends before the bytes that are to be written", path)
        sums, part_bytes = ImageSums(layout, CHUNK_BYTES), _part_bytes(num_bytes)
        parts = _parts(source, num_bytes, part_bytes, sums, progress, self._rate)
        if num_bytes <= part_bytes:
            is_new = self._create(key, next(parts))
            next(parts, None)
        elif is_new := not self.exists(path):
            self._client.upload(key, parts, part_bytes)
        if not is_new:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return Written(digests=sums.digests(), checksums=sums.checksums())

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        key, part_bytes = _key(path), _part_bytes(most_bytes, COMPRESSED_PART_BYTES)
        rest, first = self._paced(parts), list[bytes]()
        for part in rest:
            first.append(part)
            if sum(map(len, first)) > part_bytes:
                break
        if sum(map(len, first)) <= part_bytes:
            is_new = self._create(key, memoryview(b"".join(first)))
        elif is_new := not self.exists(path):
            self._client.upload(key, map(memoryview, chain(first, rest)), part_bytes)
        if not is_new:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _paced(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        for part in parts:
            self._rate.wait_for(len(part))
            yield part

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
        shard, key = contents.shard, _key(path)
        if (size := self._client.size(key)) != shard.num_bytes:
            raise other_length(path, size, shard.num_bytes)
        sums = ImageSums(contents.layout(), shard.chunk_bytes)

        def fetch(start: int, stop: int) -> None:
            data = self._range(path, start, stop)
            # What is checked is what the caller will use.
            sums.add(start, data, None if into is None else into[start:stop])
            if progress:
                _native.fetch_add(progress, stop - start)

        step = max(1, PART_BYTES // shard.chunk_bytes) * shard.chunk_bytes
        each_piece(path, size, step, _AT_ONCE, fetch, cancel)
        return sums.compared(shard)

    def read_bytes(self, path: str, offset: int, num_bytes: int, file_bytes: int | None = None) -> bytes:
        return bytes(self._range(path, offset, offset + num_bytes))

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        return None

    def view(self, path: str, num_bytes: int) -> memoryview:
        if (size := self._client.size(_key(path))) != num_bytes:
            raise other_length(path, size, num_bytes)
        memory = memoryview(_native.Mapping(-(-max(1, num_bytes) // PAGE) * PAGE))[:num_bytes]

        def fetch(start: int, stop: int) -> None:
            memory[start:stop] = self._range(path, start, stop)

        each_piece(path, num_bytes, PART_BYTES, _AT_ONCE, fetch)
        return memory

    def _range(self, path: str, start: int, stop: int) -> memoryview:
        data = self._client.get_range(_key(path), start, stop) if start < stop else memoryview(b"")
        if len(data) != stop - start:
            raise other_length(path, start + len(data), stop)
        return data


class _Look(ObjectStore):
    """The same objects by names and lengths as they were when a folder above them was first asked for; what
    was created through it since is among them. For one thread."""

    def __init__(self, store: ObjectStore, recent: str) -> None:
        self._client, self._rate = store._client, store._rate
        self._recent, self._walked, self._brief = store._recent, store._walked, None
        when, listing = self._walked.get(recent, (-math.inf, None))
        is_recent = listing is not None and time.monotonic() - when < RECENT_S
        self._listings = [listing] if listing is not None and is_recent else []
        self._are_own = False

    def list(self, folder: str, named: re.Pattern[str] | None = None) -> builtins.list[Entry]:
        if not folder:
            return super().list(folder, named)
        return matching(self._listing(folder).entries(_key(folder)), named)

    def exists(self, path: str) -> bool:
        if "/" not in path:
            return super().exists(path)
        return self._listing(path.rpartition("/")[0]).get(_key(path)) is not None

    def read(self, path: str, max_bytes: int) -> bytes:
        if "/" not in path:
            return super().read(path, max_bytes)
        found = self._listing(path.rpartition("/")[0]).get(_key(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if found.num_bytes > max_bytes:
            raise too_long(path, found.num_bytes, max_bytes)
        data = self._recent.get(found.key, found.version)
        return super().read(path, max_bytes) if data is None else data

    def fetch(self, paths: Iterable[str], max_bytes: int) -> None:
        found = [self._listing(path.rpartition("/")[0]).get(_key(path)) for path in paths]
        wanted = [each.key for each in found if each is not None and each.num_bytes <= max_bytes]

        def fetch(key: str) -> None:
            with suppress(FileNotFoundError, DamagedError):
                self.read(key, max_bytes)

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
            for each in [pool.submit(fetch, key) for key in wanted]:
                each.result()

    def _listing(self, folder: str) -> Listing:
        for each in self._listings:
            if each.covers(folder):
                return each
        key, began = _key(folder), time.monotonic()
        found = Listing(key, self._client.walk(f"{key}/"))
        self._listings.append(found)
        self._are_own = False
        if "/" not in key and found.count <= _MOST_WALKED:
            self._walked[key] = began, found
        return found

    def _own(self) -> builtins.list[Listing]:
        """To be changed: looks of other threads may have the same ones, which stay as they are."""
        if not self._are_own:
            self._listings, self._are_own = [each.copy() for each in self._listings], True
        return self._listings

    def _made(self, found: Found) -> None:
        for each in self._own():
            if each.covers(found.key):
                each.add(found)

    def _changed(self, path: str) -> None:
        """It is listed anew when it is next asked for."""
        self._listings = [each for each in self._listings if not each.covers(path)]

    def create(self, path: str, data: bytes) -> bool:
        is_new = super().create(path, data)
        if not is_new or (path.count("/") and self._listing(path.rpartition("/")[0]).get(path) is None):
            self._changed(path)
        return is_new

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self._changed(path)
        super().replace(path, data, durable=durable)

    def remove(self, path: str) -> None:
        self._changed(path)
        super().remove(path)

    def remove_files(self, paths: Iterable[str]) -> None:
        gone = [*paths]
        super().remove_files(gone)
        for path in gone:
            for each in self._own():
                each.remove(path)

    def remove_tree(self, path: str) -> None:
        """What was there."""
        self.remove_files(self._listing(path).paths(path))


def _key(path: str) -> str:
    return "/".join(split(path))


def _part_bytes(num_bytes: int, usual: int = PART_BYTES) -> int:
    least = -(-num_bytes // _MOST_PARTS)
    return max(usual, -(-least // CHUNK_BYTES) * CHUNK_BYTES)


def _parts(
    source: MemoryRange, num_bytes: int, part_bytes: int, sums: ImageSums, progress: int, rate: UploadRate
) -> Iterator[memoryview]:
    """The parts of an image, each mapped alone: memory that is mapped raises a process's OOM score. What was
    taken is counted as done with the next. Each comes no sooner than it may be sent."""
    for start in range(0, num_bytes, part_bytes):
        size, begin = min(part_bytes, num_bytes - start), source.offset + start
        rate.wait_for(size)
        # Its sums are those of the very memory that is sent.
        part = memoryview(_native.Mapping(source.descriptor, begin, size))
        sums.add(start, part)
        yield part
        if progress:
            _native.fetch_add(progress, size)
