"""What the capture asks at each boundary: whether it is taken, and whether it is persisted. `Pace` (pace.py)
answers for a rank alone; `Followed` answers what another rank has published for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flashckpt.capture.pace import Budget


class Schedule(Protocol):
    """Asked and told by the training thread. `budget` is fed with what iterations and snapshots cost."""

    budget: Budget

    @property
    def is_automatic(self) -> bool:
        """Whether the budget of this rank decides which boundaries are taken."""

    @property
    def every_step(self) -> bool:
        """Whether the snapshot of every step was ordered."""

    def due(self, step: int) -> bool:
        """Whether the boundary of this step is to be taken. Asked at each boundary, in their order."""

    def persist_due(self, step: int) -> bool:
        """Whether the snapshot of this step, if there is one, is to be persisted."""

    def captured(self, *, ordered: bool) -> None:
        """A snapshot was begun; `ordered`: whatever the schedule said."""

    def lost(self) -> None:
        """The last snapshot was not sealed, or was found torn."""

    def persist_asked(self) -> None:
        """The keeper was asked to persist a snapshot."""

    def persist_ended(self, *, fulfilled: bool) -> None:
        """It did, or could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """From `from_step` on every `capture_every`-th boundary is taken, that one first, and the one of
    `persist_at` is taken and persisted."""

    from_step: int
    capture_every: int
    persist_at: int | None = None

    def __post_init__(self) -> None:
        persist_at = self.from_step if self.persist_at is None else self.persist_at
        if self.from_step < 1 or self.capture_every < 1 or persist_at < self.from_step:
            raise ValueError(f"no schedule: {self}")


class Followed:
    """The terms that one rank has published for all. Each rank gives the same answer for the same step, so
    nothing here stays due: a step that this rank could not take is missed, and void for all."""

    is_automatic = every_step = False

    def __init__(self, overhead: float) -> None:
        self.budget = Budget(overhead)
        self._terms: tuple[Terms, ...] = ()
        self._step = 0

    def follow(self, terms: Terms) -> None:
        """Take up new terms, from any one thread. What is not newer than the newest is passed over: terms
        only ever move on. Steps of theirs that are over already are missed."""
        if not self._terms or terms.from_step > self._terms[-1].from_step:
            later = [each for each in self._terms if each.from_step > self._step]
            now = [each for each in self._terms if each.from_step <= self._step][-1:]
            self._terms = (*now, *later, terms)

    def due(self, step: int) -> bool:
        self._step = step
        terms = self._at(step)
        on_grid = terms is not None and (step - terms.from_step) % terms.capture_every == 0
        return on_grid or self.persist_due(step)

    def persist_due(self, step: int) -> bool:
        terms = self._at(step)
        return terms is not None and step == terms.persist_at

    def captured(self, *, ordered: bool) -> None:
        self.budget.taken(ordered=True)  # who publishes the terms keeps the budget

    def lost(self) -> None:
        pass

    def persist_asked(self) -> None:
        pass

    def persist_ended(self, *, fulfilled: bool) -> None:
        pass

    def _at(self, step: int) -> Terms | None:
        return next((each for each in reversed(self._terms) if each.from_step <= step), None)
