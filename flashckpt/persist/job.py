"""A step on its way to storage: the snapshots of this node's ranks.

    gathering → writing → committing → committed
                        |     ↓ ↑    | void: it is never persisted
                        | part written
                        | failed: it is retried, unless it was given up

Owns the states of a job and its retries. Waiting for the parts of other nodes (part written) is a state, and
no failure. Changes nothing in storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.catalogue import Folder
from flashckpt.format.manifest import PartHead
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.memory.cache_folder import CachePlace
from flashckpt.memory.slot import Capture, Sealed, Slot, SlotState, Word
from flashckpt.options import Keep, Remote

_MAX_PAUSE_S = 300.0
_FIRST_POLL_S, _MAX_POLL_S = 0.25, 10.0
_MAX_DOUBLINGS = 10  # of a pause: after a thousand tries 2 to their power is no number
_FEW_PAUSES_S = (0.1, 0.5, 2.0)
MOST_NAMED = 100

SlotKey = tuple[str, int]
"""The name of a slot, and a generation in it."""

# ---- retries

PauseAfter = Callable[[int], float | None]
"""The pause in seconds after this number of failed tries; None: no further try."""


def pause_s(tries: int) -> float:
    """Retry for ever: a server may be away for a long weekend."""
    return min(2.0 ** min(tries - 1, _MAX_DOUBLINGS), _MAX_PAUSE_S)


def few_pauses_s(tries: int) -> float | None:
    """Retry a few times while a user waits: long enough for the hiccup of a server."""
    return _FEW_PAUSES_S[tries - 1] if tries <= len(_FEW_PAUSES_S) else None


def poll_pause_s(polls: int) -> float:
    """The pause after this number of polls for the parts of other nodes."""
    return min(_FIRST_POLL_S * 2.0 ** min(polls - 1, _MAX_DOUBLINGS), _MAX_POLL_S)


@dataclass
class Retry:
    """When an operation is retried. `tries` counts the failed ones; the last ended at `tried_at`.
    Times are CLOCK_MONOTONIC seconds; `due_at` is infinite if no try follows."""

    pauses: PauseAfter = pause_s
    tries: int = 0
    tried_at: float = 0.0
    due_at: float = 0.0

    def failed(self, now: float) -> None:
        self.tries += 1
        pause = self.pauses(self.tries)
        self.wait(now, math.inf if pause is None else pause)

    def wait(self, now: float, pause_s: float) -> None:
        """Set the next try without counting a failure."""
        self.tried_at, self.due_at = now, now + pause_s

    def succeeded(self) -> None:
        """Forget all failures, also after a repair."""
        self.tries, self.due_at = 0, 0.0

    def expedite(self, pause_s: float) -> None:
        """Retry at most this pause after the last try."""
        self.due_at = min(self.due_at, self.tried_at + pause_s)

    def is_due(self, now: float) -> bool:
        return now >= self.due_at

    @property
    def has_next(self) -> bool:
        return self.due_at < math.inf


# ---- jobs


class RegionGone(KeeperError):
    """The region that a snapshot names is missing: only a trainer that has it could hand it over."""


class JobState(Enum):
    GATHERING = "gathering"
    """Not all ranks of this node have sealed it, or other jobs come first."""
    WRITING = "writing"
    COMMITTING = "committing"
    """Nothing of it is to be written here: it is committed, or found to be, now or next."""
    PART_WRITTEN = "part written"
    """The part of this node is stored; the parts of other nodes are not."""
    COMMITTED = "committed"
    FAILED = "failed"
    # The snapshot is never persisted.
    TORN = "torn"
    """Its bytes are not those of its boundary."""
    SUPERSEDED = "superseded"
    """A newer attempt has started without it, retention has deleted it, or it can never be whole."""
    GONE = "gone"
    """Its slot was overwritten."""
    DIVERGED = "diverged"
    """Replicas that were declared alike differ."""

    @property
    def is_void(self) -> bool:
        """Whether the snapshot is never persisted."""
        return self in (JobState.TORN, JobState.SUPERSEDED, JobState.GONE, JobState.DIVERGED)


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of an attempt on this node, and its number of ranks (`world`; None: the catalogue has it).
    `keep`: the retention that a trainer reported, or None."""

    ranks: tuple[int, ...]
    world: int | None = None
    keep: Keep | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Trainer:
    """A training process. `attempt`: None for one known only by its slots. `ranks`: all of its attempt on
    this node. `resumed`: the snapshot in memory that the attempt resumed from. `closing`: it ends in order;
    `unsaved`: its run has ended, and storage failed for the grace. `remote`: where committed
    steps are copied to; after the last trainer the keeper waits at most `grace_s` for one without progress.
    `cache`: where snapshots are copied to on this node first."""

    lock: str
    rank: int
    pid: int = 0
    world: int = 1
    ranks: tuple[int, ...] = ()
    attempt: AttemptName | None = None
    resumed: SnapshotId | None = None
    keep: Keep | None = None
    linger_s: float = 1800.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    stacks_signal: int = 0
    kill_when_stuck: bool = False
    closing: bool = False
    unsaved: bool = False
    remote: Remote | None = None
    grace_s: float = 60.0
    cache: CachePlace | None = None

    def __post_init__(self) -> None:
        self.ranks = self.ranks or (self.rank,)


