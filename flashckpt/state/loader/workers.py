"""What travels between a loader and its worker processes: each worker's random numbers, with its batches.

Owns the wrappers around the collate and the init function (picklable, for every start method) and the
states that came back. Never changes a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashckpt.state import rng


class Reported(NamedTuple):
    """A batch and its worker's generators after it; None for one that did not move since the last batch.

    A named tuple, because torch's pin_memory goes through it element by element and leaves bytes alone.
    """

    batch: Any
    python: Any
    numpy: Any
    torch: Any


class Reporting:
    """The user's collate function, and after it a report of the generators. One copy in each worker."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: rng.State = {}

    def __call__(self, samples: Any) -> Reported:
        batch = self._collate(samples)
        state, last = rng.capture_cpu(), self._last
        moved = {name: value if last.get(name) != value else None for name, value in state.items()}
        self._last = state
        return Reported(batch, **moved)


class Restoring:
    """The user's worker_init_fn, and after it the generators of this worker put back."""

    def __init__(self, init: Callable[[int], None] | None, states: list[rng.State | None]) -> None:
        self._init = init
        self._states = states

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        state = self._states[worker]
        if state is not None:
            rng.restore(state)


class Rounds:
    """The workers' states as of the last whole round (`whole`) and as of the newest batch of each.

    None stands for a worker that has loaded nothing since it was seeded.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.newest: list[rng.State | None] = [None] * workers
        self.whole: list[rng.State | None] = [None] * workers

    def set(self, states: list[rng.State | None]) -> None:
        self.newest, self.whole = list(states), list(states)

    def forget(self) -> None:
        """The workers are new."""
        self.set([None] * self._workers)

    def begin_epoch(self) -> None:
        self.whole = list(self.newest)

    def take(self, index: int, reported: Reported) -> Any:
        """The batch out of a report. `index` counts the epoch's batches; worker `index % workers` loaded it,
        since torch hands indices out in turns."""
        worker = index % self._workers
        moved = {name: value for name, value in reported._asdict().items() if name != "batch"}
        before = self.newest[worker] or {}
        self.newest[worker] = {name: before.get(name) if new is None else new for name, new in moved.items()}
        if worker == self._workers - 1:
            self.whole = list(self.newest)
        return reported.batch
