"""A run on an object store: keys instead of folders, no renames or links, one object created at a time.

Owns how the store contract maps to requests: their kind, order and size. Clients own the requests themselves
and their errors: see obstore_client.py and fsspec_client.py.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from flashckpt import _native
from flashckpt.errors import OptionError, RunError
from flashckpt.format.layout import Layout
from flashckpt.format.manifest import COMPRESSED
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.store.base import (
    Entry,
    MemoryRange,
    Written,
    other_length,
    split,
    too_long,
)
from flashckpt.store.compressed_file import read_compressed
from flashckpt.store.read_plan import ImageSums, add_pieces

# ---- the limit of a node's upload rate to a store

OPTION = "max_upload_bytes_per_s"
_LEAST = 1 << 20


class UploadRate:
    """Limits the average rate to `bytes_per_s`; 0 sets no limit. Thread-safe.

    Raises OptionError for any other value below 1 MiB a second, at which one part would take so long that its
    write would look stuck.
    """

    def __init__(
        self,
        bytes_per_s: object = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if type(bytes_per_s) is not int or (bytes_per_s and bytes_per_s < _LEAST):
            raise OptionError(
                f"{OPTION}={bytes_per_s!r} is not a valid rate. Nothing was changed. Give a number of bytes "
                f"a second, at least {_LEAST} (1 MiB), or 0 for no limit."
            )
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_at, self._lock = 0.0, threading.Lock()

    def count(self, num_bytes: int, *, waits: bool) -> None:
        """Count `num_bytes` as sent. `waits`: wait until they may be sent; small files, for which other
        processes wait, are sent at once."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + num_bytes / self._bytes_per_s
        if waits and begin > now:
            self._sleep(begin - now)


log = logging.getLogger(__name__)

PART_BYTES = 16 << 20
"""Part size of an upload and of a ranged read, a multiple of a chunk. Larger for shards that would have too
many parts."""
COMPRESSED_PART_BYTES = 8 << 20
"""Part size of compressed uploads. Smaller, because their parts occupy memory of this process until sent."""
_MOST_PARTS = 10_000
_AT_ONCE = 8
_DELAY_S = 30.0
"""Time of several writes by a brief client with all retries: servers refuse a key that is written too often
for many seconds."""


class ObjectClient(Protocol):
    """Requests to one bucket. Keys are '/'-separated. A client sends a request again, also after a lost
    answer, until its deadline. Then it raises OSError, and the request may have been executed.

    FileNotFoundError is for a missing object only, PermissionError for a refusal, ENOSPC for a full bucket,
    ENODEV for a missing bucket, EREMOTEIO for the rest. EIO would mean that a disk has lost bytes
    (`LOST_BYTES`), which an error of a server does not imply."""

    @property
    def url(self) -> str:
        """The URL without credentials."""

    @property
    def server(self) -> str:
        """Identifies the server if the URL does not: buckets of one name on two servers differ."""

    @property
    def is_read_only(self) -> bool:
        """Whether `put`, `upload` and `delete` raise RunError."""

    def brief(self) -> ObjectClient:
        """Return a client that retries for some seconds only."""

    def renew(self, options: Mapping[str, Any]) -> None:
        """Use these options from now on, also in clients from `brief`. Raises OptionError, and changes
        nothing, if they are invalid."""

    def put(self, key: str, data: memoryview, *, is_new: bool = False) -> bool:
        """Write an object in one request. With `is_new`, return False and change nothing if the object
        exists, perhaps by this call: a server may get its request twice."""

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        """Write an object in parts, a few at once. A failed upload leaves no object."""

    def get(self, key: str, max_bytes: int) -> bytes | memoryview | int:
        """Return a whole object, or its length if that exceeds `max_bytes`."""

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        """Read a range. Return fewer bytes, or none, if the object ends before."""

    def size(self, key: str) -> int: ...

    def list(self, prefix: str) -> builtins.list[Entry]:
        """List one level below a prefix, which is empty or ends with '/'. Return all pages."""

    def delete(self, keys: builtins.list[str]) -> None:
        """Delete objects; ignore missing ones."""


