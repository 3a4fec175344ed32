"""What rank 0 decides for all ranks: which boundaries are captured, which of them all have, where the loop
ends.

A function of what the nodes say and of the time that it is told: it reads no clock, no memory and no store,
so that thousands of ranks can be played through in a test. Whatever messages are late, lost or come twice,
what was once decided stands.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from flashckpt.capture.schedule import Every, Pace
from flashckpt.ranks.liveness import Silence
from flashckpt.ranks.messages import (
    MOST_COMMITTED,
    MOST_OPEN,
    MOST_SAVES,
    NONE,
    Announcement,
    Answer,
    Call,
    Gone,
    NodeMessage,
    Refused,
    Save,
    Stop,
    StopState,
    Terms,
)

log = logging.getLogger(__name__)

# What a round trip is taken for before one was measured, and how many of the newest count: the longest does.
_FIRST_ROUND_TRIP_S = 2.0
_ROUND_TRIPS_KEPT = 8
# A snapshot's outcome is open for a round trip; what a round trip may take beyond the longest of late.
_MARGIN = 1.5
# After a boundary that a rank missed snapshots come more seldom, and step by step as often as before again.
_MORE_CAUTION, _LESS_CAUTION, _MOST_CAUTION = 1.5, 0.9, 4.0
# One round trip that took far longer than others do (a rank was stopped) is no measure.
_OUTLIER = 4.0
# Of the slots one holds the newest complete snapshot and one what is being persisted.
_SLOTS_HELD = 2
_UNKNOWN_COST_PAUSE_S = 5.0
_RATES_KEPT = 16
# Of a node that is so far behind the others nothing is known to be everywhere for a while, and all keep more.
_COMMITS_KEPT = 256
_LONGEST_LEAD = 1 << 20
_LEAST_S = 1e-6
# Terms are replaced where snapshots should come more seldom, or this much more often: what they follow from
# is never twice the same.
_WORTH_IT = 1.6
_MOST_VOIDS = 10


class Decider:
    """`nodes` are the ranks of each node. `every`, `persist_every` and `overhead` are what the user asked
    for.

    `round` takes the newest message of each node, None where none came, and gives what is to be announced:
    the same as before where nothing has changed."""

    def __init__(
        self,
        nodes: Sequence[tuple[int, ...]],
        every: Every,
        persist_every: str | int | None,
        overhead: float,
    ) -> None:
        self._nodes, self._now_s = tuple(nodes), 0.0
        self._heard: list[NodeMessage | None] = [None] * len(nodes)
        pace = Pace(every, persist_every, overhead=overhead, clock=lambda: self._now_s)
        self._timing = Timing()
        self._verdicts = Verdicts(self._nodes)
        self._persists = Persists(pace, persist_every if isinstance(persist_every, int) else 0)
        self._commits = Commits(len(nodes))
        self._scheduler = Scheduler(every, persist_every, overhead)
        self._stops, self._saves = Stops(), Saves(self._nodes)
        self._silence = Silence(len(nodes), lambda: self._now_s)
        self.announced = Announcement(number=1)

    def round(self, messages: Sequence[NodeMessage | None], now_s: float) -> Announcement:
        self._now_s = now_s
        for index, new in enumerate(messages):
            before = self._heard[index]
            if new is not None and (before is None or new.follows(before)):
                self._heard[index] = new
        # Who has not said anything has done nothing, as far as is known.
        known = [each if each is not None else NodeMessage() for each in self._heard]
        self._timing.saw(known, self.announced.number, now_s)
        self._saves.look(known)
        found = self._verdicts.look(known)
        self._persists.look(found, known[0], self._saves)
        self._commits.look(known)
        self._scheduler.look(known, self._timing, found, self.announced.number)
        self._stops.look(known, self._timing)
        failed = max(each.failed for each in known)
        self._announce(is_ended=known[0].is_ended, failed=failed, gone=self._gone(known))
        return self.announced

    def _gone(self, known: Sequence[NodeMessage]) -> Gone:
        silent = self._silence.look([each.number for each in known])
        died = [each.gone.died for each in known if each.gone.died != NONE]
        died += [self._nodes[index][0] for index in silent if not known[index].is_ended]
        ended = (each.gone.ended for each in known if each.gone.ended != NONE)
        return Gone(min(died, default=NONE), min(ended, default=NONE))

    @property
    def all_have_ended(self) -> bool:
        return all(each is not None and each.is_ended for each in self._heard)

    def _announce(self, *, is_ended: bool, failed: int, gone: Gone) -> None:
        verdicts, persist = self._verdicts, set(self._persists.asked)
        new = Announcement(
            number=self.announced.number,
            decided=verdicts.decided,
            complete=tuple(verdicts.complete),
            persist=tuple(each for each in verdicts.complete if each in persist),
            terms=self._scheduler.terms,
            stop=self._stops.newest,
            refused=tuple(self._saves.refused),
            agreed=self._saves.agreed,
            missed=verdicts.missed,
            is_ended=is_ended,
            committed=self._commits.everywhere,
            failed=failed,
            gone=gone,
        )
        # All act on each number, so that a round trip can be measured, but for one that nobody has acted on
        # yet.
        if new != self.announced or self._timing.is_idle:
            self.announced = replace(new, number=self.announced.number + 1)
            self._timing.announced(self.announced.number, self._now_s)


class Timing:
    """How long a round trip takes and an iteration, in seconds, as far as messages tell."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque(maxlen=64)
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS_KEPT)
        self._iterations: deque[float] = deque(maxlen=_RATES_KEPT)
        self._seen: tuple[int, float] | None = None
        self._heard = 0

    @property
    def round_trip_s(self) -> float:
        """From a snapshot's seal, or a proposal, until all ranks know what was decided of it."""
        if not self._round_trips:
            return _FIRST_ROUND_TRIP_S
        return min(max(self._round_trips), _OUTLIER * median(self._round_trips))

    @property
    def iteration_s(self) -> float | None:
        """The shortest of late."""
        return min(self._iterations, default=None)

    @property
    def is_idle(self) -> bool:
        """Whether all have acted on everything that was announced."""
        return not self._sent

    def announced(self, number: int, now_s: float) -> None:
        self._sent.append((number, now_s))

    def saw(self, known: Sequence[NodeMessage], number: int, now_s: float) -> None:
        heard = min(each.heard for each in known)
        if heard and not self._heard:
            self._sent.clear()  # they were said before all listened
        self._heard = heard
        while self._sent and self._sent[0][0] <= heard:
            self._round_trips.append(now_s - self._sent.popleft()[1])
        if self._sent:  # one that is still on its way after longer than any before is known to take that long
            waits = now_s - self._sent[0][1]
            if self._round_trips and waits > self.round_trip_s:
                self._round_trips[-1] = waits
        high = max(each.entered_high for each in known)
        if self._seen is None or high > self._seen[0]:
            if self._seen is not None and now_s > self._seen[1]:
                self._iterations.append((now_s - self._seen[1]) / (high - self._seen[0]))
            self._seen = high, now_s

    def lead(self, seconds: float, least: int) -> int:
        """So many boundaries ahead of the fastest rank nothing is passed within that time."""
        if self.iteration_s is None:
            return least
        return least + min(math.ceil(seconds / max(self.iteration_s, _LEAST_S)), _LONGEST_LEAD)


