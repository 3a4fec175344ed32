"""The keeper's loop: control words, requests, deaths, and what is to be done next.

Owns the order of things and the only thread that changes what the keeper knows. It never writes to
storage itself: a worker does, so that requests are served while bytes flow.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from collections.abc import Collection

from flashckpt import crashpoints
from flashckpt.commit.holder import BEAT_S
from flashckpt.errors import KeeperError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.allocation import Allocation
from flashckpt.keeper.mirroring import Mirroring
from flashckpt.keeper.protocol import ELECTION_LOCK, remove_names
from flashckpt.keeper.run_folder import End, Look, RunFolder
from flashckpt.keeper.server import Outcomes, Requests, Server
from flashckpt.keeper.start import bound_log
from flashckpt.keeper.trainers import ExitRule, Roster, Trainer
from flashckpt.keeper.watchdog import Watchdog
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, TrainerLocks
from flashckpt.memory.slot import SlotState
from flashckpt.persist.deletions import Deletions
from flashckpt.persist.job import JobState, NodeRanks, StepJob, StepOutcome
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.queue import Queue
from flashckpt.persist.worker import Worker
from flashckpt.persist.writer import Writer
from flashckpt.store import open_store

log = logging.getLogger(__name__)

_TICK_MS = 20
_IDLE_TICK_MS = 100
_SWEEP_S = 0.2
_LOG_DESCRIPTOR = 2


class Keeper:
    """One keeper of one run on one node, elected or not made at all."""

    @classmethod
    def elected(cls, run_path: str, folder: RuntimeFolder, starter: int = 0) -> Keeper | None:
        """The keeper, or None where the run has one: of two started at once, one stays. `starter` is the
        process that started it."""
        election = LifeLock.acquire(folder, ELECTION_LOCK)
        return None if election is None else cls(run_path, folder, election, starter)

    def __init__(self, run_path: str, folder: RuntimeFolder, election: LifeLock, starter: int) -> None:
        self.nonce = secrets.token_hex(4)
        self.folder = folder
        self._election = election
        life = LifeLock.acquire(folder, f"keeper-{self.nonce}.lock")
        if life is None:
            raise KeeperError("Another process holds the life lock of a keeper that was just named.")
        self._life = life
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._store = store = open_store(run_path)
        self._run_folder = run_folder = RunFolder(store, os.path.basename(folder.path))
        self.ledger = Ledger(store, stands=run_folder.stands)
        living = TrainerLocks(folder)
        self.roster = Roster(living)
        self.regions = Regions(folder, life, living)
        self.outcomes = Outcomes(self.nonce)
        writer, worker = Writer(store, self.nonce, stands=run_folder.stands), Worker("writer", self._wake)
        self.queue = Queue(self.regions, writer, worker, self.ledger, told=self._told)
        self.mirroring = mirroring = Mirroring(store, self._wake, self.ledger, self.outcomes.count)
        deleter, hands = Worker("deletions", self._wake), (self.queue.in_hand, self.outcomes.count)
        spared = lambda: mirroring.spared  # noqa: E731
        self.deletions = Deletions(store, self.regions, self.ledger, deleter, *hands, spared)
        self._allocation = Allocation(
            self.regions, self.queue.is_needed, self._wake, stands=lambda: election.stands(folder)
        )
        self._round_worker = Worker("rounds", self._wake)
        self._watch_worker = Worker("watchdog", self._wake)
        self._watchdog = Watchdog(
            folder, self.regions, self.roster, self.ledger, self.queue, self._watch_worker
        )
        self.exit = ExitRule(store, self.roster, self.queue, self.regions, starter)
        held, done = (self.regions, self.roster, self.ledger), (self.queue, self.outcomes)
        requests = Requests(*held, self._allocation, *done, run_folder, self.exit, mirroring)
        self._server = Server(folder, requests.answer)
        self._ended: dict[AttemptName, End] = {}
        # Those of them that have ranks on other nodes, too.
        self._elsewhere: set[AttemptName] = set()
        # Boundaries of attempts that every node has committed.
        self._common: dict[AttemptName, tuple[int, ...]] = {}
        self._swept_at = self._round_at = 0.0
        self._ended_pidfds: set[int] = set()
        # How many trainers it had seen when it let go of its memory and stayed for the remote.
        self._emptied_after = -1

    def run(self) -> None:
        """Serve until it is time to go. Returns when the keeper has left in order, or was deposed."""
        self._adopt()
        while True:
            self._server.serve(self._ready())
            workers = self._round_worker, self._watch_worker
            for worker in (*workers, self.queue.worker, self.deletions.worker):
                worker.collect()
            self._allocation.next()
            now = time.monotonic()
            if now - self._swept_at >= _SWEEP_S:
                self._swept_at = now
                if self._election.stands(self.folder):
                    self._server.mend()
                    self._sweep()
                    if self._is_idle and self.exit.is_due(now) and not self._stays_for_remote(now):
                        self._leave()
                        return
                elif not self._is_last:
                    self._yield()
                    return
            # Before each order: what a trainer has just said (world, what to keep) holds for it already.
            self.queue.know(self.roster.all())
            self.mirroring.know(self.roster.all())
            self.queue.next()
            self.deletions.next(now)
            self.mirroring.next(now)
            if now - self._round_at >= BEAT_S and not self._round_worker.busy:
                self._round_at = now
                self.regions.remove_dead_locks()
                bound_log(self.folder, _LOG_DESCRIPTOR)
                self._round()

    @property
    def _is_idle(self) -> bool:
        """Nobody lives, nothing is under way, and no end is still to be written down: where what is in memory
        is given up, a storage that takes nothing more is waited for no longer."""
        if len(self.roster) or self.queue.worker.busy or self._allocation.busy or self.deletions.is_pending:
            return False
        return not self._ended or self.exit.run_is_gone or self.exit.discards

    def _stays_for_remote(self, now: float) -> bool:
        """Whether the last step is still on its way there. What is in memory goes all the same."""
        if self.exit.discards or self.exit.run_is_gone or not self.mirroring.holds(now):
            return False
        if self._emptied_after != self.roster.seen:
            self._emptied_after = self.roster.seen
            self._empty(self.exit.kept(self._common))
        return True

    @property
    def _is_last(self) -> bool:
        """Whether the runtime folder was swept away, nobody trains, and something is still to be persisted: a
        keeper elected in a new folder would not find it. A living trainer hands its slots to that one."""
        is_swept = not self.folder.exists() and not len(self.roster)
        return is_swept and (self.queue.worker.busy or self.queue.is_pending())

    def _ready(self) -> list[int]:
        poll = select.poll()
        self._server.register(poll)
        poll.register(self._wake, select.POLLIN)
        for pidfd in self.roster.pidfds():
            poll.register(pidfd, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(_TICK_MS if len(self.roster) else _IDLE_TICK_MS)]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        self._ended_pidfds = {pidfd for pidfd in self.roster.pidfds() if pidfd in ready}
        if self._ended_pidfds:
            self._swept_at = 0.0
        return ready

    # Who lives

    def _adopt(self) -> None:
        """Take over what an earlier keeper left: its locks go, its slots and their living owners stay."""
        adopted = self.regions.adopt_named()
        for held in adopted:
            for pid, lock in self.regions.living_owners(held):
                self.roster.watch(Trainer(lock=lock, rank=held.slot.rank, pid=pid))
        if adopted:
            names = [held.slot.name for held in adopted]
            self.ledger.add(None, Event.ADOPT, slots=names, kind="named", keeper=self.nonce)
        crashpoints.point("adopt.taken")
        self.regions.remove_dead_locks()
        self.regions.reclaim()
        crashpoints.point("adopt.reclaimed")
        for rank in {held.slot.rank for held in adopted}:
            if not self.roster.of_rank(rank):
                self.queue.rescue(rank)
        crashpoints.point("adopt.done")

    def _sweep(self) -> None:
        # Before the dead are forgotten: their last word may be what lets steps go.
        self._hear_common()
        dead = self.roster.remove_dead()
        self.roster.forget(self._ended_pidfds)
        self.regions.reclaim()
        for trainer in dead:
            self.exit.saw_end(trainer)
            self._died(trainer)
        self.queue.know(self.roster.all())
        self._watchdog.look()
        self._tidy()

    def _died(self, trainer: Trainer) -> None:
        event = Event.CLOSE if trainer.closing else Event.DEATH
        attempt = str(trainer.attempt) if trainer.attempt else None
        self.ledger.add(attempt, event, rank=trainer.rank, pid=trainer.pid)
        # Also of one that closed: a signal may have come between its last look at what is saved and its end.
        self.queue.rescue(trainer.rank)
        crashpoints.point("rescue.asked")
        if trainer.attempt and not any(each.attempt == trainer.attempt for each in self.roster.all()):
            self._ended[trainer.attempt] = "dead" if self.exit.has_died(trainer.attempt) else "closed"
            if len(trainer.ranks) < trainer.world:
                self._elsewhere.add(trainer.attempt)
            self._round_at = 0.0

    def _told(self, job: StepJob, outcome: StepOutcome) -> None:
        """A try to persist a step has ended."""
        self.outcomes.told(job, outcome)
        attempt = AttemptName.parse(outcome.attempt)
        if outcome.state is not JobState.COMMITTED or attempt is None:
            return
        if outcome.is_of_all:
            self._settle(attempt, {each.slot.name for each in job.members()})
        self.mirroring.committed(job.step, attempt)
        known = self.queue.known(attempt)
        if known is not None and known.keep is not None:
            # After the commit was told, and beside the next one: nobody waits for deletions.
            self._delete(attempt, known)

    def _settle(self, attempt: AttemptName, slots: Collection[str] = ()) -> None:
        """All nodes have committed a step of this attempt: what those before it left and it did not start
        from (that is in `slots`) is of no use."""
        for each in self.regions.sealed():
            is_left = each.attempt.number < attempt.number and each.slot.name not in slots
            if is_left and each.word.state is SlotState.SEALED:
                each.slot.free(each.word)

    def _delete(self, attempt: AttemptName, known: NodeRanks) -> None:
        """What is kept no longer of an attempt may go."""
        assert known.keep is not None
        if self.mirroring.leaves_deletions:
            return
        is_here = known.world == len(known.ranks)
        self.deletions.committed(attempt, known.keep, is_here=is_here, common=self._common.get(attempt, ()))

    def _hear_common(self) -> None:
        """What all nodes have committed, where it is news: of older steps some may go now."""
        for each in self.roster.all():
            attempt = each.attempt
            if attempt is None or max(each.common, default=0) <= max(
                self._common.get(attempt, ()), default=0
            ):
                continue
            self._common[attempt] = each.common  # beside a newer attempt an older one may still live
            self._settle(attempt)
            known = self.queue.known(attempt)
            if known is not None and known.keep is not None:
                self._delete(attempt, known)

    def _tidy(self) -> None:
        """Remove retired slots that hold nothing which is still to be persisted or the newest, and the empty
        ones of ranks that this node has no more."""
        for held in [each for each in self.regions.slots() if each.retired]:
            self.regions.remove_spent(held, self.queue.is_needed)
        trainers = self.roster.all()
        if ranks := {rank for each in trainers if each.attempt for rank in each.ranks}:
            ranks |= {each.rank for each in trainers}
            for held in [each for each in self.regions.slots() if each.slot.rank not in ranks]:
                if held.state() is SlotState.FREE:
                    self.regions.remove(held)
        self.regions.drop_constants()

    # What the run's folder is told

    def _round(self) -> None:
        living = sorted({each.attempt for each in self.roster.all() if each.attempt})
        for attempt in living:
            self._ended.pop(attempt, None)
        # "dead" needs no watching: whoever reads it may start, so what was to be saved is saved first.
        saved = [pair for pair in self._ended.items() if not self.queue.is_pending(pair[0])]

        def done(look: Look | BaseException) -> None:
            if isinstance(look, BaseException):
                log.error("a look at the run failed", exc_info=look)
                return
            self.exit.saw(look)
            for attempt in look.marked:
                self._ended.pop(attempt, None)
                self._elsewhere.discard(attempt)
            self.outcomes.superseded_by = _newer(look.claimed, living)
            if look.problem:
                self.outcomes.count("rounds_failed")

        elsewhere = frozenset(self._elsewhere)
        self._round_worker.submit(lambda: self._run_folder.round(living, saved, elsewhere), done)

    def _leave(self) -> None:
        """Regions go, but those that hold what is committed nowhere; then the names, the lock last: a
        keeper that is started meanwhile finds it held, or finds everything gone. A look at storage may
        hang, and another keeper be elected meanwhile: then all of it is that one's."""
        kept = self.exit.kept(self._common)
        crashpoints.point("leave.begun")
        if not self._empty(kept):
            self._yield()
            return
        crashpoints.point("leave.emptied")
        self.mirroring.leave()
        self.ledger.add(None, Event.CLOSE, keeper=self.nonce, kept=sorted(kept))
        self.ledger.close()
        self._server.close()
        remove_names(self.folder)
        # Also of trainers that died before they had said who they are: nobody else comes after us.
        self.regions.remove_dead_locks()
        crashpoints.point("leave.closed")
        self._life.release(self.folder)
        self._election.release(self.folder)
        self.folder.discard()

    def _empty(self, kept: Collection[str]) -> bool:
        """Let all regions go but those that are kept. False where another keeper was elected meanwhile."""
        for held in self.regions.slots():
            if not self._election.stands(self.folder):
                return False
            if held.slot.name not in kept:
                self.regions.remove(held)
        self.regions.drop_constants()
        return self._election.stands(self.folder)

    def _yield(self) -> None:
        # The life lock's file stays: by it the other keeper learns whose half-written files may go.
        log.warning("another keeper was elected, or the runtime folder removed: this one ends")


def _newer(claimed: AttemptName | None, living: list[AttemptName]) -> str | None:
    """The attempt that has claimed the run over the heads of those that live."""
    if claimed is None or not living or claimed.number <= living[-1].number:
        return None
    return str(claimed)
