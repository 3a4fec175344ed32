"""The decisions of rank 0 for all ranks: which boundaries are captured, which of them are complete, where the
loop ends.

A function of the nodes' messages and of a time that is passed in: it reads no clock, no memory and no store,
so tests can simulate thousands of ranks. Whatever messages are late, lost or repeated, a decision stands."""

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
    MOST_OPEN,
    NONE,
    Announcement,
    Answer,
    Gone,
    NodeMessage,
    Refused,
    Stop,
    StopState,
)

log = logging.getLogger(__name__)

# The assumed round trip before one was measured; of the newest measurements the longest counts.
_FIRST_ROUND_TRIP_S = 2.0
_ROUND_TRIPS_KEPT = 8
# A snapshot is undecided for a round trip, which may take this much longer than the longest recent one.
_MARGIN = 1.5
# After a boundary that a rank missed, snapshots are less frequent, and gradually return to the former rate.
_MORE_CAUTION, _LESS_CAUTION, _MOST_CAUTION = 1.5, 0.9, 4.0
# A round trip far longer than the others (a rank was stopped) is not representative.
_OUTLIER = 4.0
# One slot holds the newest complete snapshot, and one the snapshot that is being persisted.
_SLOTS_HELD = 2
_UNKNOWN_COST_PAUSE_S = 5.0
_RATES_KEPT = 16
_LONGEST_LEAD = 1 << 20
_LEAST_S = 1e-6
# A schedule is replaced if snapshots should be less frequent, or this much more frequent: its inputs always
# vary.
_WORTH_IT = 1.6
_MOST_VOIDS = 10


class Decider:
    """nodes: the ranks of each node. every, persist_every, overhead: the options of the user. has_cache: each
    node has a cache.

    `round` takes the newest message of each node, or None, and returns the announcement: the same object as
    before if nothing has changed."""

    def __init__(
        self,
        nodes: Sequence[tuple[int, ...]],
        every: Every,
        persist_every: str | int | None,
        overhead: float,
        *,
        has_cache: bool = False,
    ) -> None:
        self._nodes, self._now_s = tuple(nodes), 0.0
        self._messages: list[NodeMessage | None] = [None] * len(nodes)
        pace = Pace(every, persist_every, overhead=overhead, has_cache=has_cache, clock=lambda: self._now_s)
        self._timing = Timing()
        self._verdicts = Verdicts(self._nodes)
        self._persists = Persists(pace, persist_every if isinstance(persist_every, int) else 0)
        self._scheduler = Scheduler(every, persist_every, overhead)
        self._stops, self._saves = Stops(), Saves()
        self._silence = Silence(len(nodes), lambda: self._now_s)
        self.announced = Announcement(number=1)

    def round(self, messages: Sequence[NodeMessage | None], now_s: float) -> Announcement:
        self._now_s = now_s
        for index, new in enumerate(messages):
            before = self._messages[index]
            if new is not None and (before is None or new.number > before.number):
                self._messages[index] = new
        # A node without a message has done nothing, as far as is known.
        known = [each if each is not None else NodeMessage() for each in self._messages]
        self._timing.update(known, self.announced.number, now_s)
        found = self._saves.judge(known, self._timing, self._verdicts.judge(known), self._verdicts.decided)
        self._persists.update(found, known[0])
        self._scheduler.update(known, self._timing, found, self.announced.number)
        self._stops.update(known, self._timing)
        self._announce(is_ended=known[0].is_ended, gone=self._gone(known))
        return self.announced

    def _gone(self, known: Sequence[NodeMessage]) -> Gone:
        silent = self._silence.update([each.number for each in known])
        died = [each.gone.died for each in known if each.gone.died != NONE]
        died += [self._nodes[index][0] for index in silent if not known[index].is_ended]
        ended = (each.gone.ended for each in known if each.gone.ended != NONE)
        return Gone(min(died, default=NONE), min(ended, default=NONE))

    @property
    def all_have_ended(self) -> bool:
        return all(each is not None and each.is_ended for each in self._messages)

    def _announce(self, *, is_ended: bool, gone: Gone) -> None:
        verdicts, persist = self._verdicts, set(self._persists.asked)
        cached = persist & set(self._persists.cached)
        new = Announcement(
            number=self.announced.number,
            decided=verdicts.decided,
            complete=tuple(verdicts.complete),
            persist=tuple(each for each in verdicts.complete if each in persist),
            cached=tuple(each for each in verdicts.complete if each in cached),
            every=self._scheduler.every,
            also=self._scheduler.also,
            stop=self._stops.newest,
            refused=self._saves.refused,
            agreed=self._saves.agreed,
            save_at=self._saves.save_at,
            missed=verdicts.missed,
            is_ended=is_ended,
            gone=gone,
        )
        # A new number measures a round trip, so there is one whenever all ranks have acted on the last.
        if new != self.announced or self._timing.is_idle:
            self.announced = replace(new, number=self.announced.number + 1)
            self._timing.announced(self.announced.number, self._now_s)


