"""The words that the ranks of one node share: a row for each rank, and what rank 0 has announced to all.

A region of memory that the node's leader makes and all its ranks map. Every word is of 64 bits and written
whole, by the one thread that docs/architecture.md names; only a rank's progress and limit, which are one
word, are changed by two, by compare-and-swap. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from typing_extensions import Buffer

from flashckpt import _native
from flashckpt.capture.division import GROUPS
from flashckpt.errors import DamagedError
from flashckpt.ranks.liveness import ProcessId
from flashckpt.ranks.messages import (
    MOST_BYTES,
    MOST_COMMITTED,
    MOST_OPEN,
    MOST_SAVES,
    NONE,
    Announcement,
    Call,
)

MOST_RANKS = 64
_PAGE = 4096
_WORD = 8
_MASK = (1 << 32) - 1
_SIGN = 1 << 64
_TRIES = 100

# On the first page: how often something was announced, the confirmed stop, since when nothing was heard,
# which groups of leaves the ranks divide no more, and two places for announcements, of which the one that is
# not read is written.
_ANNOUNCED, _CONFIRMED, _LOST, _WHOLE = 0, 64, 72, 80
_PLACES = (1024, 1024 + MOST_BYTES + _WORD)


class _Of(IntEnum):
    """Offsets in a row, by who writes: both; the training thread; the background thread of its rank."""

    PROGRESS = 0

    SETTLED = 64
    BEGUN = 72
    OFFSET = 80
    STOP = 88
    WITHDRAWN = 96
    SAVES_SINCE = 104
    SAVES_COUNT = 112
    SAVES = 128

    JUDGED = 192
    HEARD = 200
    SLOTS = 208
    PLAIN_NS = 216
    COST_NS = 224
    LANDING_NS = 232
    PERSISTED = 240
    FAILED = 248
    ENDED = 256
    COMMITTED = 264
    SEALED = 320
    PID, STARTED, NAMESPACE = 448, 456, 464
    TABLES = 512


_TABLE_BYTES = _WORD * (2 + GROUPS)
_ROW_BYTES = -(-(_Of.TABLES + MOST_OPEN * _TABLE_BYTES) // 64) * 64


class Table(NamedTuple):
    """What a rank has sealed of what its node divides, and at which step: two are the same if these numbers
    are. `ground`: of names, forms and holders, 0 where nothing is divided; `groups`: of the digests of each
    group of leaves, 0 where none of it is divided."""

    ground: int = 0
    groups: tuple[int, ...] = (0,) * GROUPS
    step: int = 0


class LoopProgress(NamedTuple):
    """The newest boundary that a rank has entered, and the one that it has promised not to pass, or NONE."""

    entered: int
    limit: int


class RankRow:
    """The words of one rank."""

    def __init__(self, memory: memoryview, offset: int, rank: int) -> None:
        self._memory = memory  # held as long as its address is used
        self._address, self.rank = _native.address_of(memory) + offset, rank

    def live(self, process: ProcessId) -> None:
        """Whose row this is, once."""
        for offset, value in zip((_Of.PID, _Of.STARTED, _Of.NAMESPACE), process, strict=True):
            self._store(offset, value)

    @property
    def has_died(self) -> bool:
        """Whether its process is gone, and has not let its run go. Asks the system."""
        process = ProcessId(self._load(_Of.PID), self._load(_Of.STARTED), self._load(_Of.NAMESPACE))
        return not self.is_ended and process.has_ended

    # ---- progress and limit

    @property
    def progress(self) -> LoopProgress:
        word = self._load(_Of.PROGRESS)
        return LoopProgress(word & _MASK, word >> 32)

    def enter(self, ordinal: int, step: int) -> bool:
        """The training thread enters a boundary. False where a promise keeps it from that."""
        self._store(_Of.OFFSET, (step - ordinal) % _SIGN)
        while True:
            found = self.progress
            if ordinal > found.limit:
                return False
            if self._change(found, LoopProgress(ordinal, found.limit)):
                return True

    def promise(self, limit: int) -> bool:
        """The node's leader promises for the rank that it does not pass this boundary: it waits there. False
        where it has passed it, or is at it: nobody knows then whether it goes on."""
        while True:
            found = self.progress
            if found.entered >= limit:
                return False
            if self._change(found, LoopProgress(found.entered, limit)):
                return True

    def lift(self, limit: int) -> None:
        """The promise is taken back, if it is still this one."""
        while (found := self.progress).limit == limit:
            if self._change(found, LoopProgress(found.entered, NONE)):
                return

    def _change(self, found: LoopProgress, desired: LoopProgress) -> bool:
        address = self._address + _Of.PROGRESS
        return _native.compare_exchange(address, _packed(found), _packed(desired))

    # ---- written by the training thread

    def begin(self, ordinal: int) -> None:
        """A snapshot of this boundary is about to be begun: before its slot's word changes."""
        self._store(_Of.BEGUN, ordinal)

    def settle(self, ordinal: int) -> None:
        """Nothing is captured of this boundary, or of one before it, from now on."""
        self._store(_Of.SETTLED, ordinal)

    def ask_stop(self, reason: int) -> None:
        self._store(_Of.STOP, reason)

    def call_save(self, ordinal: int, call: Call) -> None:
        """save() was called for a boundary to come."""
        count = self._load(_Of.SAVES_COUNT)
        place = _Of.SAVES + _WORD * (count % MOST_SAVES)
        # First: whoever does not find a call any more must not take it for none.
        if count >= MOST_SAVES:
            self._store(_Of.SAVES_SINCE, (self._load(place) >> 2) + 1)
        self._store(place, ordinal << 2 | call)
        self._store(_Of.SAVES_COUNT, count + 1)

    def withdraw(self, ordinal: int) -> None:
        """save() outside of an iteration is not waited for any longer."""
        self._store(_Of.WITHDRAWN, ordinal)

    # ---- written by the rank's background thread

    def publish(self, judged: int, sealed: Mapping[int, Table]) -> None:
        """The outcome of every boundary up to `judged` is known: of those that are still open these are
        sealed, and no others, each with its table. An entry keeps its place as long as it stands: who reads
        beside this misses none."""
        stands = [self._load(_Of.SEALED + _WORD * index) for index in range(MOST_OPEN)]
        new = sorted(sealed.keys() - {*stands})
        for index, each in enumerate(stands):
            if each not in sealed:
                # Nothing while the table is another one: it must never be read as that of this boundary.
                self._store(_Of.SEALED + _WORD * index, 0)
                if new:
                    table = sealed[new[-1]]
                    for place, word in enumerate((table.step, table.ground, *table.groups)):
                        self._store(_Of.TABLES + _TABLE_BYTES * index + _WORD * place, word)
                    self._store(_Of.SEALED + _WORD * index, new.pop())
        assert not new, "more snapshots than slots"
        if judged > self.judged:
            self._store(_Of.JUDGED, judged)

    def hear(self, number: int) -> None:
        """What was announced under this number was acted on."""
        self._store(_Of.HEARD, number)

    def measure(self, slots: int, plain_s: float, cost_s: float, landing_s: float) -> None:
        """Slots that can be written, and times as in `NodeMessage`, in seconds."""
        self._store(_Of.SLOTS, slots)
        for offset, seconds in ((_Of.PLAIN_NS, plain_s), (_Of.COST_NS, cost_s), (_Of.LANDING_NS, landing_s)):
            self._store(offset, int(seconds * 1e9))

    def persisted(self, ordinal: int) -> None:
        self._store(_Of.PERSISTED, ordinal)

    def failed(self, ordinal: int) -> None:
        self._store(_Of.FAILED, ordinal)

    def commit(self, ordinals: Sequence[int]) -> None:
        """The newest boundaries that are in storage, as many as MOST_COMMITTED. An entry keeps its place as
        long as it stands."""
        new = sorted(set(ordinals) - self.committed)
        for index in range(MOST_COMMITTED):
            place = _Of.COMMITTED + _WORD * index
            if self._load(place) - 1 not in ordinals:
                self._store(place, new.pop() + 1 if new else 0)

    def end(self) -> None:
        """The rank has let its run go, and passes no boundary any more."""
        self._store(_Of.ENDED, 1)

    # ---- read by the node's leader

    @property
    def sealed(self) -> dict[int, Table]:
        """Sealed snapshots that are still open, by boundary, each with its table."""
        found = {}
        for index in range(MOST_OPEN):
            if ordinal := self._load(_Of.SEALED + _WORD * index):
                first = _Of.TABLES + _TABLE_BYTES * index
                step, ground, *groups = (self._load(first + _WORD * at) for at in range(2 + GROUPS))
                # It may have been written again meanwhile.
                if self._load(_Of.SEALED + _WORD * index) == ordinal:
                    found[ordinal] = Table(ground, tuple(groups), step)
        return found

    @property
    def saves(self) -> dict[int, Call]:
        """The newest calls of save(), by boundary. One that was put off to its boundary may be waited for
        before: then that call holds."""
        words = sorted(self._load(_Of.SAVES + _WORD * index) for index in range(MOST_SAVES))
        return {word >> 2: Call(word & 3) for word in words if word}

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
    def heard(self) -> int:
        return self._load(_Of.HEARD)

    @property
    def offset(self) -> int:
        """Step less ordinal, at the newest boundary."""
        word = self._load(_Of.OFFSET)
        return word - _SIGN if word >= _SIGN // 2 else word

    @property
    def stop_asked(self) -> int:
        return self._load(_Of.STOP)

    @property
    def saves_since(self) -> int:
        return self._load(_Of.SAVES_SINCE)

    @property
    def withdrawn(self) -> int:
        return self._load(_Of.WITHDRAWN)

    @property
    def measures(self) -> tuple[int, int, int, int]:
        """Slots; ns of an iteration without a snapshot, of what a snapshot costs, until it is sealed."""
        return (
            self._load(_Of.SLOTS), self._load(_Of.PLAIN_NS), self._load(_Of.COST_NS),
            self._load(_Of.LANDING_NS),
        )  # fmt: skip

    @property
    def newest_persisted(self) -> int:
        return self._load(_Of.PERSISTED)

    @property
    def committed(self) -> set[int]:
        """The newest boundaries that are in storage, and 0 for what the attempt went on from."""
        words = (self._load(_Of.COMMITTED + _WORD * index) for index in range(MOST_COMMITTED))
        return {word - 1 for word in words if word}

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


