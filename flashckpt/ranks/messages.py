"""What a node tells rank 0 and what rank 0 tells all: small structs of bytes, checked field by field.

A message that is damaged, cannot be, or is older than what is known changes nothing: what they say only ever
moves on. Boundaries are named by their ordinals, which are the same on all ranks; ranks by their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from flashckpt import _native
from flashckpt.errors import DamagedError

# A 32-bit number that is none: no rank, no boundary.
NONE = (1 << 32) - 1
# As many slots as a trainer may have: of so many snapshots the outcome may be open at once.
MOST_OPEN = 16
MOST_SAVES = 4
# Of the newest boundaries that a node has committed; what all have is mostly among them.
MOST_COMMITTED = 6
# A message of either kind fits into this many bytes.
MOST_BYTES = 1024

_NODE = struct.Struct("<4sQQ10Iq5Q4I")
_ANNOUNCED = struct.Struct("<4sQQI?5I")
_TERMS = struct.Struct("<5I")
_STOP = struct.Struct("<IIBIB")
_SAVE = struct.Struct("<IBIIB")
_REFUSED = struct.Struct("<III")
_ORDINAL = struct.Struct("<I")
_STEP = struct.Struct("<Q")
_NODE_MAGIC, _ANNOUNCED_MAGIC = b"FNOD", b"FANN"
_COUNT = struct.Struct("<B")
_CHECKSUM_BYTES = 8
_E = TypeVar("_E", bound=IntEnum)


class Terms(NamedTuple):
    """From the boundary `start` on every `every`-th one is captured, that one first, and every
    `also_every`-th from `also_start` on; 0 for none. Terms with a higher `number` take the place of those
    before."""

    number: int
    start: int
    every: int
    also_start: int = 0
    also_every: int = 0

    @property
    def starts(self) -> int:
        """The boundary from which on they are in force, in the place of those before."""
        starts = [self.start] * (self.every > 0) + [self.also_start] * (self.also_every > 0)
        return min(starts, default=self.start)

    def takes(self, ordinal: int) -> bool:
        """Whether they have the boundary captured, if they are in force there."""
        on_grid = self.every > 0 and ordinal >= self.start and (ordinal - self.start) % self.every == 0
        return on_grid or self.takes_also(ordinal)

    def takes_also(self, ordinal: int) -> bool:
        return (
            self.also_every > 0
            and ordinal >= self.also_start
            and (ordinal - self.also_start) % self.also_every == 0
        )


class StopState(IntEnum):
    PROPOSED = 1
    CONFIRMED = 2
    VOID = 3


class Stop(NamedTuple):
    """The newest proposal to end at the boundary `ordinal`. `rank` asked for it; `reason` as in stop.py."""

    number: int
    ordinal: int
    state: StopState
    rank: int
    reason: int


class Answer(IntEnum):
    NONE = 0
    PROMISED = 1
    REFUSED = 2


class Call(IntEnum):
    """Where save() was called: for the next boundary, or as one of its own. The second may follow the first,
    and then takes its place."""

    INSIDE = 1
    OUTSIDE = 2


class Gone(NamedTuple):
    """A rank whose process has ended without a word, and one that has let its run go; or NONE."""

    died: int = NONE
    ended: int = NONE


class Save(NamedTuple):
    """A call of save() for the boundary `ordinal` on ranks of one node. `caller` is one that called so,
    `absent` one that has not, or NONE; `is_over`: it has entered that boundary, so that it never will."""

    ordinal: int
    call: Call
    caller: int
    absent: int
    is_over: bool


class Refused(NamedTuple):
    """save() for the boundary `ordinal` was not called on all ranks alike; `absent` may be NONE: then nobody
    knows more than that not all came in time."""

    ordinal: int
    caller: int
    absent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage:
    """The ranks of one node, taken together.

    heard: the newest announcement that all of them have acted on. entered_low, entered_high: the newest
    boundary of the slowest and of the fastest. judged: the outcome of every boundary up to it is known here;
    of those, `sealed` were sealed by all its ranks, as far as slots still hold them undecided, at these
    `steps`; any other was missed. missed: the newest such, and a rank that missed it. slots: of the rank that
    has fewest. offset: step less ordinal of its leader. plain_ns, cost_ns, landing_ns: the shortest iteration
    without a snapshot, what a snapshot costs the loop at most, and how long it takes to be sealed at most; 0
    where not known.
    persisted, failed: the newest boundaries whose snapshots were, or could not be. committed: the newest
    ones that are in this node's storage, and 0 for what the attempt went on from. promise: the newest stop
    that was answered, and how. saves_since: of boundaries from there on all calls of save() are known. gone:
    of its ranks.
    """

    number: int = 0
    heard: int = 0
    entered_low: int = 0
    entered_high: int = 0
    judged: int = 0
    slots: int = 0
    missed: tuple[int, int] = (0, NONE)
    stop_asked: tuple[int, int] = (0, NONE)
    promise: tuple[int, Answer] = (0, Answer.NONE)
    saves_since: int = 0
    withdrawn: tuple[int, int] = (0, NONE)
    offset: int = 0
    plain_ns: int = 0
    cost_ns: int = 0
    landing_ns: int = 0
    persisted: int = 0
    failed: int = 0
    is_ended: bool = False
    gone: Gone = Gone()
    sealed: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    saves: tuple[Save, ...] = ()
    committed: tuple[int, ...] = ()

    def step_of(self, ordinal: int) -> int:
        """Of one of `sealed`; 0 where none was said."""
        return dict(zip(self.sealed, self.steps, strict=False)).get(ordinal, 0)

    def packed(self) -> bytes:
        head = _NODE.pack(
            _NODE_MAGIC, self.number, self.heard,
            self.entered_low, self.entered_high, self.judged, self.slots | self.is_ended << 16,
            *self.missed, self.stop_asked[0] | self.promise[1] << 16, self.stop_asked[1],
            self.promise[0], self.saves_since,
            self.offset, self.plain_ns, self.cost_ns, self.landing_ns, self.persisted, self.failed,
            *self.withdrawn, *self.gone,
        )  # fmt: skip
        sealed, committed = (
            _rows(_ORDINAL, ((each,) for each in row)) for row in (self.sealed, self.committed)
        )
        steps = _rows(_STEP, ((each,) for each in self.steps))
        return _checked(head + sealed + steps + _rows(_SAVE, self.saves) + committed)

    @classmethod
    def unpacked(cls, data: bytes) -> NodeMessage:
        """Raises DamagedError for anything but what `packed` makes."""
        reader = _Reader(data)
        (
            magic, number, heard, low, high, judged, slots, missed, missed_by, asked, asked_by, promised,
            saves_since, offset, plain_ns, cost_ns, landing_ns, persisted, failed, withdrawn, withdrawn_by,
            died, ended,
        ) = reader.take(_NODE)  # fmt: skip
        found = cls(
            number=number,
            heard=heard,
            entered_low=low,
            entered_high=high,
            judged=judged,
            slots=slots & 0xFFFF,
            missed=(missed, missed_by),
            stop_asked=(asked & 0xFFFF, asked_by),
            promise=(promised, _enum(Answer, asked >> 16)),
            saves_since=saves_since,
            withdrawn=(withdrawn, withdrawn_by),
            offset=offset,
            plain_ns=plain_ns,
            cost_ns=cost_ns,
            landing_ns=landing_ns,
            persisted=persisted,
            failed=failed,
            is_ended=bool(slots >> 16),
            gone=Gone(died, ended),
            sealed=tuple(ordinal for (ordinal,) in reader.rows(_ORDINAL, MOST_OPEN)),
            steps=tuple(step for (step,) in reader.rows(_STEP, MOST_OPEN)),
            saves=tuple(
                Save(ordinal, _enum(Call, call), caller, absent, bool(is_over))
                for ordinal, call, caller, absent, is_over in reader.rows(_SAVE, MOST_SAVES)
            ),
            committed=tuple(ordinal for (ordinal,) in reader.rows(_ORDINAL, MOST_COMMITTED)),
        )
        reader.end()
        if magic != _NODE_MAGIC or not (judged <= low <= high < NONE) or max(found.sealed, default=0) > high:
            raise DamagedError("What a node said of its ranks contradicts itself. It is not believed.")
        return found

    def follows(self, before: NodeMessage) -> bool:
        """Whether it may take the place of the one before: a message that is late, comes twice, or takes back
        what was said may not."""
        return (
            self.number > before.number
            and self.heard >= before.heard
            and self.entered_low >= before.entered_low
            and self.entered_high >= before.entered_high
            and self.judged >= before.judged
            and self.promise[0] >= before.promise[0]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What rank 0 has decided for all. decided: up to this boundary it is known which ones all ranks have
    sealed: of the newest those in `complete`, in order; all others are void. persist: those of `complete`
    that are to be persisted. missed: the newest void one that some rank had sealed, and a rank that missed
    it. agreed: the newest boundary at which all ranks have called save() outside of an iteration. committed:
    the newest boundaries, in order, that are in the storage of every node. failed: the newest that a node
    could not persist so far. gone: of all ranks; one whose node says nothing any more counts as dead until it
    does."""

    number: int = 0
    decided: int = 0
    complete: tuple[int, ...] = ()
    persist: tuple[int, ...] = ()
    terms: tuple[Terms, ...] = ()
    stop: Stop | None = None
    refused: tuple[Refused, ...] = ()
    agreed: int = 0
    missed: tuple[int, int] = (0, NONE)
    is_ended: bool = False
    committed: tuple[int, ...] = ()
    failed: int = 0
    gone: Gone = Gone()

    @property
    def newest_complete(self) -> int:
        """0 where no boundary is."""
        return self.complete[-1] if self.complete else 0

    def is_void(self, ordinal: int) -> bool:
        """Whether not all ranks have sealed a boundary. One that is older than all that are known is not said
        to be so: it is in nobody's way."""
        oldest = self.complete[0] if len(self.complete) == MOST_OPEN else 0
        return oldest < ordinal <= self.decided and ordinal not in self.complete

    def packed(self) -> bytes:
        head = _ANNOUNCED.pack(
            _ANNOUNCED_MAGIC, self.number, self.failed, self.decided, self.is_ended, self.agreed,
            *self.missed, *self.gone,
        )  # fmt: skip
        stop = () if self.stop is None else (self.stop,)
        return _checked(
            head
            + _rows(_ORDINAL, ((each,) for each in self.complete))
            + _rows(_ORDINAL, ((each,) for each in self.persist))
            + _rows(_TERMS, self.terms)
            + _rows(_STOP, stop)
            + _rows(_REFUSED, self.refused)
            + _rows(_ORDINAL, ((each,) for each in self.committed))
        )

    @classmethod
    def unpacked(cls, data: bytes) -> Announcement:
        """Raises DamagedError for anything but what `packed` makes."""
        reader = _Reader(data)
        magic, number, failed, decided, is_ended, agreed, missed, missed_by, *gone = reader.take(_ANNOUNCED)
        complete = tuple(ordinal for (ordinal,) in reader.rows(_ORDINAL, MOST_OPEN))
        persist = tuple(ordinal for (ordinal,) in reader.rows(_ORDINAL, MOST_OPEN))
        terms = tuple(Terms(*row) for row in reader.rows(_TERMS, 2))
        stops = [
            Stop(number, ordinal, _enum(StopState, state), rank, reason)
            for number, ordinal, state, rank, reason in reader.rows(_STOP, 1)
        ]
        refused = tuple(Refused(*row) for row in reader.rows(_REFUSED, MOST_SAVES))
        committed = tuple(ordinal for (ordinal,) in reader.rows(_ORDINAL, MOST_COMMITTED))
        reader.end()
        is_rising = all(a < b for a, b in zip(complete, complete[1:], strict=False))
        is_whole = (
            magic == _ANNOUNCED_MAGIC
            and is_rising
            and max(complete, default=0) <= decided < NONE
            and {*persist} <= {*complete}
        )
        if not is_whole:
            raise DamagedError("What rank 0 announced contradicts itself. It is not followed.")
        return cls(
            number=number,
            decided=decided,
            complete=complete,
            persist=persist,
            terms=terms,
            stop=stops[0] if stops else None,
            refused=refused,
            agreed=agreed,
            missed=(missed, missed_by),
            is_ended=bool(is_ended),
            committed=committed,
            failed=failed,
            gone=Gone(*gone),
        )

    def follows(self, before: Announcement) -> bool:
        """Whether it may take the place of the one before."""

        def newest(terms: Sequence[Terms]) -> int:
            return max((each.number for each in terms), default=0)

        def at(stop: Stop | None) -> tuple[int, int]:
            return (stop.number, stop.state) if stop is not None else (0, 0)

        return (
            self.number > before.number
            and self.decided >= before.decided
            and self.newest_complete >= before.newest_complete
            and newest(self.terms) >= newest(before.terms)
            and at(self.stop) >= at(before.stop)
            and self.agreed >= before.agreed
            and max(self.committed, default=0) >= max(before.committed, default=0)
        )


