"""The words that the ranks of one node share: a row for each rank, and the announcements of rank 0.

A region of memory that the node's leader creates and all its ranks map. Every word has 64 bits and is written
whole, by the one thread that docs/architecture.md names; only a rank's progress and limit, which are one
word, are changed by two threads, by compare-and-swap. Nothing here waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from typing_extensions import Buffer

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.ranks.liveness import ProcessId
from flashckpt.ranks.messages import (
    MOST_BYTES,
    MOST_OPEN,
    MOST_SAVES,
    NONE,
    Announcement,
)

MOST_RANKS = 64
_PAGE = 4096
_WORD = 8
_MASK = (1 << 32) - 1
_TRIES = 100

# Two places for announcements, which are written in turn, on the first page.
_PLACES = (1024, 1024 + MOST_BYTES + _WORD)
# In a row: the newest requests of save(), the sealed boundaries, and the table of each.
_REQUESTS = range(128, 128 + MOST_SAVES * _WORD, _WORD)
_SEALED = range(320, 320 + MOST_OPEN * _WORD, _WORD)
_TABLES = range(512, 512 + MOST_OPEN * 2 * _WORD, 2 * _WORD)
_ROW_BYTES = -(-_TABLES.stop // 64) * 64


class _Word:
    """An attribute that is a word in the shared memory, at this offset."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def __get__(self, owner: _Words, kind: object = None) -> int:
        return owner._load(self._offset)

    def __set__(self, owner: _Words, value: int) -> None:
        owner._store(self._offset, value)


class _Words:
    """Memory that several threads and processes read and write, each word whole."""

    def __init__(self, memory: memoryview, offset: int = 0) -> None:
        self._memory = memory  # held as long as its address is used
        self._address = _native.address_of(memory) + offset

    def _load(self, offset: int) -> int:
        return _native.load(self._address + offset)

    def _store(self, offset: int, value: int) -> None:
        _native.store(self._address + offset, value)


class Table(NamedTuple):
    """The step of a sealed snapshot, and a digest of the leaves that the ranks of its node divide: their
    names, forms, owners and contents. 0 if they divide none."""

    digest: int = 0
    step: int = 0


class LoopProgress(NamedTuple):
    """The newest boundary that a rank has entered, and the one that it promised not to pass, or NONE."""

    entered: int
    limit: int


class RankRow(_Words):
    """The words of one rank, by the thread that writes them. Those of the leader's thread are promises.

    Training thread: `begun`: a snapshot of this boundary begins, stored before its slot's word changes;
    `settled`: nothing more is captured of boundaries up to this one; `stop_asked`: the reason of a request;
    `outside`: the newest boundary at which this rank called save() outside of an iteration, where it waits
    for the others; `withdrawn`: it waits there no longer.
    Its background thread: `judged` (see `publish`); `acknowledged`: the announcement of this number was acted
    on; `slots` that can be written, and times as in `NodeMessage`; `persisted`, `failed`: the newest
    boundaries that are known to be; `is_ended`: the rank has released its run and passes no more
    boundaries."""

    _progress = _Word(0)
    settled, begun = _Word(64), _Word(72)
    stop_asked, withdrawn, outside = _Word(88), _Word(96), _Word(104)
    judged, acknowledged = _Word(192), _Word(200)
    slots, plain_ns, cost_ns, landing_ns = _Word(208), _Word(216), _Word(224), _Word(232)
    persisted, failed, is_ended = _Word(240), _Word(248), _Word(256)
    _pid, _started, _namespace = _Word(448), _Word(456), _Word(464)

    def __init__(self, memory: memoryview, offset: int, rank: int) -> None:
        super().__init__(memory, offset)
        self.rank = rank

    def live(self, process: ProcessId) -> None:
        """Store the process of this row, once."""
        self._pid, self._started, self._namespace = process

    @property
    def has_died(self) -> bool:
        """Whether its process is gone and has not released its run. Queries the system."""
        return not self.is_ended and ProcessId(self._pid, self._started, self._namespace).has_ended

    # ---- progress and limit

    @property
    def progress(self) -> LoopProgress:
        word = self._progress
        return LoopProgress(word & _MASK, word >> 32)

    def enter(self, boundary_index: int) -> bool:
        """Enter a boundary, on the training thread. False if a promise forbids it."""
        while True:
            found = self.progress
            if boundary_index > found.limit:
                return False
            if self._change(found, LoopProgress(boundary_index, found.limit)):
                return True

    def promise(self, limit: int) -> bool:
        """Promise, on the node's leader, that the rank does not pass this boundary: it waits there. False if
        it has passed the boundary or is at it, since it may continue at any time."""
        while True:
            found = self.progress
            if found.entered >= limit:
                return False
            if self._change(found, LoopProgress(found.entered, limit)):
                return True

    def lift(self, limit: int) -> None:
        """Withdraw the promise, if it is still this one."""
        while (found := self.progress).limit == limit:
            if self._change(found, LoopProgress(found.entered, NONE)):
                return

    def _change(self, found: LoopProgress, desired: LoopProgress) -> bool:
        return _native.compare_exchange(self._address, _packed(found), _packed(desired))

    # ---- what one thread writes and the leader reads

    def request_save(self, boundary_index: int) -> None:
        """Request that a snapshot of this boundary, or of a later one, is persisted. Keeps the newest
        requests."""
        self._store(min(_REQUESTS, key=self._load), boundary_index)

    @property
    def requests(self) -> set[int]:
        """The newest boundaries for which this rank called save()."""
        return {*map(self._load, _REQUESTS)} - {0}

    def publish(self, judged: int, sealed: Mapping[int, Table]) -> None:
        """Publish that the outcome of every boundary up to `judged` is known, and the sealed ones among those
        that are undecided, each with its table. An entry keeps its place while it is there, so that a
        concurrent reader misses none."""
        stands = [self._load(each) for each in _SEALED]
        new = sorted(sealed.keys() - {*stands})
        for index, each in enumerate(stands):
            if each not in sealed:
                # 0 while the table changes: it must never be read as that of another boundary.
                self._store(_SEALED[index], 0)
                if new:
                    for place, word in enumerate(sealed[new[-1]]):
                        self._store(_TABLES[index] + _WORD * place, word)
                    self._store(_SEALED[index], new.pop())
        assert not new, "more snapshots than slots"
        self.judged = max(judged, self.judged)

    @property
    def sealed(self) -> dict[int, Table]:
        """The sealed snapshots that are undecided, by boundary, each with its table."""
        found = {}
        for place, first in zip(_SEALED, _TABLES, strict=True):
            if boundary_index := self._load(place):
                table = Table(self._load(first), self._load(first + _WORD))
                # The place may have been written again meanwhile.
                if self._load(place) == boundary_index:
                    found[boundary_index] = table
        return found


