"""How far a run has come: boundaries done, epoch, phase, and the position in the loader.

An epoch has one phase for each call of `.batches()`. Progress is saved as it stands at a boundary and
put back before anything is drawn, so a phase that had ended gives no batch, the one that was open goes
on at its batch, and later ones start afresh. Owns the count of phases; never touches the state of the model.
"""

from __future__ import annotations

from typing import Any

from flashckpt.errors import BoundaryError, DamagedError
from flashckpt.state.loader import ReplayLog, Source, Sources


class Progress:
    """`step` counts iterations since the run began; `epoch` and `phase` (phases that have ended in this
    epoch) count from zero. `manages_epochs`: epochs are told from one another here (`.epochs()`, a whole
    run); otherwise `epoch` stays 0, and samplers are not told one. `iterated`: an iteration was counted in
    this epoch. `is_cut`: a stop kept a phase of this epoch from beginning, so that the epoch is not over."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.phase = 0
        self.manages_epochs = self.iterated = self.is_cut = False
        self._calls = 0  # of batches() in this epoch, in this process
        self._open: Source | None = None
        self._resumes_in_phase = False  # and not between two
        self._sources = Sources(ReplayLog())

    def value(self) -> dict[str, Any]:
        """What is saved at a boundary: plain Python values. Phases that have ended keep their positions:
        the workers of a persistent loader carry their random numbers into the next epoch."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "phase": self.phase,
            "open": self._open is not None or self._resumes_in_phase,
            "iterated": self.iterated,
            "sources": self._sources.value(),
        }

    def restore(self, value: dict[str, Any]) -> None:
        """Take up saved progress. Raises DamagedError if it is none, and then has changed nothing."""
        counts: list[Any] = [value.get(name) for name in ("step", "epoch", "phase")]
        try:
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError("step, epoch and phase are no counts")
            if type(value.get("open")) is not bool or type(value.get("iterated")) is not bool:
                raise ValueError("it does not say whether a phase was open, or begun")
            self._sources.restore(value.get("sources"))
        except ValueError as error:
            raise DamagedError(
                f"The saved progress is none ({error}). No loader was touched. Resume from an older step."
            ) from error
        self.step, self.epoch, self.phase = counts
        self._resumes_in_phase, self.iterated = value["open"], value["iterated"]

    def count(self) -> None:
        """An iteration is done."""
        self.step += 1
        self.iterated = True

    @property
    def phase_is_open(self) -> bool:
        return self._open is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing of this epoch is left to be given: no phase was stopped, or kept from beginning."""
        return self._open is None and not self.is_cut

    @property
    def is_after_batches(self) -> bool:
        """Whether batches of this epoch were taken and no phase gives any: the epoch's own code runs."""
        return self.manages_epochs and self.iterated and self._open is None

    @property
    def batches_taken(self) -> int:
        """Batches taken in the phase that is open, or that a restored position stands in."""
        if self._open is not None:
            return self._open.batches_taken
        return int(self._sources.saved_position(self.phase)["batches_taken"]) if self._stands_in_phase else 0

    def open_phase(self, loader: object) -> Source | None:
        """The source of the next call of `.batches()` in this epoch; None if that phase had ended."""
        if self._open is not None:
            raise BoundaryError(
                "A second .batches() was begun while the first still gives batches. Nothing was captured. "
                "Boundaries of two loops in one another cannot be told apart: put the inner loader into "
                "the outer one, or leave the inner loop to run without .batches()."
            )
        phase, self._calls = self._calls, self._calls + 1
        if phase < self.phase:
            self._sources.skip(loader, phase)
            return None
        source = self._sources.open(
            loader, self.epoch, phase, in_place=self._stands_in_phase, tell_epoch=self.manages_epochs
        )
        self._open, self._resumes_in_phase = source, False
        if not self.manages_epochs:
            self._sources.retire(self.epoch, phase)
        return source

    def close_phase(self) -> None:
        """The open phase has given its last batch."""
        if self._open is not None:
            self._sources.ended(self._calls - 1)
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
        self._resumes_in_phase = self.iterated = self.is_cut = False
        self._sources.retire(self.epoch)

    def close(self) -> None:
        """End the workers of all sources."""
        self._open = None
        self._sources.close()

    @property
    def _stands_in_phase(self) -> bool:
        """Whether the next phase is one that was open when the run was saved."""
        if not self._resumes_in_phase:
            return False
        saved = self._sources.saved_position(self.phase)
        return type(saved.get("batches_taken")) is int and saved.get("epoch") == self.epoch
