"""Chunks of a step's files that several ranks of a node need: one of them reads each from storage, the others
take it out of that one's memory.

What is taken so is as unverified as what comes from a disk: whoever takes it compares each chunk with its
checksum where it lies then (`Gathering`), and goes to storage where it is not right. So whatever happens here
costs time, and never loads a wrong byte. The memory is a memfd, which others open through /proc: it has no
name, no keeper knows of it, and it goes with the processes that have it open. Nobody maps it: of one that has
been let go less is read, and no touch is a SIGBUS.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple

from flashckpt._native import xxh3_64
from flashckpt.errors import DamagedError
from flashckpt.format.checked_json import compact
from flashckpt.memory import room
from flashckpt.memory.control_page import round_up
from flashckpt.memory.forks import OwnDescriptor
from flashckpt.restore.box_gathering import BLOCK_CHUNKS, MOST_THREADS
from flashckpt.restore.step_reading import StepReading
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

Say = Callable[[str, Any], Mapping[int, Any]]
"""Says something (plain JSON) to all ranks of the job; gives, by rank, what those of this node have said."""


class FileChunks(NamedTuple):
    """What a rank needs of a file: runs of chunks, each the first and the one behind the last. `is_held`: it
    has all of it already."""

    chunk_bytes: int
    num_bytes: int
    is_held: bool
    runs: Sequence[tuple[int, int]]


Needs = Mapping[str, FileChunks]
"""By the file's path."""


class Range(NamedTuple):
    """Bytes of a file: the first, and the one behind the last."""

    path: str
    start: int
    stop: int


class _Place(NamedTuple):
    """Where bytes of a file stand: at which byte of whose memory."""

    start: int
    stop: int
    file: OwnDescriptor
    at: int


def divide(needs: Mapping[int, Needs]) -> dict[int, list[Range]]:
    """By rank what it gives the others: of what more than one needs, or has, each byte once; who has a file
    gives of that, else who has least to read. The same on each rank."""
    loads = dict.fromkeys(sorted(needs), 0)
    found: dict[int, list[Range]] = {rank: [] for rank in loads}
    for path in sorted({path for each in needs.values() for path in each}):
        of_file = {rank: needs[rank][path] for rank in loads if path in needs[rank]}
        holder = next((rank for rank, each in of_file.items() if each.is_held), None)
        chunk_bytes, num_bytes, *_ = next(iter(of_file.values()))
        for first, last, ranks in _runs(of_file):
            start, stop = first * chunk_bytes, min(last * chunk_bytes, num_bytes)
            if holder is not None:
                found[holder].append(Range(path, start, stop))
            elif len(ranks) > 1:
                reader = min(ranks, key=lambda rank: (loads[rank], rank))
                loads[reader] += stop - start
                found[reader].append(Range(path, start, stop))
    return found


