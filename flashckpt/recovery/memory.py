"""The slots of a run whose keeper is gone, taken over in its place, and parts at rest: run through the
keeper's own queue until it is idle.

Owns what is said of each and which regions go afterwards. Nothing is persisted whose bytes differ; a step of
a branch that was left never becomes visible; a region that holds the only copy of something stays."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import replace

from flashckpt.commit import attempts, steps
from flashckpt.commit.lineage import VisibleStep
from flashckpt.commit.retention import Survivor, needed
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.protocol import remove_names
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.region import rank_of
from flashckpt.memory.runtime import LifeLock
from flashckpt.persist.job import JobState, StepJob, StepOutcome, Void, alone, few_pauses_s
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.queue import Queue
from flashckpt.persist.stored_steps import unfinished
from flashckpt.persist.worker import Worker
from flashckpt.persist.writer import Writer
from flashckpt.recovery.node import Hold
from flashckpt.recovery.report import Fate, Finding, Kind, Watcher
from flashckpt.recovery.storage import Examined, parts_found
from flashckpt.recovery.survey import slots_in
from flashckpt.store.base import Store

_SHOWN = 8
_NEWER_FAILED = "a newer one could not be saved"


class MemoryRecovery:
    """With the keeper's lock in `hold`, everything that is in named regions; without it nothing."""

    def __init__(self, hold: Hold, watcher: Watcher, ledger: Ledger) -> None:
        self._hold, self._store, self._runtime = hold, hold.store, hold.runtime
        self._watcher, self._ledger = watcher, ledger
        nonce = secrets.token_hex(4)
        life = LifeLock.acquire(self._runtime, f"keeper-{nonce}.lock")
        assert life is not None, "a nonce came twice"
        self._life = life
        self._regions = Regions(self._runtime, life)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._writer = Writer(self._store, nonce, guard=hold.guard, gathers=True)
        self._queue = Queue(
            self._regions,
            self._writer,
            Worker("writer", self._wake),
            ledger,
            told=self._told,
            pauses=few_pauses_s,
            world_of=self._world_of,
            by="recover",
        )
        self._snapshots: dict[str, Finding] = {}
        self._parts: dict[str, Finding] = {}
        self._foreign: list[Finding] = []
        self._waiting: set[AttemptName] = set()
        self._saved: dict[str, VisibleStep] = {}

    @property
    def findings(self) -> list[Finding]:
        return [*self._snapshots.values(), *self._foreign]

    @property
    def unsaved(self) -> set[AttemptName]:
        """Attempts of which something could not be saved, or is not whole without other nodes."""
        return failed_of(self._snapshots) | self._waiting

    def save(self) -> None:
        """Persist and commit what counts; afterwards `findings` has one row for each snapshot."""
        self._regions.adopt_named()
        self._regions.reclaim()
        for seen in slots_in(self._runtime):
            held = self._regions.get(seen.slot)
            sealed = None if held is None else held.sealed()
            if not seen.is_slot:
                self._foreign.append(seen.left_alone())
            elif sealed is not None:
                self._snapshots[seen.slot] = seen.finding(Fate.KEPT)
                if seen.is_persisted:
                    self._saved[seen.slot] = self._writer.place_of(alone(sealed, 0))
                    self._note(seen.slot, Fate.WAS_COMMITTED)
        for rank in sorted({held.slot.rank for held in self._regions.slots()}):
            self._queue.rescue(rank)
        self._run()
        for name, found in self._snapshots.items():
            if found.outcome is Fate.KEPT and not found.detail and found.attempt in self.unsaved:
                self._note(name, Fate.KEPT, _NEWER_FAILED)

    def finish(self, *, read: bool) -> list[Finding]:
        """Commit what is at rest and wants only its manifest; `read`: once every byte of it has been read."""
        # Oldest first: a kill in between leaves a run that goes on from an older step, as before.
        for stored in reversed(unfinished(self._store)):
            self._queue.adopt(stored, read=read)
        self._run()
        return list(self._parts.values())[::-1]

    def let_go(self, examined: Examined, *, discard: bool) -> None:
        """Remove the regions whose snapshots rest elsewhere, or count no more. `examined` are the steps at
        rest: what memory has of one that is not whole stays. With `discard` also what is saved nowhere."""
        settled, stays = settle(
            self._store, self._snapshots, self._saved, self.unsaved, examined, discard=discard
        )
        for held in self._regions.slots():
            self._hold.guard()
            name = held.slot.name
            if name in settled:
                if settled[name].outcome is Fate.DISCARDED:
                    self._tell_discarded(settled[name])
                self._snapshots[name] = settled[name]
            if name not in stays:
                self._regions.remove(held)
        self._hold.guard()
        self._regions.drop_constants()

    def forget_dead_keepers(self) -> None:
        """Their locks say whose half-written shards may go: they go once those have gone."""
        for nonce, lives in self._regions.other_keepers().items():
            if not lives:
                self._regions.forget_keeper(nonce)

    def close(self) -> None:
        """Let the slots that stay be found by the next keeper, and leave no name behind but theirs. An
        interrupt leaves a worker that is busy: it keeps what it looks at until the process ends."""
        if not self._queue.worker.busy:
            for held in self._regions.everything():
                held.slot.close()
            self._queue.worker.close()
            os.close(self._wake)
        with contextlib.suppress(OSError, FlashckptError):
            if self._hold.election is not None and self._hold.election.stands(self._runtime):
                self._regions.remove_dead_locks()
                remove_names(self._runtime)
        self._life.release(self._runtime)

    def _run(self) -> None:
        before = self._queue.progress_bytes

        def watch() -> None:
            self._hold.guard()
            writing = self._queue.writing
            names = [each.slot.name for each in writing.members()] if writing is not None else []
            total = sum(self._snapshots[name].num_bytes for name in names if name in self._snapshots)
            self._watcher.progress(self._queue.progress_bytes - before, total)

        self._queue.run_to_idle(watch)

    def _world_of(self, attempt: AttemptName) -> int | None:
        start = None
        # Of an older attempt nobody may need it; who writes a step of this very one reads it again.
        with contextlib.suppress(DamagedError):
            start = attempts.read_start(self._store, attempt)
        return None if start is None else start.world

    # What is said

    def _told(self, job: StepJob, outcome: StepOutcome) -> None:
        word, detail = word_of(outcome)
        if job.stored is not None:
            is_damage = outcome.void is Void.TORN
            self._parts[job.stored.folder] = parts_found(job.stored, word, detail, damage=is_damage)
            return
        if outcome.state is JobState.PART_WRITTEN:
            self._waiting.add(job.attempt)
        for name in (each.slot.name for each in job.members()):
            if outcome.void is Void.TORN and name != outcome.slot:
                torn_rank = rank_of(outcome.slot)
                self._note(name, Fate.KEPT, f"what rank {torn_rank} has of it is torn")
            else:
                self._note(name, word, detail)
            if word is Fate.COMMITTED:
                self._saved[name] = self._writer.place_of(job)

    def _note(self, name: str, outcome: Fate, detail: str = "") -> None:
        found = self._snapshots.get(name, Finding(Kind.SNAPSHOT, outcome, name))
        is_torn = outcome is Fate.TORN
        self._snapshots[name] = replace(found, outcome=outcome, detail=detail, damage=is_torn)

    def _tell_discarded(self, lost: Finding) -> None:
        what = f"step {lost.step} of attempt {lost.attempt}"
        self._watcher.say(f"discarding {what}, which is committed nowhere ({lost.place})")
        attempt = None if lost.attempt is None else str(lost.attempt)
        self._ledger.add(attempt, Event.CLOSE, what="discard", step=lost.step, slot=lost.place, by="recover")


