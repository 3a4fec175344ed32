"""The trainers that a keeper watches, and what each of them has said.

Owns who is alive. Alive means: holds its life lock, whether that still has its name or not. A pidfd only
wakes the loop early: it may be of another process. A closed connection says nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import TrainerLocks
from flashckpt.options import Keep


@dataclass
class Trainer:
    """One process that trains. `attempt` is None for one that is known by its slots only; `ranks` are all of
    its attempt on this node."""

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
            trainer.closing, trainer.pidfd = known.closing, known.pidfd
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

    def bury(self) -> list[Trainer]:
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
