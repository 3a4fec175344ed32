"""When the keeper goes, and what stays behind. Owns the rule; the loop does the going.

It goes after the last trainer of its node has closed; after an abnormal death when nothing is left to
persist and `linger` has passed without a new attempt; and when the run itself is gone, after `linger`
if something was still to be saved, however its trainer ended. A run that is gone may be a disk that is
away: what is committed nowhere stays in memory, for `recover`. Where the run's folder was deleted for
certain nothing can be saved any more, and nobody is waited for.
"""

from __future__ import annotations

import os
import time

from flashckpt.errors import FlashckptError
from flashckpt.events import log
from flashckpt.format.names import AttemptName
from flashckpt.keeper.run_folder import DeletionWatch, Look
from flashckpt.keeper.trainers import Roster, Trainer
from flashckpt.memory.held_regions import Regions
from flashckpt.persist.needed_snapshots import Survivor, needed
from flashckpt.persist.queue import Queue
from flashckpt.store.base import Store

# How long a keeper that nobody has spoken to waits for the trainer that started it.
_FIRST_TRAINER_S = 60.0
_MOST_LOOKS_WITHOUT_RUN = 3


class ExitRule:
    """`starter` is the process that started this one, 0 where it is not known."""

    def __init__(
        self, store: Store, roster: Roster, queue: Queue, regions: Regions, starter: int = 0
    ) -> None:
        self._store, self._roster, self._queue, self._regions = store, roster, queue, regions
        self._starter = starter
        self._until = self._gone_until = time.monotonic() + _FIRST_TRAINER_S
        # How many trainers it had seen when it was asked to go: who asked knew of no later one.
        self._asked_after = self._discarded_after = -1
        self._watch = DeletionWatch(store.url)
        self._looks_without_run = 0

    def ask(self) -> None:
        """Go once everything is saved, without lingering; unless another trainer comes."""
        self._asked_after = self._roster.seen

    def discard(self) -> None:
        """The same, and whoever asks gives up what cannot be saved. To be asked where no trainer lives."""
        self.ask()
        self._discarded_after = self._asked_after

    @property
    def discards(self) -> bool:
        return self._discarded_after == self._roster.seen

    @property
    def run_is_gone(self) -> bool:
        """Whether the run's folder was not there for a while: nothing can be written to it."""
        return self._looks_without_run >= _MOST_LOOKS_WITHOUT_RUN

    def saw_end(self, trainer: Trainer) -> None:
        """A trainer has ended. The latest end decides how long to wait for another attempt."""
        self._gone_until = time.monotonic() + trainer.linger_s
        self._until = time.monotonic() if trainer.closing else self._gone_until

    def saw(self, look: Look) -> None:
        """Whether the run stands. Where its folder was deleted before, a copy was put in its place: of that
        one nothing is certain, and the next time that it is not there it may be a disk that is away."""
        self._looks_without_run = 0 if look.is_there else self._looks_without_run + 1
        if look.is_there and not look.problem and self._watch.has_come():
            found = DeletionWatch(self._store.url)
            # Deleted since it was seen to stand: what was heard holds.
            self._watch = found if found.is_watched else self._watch

    def is_due(self, now: float) -> bool:
        """To be asked where nobody lives and nothing is under way."""
        if self.discards or self.run_is_gone and self._watch.has_come():
            return True
        if self._queue.is_pending():
            # A disk that is away looks like a run that was deleted: what is saved nowhere waits for it.
            return self.run_is_gone and now >= self._gone_until
        is_asked = self._asked_after == self._roster.seen
        return self.run_is_gone or is_asked or now >= self._until or self._is_for_nobody

    @property
    def _is_for_nobody(self) -> bool:
        """Whether who started it has ended and never came: an `attach` that failed. What is in memory here is
        waited with for another attempt all the same."""
        came = self._roster.seen or len(self._regions)
        return bool(self._starter) and not came and not os.path.exists(f"/proc/{self._starter}")

    @property
    def lingers_s(self) -> float:
        """For how long it would still wait for another attempt."""
        until = self._gone_until if self.run_is_gone else self._until
        return max(0.0, until - time.monotonic())

    def kept(self) -> set[str]:
        """Slots that stay for the next attempt, or for recover, though no process is left."""
        survivors = [
            Survivor(
                slot=each.slot.name,
                rank=each.slot.rank,
                attempt=each.attempt,
                step=each.step,
                boundary=each.boundary,
                is_committed=each.is_persisted,
            )
            for each in self._regions.sealed()
        ]
        if self.discards or not survivors:
            return set()
        if self.run_is_gone:
            return _newest_uncommitted(survivors)
        try:
            return needed(self._store, survivors)
        except (OSError, FlashckptError) as error:
            log.warning("the run cannot be read (%s): slots stay as they are", error)
            return {each.slot for each in survivors if not each.is_committed}


def _newest_uncommitted(survivors: list[Survivor]) -> set[str]:
    """By the slots alone: of each rank and attempt what is newer than all that is committed."""
    newest: dict[tuple[int, AttemptName], tuple[int, bool, str]] = {}
    for each in survivors:
        key, row = (each.rank, each.attempt), (each.step, each.is_committed, each.slot)
        newest[key] = max(row, newest.get(key, row))
    return {name for _, is_committed, name in newest.values() if not is_committed}
