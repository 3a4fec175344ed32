"""How old the newest sealed and the newest committed snapshot are, and when that is worth a warning.

A run whose checkpoints have quietly stopped looks like one that is well until it dies. Ages count from
the moment a newer step was first seen here; before the first, from the attach.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from flashckpt.options import duration_s

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


class _Age:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: int | None = None
        self._since_s = clock()
        self._warned_s = 0.0

    @property
    def seconds(self) -> float:
        return self._clock() - self._since_s

    def look(self, step: int | None, limit_s: float) -> bool:
        """Whether to warn: past the limit, and then each time the age has doubled."""
        if step != self._step:
            self._step, self._since_s, self._warned_s = step, self._clock(), 0.0
            return False
        if self.seconds < max(limit_s, 2 * self._warned_s):
            return False
        self._warned_s = self.seconds
        return True


class Ages:
    """`limit_s`: (sealed, committed) ages in seconds past which a warning is due; infinity for none."""

    def __init__(self, limit_s: tuple[float, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._sealed, self._committed = _Age(clock), _Age(clock)
        self._sealed_limit_s, self._committed_limit_s = limit_s

    def look(self, sealed_step: int | None, committed_step: int | None) -> Iterator[str]:
        """Note the newest steps; gives the warnings that are due."""
        if self._sealed.look(sealed_step, self._sealed_limit_s):
            yield _warning("sealed in memory", sealed_step, self._sealed.seconds)
        if self._committed.look(committed_step, self._committed_limit_s):
            yield _warning("committed to storage", committed_step, self._committed.seconds)

    def report(self) -> dict[str, float]:
        return {"sealed_age_seconds": self._sealed.seconds, "committed_age_seconds": self._committed.seconds}


def _warning(what: str, step: int | None, seconds: float) -> str:
    newest = "no snapshot has been" if step is None else f"step {step} is the newest that was"
    return (
        f"{newest} {what}, and that for {seconds / 60:.0f} minutes: a crash now would cost all work since. "
        "Training goes on. `Checkpointer.report()` says how many snapshots were skipped, the run's events "
        "why, and `wait()` raises what the keeper met."
    )
