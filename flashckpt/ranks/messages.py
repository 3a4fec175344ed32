"""The messages of nodes to rank 0 and of rank 0 to all: small structs of bytes, checked field by field.

A damaged, impossible or outdated message changes nothing: each has one writer, which numbers it. Boundaries
go by their index, which is the same on all ranks; ranks by their numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

from typing_extensions import Self

from flashckpt import _native
from flashckpt.errors import DamagedError

# The number of no rank and of no boundary.
NONE = (1 << 32) - 1
# The most slots of a trainer: so many snapshots may be undecided at once.
MOST_OPEN = 16
MOST_SAVES = 4
# The most bytes of a message.
MOST_BYTES = 1024

_INTEGER_BYTES = _CHECKSUM_BYTES = 8


class StopState(IntEnum):
    NONE = 0
    PROPOSED = 1
    CONFIRMED = 2
    INCOMPLETE = 3


class Stop(NamedTuple):
    """The newest proposal to end at this boundary. rank: the one that requested it; reason: see
    `JointStop`."""

    number: int = 0
    boundary_index: int = 0
    state: StopState = StopState.NONE
    rank: int = NONE
    reason: int = 0


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


@dataclass(frozen=True)
class _Message:
    """A frozen dataclass whose fields are integers or tuples of integers. A tuple is as long as its default,
    or has at most MOST_OPEN integers if that is empty."""

    MAGIC: ClassVar[bytes]

    def packed(self) -> bytes:
        values = (getattr(self, each.name) for each in fields(self))
        rows = (each if isinstance(each, tuple) else (each,) for each in values)
        return _packed(self.MAGIC, rows)

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        """Decode the result of `packed`. Raises DamagedError for anything else."""
        rows = _unpacked(cls.MAGIC, data)
        try:
            pairs = zip(fields(cls), rows, strict=True)
            found = cls(**{field.name: _as(field.default, row) for field, row in pairs})
        except ValueError as error:
            raise DamagedError("A message of a rank has other fields. It is ignored.") from error
        if not found.is_possible:
            raise DamagedError("A message of a rank contradicts itself. It is ignored.")
        return found

    @property
    def is_possible(self) -> bool:
        """Whether its fields do not contradict each other."""
        raise NotImplementedError


def _packed(magic: bytes, rows: Iterable[Sequence[int]]) -> bytes:
    data = magic + b"".join(struct.pack(f"<B{len(row)}q", len(row), *row) for row in rows)
    message = data + _native.xxh3_64(data).to_bytes(_CHECKSUM_BYTES, "little")
    assert len(message) <= MOST_BYTES, len(message)
    return message


def _unpacked(magic: bytes, data: bytes) -> list[tuple[int, ...]]:
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    is_whole = (
        len(data) <= MOST_BYTES and _native.xxh3_64(body).to_bytes(_CHECKSUM_BYTES, "little") == checksum
    )
    if not is_whole or not body.startswith(magic):
        raise DamagedError("A message of a rank does not match its checksum. It is ignored.")
    rows, at = list[tuple[int, ...]](), len(magic)
    while at < len(body):
        count, at = body[at], at + 1
        if at + count * _INTEGER_BYTES > len(body):
            raise DamagedError("A message of a rank is too short. It is ignored.")
        rows.append(struct.unpack_from(f"<{count}q", body, at))
        at += count * _INTEGER_BYTES
    return rows


def _as(default: Any, row: tuple[int, ...]) -> Any:
    """Return a field with the types of its default. Raises ValueError if it does not fit."""
    if not isinstance(default, tuple):
        [value] = row
        return type(default)(value)
    if not default:
        if len(row) > MOST_OPEN:
            raise ValueError(f"{len(row)} integers where {MOST_OPEN} can be")
        return row
    values = [type(each)(value) for each, value in zip(default, row, strict=True)]
    return getattr(type(default), "_make", tuple)(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage(_Message):
    """The state of the ranks of one node, combined.

    acknowledged: the newest announcement on which all of them have acted.
    entered_high: the newest boundary of the fastest rank.
    judged: the outcome of every boundary up to this one is known on all of them. sealed: those of them that
        all ranks have sealed, as far as slots hold them undecided, at these `steps`; the others were missed.
    missed: the newest missed boundary that a rank has sealed, and a rank that missed it.
    slots: of the rank with the fewest.
    plain_ns, cost_ns, landing_ns: the shortest iteration without a snapshot, the highest cost of a snapshot
        for the loop, and the longest time until one is sealed; 0 if unknown.
    stop_asked: a reason to stop, and the rank. promise: the newest stop proposal answered, and the answer.
    requests: the newest boundaries for which a rank called save().
    outside: the newest boundary at which a rank called save() outside of an iteration, and this rank.
        not_outside: the oldest such newest boundary of any rank, and this rank. withdrawn: the newest
        boundary at which a rank no longer waits for the others to call it.
    persisted, failed: the newest boundaries whose snapshots were persisted, or could not be. gone: of its
    ranks."""

    MAGIC: ClassVar[bytes] = b"FNOD"

    number: int = 0
    acknowledged: int = 0
    entered_high: int = 0
    judged: int = 0
    slots: int = 0
    missed: tuple[int, int] = (0, NONE)
    stop_asked: tuple[int, int] = (0, NONE)
    promise: tuple[int, Answer] = (0, Answer.NONE)
    outside: tuple[int, int] = (0, NONE)
    not_outside: tuple[int, int] = (0, NONE)
    withdrawn: int = 0
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

    @property
    def is_possible(self) -> bool:
        return self.judged <= self.entered_high < NONE and max(self.sealed, default=0) <= self.entered_high


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement(_Message):
    """The decisions of rank 0 for all ranks.

    decided: for each boundary up to this one it is known whether all ranks have sealed it. complete: the
    newest of those that all have, ascending; any other is incomplete. persist: those of `complete` to
    persist; cached: those of `persist` that go only into the caches of the nodes. every, also: boundaries
    whose step is a multiple of one of them are captured; 0 for none. missed: the newest
    incomplete boundary that a rank sealed, and a rank that missed it. save_at: a boundary that all ranks
    capture because a rank called save(), or 0. agreed: the newest boundary at which all ranks called save()
    outside of an iteration. gone: of all ranks; the leader of a silent node counts as dead until the node
    sends a message.
    """

    MAGIC: ClassVar[bytes] = b"FANN"

    number: int = 0
    decided: int = 0
    complete: tuple[int, ...] = ()
    persist: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    every: int = 0
    also: int = 0
    stop: Stop = Stop()
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

    @property
    def is_possible(self) -> bool:
        is_rising = all(a < b for a, b in zip(self.complete, self.complete[1:], strict=False))
        is_known = self.newest_complete <= self.decided < NONE
        return is_rising and is_known and {*self.cached} <= {*self.persist} <= {*self.complete}