class ObjectStore:
    """See Store in base.py."""

    is_folder, delay_s = False, _DELAY_S

    def __init__(self, client: ObjectClient, rate: UploadRate | None = None) -> None:
        self._client, self._rate = client, rate or UploadRate()
        self.is_read_only = client.is_read_only

    @property
    def url(self) -> str:
        return self._client.url

    def brief(self) -> ObjectStore:
        return ObjectStore(self._client.brief(), self._rate)

    def place(self) -> str:
        return f"{self.url} {self._client.server}".rstrip()

    def check(self) -> None:
        """Create a probe twice: some servers ignore the condition of a creation, so two processes could
        commit one step. List it: some list late, so a start could miss the newest step."""
        key = f"probe-{secrets.token_hex(8)}"
        try:
            # The first answer proves nothing, since a request may be sent twice.
            self._client.put(key, memoryview(b"1"), is_new=True)
            is_new = self._client.put(key, memoryview(b"22"), is_new=True)
            listed = self.list("")
            probe = next((each for each in listed if each.name == key), None)
            if is_new or (probe is not None and probe.num_bytes != 1):
                raise RunError(
                    f"{self.url}: this server overwrites an existing object at creation (it ignores the "
                    "condition, If-None-Match on S3), so a commit there could overwrite another process's "
                    "commit. Nothing was changed. Use another storage for the run.",
                    path=self.url,
                )
            if probe is None:
                raise RunError(
                    f"{self.url}: this server does not list an object that it has just created, so a start "
                    "could miss the newest step and resume an older one. Nothing was changed. Use another "
                    "storage for the run.",
                    path=self.url,
                )
            if len(listed) == 1:  # a start of a run that is there reads its catalogue
                self.read(key, 1)
        finally:
            self._remove_probe(key)

    def _remove_probe(self, key: str) -> None:
        try:
            self._client.delete([key])
        except PermissionError as error:
            log.warning(
                "%s: these credentials may not delete there (%s). Steps beyond the retention limit stay, and "
                "so does %s. Grant the right to delete if they should be removed.",
                self.url, error.strerror, key,
            )  # fmt: skip
        except OSError:
            pass  # one byte stays

    def move_to(self, url: str) -> None:
        raise AssertionError("a run on an object store does not move")

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        found = self._client.get(_key(path), max_bytes)
        if isinstance(found, int):
            raise too_long(path, found, max_bytes)
        return bytes(found)

    def create(self, path: str, data: bytes) -> bool:
        self._rate.count(len(data), waits=False)
        return self._client.put(_key(path), memoryview(data), is_new=True)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self._rate.count(len(data), waits=False)
        self._client.put(_key(path), memoryview(data))

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        raise AssertionError("an object is never appended to")

    def list(self, folder: str) -> builtins.list[Entry]:
        found = self._client.list(f"{_key(folder)}/" if folder else "")
        return sorted(found, key=lambda entry: entry.name)

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

    # Shards

    def write_shard(self, path: str, layout: Layout, source: MemoryRange, *, progress: int = 0) -> Written:
        num_bytes = layout.num_bytes
        if os.fstat(source.descriptor).st_size < source.offset + num_bytes:
            raise OSError(errno.EIO, "the memory region is shorter than the shard", path)
        sums, part_bytes = ImageSums(layout, CHUNK_BYTES), _part_bytes(num_bytes)
        self._write(path, _parts(source, num_bytes, part_bytes, sums, progress), num_bytes, part_bytes)
        return Written(digests=sums.digests(), checksums=sums.checksums())

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        part_bytes = _part_bytes(most_bytes, COMPRESSED_PART_BYTES)
        self._write(path, map(memoryview, parts), most_bytes, part_bytes)

    def _write(self, path: str, parts: Iterable[memoryview], most_bytes: int, part_bytes: int) -> None:
        key, parts = _key(path), map(self._throttled, parts)
        if most_bytes <= part_bytes:
            data = memoryview(b"".join(parts))
            # The same bytes are from an earlier request of this call.
            if self._client.put(key, data, is_new=True) or self._client.get(key, len(data)) == data:
                return
        elif not self.exists(path):
            self._client.upload(key, parts, part_bytes)
            return
        raise FileExistsError(errno.EEXIST, "another file has the name", path)

    def _throttled(self, part: memoryview) -> memoryview:
        """Return a part when the rate limit allows it."""
        self._rate.count(len(part), waits=True)
        return part

    def read_chunks(self, path: str, plan: _native.FilePlan, *, threads: int = 2) -> None:
        size = self._client.size(_key(path))
        if path.endswith(COMPRESSED):
            read_compressed(self, path, size, plan, max(threads, _AT_ONCE))
            return
        if size != plan.num_bytes:
            raise other_length(path, size, plan.num_bytes)
        add_pieces(path, plan, PART_BYTES, _AT_ONCE, partial(self._range, path))

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        return bytes(self._range(path, offset, offset + num_bytes))

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        return None

    def _range(self, path: str, start: int, stop: int) -> memoryview:
        data = self._client.get_range(_key(path), start, stop) if start < stop else memoryview(b"")
        if len(data) != stop - start:
            raise other_length(path, start + len(data), stop)
        return data


def _key(path: str) -> str:
    return "/".join(split(path))


def _part_bytes(num_bytes: int, usual: int = PART_BYTES) -> int:
    least = -(-num_bytes // _MOST_PARTS)
    return max(usual, -(-least // CHUNK_BYTES) * CHUNK_BYTES)


def _parts(
    source: MemoryRange, num_bytes: int, part_bytes: int, sums: ImageSums, progress: int
) -> Iterator[memoryview]:
    """Yield the parts of an image. A part counts as done when the next one is requested. Parts are mapped one
    at a time, since mapped memory raises the process's OOM score."""
    for start in range(0, num_bytes, part_bytes):
        size, begin = min(part_bytes, num_bytes - start), source.offset + start
        # Compute the sums from the same mapping that is sent.
        part = memoryview(_native.Mapping(source.descriptor, begin, size))
        sums.add(start, part)
        yield part
        if progress:
            _native.fetch_add(progress, size)
