"""What the log and the ledger are told of a run: how many snapshots, how far apart, copied how, how old, and
which steps were slow. The patience of the keeper's watchdog follows from the same step times.

A run whose checkpoints have quietly stopped looks like one that is well until it dies. Owns what was told;
never decides when a snapshot is taken, and stops nothing.
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
_FIRST = 3  # snapshots before it is looked at: they measure what a snapshot costs
_WINDOW = 6
_ANOTHER = 3.0  # times as many steps, or as few

_SEALED_LIMIT_S = 600.0
_COMMITTED_LIMIT_S = 3600.0
_INTERVALS = 3.0

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

_FIRST_TIMES_S = 10.0
_LEAST_PAUSE_S = 60.0
_PAUSE_S_A_RANK = 0.02
_MOST_HOST_CHARS = 64


def limits_s(every: int | str | None, persist_every: int | str | None) -> tuple[float, float]:
    """Ages past which a warning is due, in seconds: three of the user's own intervals where he gave one as
    a duration, never for what he turned off."""
    sealed = math.inf if every is None else _SEALED_LIMIT_S
    if persist_every is None:
        return sealed, math.inf
    if isinstance(persist_every, int):
        return sealed, _COMMITTED_LIMIT_S
    return sealed, max(60.0, _INTERVALS * duration_s(persist_every, "persist_every"))


def remote_report(status: Status) -> dict[str, float]:
    """Of what the keeper of this node copies to a remote, empty where it does not."""
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
    """`limits_s`: ages in seconds of the newest (sealed, committed) snapshot past which a warning is due."""

    def __init__(
        self,
        capture: Capture,
        limits_s: tuple[float, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capture = capture
        self._told: dict[str, float] = {}
        self._plan: list[tuple[str, int, int]] = []
        self._spacing = Spacing()
        self._limits_s, self._sealed, self._committed = limits_s, _Age(clock), _Age(clock)

    def look(self, sealed: int | None, committed: int | None) -> Iterator[tuple[Event, dict[str, Any]]]:
        """Log what is new, and give the lines for the ledger: one for all snapshots and skips since the last
        call, a step may take a millisecond; and one for a plan that changed. Takes the newest steps."""
        now, before = self._capture.report(), self._told
        self._told = now
        for event, count in _COUNTED:
            if now[count] > before.get(count, 0.0):
                yield event, {"step": sealed, "count": int(now[count] - before.get(count, 0.0))}
        spacing = self._spacing.news(sealed, int(now["snapshots"]))
        if spacing is not None and self._capture.schedule.is_automatic:
            log.info("%s", spacing)
        plan = self._capture.describe()
        if plan and plan != self._plan:
            self._plan = plan
            log.info(
                "snapshots: %s", ", ".join(f"{n} leaves, {size:,} bytes by {way}" for way, n, size in plan)
            )
            yield Event.PLAN, {"ways": [list(row) for row in plan]}
        self._sealed.look(sealed, self._limits_s[0], "sealed in memory")
        self._committed.look(committed, self._limits_s[1], "committed to storage")

    def report(self) -> dict[str, float]:
        return {"sealed_age_seconds": self._sealed.seconds, "committed_age_seconds": self._committed.seconds}


class Spacing:
    """How many steps lie between two snapshots where `every="auto"` decides: said when it has settled, and
    again where it has become quite another one."""

    def __init__(self) -> None:
        self._since: tuple[int, int] | None = None
        self._said: float | None = None

    def news(self, step: int | None, snapshots: int) -> str | None:
        """A line for the log, or None. step: of the newest sealed snapshot; snapshots: taken so far."""
        if step is None or snapshots < _FIRST:
            return None
        if self._since is None or step < self._since[0]:
            self._since = step, snapshots
            return None
        steps, taken = step - self._since[0], snapshots - self._since[1]
        if taken < _WINDOW or steps < taken:
            return None
        self._since = step, snapshots
        spacing, said = steps / taken, self._said
        if said is not None and 1 / _ANOTHER < spacing / said < _ANOTHER:
            return None
        self._said = spacing
        return f"snapshots: about every {round(spacing)} steps" if spacing >= 1.5 else "snapshots: every step"


class _Age:
    """Counts from the moment a newer step was first seen here; before the first, from the attach."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: int | None = None
        self._since_s = clock()
        self._warned_s = 0.0

    @property
    def seconds(self) -> float:
        return self._clock() - self._since_s

    def look(self, step: int | None, limit_s: float, what: str) -> None:
        """Warn where it is past the limit, and then each time the age has doubled."""
        if step != self._step:
            self._step, self._since_s, self._warned_s = step, self._clock(), 0.0
        elif self.seconds >= max(limit_s, 2 * self._warned_s):
            self._warned_s = self.seconds
            log.warning(
                "%s %s, and that for %.0f minutes: a crash now would cost all work since. Training goes on. "
                "`Checkpointer.report()` says how many snapshots were skipped, the run's events why, and "
                "`wait()` raises what the keeper met.",
                "no snapshot has been" if step is None else f"step {step} is the newest that was",
                what,
                self.seconds / 60,
            )


