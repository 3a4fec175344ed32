"""The capture schedule: the boundaries to capture, the snapshots to persist, and the cost budget.

`Pace` decides for a single rank; with several ranks, a `Schedule` returns the decisions that rank 0
announced. `Budget` and `Pace` never take a snapshot and never read a device: they get all times as arguments,
in seconds, so that their decisions are a function of their input. `Intervals` measures these times, on
devices if there are any, without waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from flashckpt.capture.devices import Device, StreamMark
from flashckpt.errors import OptionError
from flashckpt.options import duration_s

Every = int | Literal["auto"] | None

_PLAIN_KEPT = 15
_COSTS_KEPT = 7
_PLAIN_NEEDED = 3
# The most snapshots in a row: one iteration without a snapshot keeps the measured length of such iterations
# current even if snapshots cost nothing.
_LONGEST_SERIES = 64
# An unusual iteration (a validation, a stalled loader) is charged as at most this many usual snapshots.
_OUTLIER = 4.0
# Fewer measurements may all be outliers: then the least counts. After _MEASURE_AGAIN_S, or after the measured
# cost if that is longer, one more is made without enough credit.
_COSTS_NEEDED = 3
_MEASURE_AGAIN_S = 60.0

# The most intervals that wait for a device's timing; older ones use the host's clock.
_PENDING = 64

# The time after which a request to persist counts as lost, if the keeper has not answered.
_ANSWER_TIMEOUT_S = 600.0


class Schedule:
    """The decisions about captures, used by the training thread. This class requests no persisting.

    budget: gets the costs of iterations and snapshots.
    every_step: each boundary is captured.
    """

    budget: Budget
    every_step: bool

    def due(self, step: int, boundary_index: int) -> bool:
        """Return whether to capture the boundary of this step. To be called at each boundary, in order."""
        raise NotImplementedError

    def qualifies(self) -> None:
        """Record that the state of the due boundary can be captured."""

    def begins(self, boundary_index: int) -> None:
        """Record that a snapshot of this boundary is about to begin."""

    def persist_due(self, step: int, *, ordered: bool = False) -> bool:
        """Return whether to request at its capture that the snapshot of this step is persisted. ordered: by
        `save()`."""
        return False

    @property
    def persists_home(self) -> bool:
        """Whether the next persisted snapshot goes to the home, not only into the cache."""
        return True

    def captured(self, *, ordered: bool) -> None:
        """Record that a snapshot was begun. `ordered`: independent of the schedule."""
        self.budget.taken(ordered=ordered)

    def lost(self) -> None:
        """Record that the last snapshot was not sealed, or was found torn."""

    def persist_asked(self, *, home: bool = True) -> None:
        """Record a request to the keeper to persist a snapshot: at home, or in the cache only."""

    def persist_ended(self, *, fulfilled: bool) -> None:
        """Record the end of the request for the home; `fulfilled`: the snapshot is committed there."""


class Budget:
    """The cost budget of snapshots: credit of a share of the loop's time, which snapshots spend.

    overhead: that share. The cost of an iteration is its length beyond the median of iterations without a
    snapshot.
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
        """The cost of one snapshot for the loop, in seconds; None before one was measured."""
        if len(self._costs_s) < _COSTS_NEEDED:
            return min(self._costs_s, default=None)
        return median(self._costs_s)

    @property
    def plain_s(self) -> float | None:
        """The length of an iteration without a snapshot, in seconds; None before the first one."""
        return median(self._plain_s) if self._plain_s else None

    def allows(self) -> bool:
        cost = self.cost_s
        if cost is None:
            return self._unmeasured == 0
        if self._series and len(self._plain_s) < _PLAIN_NEEDED:
            return False
        if self._needs_measurement(cost):
            return True
        return self._series < _LONGEST_SERIES and self._credit_s >= cost

    def taken(self, *, ordered: bool) -> None:
        """Charge a snapshot that was begun, unless it was ordered: then the budget did not choose it."""
        self._series += 1
        self._unmeasured += 1
        self._since_s = 0.0
        if not ordered:
            self._credit_s -= self.cost_s or 0.0

    def plain(self, seconds: float) -> None:
        """Record an iteration without a snapshot and without a running copy."""
        self._series = 0
        self._since_s += seconds
        self._plain_s.append(seconds)
        self._earn(seconds)

    def burdened(self, seconds: float, floor_s: float, *, ordered: bool) -> None:
        """Record an iteration with a snapshot that cost at least `floor_s` (the call, if the host copies)."""
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
        """Record that the cost of a begun snapshot will not be measured."""
        self._unmeasured = max(0, self._unmeasured - 1)

    def _needs_measurement(self, cost: float) -> bool:
        """Whether to measure the cost once more. If the host copies, the time of the call bounds the cost
        well enough."""
        known = len(self._costs_s) >= _COSTS_NEEDED or self._unmeasured > 0
        return not known and cost > _OUTLIER * self._floor_s and self._since_s >= max(_MEASURE_AGAIN_S, cost)

    def trailing(self, seconds: float) -> None:
        """Record an iteration during the copy of an earlier snapshot: the rest of that snapshot's cost."""
        plain = self.plain_s
        if plain is not None:
            self._credit_s -= min(max(0.0, seconds - plain), _OUTLIER * (self.cost_s or 0.0))
        self._earn(seconds)

    def _earn(self, seconds: float) -> None:
        cost = self.cost_s or 0.0
        earned = self._overhead * seconds
        # Bounded, so that a long pause or one outlier has no effect minutes later.
        self._credit_s = max(-_OUTLIER * cost, min(self._credit_s + earned, 2 * cost + earned))