class Verdicts:
    """Which boundaries all ranks have sealed, at one step. `decided`: the outcome of every one up to here is
    known. `missed`: the newest that some have and not all, and who has not."""

    def __init__(self, nodes: Sequence[tuple[int, ...]]) -> None:
        self._nodes = nodes
        self.decided = 0
        self.complete: deque[int] = deque(maxlen=MOST_OPEN)
        self.missed = (0, NONE)

    def look(self, known: Sequence[NodeMessage]) -> Found:
        """What has been decided by these messages."""
        before, until = self.decided, min(each.judged for each in known)
        if until <= before:
            return Found()
        held = [set(each.sealed) for each in known]
        somewhere = set().union(*held, *({each.missed[0]} for each in known))
        new = sorted(each for each in somewhere if before < each <= until)
        complete = [
            each
            for each in new
            if all(each in of for of in held) and len({of.step_of(each) for of in known}) == 1
        ]
        void = [each for each in new if each not in complete]
        self.decided = until
        self.complete.extend(complete)
        if void:
            self.missed = void[-1], self._who_missed(void[-1], known)
        return Found(tuple(complete), tuple(void))

    def _who_missed(self, ordinal: int, known: Sequence[NodeMessage]) -> int:
        for ranks, each in zip(self._nodes, known, strict=True):
            if each.missed[0] == ordinal:
                return each.missed[1]
            if ordinal not in each.sealed:
                return ranks[0]
        # All have it: some count other steps.
        first, steps = self._nodes[0][0], [each.step_of(ordinal) for each in known]
        which = next((index for index, step in enumerate(steps) if step != steps[0]), None)
        if which is None:
            return NONE
        other = self._nodes[which][0]
        log.error(
            "rank %d counts step %d where rank %d counts step %d: there is no snapshot of both. Let all "
            "ranks run the same loop and call save() alike",
            other, steps[which], first, steps[0],
        )  # fmt: skip
        return other


