"""The schedule that a rank follows: what rank 0 has announced for all, by the ordinals of boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.capture.schedule import Budget
from flashckpt.ranks.board import RankRow
from flashckpt.ranks.messages import Terms


class Followed:
    """A `Schedule`. Each rank gives the same answer for the same boundary, so nothing stays due once a
    boundary qualifies: one that this rank could not take is missed, and void for all. Nothing is persisted
    before all have it, so no answer of this class asks for that."""

    def __init__(self, row: RankRow, overhead: float, *, is_automatic: bool) -> None:
        self._row = row
        self.is_automatic, self.every_step = is_automatic, False
        self.budget = Budget(overhead)
        self._terms: tuple[Terms, ...] = ()
        self._is_due = False

    def follow(self, terms: Sequence[Terms]) -> None:
        """Take up what was announced, from any one thread: the newest two. Boundaries of theirs that are over
        already are missed."""
        newest = self._terms[-1].number if self._terms else 0
        later = tuple(each for each in terms if each.number > newest)
        if later:
            self._terms = (*self._terms, *later)[-2:]

    def due(self, step: int, ordinal: int) -> bool:
        in_force = next((each for each in reversed(self._terms) if each.starts <= ordinal), None)
        self._is_due = self._is_due or (in_force is not None and in_force.takes(ordinal))
        return self._is_due

    def qualifies(self) -> None:
        # In the middle of an accumulation no rank could take one. Here each rank takes this one, or misses
        # it.
        self._is_due = False

    def begins(self, ordinal: int) -> None:
        self._row.begin(ordinal)

    def persist_due(self, step: int) -> bool:
        return False

    def captured(self, *, ordered: bool) -> None:
        self.budget.taken(ordered=True)  # rank 0 sees to what all of them may cost

    def lost(self) -> None:
        pass

    def persist_asked(self) -> None:
        pass

    def persist_ended(self, *, fulfilled: bool) -> None:
        pass
