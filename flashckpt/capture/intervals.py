"""How long iterations take, with and without a snapshot. Owns the marks; decides nothing.

An interval is from one boundary's entry to the next one's: it holds the capture at its start and the
iteration that may wait for it. On devices it is measured there and polled; nothing waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashckpt.capture.device.base import Device, StreamMark
from flashckpt.capture.pace import Budget

# Boundaries that may be on their way on a device at once; older ones are taken by the host's clock.
_PENDING = 64


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
    """Feeds a budget with the lengths of iterations, in their order."""

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