@dataclass(frozen=True)
class Found:
    """Of the boundaries that were decided: those that all have, and those that some have and not all."""

    complete: tuple[int, ...] = ()
    void: tuple[int, ...] = ()


class Persists:
    """Which complete snapshots are persisted: `asked`. One that is void was never asked for on any rank, so
    no keeper pins or writes it."""

    def __init__(self, pace: Pace, steps: int) -> None:
        self._pace, self._steps = pace, steps
        self.asked: deque[int] = deque(maxlen=MOST_OPEN)
        self._awaited = self._noted = self._forgotten = 0

    def look(self, found: Found, own: NodeMessage, saves: Saves) -> None:
        """own: of rank 0's node, which says what was persisted: a step is, once it is on all ranks."""
        if self._awaited and self._awaited <= max(own.persisted, own.failed):
            self._pace.persist_ended(fulfilled=self._awaited <= own.persisted)
            self._awaited = 0
        for ordinal in found.complete:
            # An order that fell on a boundary which not all have stays due.
            ordered = (ordinal + own.offset) // self._steps * self._steps if self._steps else 0
            if ordered > self._noted:
                self._noted = ordered
                self._pace.persist_due(ordered)
            is_due = self._pace.persist_due(-1)
            # For saves that came too fast to be told apart: the newest that all have, one after the other.
            is_due = is_due or (saves.forgotten > self._forgotten and not self._awaited)
            if is_due or ordinal in saves.ordered:
                self._forgotten = saves.forgotten
                self.asked.append(ordinal)
                self._awaited = ordinal
                self._pace.persist_asked()


class Commits:
    """Which boundaries are in the storage of every node, where each may have its own. A node that has said so
    of one keeps it: nothing is deleted that is newer than the newest of these."""

    def __init__(self, nodes: int) -> None:
        self._of_node: list[deque[int]] = [deque(maxlen=_COMMITS_KEPT) for _ in range(nodes)]
        self.everywhere: tuple[int, ...] = ()

    def look(self, known: Sequence[NodeMessage]) -> None:
        for mine, each in zip(self._of_node, known, strict=True):
            mine.extend(ordinal for ordinal in each.committed if ordinal not in mine)
        found = set.intersection(*map(set, self._of_node)).union(self.everywhere)
        self.everywhere = tuple(sorted(found)[-MOST_COMMITTED:])


