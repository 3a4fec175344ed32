"""The words that the ranks of one node share: a row for each rank, and the announcements of rank 0.

A region of memory that the node's leader creates and all its ranks map. Every word has 64 bits and is written
whole, by the one thread that docs/architecture.md names; only a rank's progress and limit, which are one
word, are changed by two threads, by compare-and-swap. Nothing here waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
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

# On the first page: the number of announcements, the confirmed stop, whether rank 0 is lost, whether each
# rank holds all leaves, and two places for announcements, which are written in turn.
_ANNOUNCED, _CONFIRMED, _LOST, _WHOLE = 0, 64, 72, 80
_PLACES = (1024, 1024 + MOST_BYTES + _WORD)


class _Of(IntEnum):
    """Offsets in a row, by writer: both threads; the training thread; the background thread of its rank."""

    PROGRESS = 0

    SETTLED = 64
    BEGUN = 72
    STOP = 88
    WITHDRAWN = 96
    OUTSIDE = 104
    REQUESTS = 128

    JUDGED = 192
    ACKNOWLEDGED = 200
    SLOTS = 208
    PLAIN_NS = 216
    COST_NS = 224
    LANDING_NS = 232
    PERSISTED = 240
    FAILED = 248
    ENDED = 256
    SEALED = 320
    PID, STARTED, NAMESPACE = 448, 456, 464
    TABLES = 512


_TABLE_BYTES = _WORD * 2
_ROW_BYTES = -(-(_Of.TABLES + MOST_OPEN * _TABLE_BYTES) // 64) * 64


class Table(NamedTuple):
    """The step of a sealed snapshot, and a digest of the leaves that the ranks of its node divide: their
    names, forms, owners and contents. 0 if they divide none."""

    digest: int = 0
    step: int = 0


class LoopProgress(NamedTuple):
    """The newest boundary that a rank has entered, and the one that it promised not to pass, or NONE."""

    entered: int
    limit: int


class RankRow:
    """The words of one rank."""

    def __init__(self, memory: memoryview, offset: int, rank: int) -> None:
        self._memory = memory  # held as long as its address is used
        self._address, self.rank = _native.address_of(memory) + offset, rank

    def live(self, process: ProcessId) -> None:
        """Store the process of this row, once."""
        for offset, value in zip((_Of.PID, _Of.STARTED, _Of.NAMESPACE), process, strict=True):
            self._store(offset, value)

    @property
    def has_died(self) -> bool:
        """Whether its process is gone and has not released its run. Queries the system."""
        process = ProcessId(self._load(_Of.PID), self._load(_Of.STARTED), self._load(_Of.NAMESPACE))
        return not self.is_ended and process.has_ended

    # ---- progress and limit

    @property
    def progress(self) -> LoopProgress:
        word = self._load(_Of.PROGRESS)
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
        address = self._address + _Of.PROGRESS
        return _native.compare_exchange(address, _packed(found), _packed(desired))

    # ---- written by the training thread

    def begin(self, boundary_index: int) -> None:
        """Record that a snapshot of this boundary is about to begin, before its slot's word changes."""
        self._store(_Of.BEGUN, boundary_index)

    def settle(self, boundary_index: int) -> None:
        """Record that nothing more is captured of boundaries up to this one."""
        self._store(_Of.SETTLED, boundary_index)

    def ask_stop(self, reason: int) -> None:
        self._store(_Of.STOP, reason)

    def request_save(self, boundary_index: int) -> None:
        """Request that a snapshot of this boundary, or of a later one, is persisted. Keeps the newest
        requests."""
        places = [_Of.REQUESTS + _WORD * index for index in range(MOST_SAVES)]
        self._store(min(places, key=self._load), boundary_index)

    def save_outside(self, boundary_index: int) -> None:
        """This rank called save() outside of an iteration, and waits at this boundary for the others."""
        self._store(_Of.OUTSIDE, boundary_index)

    def withdraw(self, boundary_index: int) -> None:
        """This rank waits no longer for others to call save() outside of an iteration."""
        self._store(_Of.WITHDRAWN, boundary_index)

    # ---- written by the rank's background thread

    def publish(self, judged: int, sealed: Mapping[int, Table]) -> None:
        """Publish that the outcome of every boundary up to `judged` is known, and the sealed ones among those
        that are undecided, each with its table. An entry keeps its place while it is there, so that a
        concurrent reader misses none."""
        stands = [self._load(_Of.SEALED + _WORD * index) for index in range(MOST_OPEN)]
        new = sorted(sealed.keys() - {*stands})
        for index, each in enumerate(stands):
            if each not in sealed:
                # 0 while the table changes: it must never be read as that of another boundary.
                self._store(_Of.SEALED + _WORD * index, 0)
                if new:
                    table = sealed[new[-1]]
                    for place, word in enumerate(table):
                        self._store(_Of.TABLES + _TABLE_BYTES * index + _WORD * place, word)
                    self._store(_Of.SEALED + _WORD * index, new.pop())
        assert not new, "more snapshots than slots"
        if judged > self.judged:
            self._store(_Of.JUDGED, judged)

    def acknowledge(self, number: int) -> None:
        """Record that the announcement of this number was acted on."""
        self._store(_Of.ACKNOWLEDGED, number)

    def measure(self, slots: int, plain_s: float, cost_s: float, landing_s: float) -> None:
        """Publish the number of writable slots, and times as in `NodeMessage`, in seconds."""
        self._store(_Of.SLOTS, slots)
        for offset, seconds in ((_Of.PLAIN_NS, plain_s), (_Of.COST_NS, cost_s), (_Of.LANDING_NS, landing_s)):
            self._store(offset, int(seconds * 1e9))

    def persisted(self, boundary_index: int) -> None:
        self._store(_Of.PERSISTED, boundary_index)

    def failed(self, boundary_index: int) -> None:
        self._store(_Of.FAILED, boundary_index)

    def end(self) -> None:
        """Record that the rank has released its run and passes no more boundaries."""
        self._store(_Of.ENDED, 1)

    # ---- read by the node's leader

    @property
    def sealed(self) -> dict[int, Table]:
        """The sealed snapshots that are undecided, by boundary, each with its table."""
        found = {}
        for index in range(MOST_OPEN):
            if boundary_index := self._load(_Of.SEALED + _WORD * index):
                first = _Of.TABLES + _TABLE_BYTES * index
                table = Table(self._load(first), self._load(first + _WORD))
                # The place may have been written again meanwhile.
                if self._load(_Of.SEALED + _WORD * index) == boundary_index:
                    found[boundary_index] = table
        return found

    @property
    def requests(self) -> set[int]:
        """The newest boundaries for which this rank called save()."""
        return {self._load(_Of.REQUESTS + _WORD * index) for index in range(MOST_SAVES)} - {0}

    @property
    def outside(self) -> int:
        """The newest boundary at which this rank called save() outside of an iteration; 0 if it did not."""
        return self._load(_Of.OUTSIDE)

    @property
    def settled(self) -> int:
        return self._load(_Of.SETTLED)

    @property
    def begun(self) -> int:
        return self._load(_Of.BEGUN)

    @property
    def judged(self) -> int:
        return self._load(_Of.JUDGED)

    @property
    def acknowledged(self) -> int:
        return self._load(_Of.ACKNOWLEDGED)

    @property
    def stop_asked(self) -> int:
        return self._load(_Of.STOP)

    @property
    def withdrawn(self) -> int:
        return self._load(_Of.WITHDRAWN)

    @property
    def measures(self) -> tuple[int, int, int, int]:
        """Slots; ns of an iteration without a snapshot, of the cost of a snapshot, until it is sealed."""
        return (
            self._load(_Of.SLOTS), self._load(_Of.PLAIN_NS), self._load(_Of.COST_NS),
            self._load(_Of.LANDING_NS),
        )  # fmt: skip

    @property
    def newest_persisted(self) -> int:
        return self._load(_Of.PERSISTED)

    @property
    def newest_failed(self) -> int:
        return self._load(_Of.FAILED)

    @property
    def is_ended(self) -> bool:
        return self._load(_Of.ENDED) != 0

    def _load(self, offset: int) -> int:
        return _native.load(self._address + offset)

    def _store(self, offset: int, value: int) -> None:
        _native.store(self._address + offset, value)


