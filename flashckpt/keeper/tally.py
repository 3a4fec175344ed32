"""What the keeper has done, counted: the status that trainers ask for. Owns no slot and no file."""

from __future__ import annotations

from collections import Counter

from flashckpt.keeper.drain import Outcome
from flashckpt.keeper.protocol import Failure, Status, Torn

_MOST_COMMITTED = 64
_MOST_FAILURES = 16
_MOST_TEXT = 400
_MOST_LEAVES = 22


class Tally:
    """Bounded memory of outcomes, newest last."""

    def __init__(self, keeper: str) -> None:
        self._keeper = keeper
        self._committed: list[int] = []
        self._failures: dict[tuple[str, int], Failure] = {}
        self._torn: list[Torn] = []
        self._counts: Counter[str] = Counter()
        self.persisting: int | None = None
        self.superseded_by: str | None = None

    def count(self, name: str, number: int = 1) -> None:
        self._counts[name] += number

    def commit(self, outcome: Outcome) -> None:
        """A committed step settles the failures of all steps up to it."""
        self.count("committed")
        self.count("persisted_bytes", outcome.num_bytes)
        if outcome.step in self._committed:
            self._committed.remove(outcome.step)
        self._committed = [*self._committed, outcome.step][-_MOST_COMMITTED:]
        kept = {key: each for key, each in self._failures.items() if each.step > outcome.step}
        self._failures = kept

    def fail(self, outcome: Outcome) -> bool:
        """Note a failure. Returns whether it is the first of this snapshot: said once, counted always."""
        self.count("failed")
        key = (outcome.slot, outcome.generation)
        first = key not in self._failures
        self._failures[key] = Failure(
            outcome.step, outcome.generation, outcome.message[:_MOST_TEXT], outcome.errno
        )
        while len(self._failures) > _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]
        return first

    def tear(self, outcome: Outcome) -> None:
        self.count("torn")
        self._failures.pop((outcome.slot, outcome.generation), None)
        names = tuple(name[:_MOST_TEXT] for _, name in outcome.leaves[:_MOST_LEAVES])
        torn = Torn(outcome.step, outcome.generation, outcome.slot, names)
        self._torn = [*self._torn, torn][-_MOST_FAILURES // 4 :]

    def forget_failure(self, slot: str, generation: int) -> None:
        self._failures.pop((slot, generation), None)

    def status(self, waiting: list[int]) -> Status:
        return Status(
            keeper=self._keeper,
            committed=tuple(self._committed),
            newest_committed=max(self._committed, default=None),
            persisting=self.persisting,
            waiting=tuple(sorted(waiting)[:_MOST_COMMITTED]),
            failures=tuple(self._failures.values()),
            torn=tuple(self._torn),
            superseded_by=self.superseded_by,
            counts=dict(self._counts),
        )