def settle(
    store: Store,
    found: Mapping[str, Finding],
    saved: Mapping[str, VisibleStep],
    unsaved: Collection[AttemptName],
    examined: Examined,
    *,
    discard: bool,
) -> tuple[dict[str, Finding], set[str]]:
    """What becomes of the snapshots that were found, and the names of those that stay. `saved` says where
    those rest that are committed, `unsaved` names attempts of which everything stays that counts or may
    yet."""
    settled = dict(found)
    newest = max((each.step for each in examined.whole), default=-1)
    stays = {name for name, each in saved.items() if each in examined.damaged and each.step > newest}
    for name in stays:
        why = "its copy at rest is not whole: training resumes from memory"
        settled[name] = replace(found[name], outcome=Fate.KEPT, detail=why)
    counts = stays | _needed(store, found, saved, unsaved)
    for name, each in found.items():
        if name in stays or each.outcome is Fate.SOUND:
            continue
        if name in counts and not discard:
            stays.add(name)
        elif name in counts:
            settled[name] = replace(each, outcome=Fate.DISCARDED)
        elif each.outcome is Fate.KEPT and each.attempt is not None:
            settled[name] = replace(each, outcome=Fate.DROPPED)
    return settled, stays


def failed_of(found: Mapping[str, Finding]) -> set[AttemptName]:
    """Attempts of which something could not be saved."""
    failed = (each.attempt for each in found.values() if each.outcome is Fate.FAILED)
    return {attempt for attempt in failed if attempt is not None}


def word_of(outcome: StepOutcome) -> tuple[Fate, str]:
    """What is said of a step, and why."""
    detail = outcome.message
    match outcome.state, outcome.void:
        case JobState.COMMITTED, _:
            return Fate.COMMITTED, ""
        case JobState.PART_WRITTEN, _:
            waits = "its part is saved; it is committed once those of the other ranks are there"
            return Fate.KEPT, detail or waits
        case JobState.FAILED, _:
            return Fate.FAILED, detail
        case _, Void.TORN if outcome.slot:
            names = ", ".join(leaf for _, leaf in outcome.leaves[:_SHOWN])
            return Fate.TORN, f"not the bytes of its boundary: {names}" if names else detail
    return Fate.KEPT, detail


def _needed(
    store: Store,
    found: Mapping[str, Finding],
    saved: Mapping[str, VisibleStep],
    unsaved: Collection[AttemptName],
) -> set[str]:
    """Slots that hold something which is committed nowhere and still counts."""
    left = [
        Survivor(
            slot=name,
            rank=rank_of(name),
            attempt=each.attempt,
            step=each.step,
            boundary=each.boundary,
            is_committed=name in saved and steps.is_committed(store, saved[name].step, saved[name].attempt),
        )
        for name, each in found.items()
        if each.attempt is not None and each.step is not None and each.outcome is not Fate.TORN
    ]
    names = {each.slot for each in left if not each.is_committed}
    kept = {each.slot for each in left if each.attempt in unsaved} & names
    try:
        return kept | (needed(store, left) if names else set())
    except (OSError, FlashckptError):
        return names