class NodeState:
    """The shared words of a node. ranks: of the node, the leader first. memory: shared by them, of
    `num_bytes(len(ranks))`; new memory is zeros and must be initialized by `format`."""

    def __init__(self, memory: Buffer, ranks: Sequence[int]) -> None:
        view = memoryview(memory)
        assert len(view) >= self.num_bytes(len(ranks)), "a board that is too short"
        self._view, self._address = view, _native.address_of(view)
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
            _native.store(row._address + _Of.PROGRESS, _packed(LoopProgress(0, NONE)))

    def row_of(self, rank: int) -> RankRow:
        return self.rows[self.ranks.index(rank)]

    # ---- what was announced

    def announce(self, announcement: Announcement) -> bool:
        """Publish an announcement, on the leader. False if it is not newer than the last one."""
        if not announcement.follows(self.announced):
            return False
        data, count = announcement.packed(), self._load(_ANNOUNCED) + 1
        place = _PLACES[count % 2]
        self._view[place + _WORD : place + _WORD + len(data)] = data
        self._store(place, len(data))
        self._store(_ANNOUNCED, count)
        return True

    @property
    def announced(self) -> Announcement:
        """The newest announcement. Use one NodeState for each thread that reads it."""
        for _ in range(_TRIES):
            count = self._load(_ANNOUNCED)
            if count == self._read:
                break
            place = _PLACES[count % 2]
            length = min(self._load(place), MOST_BYTES)
            try:
                self._announced = Announcement.unpacked(
                    bytes(self._view[place + _WORD : place + _WORD + length])
                )
            except DamagedError:
                continue  # it was written again meanwhile
            self._read = count
            break
        return self._announced

    # ---- words that training threads wait for

    @property
    def confirmed(self) -> int:
        """The boundary at which all loops end; 0 if none is confirmed."""
        return self._load(_CONFIRMED)

    def confirm(self, boundary_index: int) -> None:
        self._store(_CONFIRMED, boundary_index)

    @property
    def is_lost(self) -> bool:
        """Whether the leader has lost rank 0."""
        return self._load(_LOST) != 0

    @property
    def holds_whole(self) -> bool:
        """Whether each rank of the node keeps its own copy of all leaves in memory from now on."""
        return self._load(_WHOLE) != 0

    def hold_whole(self) -> None:
        """Set `holds_whole`. Called by the leader only."""
        self._store(_WHOLE, 1)

    def lose(self, is_lost: bool) -> None:
        self._store(_LOST, int(is_lost))

    def _load(self, offset: int) -> int:
        return _native.load(self._address + offset)

    def _store(self, offset: int, value: int) -> None:
        _native.store(self._address + offset, value)


def _packed(progress: LoopProgress) -> int:
    return progress.limit << 32 | progress.entered