def _runs(of_file: Mapping[int, FileChunks]) -> Iterable[tuple[int, int, list[int]]]:
    """Chunks side by side, of one block, that the same ranks need: the first, the one behind the last,
    these."""
    ranks: dict[int, list[int]] = {}
    for rank, each in of_file.items():
        for first, last in each.runs:
            for chunk in range(first, last):
                ranks.setdefault(chunk, []).append(rank)
    # Side by side: as much as the chunk's number grows, its place does.
    order = [(chunk // BLOCK_CHUNKS, ranks[chunk], chunk - i) for i, chunk in enumerate(sorted(ranks))]
    for _, group in groupby(zip(order, sorted(ranks), strict=True), key=lambda row: row[0]):
        chunks = [chunk for _, chunk in group]
        yield chunks[0], chunks[-1] + 1, ranks[chunks[0]]


class NodeChunks:
    """A step's files as one rank of a node reads them: a `Source`. Every rank of the job calls `exchange`
    once, also one that reads nothing; what it has for others goes with `close`, once they have it.

    `stored_bytes` were read from storage, its own files before `exchange` too; `taken_bytes` are another
    rank's."""

    def __init__(self, store: Store, rank: int) -> None:
        self.url = store.url
        self._store, self._rank = store, rank
        self._files: dict[int, OwnDescriptor] = {}
        self._places: dict[str, list[_Place]] = {}
        self._lock = threading.Lock()
        self.stored_bytes = self.taken_bytes = 0

    def exchange(self, reading: StepReading | None, say: Say, threads: int) -> None:
        """Know what the ranks of this node need, and read this one's share of what several do. Two rounds
        among all ranks. `reading`: None where this one has nothing to read. OSError is never raised: what is
        not to be had so is read from storage."""
        mine = None if reading is None else needs_of(reading)
        said = say("what the ranks of a node need of a step", None if mine is None else self._publish(mine))
        shares: dict[int, list[Range]] = {}
        if mine is not None and self._rank in self._files:
            found = {rank: self._known(rank, address) for rank, address in said.items()}
            shares = divide({rank: needs for rank, needs in found.items() if needs is not None})
        offered = False
        if reading is not None and self._rank in shares:
            self.stored_bytes = sum(contents.shard.num_bytes for contents, _ in reading.held.values())
            offered = self._offer(shares[self._rank], reading, len(said), threads)
        there = say("what they have read of it for each other", offered)
        for rank, ranges in shares.items():
            if there.get(rank) is True:
                self._place(rank, ranges, first=said[rank][3])

    def read_bytes(self, path: str, offset: int, num_bytes: int, file_bytes: int | None = None) -> bytes:
        """See `Store.read_bytes`; unverified."""
        places, stop, pieces = self._places.get(path, []), offset + num_bytes, []
        first = bisect_right(places, offset, key=lambda place: place.stop)
        for place in places[first:]:
            if place.start >= stop:
                break
            if offset < place.start:
                pieces.append(self._stored(path, offset, place.start, file_bytes))
                offset = place.start
            last = min(stop, place.stop)
            pieces.append(self._take(path, place, offset, last, file_bytes))
            offset = last
        if offset < stop:
            pieces.append(self._stored(path, offset, stop, file_bytes))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Give the memory back, whoever has it open."""
        if (own := self._files.get(self._rank)) is not None:
            os.ftruncate(own.descriptor, 0)
        for each in self._files.values():
            each.close()
        if self._places:
            log.info(
                "%d bytes of the step were read from storage, and %d came from other ranks of this node",
                self.stored_bytes, self.taken_bytes,
            )  # fmt: skip
        self._files, self._places = {}, {}

    # ---- what is said

    def _publish(self, needs: Needs) -> list[int] | None:
        """Where others find what this rank needs: process, descriptor, what tells the file from others, and
        of the table its bytes and digest."""
        table = compact(needs)
        try:
            file = OwnDescriptor(os.memfd_create(f"chunks-{self._rank}"))
            self._files[self._rank] = file
            _write(file.descriptor, table, 0)
            known = os.fstat(file.descriptor)
        except OSError as error:
            log.info("no memory for chunks of a step is shared on this node: %s", error)
            return None
        return [os.getpid(), file.descriptor, known.st_ino, len(table), xxh3_64(table)]

    def _known(self, rank: int, address: Any) -> Needs | None:
        """What a rank of this node needs. None where that cannot be seen from here."""
        try:
            pid, descriptor, inode, num_bytes, digest = address
            if rank not in self._files:
                path = f"/proc/{pid}/fd/{descriptor}"
                if os.stat(path).st_ino != inode:  # before it is opened: it may be anything of anybody's
                    return None
                self._files[rank] = OwnDescriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            table = _read(self._files[rank].descriptor, 0, num_bytes)
            if xxh3_64(table) != digest:
                return None
            return {path: FileChunks(*row) for path, row in json.loads(table).items()}
        except (OSError, TypeError, ValueError) as error:
            if address is not None:
                log.info("what rank %d reads of a step cannot be seen here or shared: %s", rank, error)
            return None

    # ---- what is read for others

    def _offer(self, ranges: Sequence[Range], reading: StepReading, ranks: int, threads: int) -> bool:
        """Put this rank's share where the others find it. False, said, where there is no room."""
        num_bytes = sum(each.stop - each.start for each in ranges)
        # The others of the node look at the same time, and what they read into is to be touched yet.
        needed, available = ranks * (num_bytes + reading.left.num_bytes), room.available_bytes()
        if needed > available:
            log.warning(
                "chunks that several ranks of this node need are read by each of them: for sharing them "
                "%d bytes of memory are needed, and %d are available",
                needed, available,
            )  # fmt: skip
            return False
        file = self._files[self._rank].descriptor
        starts = _starts(ranges, os.fstat(file).st_size)
        lengths = {path: contents.shard.num_bytes for path, contents, *_ in reading.left.needs()}

        def put(each: Range, at: int) -> None:
            held = reading.held.get(each.path)
            data: bytes | memoryview
            if held is not None:
                data = held[1][each.start : each.stop]
            else:
                data = self._stored(each.path, each.start, each.stop, lengths.get(each.path))
            _write(file, data, at)

        with ThreadPoolExecutor(max(1, min(threads, MOST_THREADS)), "flashckpt-share") as pool:
            try:
                list(pool.map(put, ranges, starts))
            except (OSError, DamagedError) as error:
                # Each rank tries it again by itself, and says what it finds.
                log.warning("this rank could not read its share of a step for others: %s", error)
                return False
        return True

    def _place(self, rank: int, ranges: Sequence[Range], first: int) -> None:
        for each, at in zip(ranges, _starts(ranges, first), strict=True):
            place = _Place(each.start, each.stop, self._files[rank], at)
            self._places.setdefault(each.path, []).append(place)
        for places in self._places.values():
            places.sort(key=lambda place: place.start)

    def _take(self, path: str, place: _Place, start: int, stop: int, file_bytes: int | None) -> bytes:
        data = _read(place.file.descriptor, place.at + start - place.start, stop - start)
        if len(data) < stop - start:
            return self._stored(path, start, stop, file_bytes)
        if place.file is not self._files[self._rank]:
            with self._lock:
                self.taken_bytes += len(data)
        return data

    def _stored(self, path: str, start: int, stop: int, file_bytes: int | None) -> bytes:
        data = self._store.read_bytes(path, start, stop - start, file_bytes)
        with self._lock:
            self.stored_bytes += len(data)
        return data


def needs_of(reading: StepReading) -> dict[str, FileChunks]:
    """What a rank has yet to read of a step, and which files it has."""
    found: dict[str, FileChunks] = {}
    for path, (contents, _) in reading.held.items():
        found[path] = FileChunks(contents.shard.chunk_bytes, contents.shard.num_bytes, True, [])
    runs: dict[str, list[tuple[int, int]]] = {}
    for path, contents, first, last in reading.left.needs():
        row = FileChunks(
            contents.shard.chunk_bytes, contents.shard.num_bytes, False, runs.setdefault(path, [])
        )
        found.setdefault(path, row)
        runs[path].append((first, last))
    return found


def _starts(ranges: Sequence[Range], first: int) -> list[int]:
    """Where in a rank's memory each stands, behind its table."""
    at, found = round_up(first), []
    for each in ranges:
        found.append(at)
        at += each.stop - each.start
    return found


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


def _read(file: int, at: int, num_bytes: int) -> bytes:
    """Bytes of a memory; fewer where it ends before."""
    data = os.pread(file, num_bytes, at)
    while data and len(data) < num_bytes:
        more = os.pread(file, num_bytes - len(data), at + len(data))
        if not more:
            break
        data += more
    return data