class Slow(NamedTuple):
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
        least, ordered = _LEAST_UNKNOWN_S if kills else _LEAST_S, sorted(self._lengths)
        usual = ordered[int(_QUANTILE * len(ordered))]
        return max(least, _TIMES_USUAL * usual, _TIMES_LONGEST * ordered[-1])


class RankTimes:
    """What the steps and captures of this rank take: a line for the ledger now and then, so that a rank that
    is slower than the others can be told by comparing theirs.

    All ranks write to one ledger, which is bounded: the more they are, the more seldom each of them does.
    """

    def __init__(
        self, world: int, tell: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock = tell, clock
        self._pause_s = max(_LEAST_PAUSE_S, _PAUSE_S_A_RANK * world)
        self._due_s = clock() + _FIRST_TIMES_S
        self._lengths: deque[float] = deque(maxlen=_HISTORY)
        self._steps, self._captures, self._capture_s = 0, 0.0, 0.0

    def look(self, lengths: list[float], report: Mapping[str, float], *, last: bool = False) -> None:
        """Take up the seconds of new steps; `report` is the capture's, counted since it began."""
        self._lengths.extend(lengths)
        self._steps += len(lengths)
        if not self._steps or not (last or self._clock() >= self._due_s):
            return
        self._due_s = self._clock() + self._pause_s
        captures = report["snapshots"] - self._captures
        capture_s = report["capture_call_seconds"] - self._capture_s
        self._captures, self._capture_s = report["snapshots"], report["capture_call_seconds"]
        self._tell(
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
    """Keeps the heartbeat's patience up to date and tells of slow steps."""

    def __init__(
        self,
        heartbeat: HeartbeatWriter,
        options: Options,
        tell: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat, self._tell, self._clock = heartbeat, tell, clock
        self._kills = options.watchdog_action == "kill"
        self._times = StepTimes()
        self._auto = options.watchdog == "auto"
        self._slow: list[Slow] = []
        self._told_s = -_SLOW_PAUSE_S
        if self._auto:
            heartbeat.patience_s = self._times.patience_s(kills=self._kills)
        elif options.watchdog is not None:
            heartbeat.patience_s = duration_s(options.watchdog, "watchdog")

    def look(self, *, last: bool = False) -> list[float]:
        """To be called every second or so by one thread, which may not be the training thread; once more
        when the run is let go (`last`). Gives the seconds of the steps since the last time."""
        lengths, new = self._heartbeat.lengths, []
        while lengths:
            new.append(lengths.popleft())
        if new:
            self._slow += self._times.add(new)
            if self._auto:
                self._heartbeat.patience_s = self._times.patience_s(kills=self._kills)
        if self._slow and (last or self._clock() - self._told_s >= _SLOW_PAUSE_S):
            self._told_s = self._clock()
            self._say()
        return [seconds for _, seconds in new]

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
