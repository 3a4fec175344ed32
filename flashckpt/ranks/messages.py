"""The messages of nodes to rank 0 and of rank 0 to all: small structs of bytes, checked field by field.

A damaged, impossible or outdated message changes nothing: state only moves forward. Boundaries go by their
index, which is the same on all ranks; ranks by their numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from flashckpt import _native
from flashckpt.errors import DamagedError

# The number of no rank and of no boundary.
NONE = (1 << 32) - 1
# The most slots of a trainer: so many snapshots may be undecided at once.
MOST_OPEN = 16
MOST_SAVES = 4
# The most bytes of a message.
MOST_BYTES = 1024

_NODE = struct.Struct("<4sQQ14Iq5Q2I")
_ANNOUNCED = struct.Struct("<4sQI?9I")
_SCHEDULE = struct.Struct("<5I")
_STOP = struct.Struct("<IIBIB")
_INDEX = struct.Struct("<I")
_STEP = struct.Struct("<Q")
_NODE_MAGIC, _ANNOUNCED_MAGIC = b"FNOD", b"FANN"
_COUNT = struct.Struct("<B")
_CHECKSUM_BYTES = 8
_E = TypeVar("_E", bound=IntEnum)


class AnnouncedSchedule(NamedTuple):
    """The boundaries to capture: `start` and every `every`-th one after it, `also_start` and every
    `also_every`-th one after it; 0 for none. A schedule with a higher `number` replaces one with a lower."""

    number: int
    start: int
    every: int
    also_start: int = 0
    also_every: int = 0

    @property
    def starts(self) -> int:
        """The boundary from which on it is in force."""
        starts = [self.start] * (self.every > 0) + [self.also_start] * (self.also_every > 0)
        return min(starts, default=self.start)

    def takes(self, boundary_index: int) -> bool:
        """Whether to capture a boundary, if the schedule is in force there."""
        on_grid = (
            self.every > 0
            and boundary_index >= self.start
            and (boundary_index - self.start) % self.every == 0
        )
        return on_grid or self.takes_also(boundary_index)

    def takes_also(self, boundary_index: int) -> bool:
        return (
            self.also_every > 0
            and boundary_index >= self.also_start
            and (boundary_index - self.also_start) % self.also_every == 0
        )


class StopState(IntEnum):
    PROPOSED = 1
    CONFIRMED = 2
    INCOMPLETE = 3


class Stop(NamedTuple):
    """The newest proposal to end at this boundary. rank: the one that requested it; reason: see
    `JointStop`."""

    number: int
    boundary_index: int
    state: StopState
    rank: int
    reason: int


class Answer(IntEnum):
    NONE = 0
    PROMISED = 1
    REFUSED = 2


class Gone(NamedTuple):
    """A rank whose process has died, and one that has released its run; or NONE."""

    died: int = NONE
    ended: int = NONE


class Refused(NamedTuple):
    """The newest boundary at which a rank called save() outside of an iteration and another did not;
    `absent`: that other rank, or NONE if it is not known."""

    boundary_index: int = 0
    caller: int = NONE
    absent: int = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage:
    """The state of the ranks of one node, combined.

    acknowledged: the newest announcement on which all of them have acted.
    entered_low, entered_high: the newest boundary of the slowest and of the fastest rank.
    judged: the outcome of every boundary up to this one is known on all of them. sealed: those of them that
        all ranks have sealed, as far as slots hold them undecided, at these `steps`; the others were missed.
    missed: the newest missed boundary that a rank has sealed, and a rank that missed it.
    slots: of the rank with the fewest. offset: step minus boundary index on the leader.
    plain_ns, cost_ns, landing_ns: the shortest iteration without a snapshot, the highest cost of a snapshot
        for the loop, and the longest time until one is sealed; 0 if unknown.
    stop_asked: a reason to stop, and the rank. promise: the newest stop proposal answered, and the answer.
    requests: the newest boundaries for which a rank called save().
    outside: the newest boundary at which a rank called save() outside of an iteration, and this rank.
        not_outside: the oldest such newest boundary of any rank, and this rank. withdrawn: the newest
        boundary at which a rank no longer waits for the others to call it.
    persisted, failed: the newest boundaries whose snapshots were persisted, or could not be. gone: of its
    ranks."""

    number: int = 0
    acknowledged: int = 0
    entered_low: int = 0
    entered_high: int = 0
    judged: int = 0
    slots: int = 0
    missed: tuple[int, int] = (0, NONE)
    stop_asked: tuple[int, int] = (0, NONE)
    promise: tuple[int, Answer] = (0, Answer.NONE)
    outside: tuple[int, int] = (0, NONE)
    not_outside: tuple[int, int] = (0, NONE)
    withdrawn: int = 0
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
    requests: tuple[int, ...] = ()

    def step_of(self, boundary_index: int) -> int:
        """Return the step of one of `sealed`; 0 if it is unknown."""
        return dict(zip(self.sealed, self.steps, strict=False)).get(boundary_index, 0)

    def packed(self) -> bytes:
        head = _NODE.pack(
            _NODE_MAGIC, self.number, self.acknowledged,
            self.entered_low, self.entered_high, self.judged, self.slots | self.is_ended << 16,
            *self.missed, self.stop_asked[0] | self.promise[1] << 16, self.stop_asked[1],
            self.promise[0], *self.outside, *self.not_outside, self.withdrawn,
            self.offset, self.plain_ns, self.cost_ns, self.landing_ns, self.persisted, self.failed,
            *self.gone,
        )  # fmt: skip
        sealed = _rows(_INDEX, ((each,) for each in self.sealed))
        steps = _rows(_STEP, ((each,) for each in self.steps))
        return _checked(head + sealed + steps + _rows(_INDEX, ((each,) for each in self.requests)))

    @classmethod
    def unpacked(cls, data: bytes) -> NodeMessage:
        """Decode the result of `packed`. Raises DamagedError for anything else."""
        reader = _Reader(data)
        (
            magic, number, acknowledged, low, high, judged, slots, missed, missed_by, asked, asked_by,
            promised, outside, outside_by, absent, absent_by, withdrawn,
            offset, plain_ns, cost_ns, landing_ns, persisted, failed, died, ended,
        ) = reader.take(_NODE)  # fmt: skip
        found = cls(
            number=number,
            acknowledged=acknowledged,
            entered_low=low,
            entered_high=high,
            judged=judged,
            slots=slots & 0xFFFF,
            missed=(missed, missed_by),
            stop_asked=(asked & 0xFFFF, asked_by),
            promise=(promised, _enum(Answer, asked >> 16)),
            outside=(outside, outside_by),
            not_outside=(absent, absent_by),
            withdrawn=withdrawn,
            offset=offset,
            plain_ns=plain_ns,
            cost_ns=cost_ns,
            landing_ns=landing_ns,
            persisted=persisted,
            failed=failed,
            is_ended=bool(slots >> 16),
            gone=Gone(died, ended),
            sealed=tuple(boundary_index for (boundary_index,) in reader.rows(_INDEX, MOST_OPEN)),
            steps=tuple(step for (step,) in reader.rows(_STEP, MOST_OPEN)),
            requests=tuple(each for (each,) in reader.rows(_INDEX, MOST_SAVES)),
        )
        reader.end()
        if magic != _NODE_MAGIC or not (judged <= low <= high < NONE) or max(found.sealed, default=0) > high:
            raise DamagedError("The message of a node contradicts itself. It is ignored.")
        return found

    def follows(self, before: NodeMessage) -> bool:
        """Whether it may replace the one before: a late, repeated or contradictory message may not."""
        return (
            self.number > before.number
            and self.acknowledged >= before.acknowledged
            and self.entered_low >= before.entered_low
            and self.entered_high >= before.entered_high
            and self.judged >= before.judged
            and self.promise[0] >= before.promise[0]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The decisions of rank 0 for all ranks.

    decided: for each boundary up to this one it is known whether all ranks have sealed it. complete: the
    newest of those that all have, ascending; any other is incomplete. persist: those of `complete` to
    persist; cached: those of `persist` that go only into the caches of the nodes. missed: the newest
    incomplete boundary that a rank sealed, and a rank that missed it. save_at: a boundary that all ranks
    capture because a rank called save(), or 0. agreed: the newest boundary at which all ranks called save()
    outside of an iteration. gone: of all ranks; the leader of a silent node counts as dead until the node
    sends a message.
    """

    number: int = 0
    decided: int = 0
    complete: tuple[int, ...] = ()
    persist: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    schedules: tuple[AnnouncedSchedule, ...] = ()
    stop: Stop | None = None
    refused: Refused = Refused()
    agreed: int = 0
    save_at: int = 0
    missed: tuple[int, int] = (0, NONE)
    is_ended: bool = False
    gone: Gone = Gone()

    @property
    def newest_complete(self) -> int:
        """The newest complete boundary, or 0."""
        return self.complete[-1] if self.complete else 0

    def is_incomplete(self, boundary_index: int) -> bool:
        """Whether a boundary is known to be incomplete. One older than all that are listed counts as unknown:
        it blocks nothing."""
        oldest = self.complete[0] if len(self.complete) == MOST_OPEN else 0
        return oldest < boundary_index <= self.decided and boundary_index not in self.complete

    def packed(self) -> bytes:
        head = _ANNOUNCED.pack(
            _ANNOUNCED_MAGIC, self.number, self.decided, self.is_ended, self.agreed, self.save_at,
            *self.missed, *self.gone, *self.refused,
        )  # fmt: skip
        stop = () if self.stop is None else (self.stop,)
        return _checked(
            head
            + _rows(_INDEX, ((each,) for each in self.complete))
            + _rows(_INDEX, ((each,) for each in self.persist))
            + _rows(_INDEX, ((each,) for each in self.cached))
            + _rows(_SCHEDULE, self.schedules)
            + _rows(_STOP, stop)
        )

    @classmethod
    def unpacked(cls, data: bytes) -> Announcement:
        """Decode the result of `packed`. Raises DamagedError for anything else."""
        reader = _Reader(data)
        (
            magic, number, decided, is_ended, agreed, save_at, missed, missed_by, died, ended, *refused,
        ) = reader.take(_ANNOUNCED)  # fmt: skip
        complete = tuple(boundary_index for (boundary_index,) in reader.rows(_INDEX, MOST_OPEN))
        persist = tuple(boundary_index for (boundary_index,) in reader.rows(_INDEX, MOST_OPEN))
        cached = tuple(boundary_index for (boundary_index,) in reader.rows(_INDEX, MOST_OPEN))
        schedules = tuple(AnnouncedSchedule(*row) for row in reader.rows(_SCHEDULE, 2))
        stops = [
            Stop(number, boundary_index, _enum(StopState, state), rank, reason)
            for number, boundary_index, state, rank, reason in reader.rows(_STOP, 1)
        ]
        reader.end()
        is_rising = all(a < b for a, b in zip(complete, complete[1:], strict=False))
        is_whole = (
            magic == _ANNOUNCED_MAGIC
            and is_rising
            and max(complete, default=0) <= decided < NONE
            and {*cached} <= {*persist} <= {*complete}
        )
        if not is_whole:
            raise DamagedError("The announcement of rank 0 contradicts itself. It is ignored.")
        return cls(
            number=number,
            decided=decided,
            complete=complete,
            persist=persist,
            cached=cached,
            schedules=schedules,
            stop=stops[0] if stops else None,
            refused=Refused(*refused),
            agreed=agreed,
            save_at=save_at,
            missed=(missed, missed_by),
            is_ended=bool(is_ended),
            gone=Gone(died, ended),
        )

    def follows(self, before: Announcement) -> bool:
        """Whether it may replace the one before."""

        def newest(schedules: Sequence[AnnouncedSchedule]) -> int:
            return max((each.number for each in schedules), default=0)

        def at(stop: Stop | None) -> tuple[int, int]:
            return (stop.number, stop.state) if stop is not None else (0, 0)

        return (
            self.number > before.number
            and self.decided >= before.decided
            and self.newest_complete >= before.newest_complete
            and newest(self.schedules) >= newest(before.schedules)
            and at(self.stop) >= at(before.stop)
            and self.agreed >= before.agreed
            and self.save_at >= before.save_at
            and self.refused.boundary_index >= before.refused.boundary_index
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
        """Raises DamagedError if the checksum does not match."""
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if len(data) > MOST_BYTES or _native.xxh3_64(body).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
            raise DamagedError("A message of a rank does not match its checksum. It is ignored.")
        self._data, self._at = body, 0

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        if self._at + form.size > len(self._data):
            raise DamagedError("A message of a rank is too short. It is ignored.")
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
            raise DamagedError("A message of a rank is too long. It is ignored.")
