"""The waist: every byte of a run goes through a Store. Owns the Protocol, and which URL is what.

A store holds files under '/'-separated paths relative to its run. What a path's folders are, and how a file
becomes durable, is the store's own affair: nobody above it knows a local path, a link or a sync. A backend
passes tests/contracts/ or it is not one.
"""

from __future__ import annotations

import errno
import os
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from flashckpt.errors import DamagedError
from flashckpt.format.layout import Layout
from flashckpt.format.records import Contents

_MAX_NAME_BYTES = 255
# What a file system answers for a sector, a block or a tree of a file that it cannot give any more. A server
# that is away, a permission, a time-out are others: those say nothing of the file.
LOST_BYTES = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ})


class LengthError(DamagedError):
    """A file has another length than was written."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do beyond the contract, or does in its own way.

    conditional_create: `create` refuses a taken name even when two ask at once; a run cannot be without it.
    rename: the run itself may be moved while it is in use, and is then followed. is_shared: other nodes see
    the same files; None where only a probe could tell. part_bytes: a longer shard is sent in pieces of this
    size; 0 where there are no pieces. appends: a file grows by what is added, without being written anew.
    delay_s: for how long a busy server may delay or refuse the write of a small file; 0 where writes come
    through.
    """

    conditional_create: bool
    rename: bool
    is_shared: bool | None
    part_bytes: int
    appends: bool = True
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder. `num_bytes` is the length of a file, 0 for a folder; `modified_s` the wall clock
    of the store when it was written, 0 where it does not say; `named_s` when it was given or lost a name, of
    a file that has several. `is_compressed`: it stands there in fewer bytes, and is read as if it did not."""

    name: str
    is_folder: bool
    num_bytes: int
    modified_s: float = field(default=0.0, compare=False)
    named_s: float = field(default=0.0, compare=False, kw_only=True)
    is_compressed: bool = field(default=False, compare=False)

    @property
    def since_s(self) -> float:
        """When it may have got this name; 0 where the store does not say."""
        return self.modified_s and max(self.modified_s, self.named_s)


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Bytes of this node's memory: those of a file in memory from `offset` on, a multiple of the page."""

    descriptor: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Of the very bytes that were written: the digest of each leaf, in the layout's order, and 16 bytes for
    each chunk. `direct`: they went past the page cache. `stored_bytes`: the length of the file where it
    stands compressed, else None."""

    digests: array[int]
    checksums: bytes
    direct: bool = True
    stored_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Of the very bytes that were read: the digest of each leaf, and the chunks without their checksum."""

    digests: array[int]
    bad_chunks: list[int]

    def wrong_leaves(self, contents: Contents) -> list[str]:
        """The leaves that do not have the digest of their boundary."""
        pairs = zip(contents.leaves, contents.digests, self.digests, strict=True)
        return [leaf.name for leaf, expected, found in pairs if expected != found]


