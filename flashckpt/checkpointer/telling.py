"""What the ledger is told of captures: what has changed since it was told last. Owns what was told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashckpt.capture import Capture
from flashckpt.checkpointer.spacing import Spacing
from flashckpt.events import Event, log

_COUNTED = (
    (Event.SNAPSHOT, "snapshots"),
    (Event.SKIP, "snapshots_skipped"),
    (Event.TORN, "snapshots_lost"),
)


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
