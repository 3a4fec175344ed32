"""A process's place in its job: `Group`, what ranks agree on while they attach, and `Coordination`, what is
decided beside the loop: which boundaries are captured, where the loop ends, what became of a boundary.

The classes here are those of a process that trains alone, and import nothing that several ranks need; those
of several ranks derive from them: `agreement.Ranks` and `joint_coordination.JointCoordination`. The training
thread only reads and writes words in memory here, except where its program waits: in `wait()`, in a `save()`
outside of an iteration, at a promised boundary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from flashckpt.capture.schedule import Every, Pace, Schedule
from flashckpt.errors import FlashckptError
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Slot
from flashckpt.options import Environment, Options
from flashckpt.ranks.job import Decide, meet
from flashckpt.restore.step_choice import Agreement

T = TypeVar("T")
Alike = Mapping[str, str]
"""What a rank calls with, name -> value: the same on all ranks that have the name."""

Tables = Mapping[tuple[int, ...], Mapping[str, str]]
"""For each set of ranks that has this one, ascending: the leaves that they hold alike, name ->
description."""
CALLED_WORD = "stop"
"""The reason of a stop that the program asked for."""


class Asked(Protocol):
    """The requests to end the loops of one process. reason: a signal's name, "notice file", or None.
    deadline_s: the monotonic time at which the grace period ends; infinity without a request."""

    reason: str | None
    deadline_s: float

    def expedite(self, timeout_s: float, /) -> None:
        """Limit all waits from now on to this many seconds."""


class StopPolicy:
    """Whether a loop ends at a boundary, and why. A process alone stops at the first boundary after a signal,
    a notice, or a call of `stop()`. Once the answer is yes, it stays yes."""

    def __init__(self, signals: Asked) -> None:
        self._signals = signals
        self._is_called = self._is_told = False

    @property
    def reason(self) -> str | None:
        """The reason for the end of the loop: a signal's name, "notice file", "stop", or None."""
        return self._signals.reason or (CALLED_WORD if self._is_called else None)

    @property
    def is_asked(self) -> bool:
        """Whether the loop ends at a later boundary, or has ended: nothing waits for memory then."""
        return self.reason is not None

    @property
    def is_near(self) -> bool:
        """Whether the loop ends at its next boundary, as far as is known, or has ended."""
        return self.is_asked

    def ask(self) -> None:
        """Request the end for the program."""
        self._is_called, self._is_told = True, False

    is_unconfirmed = False  # it ended without a confirmation: another rank may be dead

    def enter(self, boundary_index: int) -> None:
        """Enter a boundary; called once for each, in order."""

    def stops_at(self, boundary_index: int) -> bool:
        """Whether the loop ends at this boundary, which it has entered."""
        return self.is_asked

    def begins_at(self, boundary_index: int) -> bool:
        """Whether this is the first boundary with a yes, which is captured. A loop that the program ends by
        itself may continue after it."""
        begins = self.stops_at(boundary_index) and not self._is_told
        self._is_told = self._is_told or begins
        return begins


@dataclass(frozen=True, kw_only=True)
class SnapshotPolicy:
    """The options of `flashckpt.attach` on which the capture schedule depends."""

    every: Every
    persist_every: str | int | None
    options: Options
    has_cache: bool = False


class SnapshotSlots(Protocol):
    """The slots of this rank."""

    def held(self) -> contextlib.AbstractContextManager[Sequence[Slot]]:
        """Give all its slots; none is unmapped meanwhile."""

    @property
    def writable(self) -> int:
        """The number of slots to which captures are written."""

    def mark(self, complete: tuple[int, int], incomplete: Collection[tuple[int, int]]) -> None:
        """Set the newest snapshot that all ranks have, and the incomplete ones: (attempt number, boundary)
        each."""


