"""Chunks of a step's files that several ranks of a node need: one of them reads each from storage, and the
others map its memory.

The rank that reads a chunk compares its checksum. The others use a complete leaf in place after comparing its
digest; of chunks with parts of their leaves they compare the checksums (`ReadPlan`). What differs is read
from storage. So an error here costs time and never loads a wrong byte. The memory is a memfd, which the
others open through /proc."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from flashckpt import _native
from flashckpt._native import xxh3_64
from flashckpt.commit.steps import FileLeaf
from flashckpt.errors import DamagedError, OutOfSpaceError
from flashckpt.format.checked_json import compact
from flashckpt.memory import memory_budget
from flashckpt.memory.forks import OwnDescriptor
from flashckpt.restore.snapshot import StepReading
from flashckpt.restore.step_image import NOT_SHARED, Place, StepMemory, pages
from flashckpt.store.base import Store
from flashckpt.store.read_plan import ReadPlan, each_piece

log = logging.getLogger(__name__)

BLOCK_CHUNKS = 4
"""The number of neighbouring chunks that a rank reads together."""

_NEEDS, _SHARES = "the chunks that the ranks of a node need", "the chunks that they have read for each other"

Exchange = Callable[[str, Any], Mapping[int, Any]]
"""See `Agreement.exchange`."""


class FileChunks(NamedTuple):
    """The chunks of a file that a rank needs, in runs: (first, the one after the last). held_at: the first
    byte of the whole file in the rank's memfd, if it has it, or NOT_SHARED."""

    chunk_bytes: int
    num_bytes: int
    held_at: int
    runs: Sequence[tuple[int, int]]

    def has(self, start: int) -> bool:
        """Whether the chunk that begins at this byte is needed."""
        at = bisect_right(self.runs, start // self.chunk_bytes, key=lambda run: run[0])
        return at > 0 and start // self.chunk_bytes < self.runs[at - 1][1]


Needs = Mapping[str, FileChunks]
"""By the file's path."""


class Range(NamedTuple):
    """Bytes of a file."""

    path: str
    start: int
    stop: int


class Piece(NamedTuple):
    """Bytes of a file that begin at byte `at` of a descriptor."""

    start: int
    stop: int
    descriptor: int
    at: int


def divide(needs: Mapping[int, Needs]) -> dict[int, list[Range]]:
    """Return for each rank the ranges that it reads for itself and others: those that several ranks need and
    none holds, each by the rank with the least to read. The same on each rank."""
    loads = dict.fromkeys(sorted(needs), 0)
    found: dict[int, list[Range]] = {rank: [] for rank in loads}
    for path in sorted({path for each in needs.values() for path in each}):
        of_file = {rank: needs[rank][path] for rank in loads if path in needs[rank]}
        if any(each.held_at != NOT_SHARED for each in of_file.values()):
            continue
        chunk_bytes, num_bytes, *_ = next(iter(of_file.values()))
        for first, last, ranks in _runs(of_file):
            start, stop = first * chunk_bytes, min(last * chunk_bytes, num_bytes)
            if len(ranks) > 1:
                reader = min(ranks, key=lambda rank: (loads[rank], rank))
                loads[reader] += stop - start
                found[reader].append(Range(path, start, stop))
    for ranges in found.values():
        # Ranges without whole huge pages come last, to keep the others aligned.
        ranges.sort(key=lambda each: (each.stop - each.start) % (_native.huge_page() or 1) > 0)
    return found


def _runs(of_file: Mapping[int, FileChunks]) -> Iterable[tuple[int, int, list[int]]]:
    """Yield neighbouring chunks of one block that the same ranks need: the first, the one after the last, the
    ranks."""
    ranks: dict[int, list[int]] = {}
    for rank, each in of_file.items():
        for first, last in each.runs:
            for chunk in range(first, last):
                ranks.setdefault(chunk, []).append(rank)
    # Neighbours have equal differences of chunk number and place.
    order = [(chunk // BLOCK_CHUNKS, ranks[chunk], chunk - i) for i, chunk in enumerate(sorted(ranks))]
    for _, group in groupby(zip(order, sorted(ranks), strict=True), key=lambda row: row[0]):
        chunks = [chunk for _, chunk in group]
        yield chunks[0], chunks[-1] + 1, ranks[chunks[0]]


class _View:
    """The pieces of a file that ranks of this node have, mapped at their places in it. memory: of the rank
    that maps them. Raises OSError if a piece is not there: a rank that sees other ranks of the node divides
    differently, and its memory may be shorter."""

    def __init__(self, pieces: Sequence[Piece], memory: StepMemory) -> None:
        self._pieces, parts, end = sorted(pieces), list[tuple[int, int, int]](), 0
        for start, stop, descriptor, at in self._pieces:
            if not 0 <= at <= os.fstat(descriptor).st_size - pages(stop - start):
                raise OSError(errno.ENXIO, "a rank of this node has less of it than expected")
            parts += [(-1, 0, start - end), (descriptor, at, pages(stop - start))]
            end = start + pages(stop - start)
        self.bytes = memory.mapped(parts)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of these bytes that are here."""
        for piece in self._pieces[
            max(0, bisect_right(self._pieces, start, key=lambda each: each.start) - 1) :
        ]:
            if piece.start >= stop:
                break
            if piece.stop > start:
                yield max(start, piece.start), min(stop, piece.stop)


class NodeChunks:
    """The `Source` of a step's files for one rank of a node. Every rank of the job calls `exchange` once,
    also one that reads nothing. Chunks for other ranks are in the memory of its image.

    stored_bytes: read from storage, with its own files before `exchange`; taken_bytes: used in the memory of
    another rank."""

    def __init__(self, store: Store, rank: int) -> None:
        self.url = store.url
        self._store, self._rank = store, rank
        self._views: dict[str, _View] = {}
        self._has_shared = False
        self._lock = threading.Lock()
        self.stored_bytes = self.taken_bytes = 0

    def exchange(self, reading: StepReading | None, exchange: Exchange, threads: int) -> None:
        """Exchange the needs of this node's ranks, read this rank's share, and map those of the others, in
        two rounds among all ranks. reading: None if this rank has nothing to read. Never raises OSError: what
        cannot be shared is read from storage."""
        if reading is None:
            exchange(_NEEDS, None)
            exchange(_SHARES, None)
            return
        mine = needs_of(reading)
        self.stored_bytes = sum(contents.shard.num_bytes for contents, _ in reading.held().values())
        address = _published(reading, mine)
        addresses = exchange(_NEEDS, address)
        with ExitStack() as closing:
            files: dict[int, OwnDescriptor] = {}
            found: dict[int, Needs] = {}
            for rank, each in addresses.items() if address is not None else ():
                if (known := _known(rank, each)) is not None:
                    files[rank], found[rank] = known
                    closing.callback(files[rank].close)
            self._has_shared = self._rank in found
            shares = divide(found) if self._has_shared else {}
            offered = self._offer(shares[self._rank], reading, len(addresses), threads) if shares else None
            there = exchange(_SHARES, offered)
            for path, pieces in _pieces(mine, found, files, shares, there).items() if shares else ():
                try:
                    self._views[path] = _View(pieces, reading.image.memory)
                except OSError as error:
                    log.warning("the memory of ranks of this node with %s cannot be mapped: %s", path, error)

    def place(self, leaf: FileLeaf) -> Place | None:
        """Return the place of a complete leaf in this node's memory."""
        start = leaf.contents.shard.data_start + leaf.leaf.offset
        stop, view = start + leaf.leaf.num_bytes, self._views.get(leaf.path)
        if view is None or sum(b - a for a, b in view.within(start, stop)) != stop - start or start == stop:
            return None
        self.taken_bytes += stop - start
        return view.bytes, start

    def read_chunks(
        self, path: str, plan: _native.FilePlan, *, threads: int = 2, progress: int = 0, cancel: int = 0
    ) -> None:
        """See `Store.read_chunks`."""
        if (view := self._views.get(path)) is not None:
            chunk_bytes, before = plan.chunk_bytes, _bytes_left(plan)
            runs = ((first * chunk_bytes, last * chunk_bytes) for first, last in plan.left())
            pieces = (piece for start, stop in runs for piece in view.within(start, stop))

            def add(start: int, stop: int) -> None:
                # A private copy: the other rank could write between the comparison and the copy.
                plan.add(start, bytes(view.bytes[start:stop]))

            each_piece(path, pieces, threads, add, cancel)
            with self._lock:
                self.taken_bytes += before - _bytes_left(plan)
        if left := _bytes_left(plan):
            with self._lock:
                self.stored_bytes += left
            self._store.read_chunks(path, plan, threads=threads, progress=progress, cancel=cancel)

    def close(self) -> None:
        """End the reads."""
        if self._has_shared:
            log.info(
                "%d bytes of the step were read from storage, and %d used in memory of ranks of this node",
                self.stored_bytes, self.taken_bytes,
            )  # fmt: skip
        self._views = {}

    def _offer(self, ranges: Sequence[Range], reading: StepReading, ranks: int, threads: int) -> int | None:
        """Read this rank's share, and return its first byte in the memfd; None if that failed."""
        starts = _starts(ranges)
        # The other ranks of the node take memory at the same time.
        needed, available = ranks * starts[-1], memory_budget.available_bytes()
        if needed > available:
            log.warning(
                "each rank of this node reads by itself the chunks that several of them need: to share them "
                "takes %d bytes of memory, and %d are available",
                needed, available,
            )  # fmt: skip
            return None
        if not ranges:
            return 0
        plan, contents = ReadPlan(), {path: each for path, (each, _) in reading.needs().items()}
        try:
            [(into, first)] = reading.image.memory.share(starts[-1:])
            for (path, start, stop), at in zip(ranges, starts, strict=False):
                plan.copy(path, contents[path], start, stop - start, (), into, at)
            self.stored_bytes += plan.run(self._store, threads)
        except (OSError, DamagedError, OutOfSpaceError) as error:
            # Each rank reads them again by itself, and reports its errors.
            log.warning("this rank could not read its share of a step for others: %s", error)
            return None
        return first


def needs_of(reading: StepReading) -> dict[str, FileChunks]:
    """Return the chunks that a rank has yet to read of a step, and the files that it has."""
    found: dict[str, FileChunks] = {}
    for path, (contents, start) in reading.held().items():
        found[path] = FileChunks(contents.shard.chunk_bytes, contents.shard.num_bytes, start, [])
    for path, (contents, runs) in reading.needs().items():
        row = FileChunks(contents.shard.chunk_bytes, contents.shard.num_bytes, NOT_SHARED, runs)
        found.setdefault(path, row)
    return found


def _pieces(
    mine: Needs,
    found: Mapping[int, Needs],
    files: Mapping[int, OwnDescriptor],
    shares: Mapping[int, Sequence[Range]],
    offered: Mapping[int, Any],
) -> dict[str, list[Piece]]:
    """Return the pieces that the ranks of a node have of the files that this one needs."""
    pieces: dict[str, list[Piece]] = {path: [] for path, each in mine.items() if each.runs}
    for rank, needs in found.items():
        for path, each in needs.items():
            if each.held_at != NOT_SHARED and path in pieces and not pieces[path]:
                pieces[path].append(Piece(0, each.num_bytes, files[rank].descriptor, each.held_at))
        if type(first := offered.get(rank)) is not int:
            continue
        for (path, start, stop), at in zip(shares[rank], _starts(shares[rank]), strict=False):
            if path in pieces and mine[path].has(start):
                pieces[path].append(Piece(start, stop, files[rank].descriptor, first + at))
    return {path: each for path, each in pieces.items() if each}


def _published(reading: StepReading, needs: Needs) -> list[int] | None:
    """Write the table of this rank's needs into its memfd; return where others find it: process, descriptor,
    inode, and the first byte, length and digest of the table. None if no memory can be shared."""
    table = compact(needs)
    try:
        [(view, start)] = reading.image.memory.share([len(table)])
    except OutOfSpaceError as error:
        log.info("no memory for chunks of a step is shared on this node: %s", error)
        return None
    if (file := reading.image.memory.file) is None:
        return None
    view[: len(table)] = table
    return [os.getpid(), file.descriptor, os.fstat(file.descriptor).st_ino, start, len(table), xxh3_64(table)]


def _known(rank: int, address: Any) -> tuple[OwnDescriptor, Needs] | None:
    """Return the memfd of a rank of this node, and its needs; None if they are not accessible here."""
    if address is None:
        return None
    try:
        pid, descriptor, inode, start, num_bytes, digest = address
        path = f"/proc/{pid}/fd/{descriptor}"
        if os.stat(path).st_ino != inode:  # before it is opened: it may be any other file
            return None
        with ExitStack() as undo:
            file = OwnDescriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            undo.callback(file.close)
            table = os.pread(file.descriptor, num_bytes, start)
            is_safe = fcntl.fcntl(file.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_safe or xxh3_64(table) != digest:
                return None
            needs = {path: FileChunks(*row) for path, row in json.loads(table).items()}
            undo.pop_all()
            return file, needs
    except (OSError, TypeError, ValueError) as error:
        log.info("the memory of rank %d for a step is not accessible here: %s", rank, error)
        return None


def _bytes_left(plan: _native.FilePlan) -> int:
    return sum(
        min(last * plan.chunk_bytes, plan.num_bytes) - first * plan.chunk_bytes for first, last in plan.left()
    )


def _starts(ranges: Sequence[Range]) -> list[int]:
    """Return where each range begins in a rank's share, and where the last one ends."""
    return list(accumulate((pages(each.stop - each.start) for each in ranges), initial=0))
