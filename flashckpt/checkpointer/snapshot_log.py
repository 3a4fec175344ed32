"""What the log and the ledger are told of snapshots: how many, how far apart, copied how, how old.

A run whose checkpoints have quietly stopped looks like one that is well until it dies. Owns what was told;
never decides when a snapshot is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from flashckpt.capture import Capture
from flashckpt.events import Event, log
from flashckpt.options import duration_s

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


def limits_s(every: int | str | None, persist_every: int | str | None) -> tuple[float, float]:
    """Ages past which a warning is due, in seconds: three of the user's own intervals where he gave one as
    a duration, never for what he turned off."""
    sealed = math.inf if every is None else _SEALED_LIMIT_S
    if persist_every is None:
        return sealed, math.inf
    if isinstance(persist_every, int):
        return sealed, _COMMITTED_LIMIT_S
    return sealed, max(60.0, _INTERVALS * duration_s(persist_every, "persist_every"))


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
