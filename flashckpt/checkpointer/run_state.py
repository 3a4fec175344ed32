"""The states of a run and their order, as docs/architecture.md draws them; what a run resumed from; the calls
of each loop iterator. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run resumed from: the step, where it was read ("memory", "cache", "local" or "remote"), the
    attempt that made it, and the seconds from the call of `attach` until the live state was whole and
    verified."""

    step: int
    tier: str
    attempt: str
    seconds: float


class RunState(Enum):
    """Where the program is. An epoch's own code is any state but the iterations, while an `Epochs` is in its
    body."""

    READY = "outside of an iteration"
    STEPPING = "outside of an iteration, after a boundary that step() marked"
    ITERATION = "in an iteration, whose boundary is to come"
    MARKED = "in an iteration whose boundary step() has marked"
    CLOSED = "the run is released"


RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.READY: frozenset({RunState.STEPPING, RunState.ITERATION, RunState.CLOSED}),
    RunState.STEPPING: frozenset({RunState.ITERATION, RunState.CLOSED}),
    RunState.ITERATION: frozenset({RunState.MARKED, RunState.READY, RunState.CLOSED}),
    RunState.MARKED: frozenset({RunState.ITERATION, RunState.STEPPING, RunState.CLOSED}),
    RunState.CLOSED: frozenset(),
}


class LoopIterator(Iterator[Any]):
    """The calls of an iterator over batches that are its run's own."""

    checkpointer: Any

    @property
    def completed(self) -> int:
        return int(self.checkpointer.completed)

    def stop(self) -> None:
        """End the loop at the next boundary, which is captured and committed."""
        self.checkpointer.stop()
