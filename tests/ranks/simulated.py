"""A job of many ranks in one process, in virtual time: what decides is the library's own, only the
training, the copies and the network are played. Ranks train in step: none ends an iteration that another
has not begun."""

import heapq
import itertools
import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashckpt.capture.schedule import Every
from flashckpt.format.layout import Layout, SlotImage
from flashckpt.format.metadata import Metadata
from flashckpt.memory.region import Record
from flashckpt.memory.slot import Sealed, SlotRing, SlotState, Word
from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.joint_coordination import Followed, Snapshots
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import Announcement, NodeMessage, StopState
from flashckpt.ranks.node_state import NodeState

ATTEMPT = 7


class PlayedSlot:
    """A slot's words, without a region."""

    def __init__(self) -> None:
        self.word = Word(SlotState.FREE, 0, 0)
        self.boundary = self.asked = self.persisted = self.cached = 0
        self.home_ended = (0, 0)
        self.failed = 0
        self.complete = (ATTEMPT, 0)

    def state(self) -> Word:
        return self.word

    def begin(self, boundary: int) -> None:
        self.word = Word(SlotState.WRITING, 1, self.word.generation + 1)
        self.boundary = boundary

    def end(self, *, is_sealed: bool) -> None:
        state = SlotState.SEALED if is_sealed else SlotState.FREE
        self.word = Word(state, 0, self.word.generation)
        self._sealed = self._as_sealed()

    def sealed(self) -> Sealed | None:
        return self._sealed if self.word.state is SlotState.SEALED else None

    def _as_sealed(self) -> Sealed:
        counts = dict.fromkeys(Record.__dataclass_fields__, 0)
        counts |= {"attempt_number": ATTEMPT, "generation": self.word.generation}
        counts |= {"step": self.boundary, "boundary": self.boundary, "captured_ns": self.boundary}
        slot: Any = self
        return Sealed(slot, self.word, Record(**counts), b"")

    def metadata(self, sealed: Sealed) -> Metadata:
        """Of a state without leaves."""
        return Metadata(SlotImage(Layout.of(())), (), array("Q"), b"{}")

    def set_complete(self, attempt_number: int, boundary: int) -> None:
        self.complete = attempt_number, boundary

    def request_persist(self, generation: int, *, home: bool = True) -> None:
        self.asked = generation

    def request_persist_after(self, asked: int, generation: int) -> bool:
        taken = self.asked == asked
        self.asked = generation if taken else self.asked
        return taken

    def wants_persist(self, generation: int) -> bool:
        return self.asked == generation != self.persisted


class PlayedRing(SlotRing):
    """What stands in the slots."""

    def held(self) -> set[int]:
        sealed = [slot.sealed() for slot in self.slots]
        return {each.boundary for each in sealed if each is not None}


@dataclass(kw_only=True)
class Conditions:
    """Seconds are virtual. misses: share of the boundaries that a rank does not take; lost: of what is said;
    late: share of the looks at which the last announcement but one is found instead of the last."""

    nodes: int = 2
    ranks: int = 4
    slots: int = 4
    every: Every = 1
    persist_every: str | int | None = None
    iteration_s: float = 0.2
    landing_s: float = 0.01
    look_s: float = 0.05
    round_s: float = 0.5
    hurried_s: float = 0.02
    misses: float = 0.0
    lost: float = 0.0
    late: float = 0.0


@dataclass(eq=False)
class PlayedRank:
    job: "SimulatedJob"
    rank: int
    node_state: NodeState
    slow: float = 1.0
    hears_from: float = 0.0
    ended_at: int | None = None
    is_dead: bool = False
    missed: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        conditions = self.job.conditions
        self.row = self.node_state.row_of(self.rank)
        self.slots: list[Any] = [PlayedSlot() for _ in range(conditions.slots)]
        self.ring = PlayedRing(self.slots)
        self.schedule = Followed(self.row, 0.01)
        self.schedule.budget.plain(conditions.iteration_s)
        self.schedule.budget.burdened(conditions.iteration_s + 0.0004, 0.0004, ordered=True)
        self.snapshots = Snapshots(
            self.node_state, self.row, ATTEMPT, self.schedule.budget, lambda: self.job.now_s
        )
        self.boundary_index = 0
        self.is_waiting = False

    # ---- the training thread

    def boundary(self) -> None:
        """The iteration is over, unless the other ranks have not begun it yet."""
        job = self.job
        if self.is_dead or self.ended_at is not None:
            return
        if job.begun[self.boundary_index] < len(job.by_rank):
            job.after(0.002, self.boundary)
            return
        self.boundary_index += 1
        assert self.row.enter(self.boundary_index), "a boundary was passed against a promise"
        self.at_boundary()

    def at_boundary(self) -> None:
        job, progress = self.job, self.row.progress
        if self.is_dead:
            return
        self.is_waiting = progress.limit == self.boundary_index
        if self.is_waiting and self.node_state.confirmed == self.boundary_index:
            self.ended_at = self.boundary_index
            job.ended(self)
            return
        if self.is_waiting:
            job.after(0.002, self.at_boundary)
            return
        if self.schedule.due(self.boundary_index, self.boundary_index):
            self.schedule.qualifies()
            self.capture()
        self.row.settled = self.boundary_index
        job.begun[self.boundary_index] += 1
        job.after(job.iteration_s() * self.slow, self.boundary)

    def capture(self) -> None:
        job = self.job
        writing = any(slot.word.state is SlotState.WRITING for slot in self.slots)
        slot: Any = None if writing or job.chance(job.conditions.misses) else self.ring.take()
        if slot is None:
            self.missed.add(self.boundary_index)
            return
        if slot.word.state is SlotState.SEALED:
            job.overwritten(self, slot.boundary)
        self.row.begun = self.boundary_index
        slot.begin(self.boundary_index)
        job.after(job.conditions.landing_s, lambda: self.landed(slot))

    def landed(self, slot: PlayedSlot) -> None:
        if not self.is_dead:
            slot.end(is_sealed=True)
            self.taken.add(slot.boundary)

    # ---- its background thread

    def poll(self) -> None:
        job = self.job
        if self.is_dead:
            return
        if job.now_s >= self.hears_from:
            self.schedule.follow(self.node_state.announced)
            self.snapshots.poll(self.slots, len(self.slots))
            self.ring.incomplete = self.snapshots.incomplete
            for slot in self.slots:
                if slot.asked == slot.word.generation > 0 and job.chance(0.2):
                    slot.persisted = slot.asked
                    job.persisted.setdefault(slot.boundary, set()).add(self.rank)
        job.after(job.conditions.look_s, self.poll)