class Coordination:
    """The decisions beside the loop, of a process that trains alone. Boundaries go by their index, which is
    the same on all ranks. `JointCoordination`: of one of several ranks.

    poll_s: the interval of `poll`. full_reason: why no slot becomes free, for a message. order_binds: whether
    an ordered boundary is captured at once or never, because other ranks capture it. group_failure: returns
    why collectives may have been aborted, or ""; None without collectives."""

    schedule: Schedule
    poll_s = 0.5
    full_reason = "every slot is still to be persisted, and the keeper makes no progress"
    order_binds = False
    group_failure: Callable[[], str] | None = None

    def __init__(self, snapshot_policy: SnapshotPolicy) -> None:
        self.schedule = Pace(
            snapshot_policy.every,
            snapshot_policy.persist_every,
            overhead=snapshot_policy.options.overhead,
            has_cache=snapshot_policy.has_cache,
        )

    def stop_policy(self, signals: Asked) -> StopPolicy:
        """Return the policy that ends the loop. Called once."""
        return StopPolicy(signals)

    def poll(self, slots: SnapshotSlots) -> None:
        """Do one round of the background thread for the snapshots in these slots. Never blocks."""

    def settle(self, boundary_index: int) -> None:
        """Capture nothing more of boundaries up to this one."""

    def is_settled(self, boundary_index: int) -> bool:
        return False

    def request_save(self, boundary_index: int) -> None:
        """This rank called save() and captures this boundary, which is the next. If not all ranks do, all
        capture a later one."""

    def unanswered_save(self) -> FlashckptError | None:
        """Return the error if no snapshot of all ranks answers this rank's last `request_save` although its
        boundary has passed."""
        return None

    def save_outside(self, boundary_index: int, until_s: float) -> None:
        """Begin a boundary by a save() outside of an iteration: returns once all ranks have called it. Raises
        BoundaryError, and changes nothing, if a rank has not by the monotonic time `until_s`, or never
        will."""

    def is_unchanged(self, is_fresh: bool, is_as_captured: Callable[[], bool]) -> bool:
        """Whether a save() outside of an iteration is of the present boundary, and not of a later one.
        is_fresh: the run has no boundary yet. is_as_captured: compares this rank's state with that
        boundary."""
        return is_as_captured()

    def outcome(self, boundary_index: int, until_s: float) -> int | None:
        """Wait for the outcome of a boundary until this monotonic time, while all ranks live that decide it.
        Return the newest boundary up to it that all ranks have, or 0; None if the outcome is not known."""
        return None

    def is_persisted(self, boundary_index: int) -> bool:
        """Whether the snapshot of this boundary, or of a later one, is known to be committed."""
        return False

    @property
    def holds_whole(self) -> bool:
        """Whether each rank of the node keeps its own copy of all leaves in memory from now on."""
        return False

    @property
    def awaits_others(self) -> bool:
        """Whether the other ranks live, as far as is known, so that they may still write their parts."""
        return True

    @property
    def lost(self) -> str:
        """The name of a rank that has died ("rank 3"); "" if none is known."""
        return ""

    def close(self, *, closed: bool) -> None:
        """Release the run, in order (`closed`) or not. A second call does nothing."""


class Group:
    """The ranks of a job; this class: a process that trains alone. All ranks call the methods in one order
    while they attach; an error of one rank is raised on all, with its number. node: the ranks of this node,
    ascending."""

    node: tuple[int, ...]
    leads = True

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.node = (environment.rank,)

    def together(self, what: str, operation: Callable[[], T], *, loads: bool = False) -> T:
        """Run an operation on each rank; returns when all have succeeded. loads: it may take as long as a
        read of a step."""
        return operation()

    def guarded(self, what: str, operation: Callable[[], T]) -> T:
        """Run an operation on this rank. If it fails, all ranks raise where they agree next."""
        return operation()

    def led(self, what: str, operation: Callable[[], T]) -> T:
        """Return on all ranks the result of an operation on rank 0, in plain JSON."""
        return operation()

    def agree(self, what: str, operation: Callable[[], Any], decide: Decide) -> Any:
        """Return the decision of rank 0 from the results of `operation` on all ranks (plain JSON)."""
        return decide([operation()])

    def check_alike(
        self, what: str, operation: Callable[[], tuple[T, Alike, Tables]], *, loads: bool = False
    ) -> T:
        """Run an operation on each rank and return its first result. Raise OptionError on all ranks if they
        call with different values for a name, StateError if two declared replicas hold different leaves."""
        return operation()[0]

    def agreement(self) -> Agreement:
        """Return the ranks that agree on the step to resume from."""
        return Agreement()

    def begin(
        self, runtime: RuntimeFolder, attempt: AttemptName, snapshot_policy: SnapshotPolicy
    ) -> Coordination:
        """Begin the decisions beside the loop of an attempt. runtime: its folder on this node."""
        return Coordination(snapshot_policy)

    def attached(self) -> None:
        """End the agreements: all ranks have attached."""

    def close(self) -> None:
        """Leave the group: the run is released, or attach has failed. A second call does nothing."""


def join(environment: Environment) -> Group:
    """Meet the other ranks of this job, if there are any. One collective over the default process group.

    Raises OptionError if several processes were started and there is no process group."""
    job = meet(environment)
    if job is None:
        return Group(environment)
    from flashckpt.ranks.agreement import Ranks

    # Only torch.distributed may know this process's place in the job.
    return Ranks(replace(environment, rank=job.rank, world=job.world), job)
