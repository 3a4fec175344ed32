"""The Checkpointer and its iterators switched off: a loop as it is without this library.

Counts iterations and ends where it is told to; restores nothing, saves nothing, starts nothing and hears no
signal. Imports neither torch nor what captures.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

log = logging.getLogger(__name__)


class DisabledCheckpointer:
    """What `attach(…, enabled=False)` gives, with the names of Checkpointer. `completed` counts iterations of
    this process, `resumed` is always None."""

    resumed = None
    completed = 0
    stopping = False
    stop_reason: str | None = None
    _epoch = 0
    _in_iteration = _marked = False

    def __init__(self, path: str | os.PathLike[str], *, by_environment: bool) -> None:
        why = "FLASHCKPT=off" if by_environment else "enabled=False"
        # A warning: a job that was to be saved and is not must not find that out at its first crash.
        log.warning("%s: nothing is restored from %s, and nothing is saved", why, os.fspath(path))

    def batches(self, loader: Iterable[Any]) -> DisabledBatches:
        return DisabledBatches(self, loader, 1, None)

    def enumerate(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        return enumerate(self.batches(loader))

    def epochs(self, epochs: int) -> Iterator[int]:
        for self._epoch in range(epochs):
            before = self.completed
            yield self._epoch
            self.completed += self.completed == before  # as an epoch without batches counts when attached
            if self.stopping:
                return

    def step(self) -> None:
        if not self._marked:
            self._marked = self._in_iteration
            self.completed += 1

    def save(self) -> None:
        """Nothing is saved."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def stop(self) -> None:
        self.stopping, self.stop_reason = True, "stop"

    def close(self) -> None:
        """There is nothing to let go of."""

    def report(self) -> dict[str, float]:
        return {}

    def __enter__(self) -> DisabledCheckpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _whole_run(self, loader: Iterable[Any], epochs: int | None, steps: int | None) -> DisabledBatches:
        return DisabledBatches(self, loader, epochs, steps)

    def _end_of_iteration(self) -> None:
        self.completed += self._in_iteration and not self._marked
        self._in_iteration = self._marked = False


class DisabledBatches(Iterator[Any]):
    """Batches of a loader, or of a whole run (`epochs`, `steps`), as a bare loop gives them. What is not an
    attribute of it is looked for in the loader."""

    def __init__(
        self, checkpointer: DisabledCheckpointer, loader: Any, epochs: int | None, steps: int | None
    ) -> None:
        self.checkpointer, self._loader = checkpointer, loader
        self._epochs, self._steps = epochs, steps
        self._taken = self._passes = 0  # batches of this pass, passes before it
        self._iterator: Iterator[Any] | None = None
        self._ended = False

    @property
    def completed(self) -> int:
        return self.checkpointer.completed

    def stop(self) -> None:
        self.checkpointer.stop()

    def __len__(self) -> int:
        """Batches still to come. TypeError where the loader does not know its length."""
        if self._ended:
            return 0
        left = None if self._steps is None else max(0, self._steps - self.completed)
        if self._epochs is not None:
            length = len(self._loader)
            by_epochs = max(0, (self._epochs - self._passes) * length - self._taken)
            left = by_epochs if left is None else min(left, by_epochs)
        return left or 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __next__(self) -> Any:
        self.checkpointer._end_of_iteration()
        is_done = self._steps is not None and self.completed >= self._steps
        self._ended = self._ended or self.checkpointer.stopping or is_done
        while not self._ended and (self._epochs is None or self._passes < self._epochs):
            if self._iterator is None:
                self._tell_epoch()
                self._iterator = iter(self._loader)
            for batch in self._iterator:
                self._taken += 1
                self.checkpointer._in_iteration = True
                return batch
            if not self._taken:
                break  # an empty loader that is repeated until `steps` would never end
            self._iterator, self._taken, self._passes = None, 0, self._passes + 1
        self._ended, self._iterator = True, None
        raise StopIteration

    def _tell_epoch(self) -> None:
        """Samplers that shuffle by epoch are told which one it is, as they are when attached."""
        epoch = self.checkpointer._epoch + self._passes
        sampler = getattr(self._loader, "batch_sampler", None) or getattr(self._loader, "sampler", None)
        inner = getattr(sampler, "sampler", None)
        if epoch and any(hasattr(each, "set_epoch") for each in (sampler, inner)):
            from flashckpt.state.loader.base import set_epoch

            set_epoch(self._loader, epoch)

    def __del__(self) -> None:
        # Left by `break` or an exception: nobody knows whether the body was done.
        if not getattr(self, "_ended", True):
            self.checkpointer._in_iteration = self.checkpointer._marked = False