class Board:
    """`ranks` are those of the node, the leader first; `memory` is theirs, `num_bytes(len(ranks))` long and
    zeros when it is new (`format` makes it one that can be used)."""

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
        """For the board of so many ranks."""
        return _PAGE * (1 + -(-count * _ROW_BYTES // _PAGE))

    def format(self) -> None:
        """The leader, before anybody else maps it: nobody has promised anything."""
        for row in self.rows:
            _native.store(row._address + _Of.PROGRESS, _packed(LoopProgress(0, NONE)))

    def row_of(self, rank: int) -> RankRow:
        return self.rows[self.ranks.index(rank)]

    # ---- what was announced

    def announce(self, announcement: Announcement) -> bool:
        """The leader alone. False for what is not newer than what is known."""
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
        """The newest announcement. For one thread of a process."""
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
                continue  # the place was written again meanwhile
            self._read = count
            break
        return self._announced

    # ---- words that training threads wait for

    @property
    def confirmed(self) -> int:
        """The boundary at which all loops end, 0 while none is agreed on."""
        return self._load(_CONFIRMED)

    def confirm(self, ordinal: int) -> None:
        self._store(_CONFIRMED, ordinal)

    @property
    def is_lost(self) -> bool:
        """Whether the leader has lost rank 0 for good."""
        return self._load(_LOST) != 0

    @property
    def held_whole(self) -> int:
        """The groups of leaves of which each rank of the node keeps its own in memory from now on, a bit
        each."""
        return self._load(_WHOLE)

    def hold_whole(self, groups: int) -> None:
        """The leader alone."""
        self._store(_WHOLE, self.held_whole | groups)

    def lose(self, is_lost: bool) -> None:
        self._store(_LOST, int(is_lost))

    def _load(self, offset: int) -> int:
        return _native.load(self._address + offset)

    def _store(self, offset: int, value: int) -> None:
        _native.store(self._address + offset, value)


def _packed(progress: LoopProgress) -> int:
    return progress.limit << 32 | progress.entered