def _checked(data: bytes) -> bytes:
    message = data + _native.xxh3_64(data).to_bytes(_CHECKSUM_BYTES, "little")
    assert len(message) <= MOST_BYTES, len(message)
    return message


def _rows(form: struct.Struct, rows: Iterable[Sequence[int]]) -> bytes:
    packed = [form.pack(*row) for row in rows]
    return bytes([len(packed)]) + b"".join(packed)


def _enum(kind: type[_E], value: int) -> _E:
    try:
        return kind(value)
    except ValueError as error:
        raise DamagedError(f"A message of a rank holds {value} for a {kind.__name__}.") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        """Raises DamagedError where the checksum does not match."""
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if len(data) > MOST_BYTES or _native.xxh3_64(body).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
            raise DamagedError("A message of a rank does not match its checksum. It is not believed.")
        self._data, self._at = body, 0

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        if self._at + form.size > len(self._data):
            raise DamagedError("A message of a rank is too short. It is not believed.")
        found = form.unpack_from(self._data, self._at)
        self._at += form.size
        return found

    def rows(self, form: struct.Struct, most: int) -> list[tuple[Any, ...]]:
        (count,) = self.take(_COUNT)
        if count > most:
            raise DamagedError(f"A message of a rank holds {count} rows where {most} can be.")
        return [self.take(form) for _ in range(count)]

    def end(self) -> None:
        if self._at != len(self._data):
            raise DamagedError("A message of a rank is too long. It is not believed.")
