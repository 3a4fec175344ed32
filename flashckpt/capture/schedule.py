"""Which boundaries are taken, which snapshots are persisted, and what snapshots may cost.

`Pace` answers for a rank alone; among several, a `Schedule` answers what rank 0 has announced to all.
`Budget` and `Pace` take no snapshot and read no device: all times are given to them, in seconds, so that
their decisions are a function of their input. `Intervals` measures those times, on devices where there are
any; nothing waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

from flashckpt.capture.devices import Device, StreamMark
from flashckpt.errors import OptionError
from flashckpt.options import duration_s

Every = int | Literal["auto"] | None

_PLAIN_KEPT = 15
_COSTS_KEPT = 7
_PLAIN_NEEDED = 3
# One plain iteration in so many even where snapshots cost nothing: else the length of an iteration
# without a snapshot would be that of an hour ago.
_LONGEST_SERIES = 64
# One odd iteration (a validation, a stalled loader) is charged as at most this many usual snapshots.
_OUTLIER = 4.0
# Fewer measurements than this may all be odd ones: the least is believed, and after so long, or after as
# long as it says a snapshot takes, one more is made whatever the credit.
_COSTS_NEEDED = 3
_MEASURE_AGAIN_S = 60.0

# Boundaries that may be on their way on a device at once; older ones are taken by the host's clock.
_PENDING = 64

# A keeper that has not answered a request by then is not waited for: it may have lost it.
_PATIENCE_S = 600.0


class Schedule(Protocol):
    """Asked and told by the training thread. `budget` is fed with what iterations and snapshots cost;
    `is_automatic`: it decides which boundaries are taken; `every_step`: each was ordered."""

    budget: Budget
    is_automatic: bool
    every_step: bool

    def due(self, step: int, ordinal: int) -> bool:
        """Whether the boundary of this step, and of this number among all of the attempt, is to be taken.
        Asked at each boundary, in their order."""

    def qualifies(self) -> None:
        """The boundary that was due can be taken, as far as the state goes."""

    def begins(self, ordinal: int) -> None:
        """A snapshot of this boundary is about to be begun."""

    def persist_due(self, step: int) -> bool:
        """Whether the snapshot of this step, if there is one, is to be persisted."""

    def captured(self, *, ordered: bool) -> None:
        """A snapshot was begun; `ordered`: whatever the schedule said."""

    def lost(self) -> None:
        """The last snapshot was not sealed, or was found torn."""

    def persist_asked(self) -> None:
        """The keeper was asked to persist a snapshot."""

    def persist_ended(self, *, fulfilled: bool) -> None:
        """It did, or could not."""


class Budget:
    """What snapshots may cost: a share of the loop's time, saved up and spent.

    An iteration's cost is its length beyond the median of those without a snapshot.
    """

    def __init__(self, overhead: float) -> None:
        self._overhead = overhead
        self._credit_s = 0.0
        self._plain_s: deque[float] = deque(maxlen=_PLAIN_KEPT)
        self._costs_s: deque[float] = deque(maxlen=_COSTS_KEPT)
        self._unmeasured = 0
        self._series = 0
        self._since_s = 0.0
        self._floor_s = 0.0

    @property
    def cost_s(self) -> float | None:
        """What one snapshot costs the loop, in seconds; None before one was measured."""
        if len(self._costs_s) < _COSTS_NEEDED:
            return min(self._costs_s, default=None)
        return median(self._costs_s)

    @property
    def plain_s(self) -> float | None:
        """The length of an iteration without a snapshot, in seconds; None before there was one."""
        return median(self._plain_s) if self._plain_s else None

    def allows(self) -> bool:
        cost = self.cost_s
        if cost is None:
            return self._unmeasured == 0
        if self._series and len(self._plain_s) < _PLAIN_NEEDED:
            return False
        if self._doubted(cost):
            return True
        return self._series < _LONGEST_SERIES and self._credit_s >= cost

    def taken(self, *, ordered: bool) -> None:
        """A snapshot was begun. One that was ordered is not charged: it was not this budget's choice."""
        self._series += 1
        self._unmeasured += 1
        self._since_s = 0.0
        if not ordered:
            self._credit_s -= self.cost_s or 0.0

    def plain(self, seconds: float) -> None:
        """An iteration without a snapshot, and without the copy of one beside it."""
        self._series = 0
        self._since_s += seconds
        self._plain_s.append(seconds)
        self._earn(seconds)

    def burdened(self, seconds: float, floor_s: float, *, ordered: bool) -> None:
        """An iteration with a snapshot that certainly cost `floor_s` (the call, where the host copies)."""
        self._unmeasured = max(0, self._unmeasured - 1)
        plain, before = self.plain_s, self.cost_s
        self._floor_s = floor_s
        cost = max(floor_s, seconds - plain) if plain is not None else floor_s
        ceiling = _OUTLIER * max(floor_s, before or 0.0)
        self._costs_s.append(min(cost, ceiling) if ceiling > 0.0 else max(cost, 0.0))
        if before is not None and not ordered:
            self._credit_s -= self._costs_s[-1] - before
        self._earn(seconds)

    def dropped(self) -> None:
        """A snapshot was begun whose iteration is no iteration: it will never be measured."""
        self._unmeasured = max(0, self._unmeasured - 1)

    def _doubted(self, cost: float) -> bool:
        """Whether what is known of the cost is to be measured once more: where the host copies, the time
        of the call bounds it well enough."""
        known = len(self._costs_s) >= _COSTS_NEEDED or self._unmeasured > 0
        return not known and cost > _OUTLIER * self._floor_s and self._since_s >= max(_MEASURE_AGAIN_S, cost)

    def trailing(self, seconds: float) -> None:
        """An iteration beside the copy of a snapshot that was begun before it: the rest of its price."""
        plain = self.plain_s
        if plain is not None:
            self._credit_s -= min(max(0.0, seconds - plain), _OUTLIER * (self.cost_s or 0.0))
        self._earn(seconds)

    def _earn(self, seconds: float) -> None:
        cost = self.cost_s or 0.0
        earned = self._overhead * seconds
        # Neither a long pause nor one outlier decides what happens minutes later.
        self._credit_s = max(-_OUTLIER * cost, min(self._credit_s + earned, 2 * cost + earned))