class Timing:
    """The times of a round trip and of an iteration, in seconds, estimated from messages."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque(maxlen=64)
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS_KEPT)
        self._iterations: deque[float] = deque(maxlen=_RATES_KEPT)
        self._seen: tuple[int, float] | None = None
        self._heard = 0

    @property
    def round_trip_s(self) -> float:
        """The time from a snapshot's seal, or a proposal, until all ranks know the decision."""
        if not self._round_trips:
            return _FIRST_ROUND_TRIP_S
        return min(max(self._round_trips), _OUTLIER * median(self._round_trips))

    @property
    def iteration_s(self) -> float | None:
        """The shortest recent iteration."""
        return min(self._iterations, default=None)

    @property
    def is_idle(self) -> bool:
        """Whether all ranks have acted on every announcement."""
        return not self._sent

    def announced(self, number: int, now_s: float) -> None:
        self._sent.append((number, now_s))

    def update(self, known: Sequence[NodeMessage], number: int, now_s: float) -> None:
        heard = min(each.acknowledged for each in known)
        if heard and not self._heard:
            self._sent.clear()  # sent before all ranks received
        self._heard = heard
        while self._sent and self._sent[0][0] <= heard:
            self._round_trips.append(now_s - self._sent.popleft()[1])
        if self._sent:  # one that already takes longer than any before counts with its time so far
            waits = now_s - self._sent[0][1]
            if self._round_trips and waits > self.round_trip_s:
                self._round_trips[-1] = waits
        high = max(each.entered_high for each in known)
        if self._seen is None or high > self._seen[0]:
            if self._seen is not None and now_s > self._seen[1]:
                self._iterations.append((now_s - self._seen[1]) / (high - self._seen[0]))
            self._seen = high, now_s

    def lead(self, seconds: float, least: int) -> int:
        """Return how many boundaries ahead of the fastest rank no rank reaches within that time."""
        if self.iteration_s is None:
            return least
        return least + min(math.ceil(seconds / max(self.iteration_s, _LEAST_S)), _LONGEST_LEAD)


class Verdicts:
    """The boundaries that all ranks have sealed, at one step. decided: the outcome of every boundary up to
    this one is known. missed: the newest incomplete one that a rank sealed, and a rank that did not."""

    def __init__(self, nodes: Sequence[tuple[int, ...]]) -> None:
        self._nodes = nodes
        self.decided = 0
        self.complete: deque[int] = deque(maxlen=MOST_OPEN)
        self.missed = (0, NONE)

    def judge(self, known: Sequence[NodeMessage]) -> Found:
        """Return what these messages decide."""
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
        incomplete = [each for each in new if each not in complete]
        self.decided = until
        self.complete.extend(complete)
        if incomplete:
            self.missed = incomplete[-1], self._who_missed(incomplete[-1], known)
        return Found(tuple(complete), tuple(incomplete))

    def _who_missed(self, boundary_index: int, known: Sequence[NodeMessage]) -> int:
        for ranks, each in zip(self._nodes, known, strict=True):
            if each.missed[0] == boundary_index:
                return each.missed[1]
            if boundary_index not in each.sealed:
                return ranks[0]
        # All have it, with different step numbers.
        first, steps = self._nodes[0][0], [each.step_of(boundary_index) for each in known]
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
    """Boundaries that were decided: those that all ranks have, and those that only some have. ordered: the
    complete ones that answer a call of save()."""

    complete: tuple[int, ...] = ()
    incomplete: tuple[int, ...] = ()
    ordered: tuple[int, ...] = ()


