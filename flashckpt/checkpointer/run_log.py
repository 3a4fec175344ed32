"""The log and the ledger of a run: how many snapshots, how far apart, by which ways, how old, and which steps
were slow. The limit of the keeper's watchdog follows from the same step times.

A run whose checkpoints have stopped looks healthy until it dies. Never decides when a snapshot is taken, and
stops nothing.
"""

from __future__ import annotations

import heapq
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from flashckpt.capture import Capture
from flashckpt.capture.slot_writer import HeartbeatWriter
from flashckpt.keeper.protocol import Status
from flashckpt.options import Options, duration_s
from flashckpt.persist.ledger import Event

log = logging.getLogger(__name__)

_COUNTED = (
    (Event.SNAPSHOT, "snapshots"),
    (Event.SKIP, "snapshots_skipped"),
    (Event.TORN, "snapshots_lost"),
)
_SEALED_LIMIT_S = 600.0
_COMMITTED_LIMIT_S = 3600.0
_INTERVALS = 3.0

_HISTORY = 1024
# A hang takes many times as long as nearly all steps, and a few times as long as the longest, a validation
# maybe.
_TIMES_USUAL = 30.0
_TIMES_LONGEST = 3.0
_QUANTILE = 0.99
_LEAST_S = 600.0
# The first steps compile and fill caches. Until so many are known, or if a hang ends the process, the limit
# is an hour at least.
_STEPS_NEEDED = 20
_LEAST_UNKNOWN_S = 3600.0

_SLOW_TIMES_MEDIAN = 10.0
# Times the second longest step: a recurring slow step, such as a validation, is logged only the first times.
_SLOW_TIMES_BAR = 2.0
_SLOW_LEAST_S = 1.0
_SLOW_PAUSE_S = 60.0

_FIRST_TIMES_S = 10.0
_LEAST_PAUSE_S = 60.0
_PAUSE_S_A_RANK = 0.02
_MOST_HOST_CHARS = 64


def limits_s(every: int | str | None, persist_every: int | str | None) -> tuple[float, float]:
    """Return the ages in seconds of the newest sealed and committed snapshot past which a warning is due:
    three intervals that the user gave as a duration, infinity for what is turned off."""
    sealed = math.inf if every is None else _SEALED_LIMIT_S
    if persist_every is None:
        return sealed, math.inf
    if isinstance(persist_every, int):
        return sealed, _COMMITTED_LIMIT_S
    return sealed, max(60.0, _INTERVALS * duration_s(persist_every, "persist_every"))


def cache_report(status: Status) -> dict[str, float]:
    """Report the newest step that this node's cache has of all its ranks; {} without a cache."""
    if status.cache is None:
        return {}
    return {"newest_cached_step": max((each.step for each in status.cache.cached), default=-1)}


def remote_report(status: Status) -> dict[str, float]:
    """Report what the keeper of this node copies to a remote; {} without one."""
    if status.remote is None:
        return {}
    counts = status.counts
    return {
        "newest_remote_step": status.remote.newest,
        "remote_steps": counts.get("mirrored", 0),
        "remote_steps_skipped": counts.get("mirror_skipped", 0),
        "remote_failures": counts.get("mirror_failed", 0),
        "remote_bytes": counts.get("mirrored_bytes", 0),
    }


