"""How tries to persist have ended, counted: the status that trainers ask for. Owns no slot and no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flashckpt.keeper.protocol import Failure, Status, TornSnapshot
from flashckpt.persist.job import JobState, StepJob, StepOutcome, Void
from flashckpt.persist.queue import Queue

_MOST_COMMITTED = 64
_MOST_FAILURES = 16
_MOST_TORN = 4
_MOST_TEXT = 400
_MOST_LEAVES = 22


class Outcomes:
    """Bounded memory of outcomes, newest last, each with the attempt that it belongs to: a branch may
    train on from an older step, and what another attempt committed is not what it waits for."""

    def __init__(self, keeper: str) -> None:
        self._keeper = keeper
        self._committed: list[tuple[str, int]] = []
        self._failures: dict[tuple[str, int], tuple[str, Failure]] = {}
        self._torn: list[tuple[str, TornSnapshot]] = []
        self._counts: Counter[str] = Counter()
        self.superseded_by: str | None = None

    def count(self, name: str, number: int = 1) -> None:
        self._counts[name] += number

    def told(self, job: StepJob, outcome: StepOutcome) -> None:
        """A try of a step has come to an end."""
        if outcome.state is JobState.COMMITTED:
            self._commit(job, outcome)
        elif outcome.void is Void.TORN:
            self._tear(job, outcome)
        elif outcome.state is JobState.FAILED or outcome.void is Void.SUPERSEDED:
            self._fail(job, outcome)

    def _commit(self, job: StepJob, outcome: StepOutcome) -> None:
        """A committed step settles its attempt's failures of all steps up to it."""
        self.count("committed")
        self.count("persisted_bytes", outcome.num_bytes)
        if outcome.num_bytes:
            self.count("direct" if outcome.direct else "buffered")
        row = (outcome.attempt, job.step)
        others = [each for each in self._committed if each != row]
        self._committed = [*others, row][-_MOST_COMMITTED:]
        self._failures = {
            key: (attempt, each)
            for key, (attempt, each) in self._failures.items()
            if each.step > job.step or attempt != outcome.attempt
        }

    def _fail(self, job: StepJob, outcome: StepOutcome) -> None:
        self.count("failed")
        for each in job.members():
            failure = Failure(job.step, each.generation, outcome.message[:_MOST_TEXT], outcome.errno)
            self._failures[each.slot.name, each.generation] = (outcome.attempt, failure)
        while len(self._failures) > _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]

    def _tear(self, job: StepJob, outcome: StepOutcome) -> None:
        self.count("torn")
        names = tuple(name[:_MOST_TEXT] for _, name in outcome.leaves[:_MOST_LEAVES])
        for each in job.members():
            if each.slot.name == outcome.slot:
                self._failures.pop((outcome.slot, each.generation), None)
                torn = TornSnapshot(job.step, each.generation, outcome.slot, names)
                self._torn = [*self._torn, (outcome.attempt, torn)][-_MOST_TORN:]

    def forget_failures(self, given_up: set[tuple[str, int]]) -> None:
        """All but those of these slots and generations, which nobody tries again."""
        self._failures = {key: each for key, each in self._failures.items() if key in given_up}

    def status(self, queue: Queue, attempt: str | None, committed: Iterable[int]) -> Status:
        """What concerns an attempt (None: all). `committed` are steps of it that slots say are."""

        def concerns(owner: str) -> bool:
            return attempt is None or owner in (attempt, "")

        steps = {step for owner, step in self._committed if concerns(owner)} | set(committed)
        return Status(
            keeper=self._keeper,
            committed=tuple(sorted(steps)[-_MOST_COMMITTED:]),
            newest_committed=max(steps, default=None),
            persisting=queue.writing.step if queue.writing is not None else None,
            waiting=tuple(sorted(queue.waiting())[:_MOST_COMMITTED]),
            for_others=tuple(sorted(queue.waiting(for_others=True))[:_MOST_COMMITTED]),
            failures=tuple(each for owner, each in self._failures.values() if concerns(owner)),
            torn=tuple(each for owner, each in self._torn if concerns(owner)),
            superseded_by=self.superseded_by,
            progress_bytes=queue.progress_bytes,
            counts=dict(self._counts + Counter(audited=queue.sound)),
        )