class Scheduler:
    """The terms: which boundaries are captured. They take effect ahead of everybody, and only once the ones
    before them are in force everywhere: of two, no rank can lack the one that it needs."""

    def __init__(self, every: Every, persist_every: str | int | None, overhead: float) -> None:
        self._every, self._overhead = every, overhead
        self._persist_steps = persist_every if isinstance(persist_every, int) else 0
        self._caution = 1.0
        self._offset: int | None = None
        self._published = 0
        self.terms: tuple[Terms, ...] = ()

    def look(self, known: Sequence[NodeMessage], timing: Timing, found: Found, number: int) -> None:
        """number: of the newest announcement, which the next follows."""
        if found.void:
            self._caution = min(self._caution * _MORE_CAUTION, _MOST_CAUTION)
        elif found.complete:
            self._caution = max(self._caution * _LESS_CAUTION, 1.0)
        if self._every is None and not self._persist_steps:
            return
        is_known = timing.iteration_s is not None and all(each.slots for each in known)
        in_force = not self.terms or (
            min(each.entered_low for each in known) >= self.terms[-1].starts
            and min(each.heard for each in known) >= self._published
        )
        if is_known and in_force:
            wanted = self._wanted(known, timing)
            if not self.terms or self._is_worth_it(wanted, self.terms[-1], known[0].offset):
                self.terms = (*self.terms[-1:], wanted)
                self._offset, self._published = known[0].offset, number + 1

    def _wanted(self, known: Sequence[NodeMessage], timing: Timing) -> Terms:
        spacing, offset, steps = self._spacing(known, timing), known[0].offset, self._persist_steps
        every = self._fewest(self._every, spacing, known, timing)
        also = steps * math.ceil(spacing / steps) if steps else 0
        if self._every == "auto" and steps:
            # One grid: two of them would have snapshots come too close to one another.
            every, also = _divisor(steps, every), 0
        grid = every if also == 0 and steps else self._every if isinstance(self._every, int) else 1
        start = max(each.entered_high for each in known) + timing.lead(_MARGIN * timing.round_trip_s, 2)
        if self.terms:
            start = max(start, _last_before(self.terms[-1], start) + spacing)
        number = self.terms[-1].number + 1 if self.terms else 1
        also_start = _aligned(start, offset, steps) if also else 0
        return Terms(number, _aligned(start, offset, grid), every, also_start, also)

    def _fewest(self, every: Every, spacing: int, known: Sequence[NodeMessage], timing: Timing) -> int:
        """How many boundaries from one snapshot to the next: what was asked for, or the least multiple of it
        that no rank misses."""
        if every is None:
            return 0
        if isinstance(every, int):
            return every * math.ceil(spacing / every)
        cost_s, iteration_s = max(each.cost_ns for each in known) / 1e9, timing.iteration_s or 0.0
        plain_s = min((each.plain_ns for each in known if each.plain_ns), default=0) / 1e9
        if not cost_s or not plain_s:
            return max(spacing, math.ceil(_UNKNOWN_COST_PAUSE_S / max(iteration_s, _LEAST_S)), 2)
        # Of each two iterations one is without a snapshot: what one costs is known by the difference.
        return max(spacing, math.ceil(cost_s / (self._overhead * plain_s)), 2)

    def _spacing(self, known: Sequence[NodeMessage], timing: Timing) -> int:
        """The fewest boundaries between two snapshots of which nobody misses one."""
        landing_s = max(each.landing_ns for each in known) / 1e9
        open_at_once = max(1, min(each.slots for each in known) - _SLOTS_HELD)
        open_s = _MARGIN * (timing.round_trip_s + landing_s) / open_at_once
        iteration_s = max(timing.iteration_s or 0.0, _LEAST_S)
        return max(1, math.ceil(self._caution * max(landing_s, open_s) / iteration_s))

    def _is_worth_it(self, new: Terms, old: Terms, offset: int) -> bool:
        pairs = ((new.every, old.every), (new.also_every, old.also_every))
        is_ordered = isinstance(self._every, int) or self._persist_steps > 0
        return (is_ordered and offset != self._offset) or any(a > b or a * _WORTH_IT < b for a, b in pairs)


def _divisor(steps: int, least: int) -> int:
    """The least divisor of `steps` that is no less than `least`, or else its least such multiple."""
    if least > steps:
        return steps * math.ceil(least / steps)
    return next(each for each in range(least, steps + 1) if steps % each == 0)


def _last_before(terms: Terms, start: int) -> int:
    """The newest boundary before `start` that these terms have captured; one long ago where there is none."""
    grids = ((terms.start, terms.every), (terms.also_start, terms.also_every))
    found = [
        first + (start - 1 - first) // every * every for first, every in grids if every and first < start
    ]
    return max(found, default=0)