class SnapshotLog:
    """Lines for log and ledger about the snapshots. limits_s: see the function `limits_s`."""

    def __init__(
        self,
        capture: Capture,
        limits_s: tuple[float, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capture = capture
        self._reported: dict[str, float] = {}
        self._plan: list[tuple[str, int, int]] = []
        self._limits_s, self._sealed, self._committed = limits_s, _Age(clock), _Age(clock)

    def poll(self, sealed: int | None, committed: int | None) -> Iterator[tuple[Event, dict[str, Any]]]:
        """Log what is new; yield the lines for the ledger: one for all snapshots and skips since the last
        call, since a step may take a millisecond, and one for a changed plan. Takes the newest steps."""
        now, before = self._capture.report(), self._reported
        self._reported = now
        for event, count in _COUNTED:
            if now[count] > before.get(count, 0.0):
                yield event, {"step": sealed, "count": int(now[count] - before.get(count, 0.0))}
        plan = self._capture.describe()
        if plan and plan != self._plan:
            self._plan = plan
            log.info(
                "snapshots: %s", ", ".join(f"{n} leaves, {size:,} bytes by {way}" for way, n, size in plan)
            )
            yield Event.PLAN, {"ways": [list(row) for row in plan]}
        self._sealed.check(sealed, self._limits_s[0], "sealed in memory")
        self._committed.check(committed, self._limits_s[1], "committed to storage")

    def report(self) -> dict[str, float]:
        return {"sealed_age_seconds": self._sealed.seconds, "committed_age_seconds": self._committed.seconds}


class _Age:
    """The time since a newer step was first noticed here or, before the first, since the attach."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: int | None = None
        self._since_s = clock()
        self._warned_s = 0.0

    @property
    def seconds(self) -> float:
        return self._clock() - self._since_s

    def check(self, step: int | None, limit_s: float, what: str) -> None:
        """Warn once the age is past the limit, and then each time it has doubled."""
        if step != self._step:
            self._step, self._since_s, self._warned_s = step, self._clock(), 0.0
        elif self.seconds >= max(limit_s, 2 * self._warned_s):
            self._warned_s = self.seconds
            log.warning(
                "%s %s for %.0f minutes: a crash now would lose all work since. Training continues. "
                "`Checkpointer.report()` counts the skipped snapshots, the run's events give the reasons, "
                "and `wait()` raises the keeper's error.",
                "no snapshot has been" if step is None else f"step {step} has been the newest",
                what,
                self.seconds / 60,
            )


class Slow(NamedTuple):
    """A step that was far slower than those before it."""

    step: int
    seconds: float
    usual_s: float


class StepTimes:
    """The lengths of the newest steps, in seconds."""

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=_HISTORY)

    def add(self, steps: list[tuple[int, float]]) -> list[Slow]:
        """Add (step, seconds) of new steps; return those that are far slower than the ones before."""
        slow = []
        for step, seconds in steps:
            # Most steps are too short to need a comparison.
            if seconds > _SLOW_LEAST_S and len(self._lengths) >= _STEPS_NEEDED:
                usual, (bar, _) = median(self._lengths), heapq.nlargest(2, self._lengths)[::-1]
                if seconds > max(_SLOW_TIMES_MEDIAN * usual, _SLOW_TIMES_BAR * bar):
                    slow.append(Slow(step, seconds, usual))
            self._lengths.append(seconds)
        return slow

    def timeout_s(self, *, kills: bool) -> float:
        """Return the time without a boundary that counts as a hang. kills: a hang ends the process."""
        if len(self._lengths) < _STEPS_NEEDED:
            return max(_LEAST_UNKNOWN_S, _TIMES_LONGEST * max(self._lengths, default=0.0))
        least, ordered = _LEAST_UNKNOWN_S if kills else _LEAST_S, sorted(self._lengths)
        usual = ordered[int(_QUANTILE * len(ordered))]
        return max(least, _TIMES_USUAL * usual, _TIMES_LONGEST * ordered[-1])


class TimesLog:
    """Lines for the ledger about the times of this rank's steps and captures, so that a comparison shows slow
    ranks. All ranks write to one ledger, which is bounded: the more ranks, the less often each writes."""

    def __init__(
        self, world: int, event: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._event, self._clock = event, clock
        self._pause_s = max(_LEAST_PAUSE_S, _PAUSE_S_A_RANK * world)
        self._due_s = clock() + _FIRST_TIMES_S
        self._lengths: deque[float] = deque(maxlen=_HISTORY)
        self._steps, self._captures, self._capture_s = 0, 0.0, 0.0

    def add(self, lengths: list[float], report: Mapping[str, float], *, last: bool = False) -> None:
        """Add the seconds of new steps. report: the capture's, counted since it began."""
        self._lengths.extend(lengths)
        self._steps += len(lengths)
        if not self._steps or not (last or self._clock() >= self._due_s):
            return
        self._due_s = self._clock() + self._pause_s
        captures = report["snapshots"] - self._captures
        capture_s = report["capture_call_seconds"] - self._capture_s
        self._captures, self._capture_s = report["snapshots"], report["capture_call_seconds"]
        self._event(
            Event.TIMES,
            steps=self._steps,
            step_seconds=round(median(self._lengths), 6),
            slowest_seconds=round(max(self._lengths), 6),
            captures=int(captures),
            capture_seconds=round(capture_s / captures, 6) if captures else None,
            host=socket.gethostname()[:_MOST_HOST_CHARS],
        )
        self._lengths.clear()
        self._steps = 0


class Watch:
    """Sets the heartbeat's limit from the times of steps, and logs slow steps."""

    def __init__(
        self,
        heartbeat: HeartbeatWriter,
        options: Options,
        event: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat, self._event, self._clock = heartbeat, event, clock
        self._kills = options.watchdog_action == "kill"
        self._times = StepTimes()
        self._auto = options.watchdog == "auto"
        self._slow: list[Slow] = []
        self._logged_s = -_SLOW_PAUSE_S
        if self._auto:
            heartbeat.timeout_s = self._times.timeout_s(kills=self._kills)
        elif options.watchdog is not None:
            heartbeat.timeout_s = duration_s(options.watchdog, "watchdog")

    def poll(self, *, last: bool = False) -> list[float]:
        """Return the seconds of the steps since the last call. To be called about every second by one thread,
        which may be another than the training thread, and once more when the run is released (`last`)."""
        lengths, new = self._heartbeat.lengths, []
        while lengths:
            new.append(lengths.popleft())
        if new:
            self._slow += self._times.add(new)
            if self._auto:
                self._heartbeat.timeout_s = self._times.timeout_s(kills=self._kills)
        if self._slow and (last or self._clock() - self._logged_s >= _SLOW_PAUSE_S):
            self._logged_s = self._clock()
            self._log_slow()
        return [seconds for _, seconds in new]

    def _log_slow(self) -> None:
        """Log one line for all slow steps since the last one: the slowest, and their number."""
        worst, count = max(self._slow, key=lambda each: each.seconds), len(self._slow)
        self._slow.clear()
        log.warning(
            "step %d took %.1f s where steps take %.3g s%s",
            worst.step, worst.seconds, worst.usual_s,
            f" ({count} such steps since the last such line)" if count > 1 else "",
        )  # fmt: skip
        self._event(
            Event.SLOW,
            step=worst.step,
            seconds=round(worst.seconds, 3),
            usual_seconds=round(worst.usual_s, 6),
            count=count,
        )
