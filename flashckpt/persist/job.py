"""A step on its way to storage: the snapshots of this node's ranks, and how far they have come.

    gathering → writing → part written → committed
                                       | void: nobody will ever persist it
                                       | failed: to be tried again, unless it was given up

Owns the words for it, and when it is tried again. Waiting for the parts of other nodes (part written) is a
state, and no failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from flashckpt.errors import DamagedError
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName
from flashckpt.memory.slot import Sealed, Slot, SlotState, Word
from flashckpt.options import Keep
from flashckpt.persist.stored_steps import StoredStep

_LONGEST_PAUSE_S = 300.0
_LONGEST_LOOK_S = 10.0
_FIRST_LOOK_S = 0.25
_MOST_DOUBLINGS = 10
_FEW_PAUSES_S = (0.1, 0.5, 2.0)
MOST_NAMED = 100


class JobState(Enum):
    GATHERING = "gathering"
    """Not all ranks of this node have sealed it yet, or its turn has not come."""
    WRITING = "writing"
    PART_WRITTEN = "part written"
    """What this node has of it is at rest. The parts of other nodes are waited for."""
    COMMITTED = "committed"
    VOID = "void"
    FAILED = "failed"


class Void(Enum):
    """Why a step is never persisted, or not this content of it."""

    TORN = "torn"
    """The bytes of a snapshot are not those of its boundary."""
    SUPERSEDED = "superseded"
    """A newer attempt has started, or another content stands under this number."""
    GONE = "gone"
    """A slot was written anew meanwhile."""
    DIVERGED = "diverged"
    """What ranks hold alike by declaration is not alike."""


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """What is known of the attempt that a step is of: its ranks on this node, and on all nodes (None where
    only its start.json says it). `keep` is None where no trainer has said what its user wants to keep."""

    ranks: tuple[int, ...]
    world: int | None = None
    keep: Keep | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)


class KnownTrainer(Protocol):
    """What a trainer has said of itself. `ranks` are those of its attempt on this node."""

    rank: int
    ranks: tuple[int, ...]
    world: int
    attempt: AttemptName | None
    keep: Keep | None
    environment: Mapping[str, Any]


class LeafSource(NamedTuple):
    """Where leaves of a snapshot stand: a region, which may be another rank's, and which of its leaves."""

    region: Slot
    leaves: range


@dataclass
class SealedSnapshot:
    """What one rank has sealed of a step. `owner` is this process's index in the slot's owner table, `pin`
    the word while it is pinned by this job, `regions` those that hold leaves of it beside the slot: one that
    it names and that is not among them is not here."""

    slot: Slot
    generation: int
    owner: int
    regions: tuple[Slot, ...] = ()
    pin: Word | None = None

    @property
    def rank(self) -> int:
        return self.slot.rank

    def take(self) -> bool:
        """Pin it. False where the slot holds something else, or somebody else has it pinned."""
        if self.pin is None and (sealed := self._sealed()) is not None:
            self.pin = self.slot.pin(self.owner, sealed)
        return self.holds()

    def is_free(self) -> bool:
        """Whether it can be pinned, or is."""
        return self.holds() or self._sealed() is not None

    def _sealed(self) -> Word | None:
        try:
            word = self.slot.state()
        except DamagedError:
            return None
        return word if (word.state, word.generation) == (SlotState.SEALED, self.generation) else None

    def holds(self) -> bool:
        return self.pin is not None and self.slot.holds(self.pin)

    def release(self) -> bool:
        """Unpin it. False where the pin was taken away: the slot is not ours any more."""
        pin, self.pin = self.pin, None
        return pin is None or self.slot.unpin(pin)

    def sources(self, metadata: Metadata) -> list[LeafSource]:
        """Where the leaves of the snapshot stand, as far as they are here, but for those that are left to
        other ranks: whoever has those in its own slot answers for them."""
        rest = range(metadata.image.first_constant, len(metadata.leaves))
        shared = [LeafSource(region, rest) for region in self.regions if rest]
        return [LeafSource(self.slot, range(metadata.image.first_left)), *shared]


