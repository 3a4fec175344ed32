"""Deletions, beside persisting: what is kept no longer, and what dead keepers left half written.

Owns when they are done, and what is known of who else may still write; which files go is commit's to say.
A deletion may take as long as it likes: nothing waits for it but the next one.
"""

from __future__ import annotations

from collections.abc import Callable

from flashckpt.commit import retention
from flashckpt.commit.lineage import VisibleStep
from flashckpt.events import Event, log
from flashckpt.format.names import AttemptName
from flashckpt.memory.held_regions import Regions
from flashckpt.options import Keep
from flashckpt.persist.ledger import Ledger
from flashckpt.persist.unused_files import half_written, remove
from flashckpt.persist.worker import Worker
from flashckpt.store.base import Store

_LOOK_S = 1.0
_MOST_SWEEPS = 3
_MOST_NAMED = 20


class Deletions:
    """One deletion at a time; of several commits meanwhile the newest decides. `in_hand` gives the steps that
    this process may still commit, `count` is told what was done and how often."""

    def __init__(
        self,
        store: Store,
        regions: Regions,
        ledger: Ledger,
        worker: Worker,
        in_hand: Callable[[], set[int]],
        count: Callable[[str, int], None],
    ) -> None:
        self._store, self._regions, self._ledger, self.worker = store, regions, ledger, worker
        self._in_hand, self._count = in_hand, count
        self._wanted: tuple[AttemptName, Keep, int | None] | None = None
        self._looked_at = 0.0
        self._seen_dead: set[str] = set()
        self._dead: set[str] = set()
        self._sweeps: dict[str, int] = {}
        self._has_failed = False

    @property
    def is_pending(self) -> bool:
        return self.worker.busy or self._wanted is not None or bool(self._seen_dead)

    def committed(self, attempt: AttemptName, keep: Keep, world: int | None) -> None:
        """A step of this attempt is committed: what `keep` lets go may go."""
        self._wanted = attempt, keep, world

    def next(self, now: float) -> None:
        """Begin the next deletion, if none is under way and there is one."""
        if self.worker.busy:
            return
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            dead = {nonce for nonce, lives in self._regions.other_keepers().items() if not lives}
            # Twice: the file of a keeper's lock is there a moment before the lock is.
            self._dead, self._seen_dead = dead & self._seen_dead, dead
        if self._dead:
            self._sweep(self._dead)
            self._dead = set()
        elif self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self._prune(*wanted)

    def _prune(self, attempt: AttemptName, keep: Keep, world: int | None) -> None:
        # With one rank, and no other keeper on the node of the only trainer, nobody else commits steps of its
        # attempt; and what it captures later is newer.
        in_hand = self._in_hand() if world == 1 and not self._regions.other_keepers() else None

        def done(gone: list[VisibleStep] | BaseException) -> None:
            if isinstance(gone, BaseException):
                say = log.debug if self._has_failed else log.warning
                say("steps that are kept no longer could not be deleted, and fill the storage: %s", gone)
                self._has_failed = True
                self._count("prune_failed", 1)
                self._ledger.add(str(attempt), Event.ERROR, what="prune", message=str(gone))
                return
            self._has_failed = False
            if gone:
                self._count("pruned", len(gone))
                self._ledger.add(str(attempt), Event.PRUNE, steps=[each.step for each in gone])

        self.worker.submit(lambda: retention.prune(self._store, attempt, keep, in_hand=in_hand), done)

    def _sweep(self, dead: set[str]) -> None:
        def done(gone: list[str] | BaseException) -> None:
            for nonce in dead:
                self._sweeps[nonce] = self._sweeps.get(nonce, 0) + 1
                if not isinstance(gone, BaseException) or self._sweeps[nonce] >= _MOST_SWEEPS:
                    # Storage that fails must not keep a keeper for ever: then it goes with its step.
                    self._regions.forget_keeper(nonce)
                    self._seen_dead.discard(nonce)
                    self._sweeps.pop(nonce)
            if isinstance(gone, BaseException):
                log.warning("what dead keepers left could not be removed: %s", gone)
            elif gone:
                log.info("removed what dead keepers left half written: %s", ", ".join(gone[:_MOST_NAMED]))
                self._ledger.add(None, Event.PRUNE, unfinished=gone[:_MOST_NAMED], count=len(gone))

        def sweep() -> list[str]:
            found = half_written(self._store, dead)
            for each in found:
                remove(self._store, each)
            return sorted(each.path for each in found)

        self.worker.submit(sweep, done)
