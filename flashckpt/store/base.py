"""The Store protocol, through which every byte of a run passes. Owns the protocol and its data types.

A store holds files under '/'-separated paths relative to its run. The store alone decides what a folder is
and how a file becomes durable; its callers know no local path, link or sync. Every backend passes
tests/contracts/.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from flashckpt import _native
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.layout import Layout
from flashckpt.format.records import Contents

_MAX_NAME_BYTES = 255
WRITE_THREADS = 2
"""Threads that sum, or compress, the bytes of one shard."""
# Errors of a file system that has lost bytes of a file. An absent server, a missing permission or a timeout
# give other errors, which do not mean that the file is damaged.
LOST_BYTES = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ})


class LengthError(DamagedError):
    """The length of a file differs from the length that was written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder. `num_bytes`: length of a file, 0 for a folder. `modified_s`: time of the last
    write to a file by the store's clock; 0 if unknown, and for a folder."""

    name: str
    is_folder: bool
    num_bytes: int
    modified_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Bytes of this node's memory: a memory file's bytes from `offset`, which is a multiple of the page."""

    descriptor: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Sums of the bytes that were written. `digests`: one per leaf, in the layout's order. `checksums`: 16
    bytes per chunk. `direct`: the write bypassed the page cache."""

    digests: array[int]
    checksums: bytes
    direct: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Sums of the bytes that were read. `digests`: one per leaf, in the layout's order. `bad_chunks`: indices
    of chunks whose checksum is wrong. `header`: the shard's header."""

    digests: array[int]
    bad_chunks: list[int]
    header: bytes = b""

    def wrong_leaves(self, contents: Contents) -> list[str]:
        """Names of leaves whose digest differs from the one recorded at their boundary."""
        pairs = zip(contents.leaves, contents.digests, self.digests, strict=True)
        return [leaf.name for leaf, expected, found in pairs if expected != found]


class Store(Protocol):
    """Files of one run. Every method may raise OSError, with errno. No method follows a link: a link in place
    of a folder raises RunError, in place of a file DamagedError. `create`, `append` and `write_shard` make
    the folders they need; they raise FileNotFoundError if the run existed and has vanished."""

    @property
    def url(self) -> str:
        """The run as its user would name it, from any working directory."""

    @property
    def is_read_only(self) -> bool:
        """Whether every write raises RunError, since `create` might overwrite a name under concurrent
        calls."""

    @property
    def is_folder(self) -> bool:
        """A folder of a file system, which may be moved while the run is in use. Other stores send requests,
        each with a round trip, and take no `append`."""

    @property
    def delay_s(self) -> float:
        """The longest time for which a busy server may delay or refuse the write of a small file."""

    def place(self) -> str:
        """An identifier that differs between this place and any copy of the run. Raises OSError if the place
        does not exist."""

    def check(self) -> None:
        """Check, before a run begins or resumes, that files can be created exclusively and removed here.
        Remove the files that the check writes. Raises OSError, or RunError if creation overwrites a file."""

    def brief(self) -> Store:
        """Return this store with short timeouts: it retries failed requests for some seconds only."""

    def move_to(self, url: str) -> None:
        """Use `url` from now on, since the run was moved. Calls in progress finish at the old place."""

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read a whole file. Raises FileNotFoundError, or DamagedError if it is longer than `max_bytes`."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a new file atomically and durably. Return False if the name is taken, perhaps by this call: a
        server may get a request twice. The existing file is then durable too. All files that were visible in
        the folder become durable before the new name."""

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Replace a file atomically: a reader sees either the old or the new bytes. With `durable=False` a
        power loss may leave either file or an empty one. May raise FileNotFoundError if the folder has no
        other file."""

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        """Append to a file of a folder, not durably. If an existing file would exceed `max_bytes`, append
        nothing and return False."""

    def list(self, folder: str) -> list[Entry]:
        """List all files and folders, sorted by name; skip links and all other kinds. Return an empty list if
        the folder does not exist. Concurrent changes may or may not show."""

    def exists(self, path: str) -> bool:
        """Whether a file has this name."""

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder, not durably. Ignore a missing path and a folder that is not
        empty."""

    def remove_files(self, paths: Iterable[str]) -> None:
        """Remove files, not durably. Ignore missing files. After an error, remove the rest before raising
        it."""

    # Shards

    def write_shard(self, path: str, layout: Layout, source: MemoryRange, *, progress: int = 0) -> Written:
        """Write an image of `layout` from memory to a new file. The name is seen once the bytes are durable,
        and is durable on return; after an error no such file exists. `progress`: 0, or the address of a u64
        to which the number of bytes done is added. FileExistsError if a file has the name."""

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        """Write a new file from pieces of any length with at most `most_bytes` in total. Otherwise like
        `write_shard`."""

    def read_chunks(self, path: str, plan: _native.FilePlan, *, threads: int = 2) -> None:
        """Read the chunks of a shard that `plan` still needs, into the plan, which records damaged chunks.
        Raises LengthError, before it reads anything, if the file has another length. A name that ends with
        `.zst` is a compressed file, whose plan is that of the plain one. Starts no further read once the plan
        is closed, and raises OSError (ECANCELED)."""

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        """Read bytes of a file, unverified. Raises LengthError if the file ends before."""

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        """Open a local file to be read and mapped; the caller closes it. Return None if the store's bytes are
        not on this machine. Raises LengthError for a file of another length."""


def write_once(store: Store, path: str, data: bytes) -> None:
    """Create a file, unless it exists with the same bytes: then an earlier request of this call has made it,
    or a process that writes the same. FileExistsError if another file has the name."""
    if not store.create(path, data):
        with suppress(DamagedError):
            if store.read(path, len(data)) == data:
                return
        raise FileExistsError(errno.EEXIST, "another file has the name", path)


def split(path: str) -> list[str]:
    """Split a path in a store into names. Raises ValueError if the path could lead out of the run."""
    names = path.split("/") if path else []
    for name in names:
        if name in ("", ".", "..") or "\0" in name or len(os.fsencode(name)) > _MAX_NAME_BYTES:
            raise ValueError(f"{path!r} is not a path inside a run")
    return names


def read_only(url: str) -> RunError:
    """The error of a write where no name is created exclusively."""
    return RunError(
        f"{url}: runs are only read here, since two jobs could overwrite each other's commits: this storage "
        "does not promise to create a name once. Nothing was changed. Use a folder, s3://, gs:// or az://. "
        "If the server has a folder, mount it and name the mounted folder; or copy the run to a folder with "
        "`flashckpt copy`, and that folder to the server with scp or rsync.",
        path=url,
    )


def too_long(path: str, num_bytes: int, max_bytes: int) -> DamagedError:
    """The error of `read` for a file longer than `max_bytes`."""
    return DamagedError(
        f"{path} has {num_bytes} bytes; at most {max_bytes} are possible. The file was "
        "not read. Run `flashckpt verify` on the run to see which steps are whole.",
        path=path,
    )


def other_length(path: str, num_bytes: int, wanted: int) -> LengthError:
    """The error of reading a file of another length."""
    return LengthError(f"{num_bytes} bytes, where {wanted} were written", path=path)