class RankWrite(NamedTuple):
    """Seconds and bytes of writing what one rank has of a step: audit, checksums and file."""

    rank: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step in one try. Sizes in bytes, times in seconds. `written`: what this try wrote of
    each rank. Of one that is torn, `slot` is the slot and `leaves` are (index, name) of those that differed;
    `diverged` are the names of replicas that are not alike; `errno` is 0 where the system gave none.
    `lacks_region`: without the region that a snapshot names it can never be persisted. `is_of_all`: where it
    is committed all ranks of the job have it, and not those of this folder alone."""

    state: JobState
    void: Void | None = None
    attempt: str = ""
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
    is_of_all: bool = True


@dataclass(eq=False, kw_only=True)
class StepJob:
    """`attempt` is the one that captured the step, at its `boundary`. `has_others`: another keeper lives that
    could write for it. `has_trainers`: a trainer lives here that is, or may be, of the attempt, and may wait
    for the step. `part_of` is the attempt as whose this node's part stands, once it does. `stored`: of a job
    without snapshots, the parts that want their manifest; `reads_stored`, with every byte of them read first,
    so that no damaged step becomes the newest. `tries` counts those that failed, `looks` those that found no
    parts of other nodes, `rests_since` is when the first of these was. `given_up`: it is not tried again.
    `is_noted`: the ledger says how it was written. `lacks`: why not all ranks of this node will ever have it;
    then it is only looked whether it was committed before."""

    attempt: AttemptName
    step: int
    boundary: int
    node: NodeRanks
    snapshots: dict[int, SealedSnapshot] = field(default_factory=dict)
    state: JobState = JobState.GATHERING
    has_others: bool = True
    has_trainers: bool = False
    is_urgent: bool = False
    given_up: bool = False
    is_noted: bool = False
    tries: int = 0
    looks: int = 0
    tried_at: float = 0.0
    retry_at: float = 0.0
    rests_since: float = 0.0
    outcome: StepOutcome | None = None
    part_of: AttemptName | None = None
    stored: StoredStep | None = None
    reads_stored: bool = True
    lacks: str = ""

    @property
    def content(self) -> tuple[AttemptName, int, int]:
        """Which content it is, on all ranks: attempt, step and boundary."""
        return self.attempt, self.step, self.boundary

    @property
    def keys(self) -> set[tuple[str, int]]:
        """Its slots, each with the generation that it has in it."""
        return {(each.slot.name, each.generation) for each in self.snapshots.values()}

    @property
    def missing(self) -> set[int]:
        """The ranks of this node that do not have it in their slots."""
        return set(self.node.ranks) - self.snapshots.keys()

    @property
    def is_gathered(self) -> bool:
        """Whether all ranks of this node have sealed it that ever will, or what they had is at rest."""
        is_at_rest = self.part_of is not None or self.stored is not None
        return is_at_rest or not self.missing or bool(self.lacks)

    @property
    def is_over(self) -> bool:
        return self.given_up or self.state in (JobState.COMMITTED, JobState.VOID)

    def is_tried_after(self, now: float) -> bool:
        """Whether it has failed, and its next try is still to come."""
        return not self.is_over and self.state is JobState.FAILED and now < self.retry_at < math.inf

    def order(self) -> tuple[bool, int]:
        """Sorts jobs: of what a dead trainer left the newest first, else oldest first."""
        return not self.is_urgent, -self.step if self.is_urgent else self.step

    def members(self) -> list[SealedSnapshot]:
        """In the order of ranks."""
        return [self.snapshots[rank] for rank in sorted(self.snapshots)]

    def release(self) -> bool:
        """Unpin all. False where a pin had been taken away."""
        return all([each.release() for each in self.members()])


def alone(sealed: Sealed, owner: int, *regions: Slot) -> StepJob:
    """The job of a snapshot of one rank."""
    rank = sealed.slot.rank
    snapshots = {rank: SealedSnapshot(sealed.slot, sealed.generation, owner, regions)}
    node = NodeRanks(ranks=(rank,), world=1)
    attempt, step, boundary = sealed.content
    return StepJob(attempt=attempt, step=step, boundary=boundary, node=node, snapshots=snapshots)


# Seconds before the try that follows so many that failed; None where none follows.
PauseAfter = Callable[[int], float | None]


def pause_s(tries: int) -> float:
    """Without end: a server may be away for a long weekend."""
    # That is a thousand tries, and two to that power is no number.
    return min(2.0 ** min(tries - 1, _MOST_DOUBLINGS), _LONGEST_PAUSE_S)


def few_pauses_s(tries: int) -> float | None:
    """While somebody waits: a server's hiccup is over by then, a full disk is not."""
    return _FEW_PAUSES_S[tries - 1] if tries <= len(_FEW_PAUSES_S) else None


def look_again_s(looks: int) -> float:
    """Until the next look for the parts of other nodes: who writes the last one commits, unless it dies."""
    return min(_FIRST_LOOK_S * 2.0 ** min(looks - 1, _MOST_DOUBLINGS), _LONGEST_LOOK_S)


def unlike_steps(steps: Mapping[int, int]) -> str:
    """In words, why no step is made of a boundary that ranks count as these steps."""
    shown = ", ".join(f"step {step} on rank {rank}" for rank, step in sorted(steps.items())[:MOST_NAMED])
    return (
        f"ranks count their steps differently: the same boundary is {shown}. Let all ranks go through the "
        "same loops: a loader that says its length on all of them or on none, and `break` on all or on none"
    )


def ranks_named(ranks: Iterable[int]) -> str:
    """In words."""
    names = [str(rank) for rank in sorted(ranks)]
    shown = ", ".join(names[:MOST_NAMED])
    return f"rank {shown}" if len(names) == 1 else f"ranks {shown}"