class NodeState(_Words):
    """The shared words of a node. ranks: of the node, the leader first. memory: shared by them, of
    `num_bytes(len(ranks))`; new memory is zeros and must be initialized by `format`.

    The leader writes `confirmed`: the boundary at which all loops end, 0 if none is confirmed; `is_lost`:
    whether it has lost rank 0; `holds_whole`: whether each rank of the node keeps its own copy of all leaves
    in memory from now on."""

    _count = _Word(0)
    confirmed, is_lost, holds_whole = _Word(64), _Word(72), _Word(80)

    def __init__(self, memory: Buffer, ranks: Sequence[int]) -> None:
        view = memoryview(memory)
        assert len(view) >= self.num_bytes(len(ranks)), "a board that is too short"
        super().__init__(view)
        self.ranks = tuple(ranks)
        self.rows = [RankRow(view, _PAGE + _ROW_BYTES * index, rank) for index, rank in enumerate(self.ranks)]
        self._read = 0
        self._announced = Announcement()

    @staticmethod
    def num_bytes(count: int) -> int:
        """Return the size for so many ranks."""
        return _PAGE * (1 + -(-count * _ROW_BYTES // _PAGE))

    def format(self) -> None:
        """Initialize new memory, on the leader, before other ranks map it."""
        for row in self.rows:
            row._progress = _packed(LoopProgress(0, NONE))

    def row_of(self, rank: int) -> RankRow:
        return self.rows[self.ranks.index(rank)]

    # ---- what was announced

    def announce(self, announcement: Announcement) -> bool:
        """Publish an announcement, on the leader. False if it is not newer than the last one."""
        if announcement.number <= self.announced.number:
            return False
        data, count = announcement.packed(), self._count + 1
        place = _PLACES[count % 2]
        self._memory[place + _WORD : place + _WORD + len(data)] = data
        self._store(place, len(data))
        self._count = count
        return True

    @property
    def announced(self) -> Announcement:
        """The newest announcement. Use one NodeState for each thread that reads it."""
        for _ in range(_TRIES):
            count = self._count
            if count == self._read:
                break
            place = _PLACES[count % 2]
            length = min(self._load(place), MOST_BYTES)
            try:
                self._announced = Announcement.unpacked(
                    bytes(self._memory[place + _WORD : place + _WORD + length])
                )
            except DamagedError:
                continue  # it was written again meanwhile
            self._read = count
            break
        return self._announced


def _packed(progress: LoopProgress) -> int:
    return progress.limit << 32 | progress.entered
