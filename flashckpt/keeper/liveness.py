"""What lives and how long the keeper stays: the trainers of this node, the run's folder, and the rule of
exit.

Owns the registry of trainers, the counters and ends of attempts in the run's folder, and the decision to
leave.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flashckpt import crashpoints
from flashckpt.commit import attempts
from flashckpt.commit.needed import needed_slots
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, FlashckptError, FormatError, RunError, UnusableRunError
from flashckpt.format.catalogue import EMPTY, Catalogue
from flashckpt.format.names import AttemptName, alive_path
from flashckpt.memory.held_regions import HeldRegion, Regions
from flashckpt.memory.region import NAMED
from flashckpt.memory.runtime import TrainerLocks, identity_of
from flashckpt.memory.slot import must_stay
from flashckpt.persist.job import Trainer
from flashckpt.persist.queue import Queue
from flashckpt.store import open_store
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

_STANDS_S = 5.0  # on storage where it costs a request to ask

End = Literal["closed", "dead"]


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """The result of a round: the newest attempt of the run, and the attempts whose end is written now."""

    is_there: bool
    newest: AttemptName | None = None
    marked: tuple[AttemptName, ...] = ()
    problem: str = ""


class RunFolder:
    """The run's folder beside its steps: whether it exists, and the counters and ends of attempts that the
    keeper writes there. A missing folder may be a disk that is away: then the keeper waits. Reads storage,
    which may hang: a worker calls it, except `found_at`.

    identity: the name of the run on this node, that of the runtime folder."""

    def __init__(self, store: Store, identity: str) -> None:
        self._store, self._identity = store, identity
        self._run_id: str | None = None
        self._known: Catalogue = EMPTY
        self._reported_path: str | None = None
        self._stood_until = 0.0
        self._counts: dict[AttemptName, int] = {}
        self._saved_bytes = -1  # in the round before
        # The counters of attempts that have ended here, as they were first read, and when.
        self._still: dict[AttemptName, tuple[int, float]] = {}

    @property
    def url(self) -> str:
        return self._store.url

    def found_at(self, path: str) -> None:
        """Note the path under which a trainer has found the run."""
        self._reported_path = path

    def stands(self) -> bool:
        """Whether the run exists in the store; follows a run that was moved. OSError if that is unknown."""
        return self._stands(self._store)

    def _stands(self, store: Store) -> bool:
        if not self._store.is_folder and time.monotonic() < self._stood_until:
            return True  # each check costs a request
        if self._is_ours(store):
            self._stood_until = time.monotonic() + _STANDS_S
            return True
        path = self._reported_path
        if path is None or path == self._store.url or not self._store.is_folder:
            return False
        if not self._is_ours(open_store(path)):
            return False
        log.warning("the run was moved from %s to %s: it is followed there", self._store.url, path)
        self._store.move_to(path)
        return True

    def _is_ours(self, store: Store) -> bool:
        """Whether the store has a run with this run's id, such as a copy in its place."""
        try:
            found = self._newest(store).run_id
        except UnusableRunError:
            return False
        except (DamagedError, FormatError):
            # An unreadable id may be this run's, and the snapshots in memory are worth a doubt.
            return True
        if not found:
            return False
        if self._run_id is None and identity_of(found, store.place()) == self._identity:
            self._run_id = found
        return found == self._run_id

    def _newest(self, store: Store) -> View:
        """The newest version of the catalogue, also of a copy in its place."""
        try:
            view = View.of(store, self._known)
        except NotADirectoryError:
            return View(EMPTY, store)
        except RunError:
            view = View.of(store)
        self._known = view.catalogue
        return view

    def round(
        self,
        living: Sequence[AttemptName],
        ended: Sequence[tuple[AttemptName, End]],
        elsewhere: Collection[AttemptName] = (),
        saving: Collection[AttemptName] = (),
        saved_bytes: int = 0,
    ) -> RoundResult:
        """Advance the counters of living attempts, and of those that this keeper is `saving`, as long as
        `saved_bytes` grows. Write the end of the others: of those `elsewhere`, which have ranks on other
        nodes, once their counters stand still. A counter that another keeper advances leaves the end to that
        keeper, and counts as written here. Does not retry."""
        store = self._store.brief()
        marked: list[AttemptName] = []
        newest, problem = None, ""
        try:
            if not self._stands(store):
                return RoundResult(is_there=False)
            for attempt in living:
                with self._unless_swept(attempt):
                    attempts.beat(store, attempt, self._next_count(attempt))
            for attempt in saving if saved_bytes != self._saved_bytes else ():
                with self._unless_swept(attempt):
                    attempts.beat(store, attempt, self._next_count(attempt), saves=True)
            self._saved_bytes = saved_bytes
            for attempt, how in ended:
                moves = self._moves(attempt, how) if attempt in elsewhere else False
                if moves is None:
                    continue
                crashpoints.point("end.marking")
                with self._unless_swept(attempt):
                    if not moves:
                        attempts.mark_ended(store, attempt, how)
                marked.append(attempt)
            newest = self._newest(store).attempt
        except (OSError, FlashckptError) as error:
            problem = str(error)
        return RoundResult(is_there=True, newest=newest, marked=tuple(marked), problem=problem)

    @contextlib.contextmanager
    def _unless_swept(self, attempt: AttemptName) -> Iterator[None]:
        """Suppress the error for an attempt whose counter a newer attempt has removed."""
        try:
            yield
        except FileNotFoundError:
            if self._store.exists(alive_path(attempt)):
                raise

    def _moves(self, attempt: AttemptName, how: End) -> bool | None:
        """Whether the keeper of another node advances a counter, or has recorded the end; None while that is
        not known yet."""
        # The time before the read: a count may be as old as the read took.
        now = time.monotonic()
        found = attempts.alive(self._store.brief(), attempt)
        if found is not None and found.ended:
            return True
        count = -1 if found is None else found.count
        before, since_s = self._still.setdefault(attempt, (count, time.monotonic()))
        if count != before:
            return True
        is_saving = found is not None and found.phase == "saving"
        watch_s = attempts.STILL_S if how == "closed" and not is_saving else attempts.WATCH_S
        return False if now - since_s >= watch_s + self._store.delay_s else None

    def _next_count(self, attempt: AttemptName) -> int:
        """The count after that of an earlier keeper: it must neither stand still nor go back."""
        if attempt not in self._counts:
            before = attempts.alive(self._store.brief(), attempt)
            self._counts[attempt] = before.count if before is not None else 0
        self._counts[attempt] += 1
        return self._counts[attempt]


