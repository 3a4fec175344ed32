"""What decides beside the loop: which boundaries are captured, where it ends, what became of a boundary.
`OwnPace` is that of a process that trains by itself; that of one of several is `joint_pace.JointPace`.

The training thread only reads and writes words in memory here, but where its program waits: in `wait()`, in a
`save()` outside of an iteration, at a promised boundary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flashckpt.capture.schedule import Every, Pace, Schedule
from flashckpt.errors import FlashckptError
from flashckpt.memory.slot import Slot
from flashckpt.options import Options
from flashckpt.ranks.stop import Asked, StopPolicy


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """What the program asks for: see `flashckpt.attach`."""

    every: Every
    persist_every: str | int | None
    options: Options


class SnapshotSlots(Protocol):
    """The slots of this rank."""

    def held(self) -> contextlib.AbstractContextManager[Sequence[Slot]]:
        """All that it has, none of which is unmapped meanwhile."""

    @property
    def writable(self) -> int:
        """How many of them captures are written to."""

    def mark(self, complete: tuple[int, int], void: Collection[tuple[int, int]]) -> None:
        """The newest snapshot that all ranks have, and those that not all have: (number of the attempt,
        boundary)."""


class Outcome(NamedTuple):
    """What became of a boundary: `is_known`, and the newest up to it that all ranks have, 0 where none is."""

    is_known: bool
    newest: int


class Pacing(Protocol):
    """Boundaries are named by their ordinals, which are the same on all ranks."""

    schedule: Schedule
    is_alone: bool

    def stop_policy(self, signals: Asked) -> StopPolicy:
        """Where the loop ends. Made once."""

    def look(self, slots: SnapshotSlots) -> None:
        """A round of the background thread: what has become of the snapshots in these slots. Never blocks."""

    def settle(self, ordinal: int) -> None:
        """Nothing is captured of this boundary, or of one before it, from now on."""

    def is_settled(self, ordinal: int) -> bool: ...

    def save_inside(self, ordinal: int) -> None:
        """save() was called for this boundary, which is to come."""

    def save_outside(self, ordinal: int, until_s: float) -> None:
        """save() was called as a boundary of its own: returns once all ranks have. Raises BoundaryError, and
        nothing has changed, where a rank has not by the monotonic time `until_s`, or never will."""

    def expect(self, ordinal: int) -> None:
        """A snapshot of this boundary was ordered, and begun."""

    def refusal(self) -> FlashckptError | None:
        """Why one that was ordered is not persisted, once."""

    def outcome(self, ordinal: int, until_s: float) -> Outcome:
        """Waits for it until this monotonic time, as long as all ranks live that it depends on."""

    def is_persisted(self, ordinal: int) -> bool:
        """Whether the snapshot of this boundary, or of a later one, is known to be committed."""

    @property
    def committed(self) -> tuple[int, ...]:
        """The newest boundaries that are in the storage of every node, as far as is known; 0 is what the
        attempt went on from. For the background thread."""

    @property
    def failed(self) -> int:
        """The newest boundary that some node could not persist, so far, as far as is known; 0 for none."""

    def began_from_storage(self) -> None:
        """What the attempt went on from is in this node's storage. For the background thread."""

    @property
    def held_whole(self) -> int:
        """The groups of leaves of which nothing is left to other ranks of the node from now on, a bit
        each."""

    @property
    def awaits_others(self) -> bool:
        """Whether the other ranks live, as far as is known, and may still write their parts."""

    @property
    def lost(self) -> str:
        """A rank that is gone for good, in words; empty while none is known to be."""

    def close(self, *, closed: bool) -> None:
        """The run is let go, in order (`closed`) or not. A second call does nothing."""


class OwnPace:
    """The pace of a rank that no other has to follow."""

    is_alone = True

    def __init__(self, cadence: Cadence) -> None:
        overhead = cadence.options.overhead
        self.schedule: Schedule = Pace(cadence.every, cadence.persist_every, overhead=overhead)

    def stop_policy(self, signals: Asked) -> StopPolicy:
        return StopPolicy(signals)

    def look(self, slots: SnapshotSlots) -> None:
        pass

    def settle(self, ordinal: int) -> None:
        pass

    def is_settled(self, ordinal: int) -> bool:
        return False

    def save_inside(self, ordinal: int) -> None:
        pass

    def save_outside(self, ordinal: int, until_s: float) -> None:
        pass

    def expect(self, ordinal: int) -> None:
        pass

    def refusal(self) -> FlashckptError | None:
        return None

    def outcome(self, ordinal: int, until_s: float) -> Outcome:
        return Outcome(is_known=False, newest=0)

    def is_persisted(self, ordinal: int) -> bool:
        return False

    @property
    def committed(self) -> tuple[int, ...]:
        return ()

    @property
    def failed(self) -> int:
        return 0

    def began_from_storage(self) -> None:
        pass

    @property
    def held_whole(self) -> int:
        return 0

    @property
    def awaits_others(self) -> bool:
        return True

    @property
    def lost(self) -> str:
        return ""

    def close(self, *, closed: bool) -> None:
        pass