def _aligned(start: int, offset: int, grid: int) -> int:
    """The first boundary from `start` on whose step is a multiple of `grid`."""
    return start + -(start + offset) % grid


class Stops:
    """Where the loops of all ranks end: `newest` is the newest proposal. Ranks that end at different
    boundaries hang in a collective, so one is proposed ahead of all and confirmed once all have promised
    not to pass it."""

    def __init__(self) -> None:
        self.newest: Stop | None = None
        self._voids = 0

    def look(self, known: Sequence[NodeMessage], timing: Timing) -> None:
        stop = self.newest
        if stop is not None and stop.state is StopState.PROPOSED:
            # A node that has ended passes no boundary any more.
            answers = [
                each.promise[1] if each.promise[0] == stop.number else Answer.NONE
                for each in known
                if not each.is_ended
            ]
            if Answer.REFUSED in answers:
                self._voids = min(self._voids + 1, _MOST_VOIDS)
                self.newest = stop._replace(state=StopState.VOID)
            elif all(each is Answer.PROMISED for each in answers):
                self.newest = stop._replace(state=StopState.CONFIRMED)
        elif stop is None or stop.state is StopState.VOID:
            asked = min((each.stop_asked[::-1] for each in known if each.stop_asked[0]), default=None)
            if asked is not None:
                rank, reason = asked
                lead = timing.lead(_MARGIN * timing.round_trip_s * 2**self._voids, 1)
                ordinal = max(each.entered_high for each in known) + lead
                number = stop.number + 1 if stop is not None else 1
                self.newest = Stop(number, ordinal, StopState.PROPOSED, rank, reason)


class Saves:
    """Whether save() was called on all ranks alike. `agreed`: the newest boundary that all are at because all
    called it outside of an iteration; `ordered`: the newest that are to be persisted once they are complete;
    `refused`: the newest at which some called and others did not; `forgotten`: the newest of which not all
    calls are known any more, since they came faster than messages."""

    def __init__(self, nodes: Sequence[tuple[int, ...]]) -> None:
        self._nodes = nodes
        self.agreed = self.forgotten = 0
        self.ordered: deque[int] = deque(maxlen=MOST_OPEN)
        self.refused: deque[Refused] = deque(maxlen=MOST_SAVES)
        self._refused_until = 0

    def look(self, known: Sequence[NodeMessage]) -> None:
        saves = [save for each in known for save in each.saves]
        outside = {save.ordinal for save in saves if save.call is Call.OUTSIDE}
        for ordinal in sorted({save.ordinal for save in saves}):
            is_answered = ordinal in self.ordered and (ordinal not in outside or ordinal <= self.agreed)
            if ordinal <= self._refused_until or is_answered:
                continue
            if all(each.saves_since <= ordinal for each in known):
                self._judge(ordinal, known)
            else:
                self.forgotten = max(self.forgotten, ordinal)

    def _judge(self, ordinal: int, known: Sequence[NodeMessage]) -> None:
        rows = [self._of_node(ordinal, *pair) for pair in zip(self._nodes, known, strict=True)]
        call = max(each.call for each in rows if each.caller != NONE)
        caller = next(each.caller for each in rows if each.caller != NONE and each.call is call)
        without = [(not each.is_over, each.absent) for each in rows if each.absent != NONE]
        without += [  # they may yet wait for what they have called for
            (message.entered_high < ordinal, each.caller)
            for each, message in zip(rows, known, strict=True)
            if each.caller != NONE and each.call is not call
        ]
        if not without:
            if ordinal not in self.ordered:
                self.ordered.append(ordinal)
            self.agreed = max(self.agreed, ordinal if call is Call.OUTSIDE else 0)
            return
        to_come, absent = min(without)
        if not to_come or any(each.withdrawn[0] == ordinal for each in known):
            self.refused.append(Refused(ordinal, caller, absent))
            self._refused_until = ordinal

    def _of_node(self, ordinal: int, ranks: tuple[int, ...], message: NodeMessage) -> Save:
        for save in message.saves:
            if save.ordinal == ordinal:
                return save
        return Save(ordinal, Call.INSIDE, NONE, ranks[0], message.entered_high >= ordinal)
