"""Files in object storage that several ranks of a node need: one of them fetches each into memory, from which
the others read it. Each rank verifies what it uses, and reads from storage what it cannot use here.

The memory is a memfd, which the others open through /proc. It has no name, and is released with the last
process that has it open. It cannot shrink."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from flashckpt import _native
from flashckpt.errors import DamagedError, OutOfSpaceError
from flashckpt.format.records import Contents
from flashckpt.memory import memory_budget
from flashckpt.memory.forks import OwnDescriptor
from flashckpt.store.base import Store
from flashckpt.store.read_plan import ReadPlan, Source, add_pieces

log = logging.getLogger(__name__)

_NEEDS, _COPIES = "the files that the ranks of a node need", "the files that they have fetched for each other"
_PIECE_BYTES = 16 << 20

Exchange = Callable[[str, Any], Mapping[int, Any]]
"""See `Agreement.exchange`."""


class NodeCopies:
    """The `Source` of a step's files for one rank of a node. copies: of files that a rank of the node has
    fetched, by path."""

    def __init__(self, store: Store, copies: Mapping[str, OwnDescriptor]) -> None:
        self.url = store.url
        self._store, self._copies = store, copies

    def read_chunks(self, path: str, plan: _native.FilePlan, *, threads: int = 2) -> None:
        """See `Store.read_chunks`."""
        if (copy := self._copies.get(path)) is None:
            self._store.read_chunks(path, plan, threads=threads)
            return

        def read(start: int, stop: int) -> bytes:
            data = os.pread(copy.descriptor, stop - start, start)
            if len(data) != stop - start:
                raise OSError(errno.EIO, "the copy of another rank is truncated", path)
            return data

        add_pieces(path, plan, _PIECE_BYTES, threads, read)


@contextmanager
def fetched(
    store: Store, rank: int, files: Mapping[str, Contents], exchange: Exchange, threads: int
) -> Iterator[Source]:
    """Fetch this rank's share of the files that several ranks of the node need, and give the source of all
    files; the store itself if there are no copies. Every rank of the job calls it once, in two rounds among
    all ranks, with the files that it needs. Never raises OSError: each rank reads from storage what was not
    fetched."""
    with ExitStack() as closing:
        # A rank that has left has nothing.
        needs = {each: paths or [] for each, paths in exchange(_NEEDS, sorted(files)).items()}
        offers: dict[str, list[int]] = {}
        for path in _divided(needs).get(rank, ()):
            copy = _fetched(store, path, files[path], len(needs), threads)
            if copy is not None:
                closing.callback(copy.close)
                offers[path] = [os.getpid(), copy.descriptor, os.fstat(copy.descriptor).st_ino]
        copies, offered = dict[str, OwnDescriptor](), exchange(_COPIES, offers).values()
        for path, place in (row for each in offered for row in (each or {}).items()):
            if path in files and (found := _opened(place, files[path].num_bytes)) is not None:
                closing.callback(found.close)
                copies[path] = found
        yield NodeCopies(store, copies) if copies else store


def _divided(needs: Mapping[int, Any]) -> dict[int, list[str]]:
    """Return for each rank the files that it fetches: those that several ranks need, in turn. The same on
    each rank."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(needs):
        for path in needs[rank]:
            ranks.setdefault(path, []).append(rank)
    found: dict[int, list[str]] = {}
    for index, path in enumerate(sorted(path for path, those in ranks.items() if len(those) > 1)):
        found.setdefault(ranks[path][index % len(ranks[path])], []).append(path)
    return found


def _fetched(store: Store, path: str, contents: Contents, ranks: int, threads: int) -> OwnDescriptor | None:
    """Return a copy of a file, verified; None if it cannot be made."""
    num_bytes = contents.num_bytes
    with ExitStack() as undo:
        try:
            copy = OwnDescriptor(os.memfd_create("shard-0", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            undo.callback(copy.close)
            # The other ranks of the node take memory at the same time.
            memory_budget.take(
                copy.descriptor, num_bytes, available=lambda: memory_budget.available_bytes() // ranks
            )
            fcntl.fcntl(copy.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            plan, into = ReadPlan(), memoryview(_native.Mapping(copy.descriptor, num_bytes))
            plan.copy(path, contents, 0, num_bytes, (), into, 0)
            plan.run(store, threads)
        except (OSError, DamagedError, OutOfSpaceError) as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise  # the handler of a signal: storage gives a number
            log.warning("each rank of this node reads %s by itself: %s", path, error)
            return None
        undo.pop_all()
        return copy


def _opened(place: Any, num_bytes: int) -> OwnDescriptor | None:
    """Open the memory of a rank of this node; None if it is not accessible here."""
    try:
        pid, descriptor, inode = map(int, place)
        path = f"/proc/{pid}/fd/{descriptor}"
        if os.stat(path).st_ino != inode:  # before it is opened: it may be any other file
            return None
        file = OwnDescriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except (OSError, TypeError, ValueError) as error:
        log.info("the memory of a rank of this node is not accessible here: %s", error)
        return None
    if os.fstat(file.descriptor).st_size != num_bytes:
        file.close()
        return None
    return file
