"""A schedule that one rank has published for all, as a `Schedule` that another follows."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.capture.schedule import Budget


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

    def __init__(self, overhead: float) -> None:
        self.is_automatic = self.every_step = False
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