class Persists:
    """The complete snapshots to persist: `asked`; `cached` are those of them that go only into the caches of
    the nodes, since the home still takes another one. An incomplete one is requested on no rank, so no keeper
    pins or writes it."""

    def __init__(self, pace: Pace, steps: int) -> None:
        self._pace, self._steps = pace, steps
        self.asked: deque[int] = deque(maxlen=MOST_OPEN)
        self.cached: deque[int] = deque(maxlen=MOST_OPEN)
        self._awaited = self._noted = 0

    def update(self, found: Found, own: NodeMessage) -> None:
        """own: of rank 0's node, whose keeper knows when a step is persisted on all ranks."""
        if self._awaited and self._awaited <= max(own.persisted, own.failed):
            self._pace.persist_ended(fulfilled=self._awaited <= own.persisted)
            self._awaited = 0
        for boundary_index in found.complete:
            # An order that fell on an incomplete boundary stays due.
            ordered = own.step_of(boundary_index) // self._steps * self._steps if self._steps else 0
            if ordered > self._noted:
                self._noted = ordered
                self._pace.persist_due(ordered)
            is_ordered = boundary_index in found.ordered
            if self._pace.persist_due(-1) or is_ordered:
                self.asked.append(boundary_index)
                home = is_ordered or self._pace.persists_home
                if home:
                    self._awaited = boundary_index
                else:
                    self.cached.append(boundary_index)
                self._pace.persist_asked(home=home)


class Scheduler:
    """The capture schedule: a boundary whose step is a multiple of `every` or of `also` is captured; 0 for
    none. A rank follows a new one as soon as it receives it, so a few boundaries are missed by others."""

    def __init__(self, every: Every, persist_every: str | int | None, overhead: float) -> None:
        self._every, self._overhead = every, overhead
        self._persist_steps = persist_every if isinstance(persist_every, int) else 0
        self._caution = 1.0
        self._published = self._followed_from = 0
        self.every = self.also = 0

    def update(self, known: Sequence[NodeMessage], timing: Timing, found: Found, number: int) -> None:
        """number: of the newest announcement."""
        # The caution is not about boundaries that ranks missed because they did not know the schedule.
        if any(each >= self._followed_from for each in found.incomplete):
            self._caution = min(self._caution * _MORE_CAUTION, _MOST_CAUTION)
        elif found.complete:
            self._caution = max(self._caution * _LESS_CAUTION, 1.0)
        is_known = timing.iteration_s is not None and all(each.slots for each in known)
        if not is_known or min(each.acknowledged for each in known) < self._published:
            return
        every, also = self._wanted(known, timing)
        pairs = ((every, self.every), (also, self.also))
        if any(new > old or new * _WORTH_IT < old for new, old in pairs):
            self.every, self.also, self._published = every, also, number + 1
            lead = timing.lead(_MARGIN * timing.round_trip_s, 2)
            self._followed_from = max(each.entered_high for each in known) + lead

    def _wanted(self, known: Sequence[NodeMessage], timing: Timing) -> tuple[int, int]:
        spacing, steps = self._spacing(known, timing), self._persist_steps
        every = self._fewest(self._every, spacing, known, timing)
        if self._every == "auto" and steps:
            # One grid: with two of them, snapshots would be too close to each other.
            return _divisor(steps, every), 0
        return every, steps * math.ceil(spacing / steps) if steps else 0

    def _fewest(self, every: Every, spacing: int, known: Sequence[NodeMessage], timing: Timing) -> int:
        """Return the number of boundaries from one snapshot to the next: the requested one, or its least
        multiple that no rank misses."""
        if every is None:
            return 0
        if isinstance(every, int):
            return every * math.ceil(spacing / every)
        cost_s, iteration_s = max(each.cost_ns for each in known) / 1e9, timing.iteration_s or 0.0
        plain_s = min((each.plain_ns for each in known if each.plain_ns), default=0) / 1e9
        if not cost_s or not plain_s:
            return max(spacing, math.ceil(_UNKNOWN_COST_PAUSE_S / max(iteration_s, _LEAST_S)), 2)
        # At least every second iteration is without a snapshot, so that the difference shows the cost.
        return max(spacing, math.ceil(cost_s / (self._overhead * plain_s)), 2)

    def _spacing(self, known: Sequence[NodeMessage], timing: Timing) -> int:
        """Return the fewest boundaries between two snapshots with which no rank misses one."""
        landing_s = max(each.landing_ns for each in known) / 1e9
        open_at_once = max(1, min(each.slots for each in known) - _SLOTS_HELD)
        open_s = _MARGIN * (timing.round_trip_s + landing_s) / open_at_once
        iteration_s = max(timing.iteration_s or 0.0, _LEAST_S)
        return max(1, math.ceil(self._caution * max(landing_s, open_s) / iteration_s))