class SimulatedJob:
    """`run` plays it until a time. `complete` are the boundaries that rank 0 has called complete,
    `proposed` the ordinals of the stops that it has proposed."""

    def __init__(self, seed: int, conditions: Conditions | None = None) -> None:
        self.random = random.Random(seed)
        self.conditions = conditions = conditions or Conditions()
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        places = [
            tuple(range(node * conditions.ranks, (node + 1) * conditions.ranks))
            for node in range(conditions.nodes)
        ]
        self.memory = [bytearray(NodeState.num_bytes(len(ranks))) for ranks in places]
        self.boards = [NodeState(memory, ranks) for memory, ranks in zip(self.memory, places, strict=True)]
        for node_state in self.boards:
            node_state.format()
        self.leaders = [Leader(node_state) for node_state in self.boards]
        self.by_rank = [
            PlayedRank(self, rank, self.boards[rank // conditions.ranks])
            for ranks in places
            for rank in ranks
        ]
        self.decider = Decider(places, conditions.every, conditions.persist_every, 0.01)
        self.store: dict[int, bytes] = {}
        self.said = [self.decider.announced.packed()]
        self.complete: list[int] = []
        self.proposed: list[int] = []
        self.persisted: dict[int, set[int]] = {}
        self.is_deaf = False
        self.begun: Counter[int] = Counter({0: len(self.by_rank)})
        for rank in self.by_rank:
            self.after(self.iteration_s(), rank.boundary)
            self.after(self.random.random() * conditions.look_s, rank.poll)
        for node in range(conditions.nodes):
            self.after(self.random.random() * conditions.round_s, lambda node=node: self.exchange(node))

    # ---- time

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._count), event))

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= until_s and not done():
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def chance(self, share: float) -> bool:
        return share > 0 and self.random.random() < share

    def iteration_s(self) -> float:
        return self.conditions.iteration_s * self.random.uniform(0.8, 1.2)

    # ---- the network

    def exchange(self, node: int) -> None:
        conditions, leader = self.conditions, self.leaders[node]
        if not self.is_deaf:
            late = len(self.said) > 1 and self.chance(conditions.late)
            leader.act_on(Announcement.unpacked(self.said[-2 if late else -1]))
            message = leader.message().packed()
            if not self.chance(conditions.lost):
                self.store[node] = message
            if node == 0:
                self.decide()
        pause_s = conditions.hurried_s if leader.is_expedited else conditions.round_s
        self.after(pause_s * self.random.uniform(0.8, 1.2), lambda: self.exchange(node))

    def decide(self) -> None:
        messages = [self.store.get(node) for node in range(self.conditions.nodes)]
        before = self.decider.announced
        found = self.decider.round(
            [None if each is None else NodeMessage.unpacked(each) for each in messages], self.now_s
        )
        if found is before:
            return
        for boundary_index in found.complete:
            if boundary_index not in self.complete:
                self.complete.append(boundary_index)
                assert all(boundary_index in rank.taken for rank in self.by_rank), "not all have it"
        self.check_held()
        stop = found.stop
        if stop.state is StopState.PROPOSED and stop.boundary_index not in self.proposed:
            self.proposed.append(stop.boundary_index)
        self.said.append(found.packed())

    # ---- what must hold

    def overwritten(self, rank: PlayedRank, boundary: int) -> None:
        newest = self.decider.announced.newest_complete
        assert boundary != newest, f"rank {rank.rank} overwrites {boundary}, the newest that all have"

    def check_held(self) -> None:
        newest = self.decider.announced.newest_complete
        if newest:
            assert all(newest in rank.ring.held() for rank in self.by_rank if not rank.is_dead)

    def ended(self, rank: PlayedRank) -> None:
        ends = {each.ended_at for each in self.by_rank if each.ended_at is not None}
        assert len(ends) == 1, f"ranks end at different boundaries: {ends}"
        assert all(each.boundary_index <= rank.boundary_index for each in self.by_rank), (
            "a rank has passed the end of another"
        )

    @property
    def all_ended(self) -> bool:
        return all(rank.ended_at is not None for rank in self.by_rank if not rank.is_dead)