_FIRST_TRAINER_TIMEOUT_S = 60.0
_MAX_ROUNDS_WITHOUT_RUN = 3


class TrainerRegistry:
    """The trainers of a run on this node, by the names of their life locks. A trainer is alive while it holds
    its lock, whether that still has its name or not; a closed connection means nothing. `seen` counts all
    that were ever watched."""

    def __init__(self, living: TrainerLocks) -> None:
        self._living = living
        self.seen = 0
        self._trainers: dict[str, Trainer] = {}

    def __len__(self) -> int:
        return len(self._trainers)

    def watch(self, trainer: Trainer) -> Trainer:
        """Watch a trainer, or update a watched one. Slots never replace what a hello has said."""
        self._living.watch(trainer.lock)
        known = self._trainers.get(trainer.lock)
        if known is not None and trainer.attempt is None:
            return known
        self.seen += known is None
        self._trainers[trainer.lock] = trainer
        return trainer

    def watch_owners(self, regions: Regions, adopted: Iterable[HeldRegion]) -> None:
        """Watch the living trainers in the owner tables of these slots, which may not have said hello yet."""
        for held in adopted:
            for pid, lock in regions.living_owners(held):
                self.watch(Trainer(lock=lock, rank=held.slot.rank, pid=pid))

    def get(self, lock: str | None) -> Trainer | None:
        return self._trainers.get(lock) if lock is not None else None

    def all(self) -> list[Trainer]:
        return list(self._trainers.values())

    def newest(self) -> Trainer | None:
        """The trainer of the lowest rank of the newest attempt here."""
        named = [each for each in self._trainers.values() if each.attempt is not None]
        return max(named, key=lambda each: (each.attempt or AttemptName(0, ""), -each.rank), default=None)

    def of_rank(self, rank: int) -> list[Trainer]:
        return [trainer for trainer in self._trainers.values() if trainer.rank == rank]

    def remove_dead(self) -> list[Trainer]:
        """Remove the dead trainers and their locks, and return them."""
        dead = [each for each in self._trainers.values() if self._living.remove_dead(each.lock)]
        for trainer in dead:
            # Its message may have found no keeper: this one was stopped, or just starting.
            trainer.closing = trainer.closing or self._living.has_closed(trainer.lock)
            del self._trainers[trainer.lock]
            self._living.forget(trainer.lock)
        return dead


# ---- when the keeper leaves