class LeafSource(NamedTuple):
    """A region, which may be another rank's, and the leaves of a snapshot that it holds."""

    region: Slot
    leaves: range


@dataclass
class SealedSnapshot:
    """A sealed snapshot of one rank. `owner`: this process's index in the owner table of the slot. `pin`: the
    word while this job has it pinned. `regions`: the regions that hold other leaves of it; `is_whole`: none
    is missing. `capture`: None if the record is damaged."""

    slot: Slot
    generation: int
    owner: int
    regions: tuple[Slot, ...] = ()
    pin: Word | None = None
    capture: Capture | None = None
    is_whole: bool = True

    @property
    def rank(self) -> int:
        return self.slot.rank

    def take(self) -> bool:
        """Pin it. False if the slot holds another snapshot, or another process has it pinned."""
        if self.pin is None and (word := self._sealed_word()) is not None:
            self.pin = self.slot.pin(self.owner, word)
        return self.holds()

    def is_free(self) -> bool:
        """Whether it is pinned by this job, or can be."""
        return self.holds() or self._sealed_word() is not None

    def _sealed_word(self) -> Word | None:
        try:
            word = self.slot.state()
        except DamagedError:
            return None
        return word if (word.state, word.generation) == (SlotState.SEALED, self.generation) else None

    def holds(self) -> bool:
        return self.pin is not None and self.slot.holds(self.pin)

    def release(self) -> bool:
        """Unpin it. False if another process has removed the pin."""
        pin, self.pin = self.pin, None
        return pin is None or self.slot.unpin(pin)

    def sources(self, metadata: Metadata) -> list[LeafSource]:
        """The regions with the leaves of the snapshot, without missing regions and without leaves that other
        ranks hold in their own slots."""
        rest = range(metadata.image.first_constant, len(metadata.leaves))
        shared = [LeafSource(region, rest) for region in self.regions if rest]
        return [LeafSource(self.slot, range(metadata.image.first_left)), *shared]


