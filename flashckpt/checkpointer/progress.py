"""How far a run has come: boundaries done, epoch, phase, and the position in the loader.

An epoch has one phase for each call of `.batches()`. Progress is saved as it stands at a boundary and
put back before anything is drawn, so a phase that had ended gives no batch, the one that was open goes
on at its batch, and later ones start afresh. Owns the sources (one a loader, kept over epochs because
persistent workers live in them); never touches the state of the model.
"""

from __future__ import annotations

from typing import Any

from flashckpt.errors import BoundaryError, DamagedError
from flashckpt.state.loader import Source, source_of


class Progress:
    """`step` counts boundaries since the run began; `epoch` and `phase` (phases that have ended in this
    epoch) count from zero."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.phase = 0
        self.manages_epochs = False  # inside .epochs() or loop(): the epoch's number is known
        self._calls = 0  # of batches() in this epoch, in this process
        self._open: Source | None = None
        self._by_phase: dict[str, Source] = {}
        self._restored: dict[str, dict[str, Any]] = {}  # by phase, not yet taken up
        self._sources: dict[int, tuple[object, Source]] = {}

    def value(self) -> dict[str, Any]:
        """What is saved at a boundary: plain Python values. Phases that have ended keep their positions:
        the workers of a persistent loader carry their random numbers into the next epoch."""
        positions = dict(self._restored)
        positions.update((phase, source.position()) for phase, source in self._by_phase.items())
        return {"step": self.step, "epoch": self.epoch, "phase": self.phase, "positions": positions}

    def restore(self, value: dict[str, Any]) -> None:
        """Take up saved progress. Raises DamagedError if it is none."""
        counts: list[Any] = [value.get(name) for name in ("step", "epoch", "phase")]
        positions = value.get("positions")
        if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(positions, dict):
            raise DamagedError(
                "The saved progress is none: its step, epoch, phase or positions cannot be read. Nothing was "
                "loaded."
            )
        self.step, self.epoch, self.phase = counts
        self._restored = dict(positions)

    @property
    def phase_is_open(self) -> bool:
        return self._open is not None

    @property
    def batches_taken(self) -> int:
        """Batches taken in the phase that is open, or that a restored position stands in."""
        if self._open is not None:
            return self._open.batches_taken
        restored = self._restored.get(str(self.phase), {})
        return int(restored.get("batches_taken", 0)) if restored.get("epoch") == self.epoch else 0

    def open_phase(self, loader: object) -> Source | None:
        """The source of the next call of `.batches()` in this epoch; None if that phase had ended."""
        if self._open is not None:
            raise BoundaryError(
                "A second .batches() was begun while the first still gives batches. Nothing was captured. "
                "Boundaries of two loops in one another cannot be told apart: put the inner loader into "
                "the outer one, or leave the inner loop to run without .batches()."
            )
        self._calls += 1
        if self._calls <= self.phase:
            return None
        phase = str(self._calls - 1)
        source = self._source(loader)
        source.begin(self.epoch, self._restored.pop(phase, None))
        self._open = self._by_phase[phase] = source
        return source

    def close_phase(self) -> None:
        """The open phase has given its last batch."""
        self._open = None
        self.phase = self._calls

    def abandon_phase(self) -> None:
        """The open phase was left in the middle: it counts as ended, as it would in a plain loop."""
        if self._open is not None:
            self.close_phase()

    def next_epoch(self) -> None:
        """The epoch has ended; its phases begin anew."""
        self.epoch += 1
        self.phase = self._calls = 0

    def close(self) -> None:
        """End the workers of all sources."""
        self._open = None
        self._by_phase.clear()
        for _, source in self._sources.values():
            source.close()
        self._sources.clear()

    def _source(self, loader: object) -> Source:
        known = self._sources.get(id(loader))
        if known is None:
            known = self._sources[id(loader)] = (loader, source_of(loader))
        return known[1]
