"""Where a run goes on from: the visible steps, newest first, at each the nearest tier first.

Owns the order of candidates and what is said of those that cannot be used. Down the ladder goes only
what is unreadable or damaged. A state that does not fit stops the resume: an older step that happens to
fit is not what the user wants, and a run whose steps cannot be used is never taken for a fresh one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from flashckpt.commit import attempts, lineage, marks, reading
from flashckpt.commit.steps import read_step
from flashckpt.errors import DamagedError, FlashckptError, OutOfRoomError, UnusableRunError
from flashckpt.events import log
from flashckpt.format.records import AttemptName
from flashckpt.restore import local_tier, memory_tier
from flashckpt.restore.memory_tier import Held
from flashckpt.restore.snapshot import Snapshot
from flashckpt.store.base import Store

SlotFor = Callable[[int, int], Held]
"""Takes bytes of metadata and of image; gives a slot of at least that size to read into."""


@dataclass(frozen=True)
class Candidate:
    """A visible step in one tier: `held` in a slot of this node, or committed in the store."""

    step: int
    attempt: AttemptName
    held: Held | None = None


@dataclass(frozen=True)
class Loaded:
    """A verified snapshot, and the slot that holds it, pinned."""

    snapshot: Snapshot
    held: Held
    seconds: float


class Ladder:
    """The candidates of one run, and the reasons why some were passed over.

    `survived` are the slots in which this node's keeper found sealed snapshots. `refused` gathers one
    sentence for each candidate that could not be used.
    """

    def __init__(
        self, store: Store, survived: list[Held], rank: int, slot_for: SlotFor, threads: int
    ) -> None:
        self._store, self._survived, self._rank = store, survived, rank
        self._slot_for, self._threads = slot_for, threads
        self.refused: list[str] = []

    def climb(self) -> Loaded | None:
        """The first candidate that is whole. None for a run that has no step at all.

        Raises UnusableRunError where there are steps and none can be used, OutOfRoomError where there is
        no memory to read one into.
        """
        candidates = self.candidates()
        for candidate in candidates:
            began = time.perf_counter()
            try:
                loaded = self._load(candidate)
            except OutOfRoomError:
                raise
            except (FlashckptError, OSError) as error:
                self._refuse(candidate, error)
                continue
            snapshot, held = loaded
            return Loaded(snapshot, held, time.perf_counter() - began)
        if candidates:
            reasons = "\n".join(f"  {reason}" for reason in self.refused)
            raise UnusableRunError(
                f"{self._store.url} has steps and none of them can be used:\n{reasons}\nNothing was loaded "
                "and nothing was changed: it is not taken for a fresh run. See what `flashckpt verify` says, "
                "put back what is missing, or start in another folder.",
                path=self._store.url,
            )
        reading.check_usable(self._store)
        return None

    def candidates(self) -> list[Candidate]:
        """Newest step first, memory before local; steps that a verification has marked come last."""
        at_rest = reading.candidates(self._store)
        marked = {each for each in at_rest if marks.is_marked(self._store, each)}
        found = [Candidate(held.step, held.attempt, held) for held in self._visible_slots()]
        found += [Candidate(each.step, each.attempt) for each in at_rest if each not in marked]
        found.sort(key=lambda each: (each.step, each.attempt.number, each.held is not None), reverse=True)
        return found + [Candidate(each.step, each.attempt) for each in at_rest if each in marked]

    def _visible_slots(self) -> list[Held]:
        """Slots follow the rule of lineage; the one that the newest start names as loaded is its own."""
        known = attempts.attempts(self._store)
        last_step = {bound.attempt: bound.last_step for bound in lineage.bounds(known)}
        return [held for held in self._survived if held.step <= last_step.get(held.attempt, -1)]

    def _load(self, candidate: Candidate) -> tuple[Snapshot, Held]:
        if candidate.held is not None:
            return memory_tier.load(candidate.held, self._threads), candidate.held
        record = read_step(self._store, candidate.step, candidate.attempt)
        return local_tier.load(record, self._rank, self._slot_for, self._threads)

    def _refuse(self, candidate: Candidate, error: Exception) -> None:
        tier = "local" if candidate.held is None else "memory"
        reason = f"step {candidate.step} of attempt {candidate.attempt} ({tier}): {error}"
        self.refused.append(reason)
        log.error("cannot resume from %s", reason)
        if candidate.held is None and isinstance(error, DamagedError):
            marks.mark(self._store, candidate.step, candidate.attempt, socket.gethostname(), str(error))