class RankWrite(NamedTuple):
    """Seconds and bytes of writing the snapshot of one rank: audit, checksums and file."""

    rank: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one try. Sizes in bytes, times in seconds; `written`: by rank, in this try. `slot`: the
    slot whose snapshot is torn, or the cached slot that cannot be read. `leaves`: (index, name) of torn
    leaves; `diverged`: names of replicas that differ. `errno`: 0 if the system gave none. `lacks_region`: a
    region of the snapshot is missing. `view`: the one that has the commit. `dropped`: the steps that
    retention dropped with it, None if it was not applied."""

    state: JobState
    num_bytes: int = 0
    seconds: float = 0.0
    direct: bool = True
    written: tuple[RankWrite, ...] = ()
    slot: str = ""
    leaves: tuple[tuple[int, str], ...] = ()
    diverged: tuple[str, ...] = ()
    message: str = ""
    errno: int = 0
    lacks_region: bool = False
    view: View | None = field(default=None, compare=False, repr=False)
    dropped: tuple[CommitName, ...] | None = None


@dataclass(eq=False, kw_only=True)
class StepJob:
    """`given_up`: it is not retried. `is_noted`: the ledger has its write. `polls`: tries that did not find
    the parts of other nodes, since `rests_since`. `has_part`: the part of this node is stored, as `part` in
    `folder`. `written`: the outcome of that write. `known`: heads of parts that were read. `hastened_for`:
    the try of a newer snapshot before which it was tried again. `lacks`: why not all ranks of this node will
    have it; only an earlier commit counts then."""

    id: SnapshotId
    step: int
    node: NodeRanks
    snapshots: dict[int, SealedSnapshot] = field(default_factory=dict)
    state: JobState = JobState.GATHERING
    is_urgent: bool = False
    given_up: bool = False
    is_noted: bool = False
    retry: Retry = field(default_factory=Retry)
    polls: int = 0
    rests_since: float = 0.0
    outcome: StepOutcome | None = None
    has_part: bool = False
    folder: Folder | None = None
    part: str = ""
    written: StepOutcome | None = None
    hastened_for: tuple[SnapshotId, bool, int] | None = None
    known: dict[str, PartHead] = field(default_factory=dict)
    lacks: str = ""

    @property
    def attempt(self) -> AttemptName:
        """The attempt that captured the snapshot."""
        return self.id.attempt

    @property
    def boundary(self) -> int:
        return self.id.boundary

    @property
    def name(self) -> CommitName:
        """The name of its commit."""
        return CommitName(self.step, self.id.attempt, self.id.boundary)

    @property
    def keys(self) -> set[SlotKey]:
        return {(each.slot.name, each.generation) for each in self.snapshots.values()}

    @property
    def missing(self) -> set[int]:
        """The ranks of this node that do not have it in their slots."""
        return set(self.node.ranks) - self.snapshots.keys()

    @property
    def is_gathered(self) -> bool:
        """Whether all ranks of this node have sealed it that ever will, or its part is stored."""
        return self.has_part or not self.missing or bool(self.lacks)

    @property
    def is_to_commit(self) -> bool:
        """Whether nothing of it is to be written here."""
        return self.has_part or bool(self.lacks) or self.state is JobState.COMMITTING

    def world(self, view: View) -> int:
        """The number of ranks of the attempt that captured it; from the catalogue if its trainers are
        dead."""
        return self.node.world if self.node.world is not None else view.catalogue.world

    @property
    def is_over(self) -> bool:
        return self.given_up or self.state is JobState.COMMITTED or self.state.is_void

    def is_tried_after(self, now: float) -> bool:
        """Whether it has failed, and is retried later."""
        return not self.is_over and self.state is JobState.FAILED and now < self.retry.due_at < math.inf

    def order(self) -> tuple[bool, int, int]:
        """Sort key: snapshots of dead trainers first, newest first; then the others, oldest first."""
        number, boundary = self.attempt.number, self.boundary
        return (False, -number, -boundary) if self.is_urgent else (True, number, boundary)

    def members(self) -> list[SealedSnapshot]:
        """Its snapshots in the order of ranks."""
        return [self.snapshots[rank] for rank in sorted(self.snapshots)]

    def release(self) -> bool:
        """Unpin all. False if another process has removed a pin."""
        return all([each.release() for each in self.members()])


def job_of_one(sealed: Sealed, *regions: Slot, owner: int = 0) -> StepJob:
    """The job of a snapshot of one rank. owner: this process's index in the owner table of the slot."""
    rank = sealed.slot.rank
    snapshots = {rank: SealedSnapshot(sealed.slot, sealed.generation, owner, regions)}
    node = NodeRanks(ranks=(rank,), world=1)
    return StepJob(id=sealed.id, step=sealed.step, node=node, snapshots=snapshots)


def unlike_steps(steps: Mapping[int, int]) -> str:
    """Say why a boundary with these step numbers, by rank, is no step."""
    shown = ", ".join(f"step {step} on rank {rank}" for rank, step in sorted(steps.items())[:MOST_NAMED])
    return (
        f"ranks count their steps differently: the same boundary is {shown}. Let all ranks go through the "
        "same loops: a loader that says its length on all of them or on none, and `break` on all or on none"
    )


def ranks_named(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    shown = ", ".join(names[:MOST_NAMED])
    return f"rank {shown}" if len(names) == 1 else f"ranks {shown}"
