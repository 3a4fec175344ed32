"""When the keeper goes, and what stays behind. Owns the rule; the loop does the going.

It goes after the last trainer of its node has closed; after an abnormal death when nothing is left to
persist and `linger` has passed without a new attempt; and when the run itself is gone, after `linger`
if something was still to be saved, however its trainer ended. A run that is gone may be a disk that is
away: what is committed nowhere stays in memory, for `recover`. Where the run's folder was deleted for
certain nothing can be saved any more, and nobody is waited for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flashckpt.errors import FlashckptError
from flashckpt.events import log
from flashckpt.format.names import AttemptName
from flashckpt.keeper.deletion import Deletion
from flashckpt.keeper.protocol import LOG_NAME, SOCKET_NAME
from flashckpt.keeper.trainers import Trainer
from flashckpt.memory.region import is_region_name
from flashckpt.persist.needed import Survivor, needed
from flashckpt.store.base import Store

if TYPE_CHECKING:
    from flashckpt.keeper.daemon import Keeper

# How long a keeper that nobody has spoken to waits for the trainer that started it.
_FIRST_TRAINER_S = 60.0


class Departure:
    def __init__(self, keeper: Keeper, store: Store) -> None:
        self._keeper = keeper
        self._store = store
        self._until = self._gone_until = time.monotonic() + _FIRST_TRAINER_S
        # How many trainers it had seen when it was asked to go: who asked knew of no later one.
        self._asked_after = self._discarded_after = -1
        self._deletion = Deletion(store.url)

    def ask(self) -> None:
        """Go once everything is saved, without lingering; unless another trainer comes."""
        self._asked_after = self._keeper.roster.seen

    def discard(self) -> None:
        """The same, and whoever asks gives up what cannot be saved. To be asked where no trainer lives."""
        self.ask()
        self._discarded_after = self._asked_after

    @property
    def asked(self) -> bool:
        return self._asked_after == self._keeper.roster.seen

    @property
    def discards(self) -> bool:
        return self._discarded_after == self._keeper.roster.seen

    def saw_end(self, trainer: Trainer) -> None:
        """A trainer has ended. The latest end decides how long to wait for another attempt."""
        linger_s = 0.0 if trainer.closing else trainer.linger_s
        self._until = time.monotonic() + linger_s
        self._gone_until = time.monotonic() + trainer.linger_s

    def saw_run(self) -> None:
        """The run stands. Where its folder was deleted before, a copy was put in its place: of that one
        nothing is certain, and the next time that it is not there it may be a disk that is away."""
        if self._deletion.has_come():
            found = Deletion(self._store.url)
            # Deleted since it was seen to stand: what was heard holds.
            self._deletion = found if found.is_watched else self._deletion

    def is_due(self, now: float) -> bool:
        keeper = self._keeper
        if not keeper.is_idle:
            return False
        if self.discards or self.is_deleted:
            return True
        if keeper.run_is_gone:
            # A disk that is away looks like a run that was deleted: what is saved nowhere waits for it.
            return now >= self._gone_until or not keeper.queue.is_pending()
        return (now >= self._until or self.asked) and not keeper.queue.is_pending()

    @property
    def is_deleted(self) -> bool:
        """Whether the run's folder is gone, and was deleted for certain."""
        return self._keeper.run_is_gone and self._deletion.has_come()

    @property
    def lingers_s(self) -> float:
        """For how long it would still wait for another attempt."""
        until = self._gone_until if self._keeper.run_is_gone else self._until
        return max(0.0, until - time.monotonic())

    def kept(self) -> set[str]:
        """Slots that stay for the next attempt, or for recover, though no process is left."""
        if self.discards:
            return set()
        if self._keeper.run_is_gone:
            return self._newest_uncommitted()
        survivors = []
        for held in self._keeper.regions.slots():
            sealed = held.sealed()
            if sealed is not None:
                survivors.append(
                    Survivor(
                        slot=held.slot.name,
                        rank=held.slot.rank,
                        attempt=sealed.attempt,
                        step=sealed.step,
                        is_committed=held.slot.persisted == sealed.generation,
                    )
                )
        try:
            return needed(self._store, survivors) if survivors else set()
        except (OSError, FlashckptError) as error:
            log.warning("the run cannot be read (%s): slots stay as they are", error)
            return {each.slot for each in survivors if not each.is_committed}

    def _newest_uncommitted(self) -> set[str]:
        """By the slots alone: of each rank and attempt what is newer than all that is committed."""
        newest: dict[tuple[int, AttemptName], tuple[int, bool, str]] = {}
        for held in self._keeper.regions.slots():
            sealed = held.sealed()
            if sealed is not None:
                key = (held.slot.rank, sealed.attempt)
                row = (sealed.step, held.slot.persisted == sealed.generation, held.slot.name)
                newest[key] = max(row, newest.get(key, row))
        return {name for _, is_committed, name in newest.values() if not is_committed}

    def remove_names(self) -> None:
        """The socket, and the log where no region needs it for an explanation."""
        folder = self._keeper.folder
        folder.remove(SOCKET_NAME)
        if not any(is_region_name(name) for name in folder.names()):
            folder.remove(LOG_NAME)