class ExitRule:
    """When the keeper leaves: after the last trainer of its node has closed; after a death once all is
    persisted and `linger` has passed without a new attempt, or at once without a snapshot in memory; and when
    the run is gone, after `linger` if there was something to save. A run that is gone may be on a disk that
    is away: uncommitted snapshots stay in memory, for `recover`.
    Once a run has ended and storage fails for its `grace`, the keeper leaves if what is not committed
    outlives it.

    starter: the process that started this one, 0 if it is not known."""

    def __init__(
        self, store: Store, registry: TrainerRegistry, queue: Queue, regions: Regions, starter: int = 0
    ) -> None:
        self._store, self._registry, self._queue, self._regions = store, registry, queue, regions
        self._starter = starter
        self._until = self._gone_until = time.monotonic() + _FIRST_TRAINER_TIMEOUT_S
        # The number of trainers seen when it was asked to leave: not valid after another one.
        self._asked_after = self._discarded_after = -1
        self._rounds_without_run = 0
        self._died: AttemptName | None = None
        self._grace_s = 0.0
        self._progressed = 0.0, 0  # when bytes were last seen to be written after the end, and how many
        self._round_failed = False
        self.was_closed = False  # the last attempt ended in order
        self.has_ended = False  # so did it, or its end found that storage fails

    def ask(self) -> None:
        """Leave once everything is saved, without lingering; unless another trainer comes."""
        self._asked_after = self._registry.seen

    def discard(self) -> None:
        """The same, and give up snapshots that cannot be saved. Only while no trainer lives."""
        self.ask()
        self._discarded_after = self._asked_after

    @property
    def discards(self) -> bool:
        return self._discarded_after == self._registry.seen

    @property
    def run_is_gone(self) -> bool:
        """Whether the run's folder has been missing for a while."""
        return self._rounds_without_run >= _MAX_ROUNDS_WITHOUT_RUN

    def trainer_ended(self, trainer: Trainer) -> None:
        """Note the end of a trainer. The latest end decides how long to wait for another attempt; ranks that
        end in order after the death of another were only stopped."""
        if not trainer.closing:
            self._died = trainer.attempt
        lingers = not trainer.closing or (len(trainer.ranks) > 1 and trainer.attempt == self._died)
        self._gone_until = time.monotonic() + trainer.linger_s
        self._until = self._gone_until if lingers else time.monotonic()
        self.was_closed, self.has_ended = not lingers, trainer.unsaved or not lingers
        self._grace_s, self._progressed = trainer.grace_s, (time.monotonic(), self._queue.progress_bytes)

    def has_died(self, attempt: AttemptName) -> bool:
        """Whether one of its ranks on this node ended without having closed."""
        return attempt == self._died

    def round_ended(self, found: RoundResult) -> None:
        """Note whether the run exists."""
        self._round_failed = bool(found.problem)
        self._rounds_without_run = 0 if found.is_there else self._rounds_without_run + 1

    def is_in_vain(self, now: float) -> bool:
        """Whether the run has ended, storage has taken nothing for the grace, also in a try in progress, and
        every snapshot that is not committed is in files, which the next start or `recover` finds."""
        if not self.has_ended or self.run_is_gone or self.discards:
            return False
        if (progress := self._queue.progress_bytes) != self._progressed[1]:
            self._progressed = now, progress
        if now < self._progressed[0] + self._grace_s:
            return False
        if not (self._queue.is_pending() or self._round_failed):
            return False
        held = self._regions.everything()
        unsaved = [e for e in held if (found := e.sealed()) is not None and not found.is_persisted]
        constants = [each for each in held if each.slot.header.holds_constants] if unsaved else []
        return all(each.kind == NAMED for each in (*unsaved, *constants))

    def is_due(self, now: float) -> bool:
        """Whether to leave now, given that no trainer lives and no operation is running."""
        if self.discards:
            return True
        if self._queue.is_pending():
            # A disk that is away looks like a deleted run: unsaved snapshots wait for it.
            return self.run_is_gone and now >= self._gone_until
        is_asked = self._asked_after == self._registry.seen
        return self.run_is_gone or is_asked or now >= self._until or self._is_unneeded

    @property
    def _is_unneeded(self) -> bool:
        """Whether no trainer is expected and no snapshot in memory waits for one: after a failed `attach`, or
        a death before the first snapshot."""
        is_expected = not self._registry.seen and (not self._starter or _lives(self._starter))
        return not is_expected and not self._regions.sealed()

    @property
    def lingers_s(self) -> float:
        """The remaining time for another attempt to come."""
        until = self._gone_until if self.run_is_gone else self._until
        return max(0.0, until - time.monotonic())

    def kept(self) -> set[str]:
        """The slots that stay for the next attempt, or for `recover`, without any process."""
        sealed = self._regions.sealed()
        if self.discards or not sealed:
            return set()
        if self.run_is_gone:
            needed = [each for each in sealed if must_stay(each, self._regions.sealed(each.slot.rank))]
            return {each.slot.name for each in needed if not each.is_persisted}
        try:
            committed = {each.slot.name for each in sealed if each.is_persisted}
            return needed_slots(self._store, sealed, committed)
        except (OSError, FlashckptError) as error:
            log.warning("the run cannot be read (%s): slots stay as they are", error)
            return {each.slot.name for each in sealed if not each.is_persisted}


def _lives(pid: int) -> bool:
    # Not by /proc, which a container may not have.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