class Store(Protocol):
    """All of it may raise OSError, with errno; a link raises RunError in a folder's place and DamagedError in
    a file's: none is followed. `create`, `append`, `copy` and `write_shard` make the folders they need;
    FileNotFoundError where the run itself was there and is not any more."""

    @property
    def url(self) -> str:
        """The run as its user would name it, from any working directory."""

    @property
    def capabilities(self) -> Capabilities: ...

    def place(self) -> str:
        """What tells this place from one that holds a copy of the run. OSError where it is not there."""

    def check(self) -> None:
        """Find out, before a run begins or goes on, whether files can be made here, each name once, and
        removed. What it writes it removes. OSError, or RunError where the storage overwrites what is to be
        created."""

    def at_once(self, recent: str = "") -> Store:
        """This store for one look at several of its files. Where a request costs, names and lengths below a
        folder are listed together when one of them is first asked for, and stand as they were then, but for
        what is written through it; those below the folder `recent` may be some seconds older. Whoever
        needs them anew asks for another one. For one thread."""

    def brief(self) -> Store:
        """This store for who is better told soon that something failed, and does it anew: where requests are
        tried again for long, they are for some seconds only."""

    def move_to(self, url: str) -> None:
        """The run is found there from now on: somebody has moved it. Calls under way end where it was."""

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        """A whole file. FileNotFoundError where there is none, DamagedError beyond `max_bytes`."""

    def fetch(self, paths: Iterable[str], max_bytes: int) -> None:
        """These files are read next: where each costs a round trip, several are read at once. One that is not
        there, or is longer, is left out."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a new file, durably and whole or not at all. False where the name is taken: what stands
        there is then durable too. Whatever was seen in its folder is durable before the new name is."""

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Put a file in a name's place at once: a reader sees the old bytes or the new ones. Not
        durable means that a power loss may leave either, or an empty file. May raise FileNotFoundError where
        nothing else is in its folder."""

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        """Add to a file's end; not durable. False, and nothing is added, where a file that is there would
        become longer than `max_bytes`."""

    def copy(self, source: str, target: str) -> bool:
        """The same bytes under a second name, durably, without reading them here. False where the store
        cannot, or `target` is taken."""

    def list(self, folder: str, named: re.Pattern[str] | None = None) -> list[Entry]:
        """Files and folders by name, all of them, in however many pages they come; links and everything else
        are left out. Empty where there is none. What comes or goes meanwhile may be there or not. `named`:
        only those whose whole name matches, which no shard's name does; all others cost no more than to be
        listed."""

    def exists(self, path: str) -> bool:
        """Whether a file has this name."""

    def remove(self, path: str) -> None:
        """Remove one file, or a folder with nothing in it; nothing where there is none, or where something
        is in it. Not durable by itself."""

    def remove_files(self, paths: Iterable[str]) -> None:
        """Remove files; nothing where one is not there. One that cannot be removed is told of once all others
        are. Not durable by itself."""

    def remove_tree(self, path: str) -> None:
        """Remove all files below a folder; nothing where there are none. Links are removed, not followed. One
        that cannot be removed is told of once all others are."""

    # Shards

    def write_shard(
        self, path: str, layout: Layout, source: MemoryRange, *, threads: int = 2, progress: int = 0
    ) -> Written:
        """Write an image of `layout` from memory to a new file. Bytes and name are durable when this returns;
        after an error there is no such file. `progress`: 0, or the address of a u64 that grows by the bytes
        done. FileExistsError where the name is taken."""

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        """Write a new file of pieces of any length, `most_bytes` together at most. Otherwise as
        `write_shard`."""

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
        """Read a shard into memory, every chunk and leaf checked on the way; with none it is checked
        and kept nowhere. `into` is writable and holds the shard; best it has whole pages. LengthError,
        before anything is read, for a file of another length.

        `cancel`: 0, or the address of a u64: once that is not 0 nothing more is begun, and OSError
        (ECANCELED) is raised."""

    def read_bytes(self, path: str, offset: int, num_bytes: int, file_bytes: int | None = None) -> bytes:
        """Bytes of a file as they are, for who compares them himself. LengthError where it ends before.
        `file_bytes`: the length of the whole file, where that is known: a store in which several files may
        stand for it, compressed or not, reads the one of this length."""

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        """A file of this machine, open to be read and mapped; whoever asked closes it. None where a store's
        bytes are elsewhere. LengthError for a file of another length."""

    def view(self, path: str, num_bytes: int) -> memoryview:
        """A whole file as memory of this process, which may write to it: mapped copy-on-write where that can
        be, else read. Unchecked. LengthError for a file of another length."""


def split(path: str) -> list[str]:
    """The names on a path in a store. ValueError for one that could lead out of it."""
    names = path.split("/") if path else []
    for name in names:
        if name in ("", ".", "..") or "\0" in name or len(os.fsencode(name)) > _MAX_NAME_BYTES:
            raise ValueError(f"{path!r} is no path inside a run")
    return names


def matching(entries: list[Entry], named: re.Pattern[str] | None) -> list[Entry]:
    """The entries that `Store.list` returns for `named`."""
    return entries if named is None else [each for each in entries if named.fullmatch(each.name)]


def too_long(path: str, num_bytes: int, max_bytes: int) -> DamagedError:
    """What `read` raises for a file beyond `max_bytes`."""
    return DamagedError(
        f"{path} has {num_bytes} bytes, where at most {max_bytes} can be. Nothing of it "
        "was read. Run `flashckpt verify` on the run to see which steps are whole.",
        path=path,
    )


def other_length(path: str, num_bytes: int, wanted: int) -> LengthError:
    """What the reading of a shard raises for a file of another length."""
    return LengthError(f"{num_bytes} bytes, where {wanted} were written", path=path)