class Pace(Schedule):
    """The schedule of a single rank.

    every: "auto" (as often as the budget allows), a number of steps (stays due until captured), or None (only
        ordered captures).
    persist_every: a duration, a number of steps, or None.
    has_cache: a snapshot that is due while the home is busy goes into the cache only; without a cache, it
        waits.
    """

    def __init__(
        self,
        every: Every = "auto",
        persist_every: str | int | None = None,
        *,
        overhead: float = 0.01,
        has_cache: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (every is None or every == "auto" or isinstance(every, int)):
            raise OptionError(
                f'every={every!r} is invalid. Nothing was changed. Pass "auto", a number of steps, or None; '
                "durations are for persist_every."
            )
        if not (persist_every is None or isinstance(persist_every, int | str)):
            raise OptionError(
                f"persist_every={persist_every!r} is invalid. Nothing was changed. Pass a duration such as "
                '"5min", a number of steps, or None.'
            )
        _check_number(every if every != "auto" else None, "every")
        self._every = every
        self.every_step = every == 1
        self._clock = clock
        self.budget = Budget(overhead)
        self._due = False
        self._persist_steps = persist_every if isinstance(persist_every, int) else None
        _check_number(self._persist_steps, "persist_every")
        self._persist_s = (
            duration_s(persist_every, "persist_every") if isinstance(persist_every, str) else None
        )
        self._persist_due = False
        self._has_cache = has_cache
        self._is_requested = self._is_behind = False
        self._requested_at_s = self._home_requested_at_s = clock()

    def due(self, step: int, boundary_index: int = 0) -> bool:
        """Return whether to capture, and remember that this step is due. To be called once at each
        boundary."""
        if isinstance(self._every, int) and step % self._every == 0:
            self._due = True
        persists = self.persist_due(step) and self._persist_steps is not None
        if self._every is None:
            return persists
        return self._due or persists or (self._every == "auto" and self.budget.allows())

    def persist_due(self, step: int, *, ordered: bool = False) -> bool:
        if ordered:
            return True
        if self._persist_steps is not None and step % self._persist_steps == 0:
            self._persist_due = True
        if self._persist_s is not None and self._clock() - self._requested_at_s >= self._persist_s:
            self._persist_due = True
        return self._persist_due and (self._has_cache or self.persists_home)

    @property
    def persists_home(self) -> bool:
        timeout_s = max(_ANSWER_TIMEOUT_S, 2 * (self._persist_s or 0.0))
        return not self._is_requested or self._clock() - self._home_requested_at_s >= timeout_s

    def captured(self, *, ordered: bool) -> None:
        self._due = False
        self.budget.taken(ordered=ordered)

    def lost(self) -> None:
        """Make the lost snapshot due again, if it was due by its step."""
        self._due = isinstance(self._every, int)

    def persist_asked(self, *, home: bool = True) -> None:
        """Request nothing more for the home until `persist_ended`, or until the keeper's answer is overdue by
        ten minutes and twice the interval."""
        self._persist_due, self._requested_at_s = False, self._clock()
        self._is_behind = not home
        if home:
            self._is_requested, self._home_requested_at_s = True, self._requested_at_s

    def persist_ended(self, *, fulfilled: bool) -> None:
        """Make a snapshot due again at once if the request failed, was discarded, or if only the cache has a
        newer one."""
        self._is_requested = False
        self._persist_due = self._persist_due or self._is_behind or not fulfilled


def _check_number(number: object, option: str) -> None:
    if isinstance(number, int) and number < 1:
        raise OptionError(
            f"{option}={number} is invalid: a number of steps must be positive. Nothing was changed."
        )


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
    """Passes the lengths of iterations to a budget, in order. An interval is the time from one boundary's
    entry to the next: the capture at its start, and the iteration that may wait for it."""

    def __init__(
        self, budget: Budget, devices: Sequence[Device], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._budget, self._devices, self._clock = budget, devices, clock
        self._open: _Interval | None = None
        self._pending: deque[_Interval] = deque()
        self._spare: list[tuple[StreamMark, ...]] = []

    def boundary(self, *, trailing: bool, marking: bool = True) -> None:
        """Begin an interval. `trailing`: the copy of an earlier snapshot is still running. `marking` is False
        if nothing may be enqueued on a device."""
        now = self._clock()
        marks = self._mark() if marking else ()
        if self._open is not None:
            self._open.end_s, self._open.ends = now, marks
            self._pending.append(self._open)
        self._open = _Interval(now, marks, trailing=trailing)
        if marking:  # a query of an event would invalidate a graph that is being captured
            self._poll()

    def captured(self, call_s: float, *, ordered: bool, once_s: float = 0.0) -> None:
        """Record the capture of the last boundary. call_s: the time in which the host itself copied. once_s:
        further time for work that no later capture repeats."""
        if self._open is None:
            self._budget.dropped()
        else:
            self._open.captured, self._open.ordered = True, ordered
            self._open.call_s, self._open.once_s = call_s, once_s

    def pause(self) -> None:
        """Ignore the time until the next boundary, because the host waited for storage."""
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