class Pace:
    """Whether the boundary of a step is due for a snapshot, and whether that one is persisted.

    every: "auto" (as often as the budget allows), a number of steps (an order: stays due until taken),
    None (only what is ordered). persist_every: a duration, a number of steps, None.
    """

    def __init__(
        self,
        every: Every = "auto",
        persist_every: str | int | None = None,
        *,
        overhead: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (every is None or every == "auto" or isinstance(every, int)):
            raise OptionError(
                f'every={every!r}: "auto", a number of steps, or None. Nothing was changed. Durations are '
                "for persist_every."
            )
        if not (persist_every is None or isinstance(persist_every, int | str)):
            raise OptionError(
                f'persist_every={persist_every!r}: a duration such as "5min", a number of steps, or None. '
                "Nothing was changed."
            )
        _check_number(every if every != "auto" else None, "every")
        self._every = every
        self.is_automatic, self.every_step = every == "auto", every == 1
        self._clock = clock
        self.budget = Budget(overhead)
        self._due = False
        self._persist_steps = persist_every if isinstance(persist_every, int) else None
        _check_number(self._persist_steps, "persist_every")
        self._persist_s = (
            duration_s(persist_every, "persist_every") if isinstance(persist_every, str) else None
        )
        self._persist_due = False
        self._asked = False
        self._asked_at_s = clock()

    def due(self, step: int, ordinal: int = 0) -> bool:
        """Ask once at each boundary: an order that falls on this step is noted by asking."""
        if isinstance(self._every, int) and step % self._every == 0:
            self._due = True
        persists = self.persist_due(step) and self._persist_steps is not None
        if self._every is None:
            return persists
        return self._due or persists or (self.is_automatic and self.budget.allows())

    def qualifies(self) -> None:
        pass

    def begins(self, ordinal: int) -> None:
        pass

    def persist_due(self, step: int) -> bool:
        if self._persist_steps is not None and step % self._persist_steps == 0:
            self._persist_due = True
        if self._persist_s is not None and self._clock() - self._asked_at_s >= self._persist_s:
            self._persist_due = True
        return self._persist_due and not self._awaited()

    def _awaited(self) -> bool:
        patience_s = max(_PATIENCE_S, 2 * (self._persist_s or 0.0))
        return self._asked and self._clock() - self._asked_at_s < patience_s

    def captured(self, *, ordered: bool) -> None:
        self._due = False
        self.budget.taken(ordered=ordered)

    def lost(self) -> None:
        """The last snapshot was not sealed, or was found torn: an order for it stands again."""
        self._due = isinstance(self._every, int)

    def persist_asked(self) -> None:
        """From here on nothing more is asked for until `persist_ended`, or until the keeper's answer has
        been missing for ten minutes and for twice the interval."""
        self._asked, self._persist_due = True, False
        self._asked_at_s = self._clock()

    def persist_ended(self, *, fulfilled: bool) -> None:
        """One that failed or was discarded is due again at once."""
        self._asked = False
        self._persist_due = self._persist_due or not fulfilled


def _check_number(number: object, option: str) -> None:
    if isinstance(number, int) and number < 1:
        raise OptionError(f"{option}={number}: a number of steps must be positive. Nothing was changed.")


@dataclass(slots=True)
class _Interval:
    start_s: float
    marks: tuple[StreamMark, ...]
    end_s: float = 0.0
    ends: tuple[StreamMark, ...] = ()
    captured: bool = False
    ordered: bool = False
    trailing: bool = False
    call_s: float = 0.0
    once_s: float = 0.0


class Intervals:
    """Feeds a budget with the lengths of iterations, in their order. An interval is from one boundary's entry
    to the next one's: it holds the capture at its start and the iteration that may wait for it."""

    def __init__(
        self, budget: Budget, devices: Sequence[Device], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._budget, self._devices, self._clock = budget, devices, clock
        self._open: _Interval | None = None
        self._pending: deque[_Interval] = deque()
        self._spare: list[tuple[StreamMark, ...]] = []

    def boundary(self, *, trailing: bool, marking: bool = True) -> None:
        """A boundary is entered; `trailing`: the copy of an earlier snapshot is still running.
        `marking` is False where nothing may be enqueued."""
        now = self._clock()
        marks = self._mark() if marking else ()
        if self._open is not None:
            self._open.end_s, self._open.ends = now, marks
            self._pending.append(self._open)
        self._open = _Interval(now, marks, trailing=trailing)
        if marking:  # asking for an event would break a graph that is being captured
            self._poll()

    def captured(self, call_s: float, *, ordered: bool, once_s: float = 0.0) -> None:
        """The boundary that was entered last was captured; the host itself copied for `call_s`, and was
        busy for `once_s` more with what no later capture does again."""
        if self._open is None:
            self._budget.dropped()
        else:
            self._open.captured, self._open.ordered = True, ordered
            self._open.call_s, self._open.once_s = call_s, once_s

    def pause(self) -> None:
        """What comes until the next boundary is no iteration (the host waited for storage)."""
        if self._open is not None and self._open.captured:
            self._budget.dropped()
        self._open = None

    def _mark(self) -> tuple[StreamMark, ...]:
        marks = self._spare.pop() if self._spare else tuple(d.new_mark(timing=True) for d in self._devices)
        for device, mark in zip(self._devices, marks, strict=True):
            device.mark(mark)
        return marks

    def _poll(self) -> None:
        while self._pending:
            interval = self._pending[0]
            seconds = self._seconds(interval)
            if seconds is None and len(self._pending) <= _PENDING:
                return
            self._pending.popleft()
            if interval.marks:
                self._spare.append(interval.marks)
            self._feed(interval, interval.end_s - interval.start_s if seconds is None else seconds)

    def _seconds(self, interval: _Interval) -> float | None:
        if not interval.marks or not interval.ends:
            return interval.end_s - interval.start_s
        longest = 0.0
        for device, start, end in zip(self._devices, interval.marks, interval.ends, strict=True):
            seconds = device.elapsed_s(start, end)
            if seconds is None:
                return None
            longest = max(longest, seconds)
        return longest

    def _feed(self, interval: _Interval, seconds: float) -> None:
        if interval.captured:
            usual_s = max(interval.call_s, seconds - interval.once_s)
            self._budget.burdened(usual_s, interval.call_s, ordered=interval.ordered)
        elif interval.trailing:
            self._budget.trailing(seconds)
        else:
            self._budget.plain(seconds)
