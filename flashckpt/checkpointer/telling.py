"""What the ledger and the log are told of captures: what has changed since they were told last. Owns what was
told; never decides when a snapshot is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashckpt.capture import Capture
from flashckpt.events import Event, log

_COUNTED = (
    (Event.SNAPSHOT, "snapshots"),
    (Event.SKIP, "snapshots_skipped"),
    (Event.TORN, "snapshots_lost"),
)
_FIRST = 3  # snapshots before it is looked at: they measure what a snapshot costs
_WINDOW = 6
_ANOTHER = 3.0  # times as many steps, or as few


class Telling:
    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._told: dict[str, float] = {}
        self._plan: list[tuple[str, int, int]] = []
        self._spacing = Spacing()

    def news(self, step: int | None) -> Iterator[tuple[Event, dict[str, Any]]]:
        """One line for all snapshots and skips since the last call, a step may take a millisecond; and one
        for a plan that changed. `step` is that of the newest sealed snapshot."""
        now, before = self._capture.report(), self._told
        self._told = now
        for event, count in _COUNTED:
            if now[count] > before.get(count, 0.0):
                yield event, {"step": step, "count": int(now[count] - before.get(count, 0.0))}
        spacing = self._spacing.news(step, int(now["snapshots"]))
        if spacing is not None and self._capture.schedule.is_automatic:
            log.info("%s", spacing)
        plan = self._capture.describe()
        if plan and plan != self._plan:
            self._plan = plan
            log.info(
                "snapshots: %s", ", ".join(f"{n} leaves, {size:,} bytes by {way}" for way, n, size in plan)
            )
            yield Event.PLAN, {"ways": [list(row) for row in plan]}


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
