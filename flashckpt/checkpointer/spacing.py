"""How many steps lie between two snapshots where `every="auto"` decides: said when it has settled, and again
where it has become quite another one. Owns what was said; never decides when a snapshot is taken."""

from __future__ import annotations

_FIRST = 3  # snapshots before it is looked at: they measure what a snapshot costs
_WINDOW = 6
_ANOTHER = 3.0  # times as many steps, or as few


class Spacing:
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
