"""The trainers that a keeper watches, what each of them has said, and when the keeper goes after the last.

Owns who is alive. Alive means: holds its life lock, whether that still has its name or not. A pidfd only
wakes the loop early: it may be of another process. A closed connection says nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashckpt.commit.retention import Survivor, needed
from flashckpt.errors import FlashckptError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.run_folder import DeletionWatch, Look
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import TrainerLocks
from flashckpt.options import Keep, Remote
from flashckpt.persist.queue import Queue
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

# How long a keeper that nobody has spoken to waits for the trainer that started it.
_FIRST_TRAINER_S = 60.0
_MOST_LOOKS_WITHOUT_RUN = 3


@dataclass
class Trainer:
    """One process that trains. `attempt` is None for one that is known by its slots only; `ranks` are all of
    its attempt on this node; `common` the newest boundaries that it knows to be in every node's storage;
    `remote` where committed steps are copied to, which the keeper, once nobody trains, waits for `grace_s` at
    most while it takes nothing."""

    lock: str
    rank: int
    pid: int = 0
    world: int = 1
    ranks: tuple[int, ...] = ()
    attempt: AttemptName | None = None
    keep: Keep | None = None
    linger_s: float = 1800.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    stacks_signal: int = 0
    kill_when_stuck: bool = False
    closing: bool = False
    common: tuple[int, ...] = ()
    remote: Remote | None = None
    grace_s: float = 60.0
    pidfd: int = -1

    def __post_init__(self) -> None:
        self.ranks = self.ranks or (self.rank,)


class Roster:
    """Trainers by the names of their life locks. `seen` counts those that were ever watched."""

    def __init__(self, living: TrainerLocks) -> None:
        self._living = living
        self.seen = 0
        self._trainers: dict[str, Trainer] = {}

    def __len__(self) -> int:
        return len(self._trainers)

    def watch(self, trainer: Trainer) -> Trainer:
        """Watch a trainer from now on, or take over what it says anew. One known by its slots only never
        replaces one that has said who it is."""
        self._living.watch(trainer.lock)
        known = self._trainers.get(trainer.lock)
        if known is not None:
            if trainer.attempt is None:
                return known
            trainer.closing, trainer.pidfd, trainer.common = known.closing, known.pidfd, known.common
        if trainer.pidfd < 0 and trainer.pid > 0:
            # A pid of another namespace, or used again by now, only makes the wake late.
            with contextlib.suppress(OSError):
                trainer.pidfd = os.pidfd_open(trainer.pid)
        self.seen += known is None
        self._trainers[trainer.lock] = trainer
        return trainer

    def get(self, lock: str | None) -> Trainer | None:
        return self._trainers.get(lock) if lock is not None else None

    def all(self) -> list[Trainer]:
        return list(self._trainers.values())

    def of_rank(self, rank: int) -> list[Trainer]:
        return [trainer for trainer in self._trainers.values() if trainer.rank == rank]

    def pidfds(self) -> list[int]:
        return [trainer.pidfd for trainer in self._trainers.values() if trainer.pidfd >= 0]

    def forget(self, pidfds: Collection[int]) -> None:
        """Close the pidfds among these whose trainers live all the same: they are of other processes (a
        pid used again, or of another namespace), and would wake the loop for ever."""
        for trainer in self._trainers.values():
            if trainer.pidfd in pidfds:
                os.close(trainer.pidfd)
                trainer.pidfd = -1

    def remove_dead(self) -> list[Trainer]:
        """Take out those that are dead, and remove their locks."""
        dead = [each for each in self._trainers.values() if self._living.remove_dead(each.lock)]
        for trainer in dead:
            # Said to nobody: this keeper was stopped, or another one was being started, when it ended.
            trainer.closing = trainer.closing or self._living.has_closed(trainer.lock)
            del self._trainers[trainer.lock]
            self._living.forget(trainer.lock)
            if trainer.pidfd >= 0:
                os.close(trainer.pidfd)
                trainer.pidfd = -1
        return dead


# ---- when the keeper goes


class ExitRule:
    """After the last trainer of its node has closed; after an abnormal death when nothing is left to persist
    and `linger` has passed without a new attempt, or at once where no snapshot is in memory; and when the run
    itself is gone, after `linger` if there was something to save. A run that is gone may be a disk that is
    away: what is committed nowhere stays in memory, for `recover`. Where its folder was deleted for certain,
    nobody is waited for.

    `starter` is the process that started this one, 0 where it is not known."""

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
        self._died: AttemptName | None = None

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
        """A trainer has ended. The latest end decides how long to wait for another attempt; where a rank of
        it has died, the ranks that end in order after it were only stopped."""
        if not trainer.closing:
            self._died = trainer.attempt
        lingers = not trainer.closing or (len(trainer.ranks) > 1 and trainer.attempt == self._died)
        self._gone_until = time.monotonic() + trainer.linger_s
        self._until = self._gone_until if lingers else time.monotonic()

    def has_died(self, attempt: AttemptName) -> bool:
        """Whether one of its ranks on this node ended without having closed."""
        return attempt == self._died

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
        return self.run_is_gone or is_asked or now >= self._until or self._is_unneeded

    @property
    def _is_unneeded(self) -> bool:
        """Whether no trainer is to come and no snapshot in memory waits for another attempt: an `attach` that
        failed, or a death before the first snapshot."""
        is_expected = not self._roster.seen and (not self._starter or _lives(self._starter))
        return not is_expected and not self._regions.sealed()

    @property
    def lingers_s(self) -> float:
        """For how long it would still wait for another attempt."""
        until = self._gone_until if self.run_is_gone else self._until
        return max(0.0, until - time.monotonic())

    def kept(self, common: Mapping[AttemptName, Collection[int]]) -> set[str]:
        """Slots that stay for the next attempt, or for recover, though no process is left. `common`: of
        attempts the boundaries that all nodes have committed, where each has a folder of its own."""
        survivors = [
            Survivor(
                slot=each.slot.name,
                rank=each.slot.rank,
                attempt=each.attempt,
                step=each.step,
                boundary=each.boundary,
                is_committed=each.is_persisted,
                complete=each.slot.complete,
            )
            for each in self._regions.sealed()
        ]
        if self.discards or not survivors:
            return set()
        if self.run_is_gone:
            return _newest_uncommitted(survivors)
        try:
            return needed(self._store, survivors, common)
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


def _lives(pid: int) -> bool:
    # Not by /proc, which a container may not have: then everybody would seem dead.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
