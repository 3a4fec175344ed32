"""The plan of a read: which chunks of a step's files are read, and where their bytes go. For all readers.

Owns the one way in which bytes of a shard are believed: each chunk has the checksum of its record, each leaf
that is read whole has its digest. Copies, checksums and digests are computed by the native engine
(csrc/io/plan.h); stores give it the chunks. See docs/architecture.md."""

from __future__ import annotations

import contextlib
import errno
import os
from array import array
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.records import Contents
from flashckpt.store.base import LOST_BYTES, LengthError, Read
from flashckpt.threads import results


class ImageSums:
    """Checksum of each chunk (16 bytes) and digest of each leaf of an image. Pieces arrive in any order and
    from several threads, each byte once. A piece begins at a chunk and ends at a chunk or the image's end."""

    def __init__(self, layout: Layout, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._checksums = bytearray(16 * -(-layout.num_bytes // chunk_bytes))
        self._audit = _native.Audit(
            num_bytes=layout.num_bytes,
            chunk_bytes=chunk_bytes,
            leaf_offsets=array("Q", [layout.data_start + leaf.offset for leaf in layout.leaves]),
            leaf_sizes=array("Q", [leaf.num_bytes for leaf in layout.leaves]),
        )

    def add(self, offset: int, data: memoryview) -> None:
        """Add the image's bytes at `offset`."""
        found, place = self._audit.add(offset, data), 16 * (offset // self._chunk_bytes)
        self._checksums[place : place + len(found)] = found

    def checksums(self) -> bytes:
        return bytes(self._checksums)

    def digests(self) -> array[int]:
        """Digests in the layout's order. Call it after all pieces were added."""
        return array("Q", self._audit.digests())


# Reading more files concurrently is seldom faster.
_MOST_FILES = 8
_SHOWN = 5

Steps = Sequence[tuple[int, int, int]]
"""How often, and the bytes from one time to the next in the file and in memory; outermost first."""


class UnreadableShardError(OSError):
    """The file system cannot read one shard: a failure of the disk, or of this host."""


class MissingShardError(DamagedError):
    """A shard is missing."""


class Source(Protocol):
    """A source of chunks: a store, or a cache in front of one."""

    @property
    def url(self) -> str: ...

    def read_chunks(self, path: str, plan: _native.FilePlan, *, threads: int = 2) -> None:
        """See `Store.read_chunks`."""


class Digests:
    """The digests of leaves, for one plan or several. Add all leaves before the first read."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], int] = {}
        self._rows: list[tuple[str, Leaf, int]] = []
        self._native: _native.LeafDigests | None = None

    def place(self, path: str, leaf: Leaf, digest: int) -> tuple[int, bool]:
        """The index of a leaf of a file, and whether it is new. `digest`: the expected one."""
        key = path, leaf.name
        if key in self._places:
            return self._places[key], False
        if self._native is not None:
            raise AssertionError(f"{leaf.name} comes after the first read")
        self._places[key] = len(self._rows)
        self._rows.append((path, leaf, digest))
        return self._places[key], True

    def native(self) -> _native.LeafDigests:
        if self._native is None:
            self._native = _native.LeafDigests(array("Q", [leaf.num_bytes for _, leaf, _ in self._rows]))
        return self._native

    def found(self) -> array[int]:
        return array("Q", self.native().digests())

    def check(self, url: str) -> None:
        """DamagedError if a leaf that was read whole is not that of its boundary."""
        for (path, leaf, expected), found in zip(self._rows, self.found(), strict=True):
            if found != expected:
                raise damaged(url, path, f"{leaf.name} is not what was captured")


@dataclass
class _File:
    """The needed bytes of one file. `copies`, `parts` and `ranges`: as the native plan takes them."""

    contents: Contents
    copies: array[int] = field(default_factory=lambda: array("Q"))
    parts: array[int] = field(default_factory=lambda: array("Q"))
    ranges: array[int] = field(default_factory=lambda: array("Q"))

    def native(self, digests: _native.LeafDigests, *, direct: bool, progress: int) -> _native.FilePlan:
        shard = self.contents
        return _native.FilePlan(
            num_bytes=shard.num_bytes, chunk_bytes=shard.chunk_bytes, checksums=shard.checksums,
            copies=self.copies, parts=self.parts, ranges=self.ranges, digests=digests, direct=direct,
            progress=progress,
        )  # fmt: skip


class ReadPlan:
    """Chunks of files, and copies of their bytes into memory, read once. A chunk is verified before a byte of
    it is copied.

    `digests`: where leaves come in slices, that of all plans that read them; the caller checks them after the
    last. `buffered`: files that are read through the page cache, since other processes read them, too."""

    def __init__(self, digests: Digests | None = None, buffered: Set[str] = frozenset()) -> None:
        self._are_shared, self._buffered = digests is not None, buffered
        self._digests = digests if digests is not None else Digests()
        self._files: dict[str, _File] = {}
        self._memory: list[memoryview] = []
        self._addresses: dict[int, int] = {}

    def copy(
        self,
        path: str,
        contents: Contents,
        source: int,
        run: int,
        steps: Steps,
        into: memoryview,
        target: int,
    ) -> None:
        """Copy `run` bytes at `source` of a file to `target` in memory, and so at each of the steps."""
        if not run:
            return
        last = target + run + sum((count - 1) * stride for count, _, stride in steps)
        if target < 0 or last > into.nbytes or into.readonly:
            raise ValueError(f"a copy from {path} does not fit into its memory")
        rows = [number for step in steps for number in step]
        self._of(path, contents).copies.extend((source, self._address(into) + target, run, len(steps), *rows))

    def digest(
        self, path: str, contents: Contents, leaf: Leaf, digest: int, low: int = 0, high: int | None = None
    ) -> None:
        """Read bytes [low, high) of a leaf, by default all, and count them in its digest once. `leaf`: one of
        `contents.layout().leaves`."""
        high = leaf.num_bytes if high is None else high
        place, is_new = self._digests.place(path, leaf, digest)
        if low < high and (is_new or self._are_shared):
            begin = contents.data_start + leaf.offset
            self._of(path, contents).parts.extend((begin + low, begin + high, place, low))

    def whole_file(self, path: str, contents: Contents, into: memoryview | None) -> None:
        """Read a whole file. Without memory its bytes are compared and dropped."""
        file, num_bytes = self._of(path, contents), contents.num_bytes
        if into is not None:
            self.copy(path, contents, 0, num_bytes, (), into, 0)
        file.ranges.extend((0, num_bytes))
        for leaf, digest in zip(contents.layout().leaves, contents.digests, strict=True):
            self.digest(path, contents, leaf, digest)

    def native(self, progress: int = 0) -> dict[str, _native.FilePlan]:
        """The native plan of each file, before any read. In the order of their names: ranks that read the
        same files read the same one at a time, so that a disk gives each byte in turn, and once. `progress`:
        see `FilePlan`."""
        found = self._digests.native()
        return {
            path: self._files[path].native(found, direct=path not in self._buffered, progress=progress)
            for path in sorted(self._files)
        }

    def run(self, source: Source, threads: int) -> None:
        """Read it. After an error or a signal, no further chunk is begun, and no byte is copied any more. A
        signal does not wait for storage that does not answer.

        Raises DamagedError if a chunk or a leaf is not the committed one, MissingShardError, and
        UnreadableShardError if the disk fails; OSError.
        """
        plans = self.native()
        natives, at_once = list(plans.values()), max(1, min(threads, len(plans), _MOST_FILES))

        def read(path: str, plan: _native.FilePlan) -> None:
            with _naming(source, path):
                source.read_chunks(path, plan, threads=max(1, threads // at_once))
            if bad := plan.bad_chunks():
                words = ", ".join(map(str, bad[:_SHOWN]))
                raise damaged(source.url, path, f"chunk {words} does not have its checksum")

        close = partial(_native.FilePlan.close, natives)
        try:
            reads = (partial(read, *each) for each in plans.items())
            for _ in results("files", reads, at_once, len(plans), close):
                pass
        finally:
            close()
        if not self._are_shared:
            self._digests.check(source.url)

    def _of(self, path: str, contents: Contents) -> _File:
        if path not in self._files:
            self._files[path] = _File(contents)
        return self._files[path]

    def _address(self, into: memoryview) -> int:
        if id(into) not in self._addresses:
            self._memory.append(into)
            self._addresses[id(into)] = _native.address_of(into)
        return self._addresses[id(into)]


def read_shard(
    store: Source,
    path: str,
    contents: Contents,
    into: memoryview | None,
    *,
    threads: int = 2,
    progress: int = 0,
) -> Read:
    """Read a whole shard into memory; without memory its bytes are compared and dropped. Damage is returned,
    not raised. `progress`: 0, or the address of a u64 to which the number of bytes done is added. Otherwise
    as `Store.read_chunks`."""
    digests = Digests()
    plan, start = ReadPlan(digests), contents.data_start
    plan.whole_file(path, contents, into)
    header = memoryview(bytearray(start)) if into is None else into[:start]
    if into is None:
        plan.copy(path, contents, 0, start, (), header, 0)
    [native] = plan.native(progress).values()
    try:
        store.read_chunks(path, native, threads=threads)
    finally:
        _native.FilePlan.close([native])
    return Read(digests=digests.found(), bad_chunks=native.bad_chunks(), header=bytes(header))


def add_pieces(
    path: str,
    plan: _native.FilePlan,
    piece_bytes: int,
    at_once: int,
    read: Callable[[int, int], bytes | bytearray | memoryview],
) -> None:
    """Read the rest of a plan in pieces of whole chunks, `at_once` concurrently. `read(start, stop)` returns
    bytes of the file."""
    step = max(1, piece_bytes // plan.chunk_bytes)

    def pieces() -> Iterator[Callable[[], None]]:
        for first, last in plan.left():
            for chunk in range(first, last, step):
                stop = min(chunk + step, last) * plan.chunk_bytes
                yield partial(add, chunk * plan.chunk_bytes, min(stop, plan.num_bytes))

    def add(start: int, stop: int) -> None:
        if plan.is_closed:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), path)
        plan.add(start, read(start, stop))

    for _ in results("read", pieces(), at_once):
        pass


def damaged(url: str, path: str, why: str, kind: type[DamagedError] = DamagedError) -> DamagedError:
    where = f"{url}/{path}"
    return kind(f"{where} is damaged: {why}. No damaged byte was loaded or written.", path=where)


@contextlib.contextmanager
def _naming(source: Source, path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise damaged(source.url, path, "it is missing", MissingShardError) from error
    except LengthError as error:
        raise damaged(source.url, path, f"it has {error}") from error
    except OSError as error:
        if error.errno in LOST_BYTES:
            where = f"{source.url}/{path}"
            raise UnreadableShardError(error.errno, error.strerror, where) from error
        raise
