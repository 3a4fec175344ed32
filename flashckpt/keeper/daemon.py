"""The keeper's loop: requests, deaths of trainers, and the next operation of each worker.

Owns the order of these, and the only thread that changes the keeper's state. Workers access storage, so that
requests are served meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import time
from collections.abc import Collection

from flashckpt import crashpoints
from flashckpt.commit.attempts import BEAT_S
from flashckpt.format.names import AttemptName
from flashckpt.keeper.allocation import Allocation
from flashckpt.keeper.liveness import End, ExitRule, RoundResult, RunFolder, TrainerRegistry
from flashckpt.keeper.mirror_upload import MirrorUpload
from flashckpt.keeper.protocol import ELECTION_LOCK, remove_names
from flashckpt.keeper.server import Outcomes, Requests, Server
from flashckpt.keeper.start import bound_log
from flashckpt.keeper.watchdog import Watchdog
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, TrainerLocks
from flashckpt.memory.slot import SlotState
from flashckpt.persist.committer import Committer, KnownRun
from flashckpt.persist.deletions import Deletions
from flashckpt.persist.job import JobState, StepJob, StepOutcome, Trainer
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.queue import Queue
from flashckpt.persist.slot_cache import SlotCache
from flashckpt.persist.writer import Writer
from flashckpt.store import open_store
from flashckpt.threads import Worker

log = logging.getLogger(__name__)

_TICK_MS = 20
_IDLE_TICK_MS = 100
_SWEEP_S = 0.2
_LOG_DESCRIPTOR = 2
_REPLACED = "another keeper was elected, or the runtime folder removed: this one ends"


class Keeper:
    """The keeper of a run on a node."""

    @classmethod
    def elected(cls, run_path: str, folder: RuntimeFolder, starter: int = 0) -> Keeper | None:
        """The keeper, or None if the run has one: of two that start together, one stays."""
        election = LifeLock.acquire(folder, ELECTION_LOCK)
        return None if election is None else cls(run_path, folder, election, starter)

    def __init__(self, run_path: str, folder: RuntimeFolder, election: LifeLock, starter: int) -> None:
        self.nonce = secrets.token_hex(4)
        self.folder = folder
        self._election = election
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._store = store = open_store(run_path)
        self._run_folder = run_folder = RunFolder(store, os.path.basename(folder.path))
        self.ledger = Ledger(store, stands=run_folder.stands)
        living = TrainerLocks(folder)
        self.registry = TrainerRegistry(living)
        self.regions = Regions(folder, self.nonce, living)
        self.outcomes = Outcomes(self.nonce)
        self.cache = SlotCache(
            store, os.path.basename(folder.path), self.regions, self.ledger, self._wake, self.outcomes.count
        )
        self.mirroring = mirroring = MirrorUpload(store, self._wake, self.ledger, self.outcomes.count)
        run, deleter = KnownRun(store, run_folder.stands), Worker("deletions", self._wake)
        writer = Writer(run, self.nonce)
        committer = Committer(run, pinned=lambda: mirroring.copying)
        self.queue = Queue(
            self.regions,
            writer,
            committer,
            self._wake,
            self.ledger,
            notify=self._step_ended,
            cache=self.cache,
        )
        self.deletions = Deletions(
            store, self.ledger, deleter, self.outcomes.count, lambda: mirroring.copying
        )
        self._allocation = Allocation(
            self.regions, self.queue.is_needed, self._wake, stands=lambda: election.stands(folder)
        )
        self._round_worker = Worker("rounds", self._wake)
        self._watch_worker = Worker("watchdog", self._wake)
        self._watchdog = Watchdog(
            folder, self.regions, self.registry, self.ledger, self.queue, self._watch_worker
        )
        self.exit = ExitRule(store, self.registry, self.queue, self.regions, starter)
        held, done = (self.regions, self.registry, self.ledger), (self.queue, self.outcomes)
        requests = Requests(*held, self._allocation, *done, run_folder, self.exit, mirroring, self.cache)
        self._server = Server(folder, requests.answer)
        self._newest: AttemptName | None = None
        self._ended: dict[AttemptName, End] = {}
        self._elsewhere: set[AttemptName] = set()  # those of them with ranks on other nodes
        self._swept_at = self._round_at = 0.0
        self._emptied_after = -1  # the trainers seen when it released its memory and stayed for the remote

    def run(self) -> None:
        """Serve until the keeper has left in order, or was replaced."""
        self._adopt()
        while True:
            self._server.serve(self._ready())
            for each in (self._round_worker, self._watch_worker, self.queue, self.deletions.worker):
                each.collect()
            self._allocation.next()
            now = time.monotonic()
            if now - self._swept_at >= _SWEEP_S:
                self._swept_at = now
                if self._election.stands(self.folder):
                    self._server.restore_name()
                    self._sweep()
                    in_vain = self.exit.is_in_vain(now)  # once: bytes that are written meanwhile change it
                    is_idle = self._is_idle(in_vain) and (in_vain or self.exit.is_due(now))
                    if is_idle and not self._stays_for_remote(now):
                        self._leave(in_vain)
                        return
                elif not self._is_last:
                    log.warning(_REPLACED)
                    return
            # Before the next order: a new hello is valid for it already.
            self.queue.set_trainers(self.registry.all())
            self.mirroring.set_newest(self.registry.newest())
            self.queue.next()
            self.deletions.next()
            self.mirroring.next(now)
            if now - self._round_at >= BEAT_S and not self._round_worker.busy:
                self._round_at = now
                self.regions.remove_dead_locks()
                bound_log(self.folder, _LOG_DESCRIPTOR)
                self._round()

    def _is_idle(self, in_vain: bool) -> bool:
        """Whether no trainer lives, no operation is running, and the ends of attempts are written. Does not
        wait for storage if it fails in vain, or if the snapshots in memory are given up."""
        if len(self.registry) or self._allocation.busy or self.cache.is_busy:
            return False
        if in_vain:
            return True
        if self.queue.is_busy or self.deletions.is_pending:
            return False
        return not self._ended or self.exit.run_is_gone or self.exit.discards

    def _stays_for_remote(self, now: float) -> bool:
        """Whether the keeper stays until the last step is in the remote. It empties its memory meanwhile."""
        if self.exit.discards or self.exit.run_is_gone or not self.mirroring.holds(now):
            return False
        if self._emptied_after != self.registry.seen:
            self._emptied_after = self.registry.seen
            self._empty(self.exit.kept())
        return True

    @property
    def _is_last(self) -> bool:
        """Whether the runtime folder was removed, no trainer lives, and a snapshot is still to be persisted:
        a keeper elected in a new folder would not find it. (A living trainer would hand its slots over.)"""
        is_swept = not self.folder.exists() and not len(self.registry)
        return is_swept and (self.queue.is_busy or self.queue.is_pending())

    def _ready(self) -> list[int]:
        poll = select.poll()
        self._server.register(poll)
        poll.register(self._wake, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(_TICK_MS if len(self.registry) else _IDLE_TICK_MS)]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready

    # ---- trainers

    def _adopt(self) -> None:
        """Adopt the slots of an earlier keeper and their living owners, and remove its locks."""
        adopted = self.regions.adopt_named()
        self.registry.watch_owners(self.regions, adopted)
        if adopted:
            names = [held.slot.name for held in adopted]
            self.ledger.add(None, Event.ADOPT, slots=names, kind="named", keeper=self.nonce)
        crashpoints.point("adopt.taken")
        self.regions.remove_dead_locks()
        self.regions.reclaim()
        crashpoints.point("adopt.reclaimed")
        for rank in {held.slot.rank for held in adopted}:
            if not self.registry.of_rank(rank):
                self.queue.rescue(rank)
        crashpoints.point("adopt.done")

    def _sweep(self) -> None:
        dead = self.registry.remove_dead()
        self.regions.reclaim()
        for trainer in dead:
            self.exit.trainer_ended(trainer)
            self._died(trainer)
        self.queue.set_trainers(self.registry.all())
        self._watchdog.check()
        self._tidy()

    def _died(self, trainer: Trainer) -> None:
        event = Event.CLOSE if trainer.closing else Event.DEATH
        attempt = str(trainer.attempt) if trainer.attempt else None
        self.ledger.add(attempt, event, rank=trainer.rank, pid=trainer.pid)
        # Also of a trainer that closed: a signal may have come after its last request.
        self.queue.rescue(trainer.rank)
        crashpoints.point("rescue.asked")
        if trainer.attempt and not any(each.attempt == trainer.attempt for each in self.registry.all()):
            self._ended[trainer.attempt] = "dead" if self.exit.has_died(trainer.attempt) else "closed"
            if len(trainer.ranks) < trainer.world:
                self._elsewhere.add(trainer.attempt)
            self._round_at = 0.0

    def _step_ended(self, job: StepJob, outcome: StepOutcome) -> None:
        """Act on the outcome of a try to persist a step."""
        self.outcomes.record(job, outcome)
        if outcome.state.is_void:
            self.deletions.left_garbage()
        if outcome.errno in (errno.ENOSPC, errno.EDQUOT):
            self.deletions.make_room()
        if outcome.state is not JobState.COMMITTED:
            return
        self._settle(job.attempt, {each.slot.name for each in job.members()})
        self.mirroring.committed(job.name)
        known = self.queue.known(job.attempt)
        # Only the keeper of rank 0's node deletes: it knows which step is being copied to the mirror.
        if known is not None and known.keep is not None and 0 in known.ranks and outcome.view is not None:
            self.deletions.committed(job.name, known.keep, outcome.view, outcome.dropped)

    def _settle(self, attempt: AttemptName, slots: Collection[str]) -> None:
        """After a commit of an attempt, free the slots of earlier attempts except `slots`."""
        for each in self.regions.sealed():
            is_old = each.attempt.number < attempt.number and each.slot.name not in slots
            if is_old and each.word.state is SlotState.SEALED:
                each.slot.free(each.word)

    def _tidy(self) -> None:
        """Remove retired slots whose snapshot is not needed, and empty slots of ranks that left this node.
        After the end of the run all slots are retired, and a committed snapshot is not needed: storage may
        fail, and this keeper stay for another snapshot."""
        trainers, is_needed = self.registry.all(), self.queue.is_needed
        is_over = self.exit.has_ended and not trainers
        for held in [each for each in self.regions.slots() if each.retired or is_over]:
            self.regions.remove_spent(
                held, lambda held, each: not (is_over and each.is_persisted) and is_needed(held, each)
            )
        if ranks := {rank for each in trainers if each.attempt for rank in each.ranks}:
            ranks |= {each.rank for each in trainers}
            for held in [each for each in self.regions.slots() if each.slot.rank not in ranks]:
                if held.state() is SlotState.FREE:
                    self.regions.remove(held)
        self.regions.drop_constants()

    # ---- the run's folder

    def _round(self) -> None:
        living = sorted({each.attempt for each in self.registry.all() if each.attempt})
        for attempt in living:
            self._ended.pop(attempt, None)
        # A start may follow the mark "dead" at once, so all snapshots are saved before it.
        saving = [each for each in self._ended if self.queue.is_pending(each)]
        saved = [pair for pair in self._ended.items() if pair[0] not in saving]

        def done(found: RoundResult | BaseException) -> None:
            if isinstance(found, BaseException):
                log.error("a round failed", exc_info=found)
                return
            self.exit.round_ended(found)
            for attempt in found.marked:
                self._ended.pop(attempt, None)
                self._elsewhere.discard(attempt)
            newest = found.newest
            first = self.registry.newest()
            if newest != self._newest and first is not None and 0 in first.ranks:
                # What older attempts have left is garbage from its beginning on.
                self._newest = newest
                self.deletions.make_room()
            is_superseded = newest is not None and bool(living) and newest.number > living[0].number
            self.outcomes.superseded_by = str(newest) if is_superseded else None
            if found.problem:
                self.outcomes.count("rounds_failed")

        elsewhere, saved_bytes = frozenset(self._elsewhere), self.queue.progress_bytes
        self._round_worker.submit(
            lambda: self._run_folder.round(living, saved, elsewhere, saving, saved_bytes), done
        )

    def _leave(self, in_vain: bool = False) -> None:
        """Remove all regions that are not kept, then the names, the lock last: a keeper that starts meanwhile
        finds it held, or finds everything gone. Reading storage may hang, and another keeper be elected
        meanwhile: then everything is that keeper's."""
        if in_vain:
            # Without reading storage, which fails.
            kept = {each.slot.name for each in self.regions.sealed() if not each.is_persisted}
            self._note_unsaved(kept)
        else:
            kept = self.exit.kept()
        crashpoints.point("leave.begun")
        if not self._empty(kept):
            log.warning(_REPLACED)
            return
        crashpoints.point("leave.emptied")
        self.mirroring.leave()
        self.cache.tidy()
        # After a death the folder stays for the restart, until `recover --cache` removes it.
        is_done = self.exit.was_closed and not self.cache.has_unsaved
        self.cache.leave(removes=is_done or self.exit.discards)
        self.ledger.add(None, Event.CLOSE, keeper=self.nonce, kept=sorted(kept))
        self.ledger.close()
        self._server.close()
        remove_names(self.folder)
        # Also of trainers that died before their hello: no other process would.
        self.regions.remove_dead_locks()
        crashpoints.point("leave.closed")
        self._election.release(self.folder)
        self.folder.discard()

    def _note_unsaved(self, kept: Collection[str]) -> None:
        """Report the snapshots that this keeper could not commit and leaves in their files."""
        for each in (each for each in self.regions.sealed() if each.slot.name in kept):
            message = (
                f"step {each.step} is not committed: the run has ended, and its storage fails. The snapshot "
                f"stays in {self.folder.path}/{each.slot.name}. The next start on this node, or `flashckpt "
                f"recover {self._store.url}` here, saves it"
            )
            log.error("%s", message)
            about = {"rank": each.slot.rank, "step": each.step, "boundary": each.boundary}
            self.ledger.add(str(each.attempt), Event.ERROR, what="unsaved", message=message, **about)

    def _empty(self, kept: Collection[str]) -> bool:
        """Remove all regions that are not `kept`. False if another keeper was elected meanwhile."""
        for held in self.regions.slots():
            if not self._election.stands(self.folder):
                return False
            if held.slot.name not in kept:
                self.regions.remove(held)
        self.regions.drop_constants()
        return self._election.stands(self.folder)
