"""What a run's own steps say: how long one may take before it is a hang, and which was far too slow.

Owns the history of step times, in the attendant's thread. Measures nothing and stops nothing: the pulse
measures, the keeper's watchdog acts.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from flashckpt.capture.heartbeat import Pulse
from flashckpt.events import Event, log
from flashckpt.options import Options, duration_s

_HISTORY = 1024
# A hang is many times what nearly all steps took, and a few times the longest: that may be a validation.
_TIMES_USUAL = 30.0
_TIMES_LONGEST = 3.0
_QUANTILE = 0.99
_LEAST_S = 600.0
# Until this many steps are known (they compile, they fill caches), and where a wrong judgement costs a
# process, it takes an hour at least.
_STEPS_NEEDED = 20
_LEAST_UNKNOWN_S = 3600.0

_SLOW_TIMES_MEDIAN = 10.0
# Of the longest step but one: what comes again and again, such as a validation, is told the first times.
_SLOW_TIMES_BAR = 2.0
_SLOW_LEAST_S = 1.0
_SLOW_PAUSE_S = 60.0


@dataclass(frozen=True)
class Slow:
    """A step far slower than those before it."""

    step: int
    seconds: float
    usual_s: float


class StepTimes:
    """The lengths of the newest steps, in seconds."""

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=_HISTORY)

    def add(self, steps: list[tuple[int, float]]) -> list[Slow]:
        """Take up (step, seconds) of new steps. Those that are far slower than the ones before are
        returned."""
        slow = []
        for step, seconds in steps:
            # Most are short enough to need no comparison.
            if seconds > _SLOW_LEAST_S and len(self._lengths) >= _STEPS_NEEDED:
                usual, (bar, _) = median(self._lengths), heapq.nlargest(2, self._lengths)[::-1]
                if seconds > max(_SLOW_TIMES_MEDIAN * usual, _SLOW_TIMES_BAR * bar):
                    slow.append(Slow(step, seconds, usual))
            self._lengths.append(seconds)
        return slow

    def patience_s(self, *, kills: bool) -> float:
        """How long a boundary may be missing before it is a hang. `kills`: a hang ends the process."""
        if len(self._lengths) < _STEPS_NEEDED:
            return max(_LEAST_UNKNOWN_S, _TIMES_LONGEST * max(self._lengths, default=0.0))
        least = _LEAST_UNKNOWN_S if kills else _LEAST_S
        return max(least, _TIMES_USUAL * self._high(), _TIMES_LONGEST * max(self._lengths))

    def _high(self) -> float:
        ordered = sorted(self._lengths)
        return ordered[min(int(_QUANTILE * len(ordered)), len(ordered) - 1)]


class Watch:
    """Keeps the pulse's patience up to date and tells of slow steps."""

    def __init__(
        self,
        pulse: Pulse,
        options: Options,
        tell: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pulse, self._tell, self._clock = pulse, tell, clock
        self._kills = options.watchdog_action == "kill"
        self._times = StepTimes()
        self._auto = options.watchdog == "auto"
        self._slow: list[Slow] = []
        self._told_s = -_SLOW_PAUSE_S
        if self._auto:
            pulse.patience_s = self._times.patience_s(kills=self._kills)
        elif options.watchdog is not None:
            pulse.patience_s = duration_s(options.watchdog, "watchdog")

    def look(self, *, last: bool = False) -> None:
        """To be called every second or so by one thread, which may not be the training thread; once more
        when the run is let go (`last`)."""
        lengths, new = self._pulse.lengths, []
        while lengths:
            new.append(lengths.popleft())
        if new:
            self._slow += self._times.add(new)
            if self._auto:
                self._pulse.patience_s = self._times.patience_s(kills=self._kills)
        if self._slow and (last or self._clock() - self._told_s >= _SLOW_PAUSE_S):
            self._told_s = self._clock()
            self._say()

    def _say(self) -> None:
        """One line for all slow steps since the last one: the slowest of them, and how many there were."""
        worst, count = max(self._slow, key=lambda each: each.seconds), len(self._slow)
        self._slow.clear()
        log.warning(
            "step %d took %.1f s where steps take %.3g s%s",
            worst.step, worst.seconds, worst.usual_s,
            f" ({count} such steps since the last such line)" if count > 1 else "",
        )  # fmt: skip
        self._tell(
            Event.SLOW,
            step=worst.step,
            seconds=round(worst.seconds, 3),
            usual_seconds=round(worst.usual_s, 6),
            count=count,
        )