def _divisor(steps: int, least: int) -> int:
    """Return the least divisor of `steps` that is at least `least`, or else its least such multiple."""
    if least > steps:
        return steps * math.ceil(least / steps)
    return next(each for each in range(least, steps + 1) if steps % each == 0)


class Stops:
    """The end of the loops of all ranks. newest: the newest proposal. Ranks that end at different boundaries
    hang in a collective, so a boundary ahead of all is proposed, and confirmed once all ranks have promised
    not to pass it."""

    def __init__(self) -> None:
        self.newest = Stop()
        self._voids = 0

    def update(self, known: Sequence[NodeMessage], timing: Timing) -> None:
        stop = self.newest
        if stop.state is StopState.PROPOSED:
            # A node that has ended passes no more boundaries.
            answers = [
                each.promise[1] if each.promise[0] == stop.number else Answer.NONE
                for each in known
                if not each.is_ended
            ]
            if Answer.REFUSED in answers:
                self._voids = min(self._voids + 1, _MOST_VOIDS)
                self.newest = stop._replace(state=StopState.INCOMPLETE)
            elif all(each is Answer.PROMISED for each in answers):
                self.newest = stop._replace(state=StopState.CONFIRMED)
        elif stop.state is not StopState.CONFIRMED:
            asked = min((each.stop_asked[::-1] for each in known if each.stop_asked[0]), default=None)
            if asked is not None:
                rank, reason = asked
                lead = timing.lead(_MARGIN * timing.round_trip_s * 2**self._voids, 1)
                boundary_index = max(each.entered_high for each in known) + lead
                self.newest = Stop(stop.number + 1, boundary_index, StopState.PROPOSED, rank, reason)


class Saves:
    """Answers calls of save().

    A call in an iteration on any rank requests a snapshot of all ranks: of the next boundary, which the rank
    captures by itself and which is complete if all ranks called it, or of a later one. If none is complete by
    then, `save_at` announces a boundary ahead of all ranks, which all capture.

    A call outside of an iteration is a boundary of its own, so all ranks must call it. `agreed`: the newest
    boundary at which all have; `refused`: the newest at which some have and others never will."""

    def __init__(self) -> None:
        self.agreed = self.save_at = 0
        self.refused = Refused()
        self._open: set[int] = set()
        self._answered = self._voids = 0

    def judge(self, known: Sequence[NodeMessage], timing: Timing, found: Found, decided: int) -> Found:
        """Return `found` with the boundaries that answer calls, and without those that only callers have
        captured."""
        self._judge_outside(known)
        requests = {each for message in known for each in message.requests} | {self.agreed}
        self._open |= {each for each in requests if each > self._answered}
        incomplete = tuple(each for each in found.incomplete if each not in self._open)
        ordered = []
        for boundary_index in found.complete:
            if any(each <= boundary_index for each in self._open):
                ordered.append(boundary_index)
                self._answered, self._voids = boundary_index, 0
                self._open = {each for each in self._open if each > boundary_index}
        self._open = {*sorted(self._open)[-MOST_OPEN:]}
        if self._open and max(min(self._open), self.save_at) <= decided:
            lead = timing.lead(_MARGIN * timing.round_trip_s * 2**self._voids, 1)
            self.save_at = max(each.entered_high for each in known) + lead
            self._voids = min(self._voids + 1, _MOST_VOIDS)
        return Found(found.complete, incomplete, tuple(ordered))

    def _judge_outside(self, known: Sequence[NodeMessage]) -> None:
        boundary_index, caller = max((each.outside for each in known), key=lambda pair: pair[0])
        if boundary_index <= max(self.agreed, self.refused.boundary_index):
            return
        without = [each for each in known if each.not_outside[0] < boundary_index]
        passed = [each for each in without if each.entered_high >= boundary_index]
        if not without:
            self.agreed = boundary_index
        elif passed or any(each.withdrawn == boundary_index for each in known):
            self.refused = Refused(boundary_index, caller, (passed or without)[0].not_outside[1])
