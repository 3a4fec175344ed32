"""What to persist or audit next, and what follows from how it went.

Owns the jobs: which snapshots make one, their order, when one is tried again, and the rescue of what a dead
trainer left. The bytes are the writer's. For one thread, but for the deeds that its worker does.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from flashckpt.errors import DamagedError
from flashckpt.format.names import AttemptName
from flashckpt.memory.held_regions import HeldRegion, Regions
from flashckpt.memory.region import rank_of
from flashckpt.memory.slot import Sealed, SlotState, must_stay, newest_complete
from flashckpt.persist.audit import Torn, audit, discard
from flashckpt.persist.job import (
    MOST_NAMED,
    JobState,
    KnownTrainer,
    NodeRanks,
    PauseAfter,
    SealedSnapshot,
    StepJob,
    StepOutcome,
    Void,
    alone,
    look_again_s,
    pause_s,
    ranks_named,
    unlike_steps,
)
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.stored_steps import StoredStep
from flashckpt.persist.worker import Worker
from flashckpt.persist.writer import Writer

log = logging.getLogger(__name__)

_AWAITED_RETRY_S = 1.0
# An audit may take this share of the time, so that idle means idle for the trainer too.
_AUDIT_SHARE = 0.05
_LEAST_AUDIT_PAUSE_S = 1.0
_LOOK_PAUSE_S = 0.2
_OTHERS_S = 60.0  # so long parts of other nodes, which may never come, keep a slot of what is at rest here

# A slot and the generation in it.
_Key = tuple[str, int]


class Queue:
    """`sound` counts the snapshots that an audit in idle time found to be so. `told` is called with every job
    whose try has come to an end, after the queue has drawn its own conclusions. `by` is noted in the ledger,
    `pauses` are those between tries that fail, `world_of` gives the ranks of an attempt of which no trainer
    has said anything."""

    def __init__(
        self,
        regions: Regions,
        writer: Writer,
        worker: Worker,
        ledger: Ledger,
        *,
        told: Callable[[StepJob, StepOutcome], None] = lambda job, outcome: None,
        pauses: PauseAfter = pause_s,
        world_of: Callable[[AttemptName], int | None] = lambda attempt: None,
        by: str = "",
    ) -> None:
        self._regions, self._writer, self.worker, self._ledger = regions, writer, worker, ledger
        self._told, self._pauses, self._world_of = told, pauses, world_of
        self._by = {"by": by} if by else {}
        self._known: dict[tuple[AttemptName, int], NodeRanks] = {}
        self._living: set[tuple[AttemptName | None, int]] = set()
        # Those of snapshots, and those without any, of which parts are at rest.
        self._jobs: list[StepJob] = []
        self._urgent: set[_Key] = set()
        self._audited: dict[str, int] = {}
        self._audit_at = 0.0
        self.sound = 0
        self._is_hurried = threading.Event()
        self.writing: StepJob | None = None
        self._begun_before = False

    # What is to be done

    def know(self, trainers: Iterable[KnownTrainer]) -> None:
        """Who lives. What a dead trainer said (what to keep, its environment) holds for what it left."""
        living = list(trainers)
        before, self._living = self._living, {(trainer.attempt, trainer.rank) for trainer in living}
        if self._living - before:
            # Whoever comes may hand a region over.
            self._take_back()
        for trainer in living:
            if trainer.attempt is not None:
                self._known[trainer.attempt, trainer.rank] = NodeRanks(
                    ranks=trainer.ranks,
                    world=trainer.world,
                    keep=trainer.keep,
                    environment=trainer.environment,
                )
        for job in self._jobs if self._living != before else ():
            if job.state is JobState.GATHERING and job.snapshots:
                job.node = self._node(job.attempt, min(job.snapshots))

    def known(self, attempt: AttemptName | None) -> NodeRanks | None:
        """What a trainer of an attempt has said, if one has."""
        return next((each for (of, _), each in self._known.items() if of == attempt), None)

    def adopt(self, stored: StoredStep, *, read: bool) -> None:
        """Take up a step at rest whose parts want their manifest."""
        boundary = stored.heads[0].boundary if stored.heads else 0
        node = NodeRanks(ranks=())
        job = StepJob(attempt=stored.attempt, step=stored.step, boundary=boundary, node=node, stored=stored)
        job.state, job.reads_stored = JobState.PART_WRITTEN, read
        self._jobs.append(job)

    def rescue(self, rank: int) -> None:
        """Ask for the newest step that a dead or stuck trainer and the other ranks of its node have sealed,
        whether it had asked or not; past those that were given up. One that lives after all may ask for a
        newer one in the same slot meanwhile: that stands."""
        before = {held.slot.name: held.slot.asked for held in self._regions.slots()}
        self._discard_damaged(rank)
        found = [
            rows for rows in self._complete(rank) if not any(self._is_given_up(each.key) for each in rows)
        ]
        node = self._node(found[0][0].attempt, rank) if found else NodeRanks(ranks=())
        complete = newest_complete(self._regions.sealed(rank))
        # Of a job on several nodes nobody here may know which step all of them hold: it is one of these.
        is_alone = complete is None if node.world is None else node.world == len(node.ranks)
        for rows in found[: 1 if is_alone else None]:
            if all(each.is_persisted for each in rows):
                return  # it is committed, and what is older is not needed
            order = rows[0].order
            if complete is not None and not is_alone and order < complete:
                continue  # all nodes have a newer one
            for each in rows:
                self._save(each, before, urgently=complete in (None, order))

    def _save(self, sealed: Sealed, before: Mapping[str, int], *, urgently: bool) -> None:
        if sealed.is_persisted:
            return
        if urgently:
            self._urgent.add(sealed.key)
            if (job := self._job(sealed.key)) is not None:
                job.is_urgent = True
        sealed.slot.request_persist_after(before[sealed.slot.name], sealed.generation)

    def taken_up(self, attempt: AttemptName, step: int, boundary: int) -> None:
        """An attempt has started that went on from this boundary of another: what the ranks of this node have
        of it counts as its own now. Who was too late for the old one is not for this one."""
        before = {held.slot.name: held.slot.asked for held in self._regions.slots()}
        for each in self._regions.sealed():
            if each.content != (attempt, step, boundary):
                continue
            job = self._job(each.key)
            if job is not None and job.state is not JobState.WRITING:
                self._drop(job)
            each.slot.request_persist_after(before[each.slot.name], each.generation)

    def next(self) -> None:
        """Give the worker its next job, if it is free and there is one."""
        now = time.monotonic()
        ready = self._ready(now)
        if self.worker.busy:
            if ready:
                # An audit is for idle time: of a large state it would take a run's grace.
                self._is_hurried.set()
            return
        if ready:
            self._submit(min(ready, key=StepJob.order))
        elif now >= self._audit_at:
            self._audit_newest()

    def run_to_idle(self, watch: Callable[[], None]) -> None:
        """Do all that can be done now: what waits for others is looked at once more and left to them, what
        fails is tried as often as the pauses say. `watch` is called again and again meanwhile; what it
        raises ends this, once the worker is done; an interrupt at once: storage may hang."""
        try:
            while True:
                self.worker.collect()
                now = time.monotonic()
                if ready := self._ready(now):
                    if not self.worker.busy:
                        self._submit(min(ready, key=StepJob.order))
                elif not (self.worker.busy or any(job.is_tried_after(now) for job in self._jobs)):
                    return
                watch()
                self.worker.wait()
        except Exception:
            while self.worker.busy:
                self.worker.wait()
                self.worker.collect()
            raise

    def try_again(self) -> None:
        """Something was mended: what failed so far, and fails in the try under way, says nothing now."""
        self._begun_before = self.writing is not None
        for job in self._look():
            if job is not self.writing and not job.given_up:
                job.tries, job.retry_at = 0, 0.0

    def hurry(self) -> None:
        """Somebody waits: what failed is tried again soon, however often it has failed."""
        for job in self._look():
            if not job.given_up:
                job.retry_at = min(job.retry_at, job.tried_at + _AWAITED_RETRY_S)

    # What is known

    @property
    def progress_bytes(self) -> int:
        return self._writer.progress_bytes

    def waiting(self, *, for_others: bool = False) -> list[int]:
        """The steps that were asked for and are not done; or of these those that wait for other nodes."""
        jobs = [job for job in self._look() if not job.is_over]
        return [job.step for job in jobs if not for_others or job.state is JobState.PART_WRITTEN]

    def given_up(self) -> set[_Key]:
        """Slots and generations that nobody tries again."""
        return {key for job in self._jobs if job.given_up for key in job.keys}

    def committed(self, attempt: AttemptName | None) -> list[int]:
        """Steps in slots that are committed. They know of commits of an earlier keeper, too."""
        found = [each for each in self._regions.sealed() if each.is_persisted]
        return [each.step for each in found if attempt in (None, each.attempt)]

    def is_pending(self, attempt: AttemptName | None = None) -> bool:
        """Whether something of an attempt (of any) is still to be persisted from this node's memory. What
        waits for other nodes is at rest here, and what waits for a rank that is dead will not come."""
        jobs = [job for job in self._look() if attempt in (None, job.attempt)]
        return any(self._is_to_come(job) for job in jobs)

    def is_saved(self, rank: int) -> bool:
        """Whether the newest sealed snapshot of a rank is committed."""
        newest = self._newest(rank)
        return newest is not None and newest.is_persisted

    def is_settled(self, rank: int) -> bool:
        """Whether it is, or its last try has failed, or its part is at rest, or there is none."""
        newest = self._newest(rank)
        if newest is None or newest.is_persisted or newest.slot.failed[0] == newest.generation:
            return True
        job = self._job(newest.key)
        return job is not None and (job.given_up or job.part_of is not None)

    def is_needed(self, held: HeldRegion, sealed: Sealed) -> bool:
        """Whether a snapshot must stay in its rank's slots, or is still to be persisted."""
        if must_stay(sealed, self._regions.sealed(held.slot.rank)):
            return True
        return held.slot.wants_persist(sealed.generation) and not self._is_given_up(sealed.key)

    def in_hand(self) -> set[int]:
        """The steps that this process may still commit."""
        return {each.step for each in self._regions.sealed()} | {job.step for job in self._look()}

    def _newest(self, rank: int) -> Sealed | None:
        return max(self._regions.sealed(rank), key=lambda each: each.age, default=None)

    def _complete(self, rank: int) -> list[list[Sealed]]:
        """The steps that all ranks of a rank's node hold, newest first."""
        steps, here = [], sorted(self._regions.sealed(), key=lambda each: each.age)
        for mine in reversed([each for each in here if each.slot.rank == rank]):
            ranks = self._node(mine.attempt, rank).ranks
            same = [each for each in here if each.content == mine.content]
            rows = {each.slot.rank: each for each in same if each.slot.rank in ranks} | {rank: mine}
            if len(rows) == len(ranks):
                steps.append(list(rows.values()))
        return steps

    def _is_given_up(self, key: _Key) -> bool:
        job = self._job(key)
        return job is not None and job.given_up

    def _node(self, attempt: AttemptName, rank: int) -> NodeRanks:
        said = (known for (of, _), known in self._known.items() if of == attempt and rank in known.ranks)
        if (known := next(said, None)) is not None:
            return known
        # Nobody has said it: those that have something of the attempt here, and who lives and may yet say it.
        # A part without one of them would stand in the way of the whole one.
        ranks = {each.slot.rank for each in self._regions.sealed() if each.attempt == attempt}
        ranks |= {rank, *self._living_of(attempt)}
        return NodeRanks(ranks=tuple(sorted(ranks)), world=self._world_of(attempt))

    def _living_of(self, attempt: AttemptName) -> set[int]:
        """The ranks on this node that live and are, or may be, of an attempt."""
        heard = {of for said, of in self._living if said in (None, attempt)}
        elsewhere = {of for said, of in self._living if said not in (None, attempt)}
        return heard | (self._regions.living_ranks() - elsewhere)

    # The jobs

    def _job(self, key: _Key) -> StepJob | None:
        return next((job for job in self._jobs if key in job.keys), None)

    def _look(self) -> list[StepJob]:
        """All jobs: those of snapshots that were asked for, as the slots stand now, and of parts at rest."""
        wanted: set[_Key] = set()
        for held in self._regions.slots():
            word = held.word()
            if word is None or not held.slot.wants_persist(word.generation):
                continue
            key = held.slot.name, word.generation
            if self._job(key) is None:
                if (sealed := held.sealed()) is not None:
                    self._join(sealed)
                elif word.state is SlotState.SEALED:
                    self._discard_damaged(held.slot.rank)
            if word.state in (SlotState.SEALED, SlotState.PINNED):
                wanted.add(key)
        self._urgent &= wanted
        for job in self._jobs:
            if not job.keys <= wanted and job is not self.writing:
                self._left(job, wanted)
        for job in self._jobs:
            self._gather(job)
        return self._jobs

    def _join(self, sealed: Sealed) -> None:
        """Put a snapshot into the job of its step."""
        rank, jobs = sealed.slot.rank, [job for job in self._jobs if job.state is JobState.GATHERING]
        same = [job for job in jobs if job.content == sealed.content and rank in job.missing]
        if not same:
            attempt, step, boundary = sealed.content
            node = self._node(attempt, rank)
            same = [StepJob(attempt=attempt, step=step, boundary=boundary, node=node)]
            self._jobs.append(same[0])
        same[0].snapshots[rank] = self._snapshot(sealed)
        same[0].is_urgent = same[0].is_urgent or sealed.key in self._urgent

    def _snapshot(self, sealed: Sealed) -> SealedSnapshot:
        index, region = self._regions.own_index(sealed.slot), self._regions.constants_named_by(sealed)
        return SealedSnapshot(sealed.slot, sealed.generation, index, () if region is None else (region,))

    def _left(self, job: StepJob, wanted: set[_Key]) -> None:
        """A snapshot of a job is not there any more, or not wanted. What is at rest of it is."""
        if job.part_of is None or job.is_over:
            self._drop(job)
            return
        # Its slot may be unmapped from here on.
        here = [each for each in job.members() if (each.slot.name, each.generation) in wanted]
        job.snapshots = {each.rank: each for each in here}

    def _drop(self, job: StepJob) -> None:
        job.release()
        self._jobs = [each for each in self._jobs if each is not job]

    def _gather(self, job: StepJob) -> None:
        """Pin what is sealed of a step that several ranks have, until all have it or one never will."""
        if job.state is not JobState.GATHERING or len(job.node.ranks) < 2:
            return
        held = self._held(job)
        absent = job.missing - held.keys()
        if any(held[rank].is_persisted for rank in job.missing - absent):
            job.lacks = "another rank of this node was told that it is committed, and it is not there"
        elif (why := self._why_never(job, absent)) and self._held(job).keys() == held.keys():
            # Looked at twice: who has sealed it, and more, since the first look is neither late nor lost.
            job.lacks = why
        elif self._may_come(job):
            for each in job.members():
                each.take()
        else:
            job.release()

    def _held(self, job: StepJob) -> dict[int, Sealed]:
        """By rank, what this node has sealed of a job's content, asked for or not."""
        return {each.slot.rank: each for each in self._regions.sealed() if each.content == job.content}

    def _why_never(self, job: StepJob, absent: Collection[int]) -> str:
        """Why these ranks, which did not hold it before this was asked, never will; empty where they may."""
        if unlike := self._counted_otherwise(job, absent):
            return unlike_steps({rank: job.step for rank in job.snapshots} | unlike)
        if passed := {rank for rank in absent if self._has_passed(job, rank)}:
            return f"{ranks_named(passed)} of this node passed its boundary without a snapshot of it"
        if absent and (lost := set(absent) - self._living_of(job.attempt)):
            return f"{ranks_named(lost)} of this node ended before a snapshot of it was sealed"
        return ""

    def _void(self, job: StepJob, why: str) -> None:
        """What this node has of it will never be whole, and is in nobody's way."""
        self._give_up(job, str(job.attempt), "void", why)
        self._told(job, StepOutcome(JobState.VOID, Void.SUPERSEDED, str(job.attempt), message=why))

    def _counted_otherwise(self, job: StepJob, ranks: Collection[int]) -> dict[int, int]:
        """Those of these ranks that have sealed the same boundary as another step, with that step. One that
        has sealed it as this step since it was looked for is none of them."""
        same = [e for e in self._regions.sealed() if (e.attempt, e.boundary) == (job.attempt, job.boundary)]
        unlike = [each for each in same if each.step != job.step]
        return {each.slot.rank: each.step for each in unlike if each.slot.rank in ranks}

    def _has_passed(self, job: StepJob, rank: int) -> bool:
        """Whether a rank that does not hold it has sealed a later boundary: it never will."""
        held = [each.boundary for each in self._regions.sealed(rank) if each.attempt == job.attempt]
        return any(boundary > job.boundary for boundary in held)

    def _give_up(self, job: StepJob, attempt: str | None, what: str, why: str) -> None:
        job.release()
        job.state, job.given_up = JobState.VOID, True
        for each in job.members():
            each.slot.set_failed(each.generation, errno.ESTALE)
        # Said also where a try before it failed: this is the last word on the snapshot.
        log.warning("step %d is not persisted: %s", job.step, why)
        self._note(job, Event.ERROR, attempt, what=what, message=why)

    def _is_to_come(self, job: StepJob) -> bool:
        if job.is_over or job.lacks or job.state is JobState.PART_WRITTEN:
            return False
        if job.is_gathered or job.state is JobState.WRITING:
            return job.retry_at < math.inf
        return self._may_come(job)

    def _may_come(self, job: StepJob) -> bool:
        """Whether all ranks of the node that have not sealed it live."""
        return all((job.attempt, rank) in self._living for rank in job.missing)

    def _ready(self, now: float) -> list[StepJob]:
        jobs = [job for job in self._look() if job is not self.writing and not job.is_over]
        due = [job for job in jobs if job.is_gathered and now >= job.retry_at]
        return [job for job in due if all(each.is_free() for each in job.members())]

    # Doing it

    def _submit(self, job: StepJob) -> None:
        for each in [each for each in self._regions.sealed() if each.key in job.keys]:
            # A region may have been handed over since.
            job.snapshots[each.slot.rank].regions = self._snapshot(each).regions
        job.has_others = any(self._regions.other_keepers().values())
        # One that has not said its attempt yet may wait for the step, too: the keeper before this one died.
        job.has_trainers = any(said in (None, job.attempt) for said, _ in self._living)
        job.state, self.writing = JobState.WRITING, job

        def done(outcome: StepOutcome | BaseException) -> None:
            self.writing = None
            begun_before, self._begun_before = self._begun_before, False
            if isinstance(outcome, BaseException):
                log.error("persisting step %d failed", job.step, exc_info=outcome)
                job.release()
                message = f"{type(outcome).__name__}: {outcome}"
                outcome = StepOutcome(JobState.FAILED, attempt=str(job.attempt), message=message)
            job.state, job.outcome, job.tried_at = outcome.state, outcome, time.monotonic()
            if not (begun_before and outcome.state is JobState.FAILED):
                self._follow(job, outcome)
            self._regions.given_back()

        self._regions.lend([region for each in job.members() for region in (each.slot, *each.regions)])
        self.worker.submit(partial(self._writer.persist, job), done)

    def _audit_newest(self) -> None:
        self._audit_at = time.monotonic() + _LOOK_PAUSE_S
        for rank in {held.slot.rank for held in self._regions.slots()}:
            newest = self._newest(rank)
            if newest is None or newest.word.state is not SlotState.SEALED:
                continue
            if newest.generation not in (self._audited.get(newest.slot.name), newest.slot.persisted):
                self._audit(newest)
                return

    def _audit(self, sealed: Sealed) -> None:
        snapshot, began = self._snapshot(sealed), time.monotonic()

        def done(found: StepOutcome | bool | BaseException) -> None:
            pause = (time.monotonic() - began) / _AUDIT_SHARE
            self._audit_at = time.monotonic() + max(pause, _LEAST_AUDIT_PAUSE_S)
            if isinstance(found, BaseException):
                log.error("an audit failed", exc_info=found)
            elif isinstance(found, StepOutcome):
                self._torn(self._job(sealed.key) or alone(sealed, 0), found)
            elif found:
                self.sound += 1
                self._audited[sealed.slot.name] = sealed.generation
            self._regions.given_back()

        self._is_hurried.clear()
        self._regions.lend([sealed.slot, *snapshot.regions])
        self.worker.submit(partial(audit, snapshot, self._is_hurried.is_set), done)

    def _discard_damaged(self, rank: int) -> None:
        """A record that does not match its checksum names no snapshot that anybody could use."""
        for held in self._regions.of_rank(rank):
            word = held.word()
            if word is None or word.state is not SlotState.SEALED:
                continue
            try:
                held.slot.sealed()
            except DamagedError as error:
                job = StepJob(attempt=_NOBODY, step=-1, boundary=0, node=NodeRanks(ranks=(rank,)))
                job.snapshots[rank] = SealedSnapshot(held.slot, word.generation, 0)
                self._torn(job, discard(held.slot, word, Torn(str(error))))

    # What follows

    def _follow(self, job: StepJob, outcome: StepOutcome) -> None:
        match outcome.state, outcome.void:
            case JobState.COMMITTED, _:
                self._committed(job, outcome)
            case JobState.PART_WRITTEN, _:
                self._waits(job, outcome)
            case JobState.FAILED, _:
                self._failed(job, outcome)
            case _, Void.GONE if job.part_of is not None:
                job.state = JobState.PART_WRITTEN
            case _, Void.SUPERSEDED | Void.DIVERGED if job.stored is None:
                self._superseded(job, outcome)
            case _, Void.TORN if job.stored is None:
                self._torn(job, outcome)
            case _:
                self._drop(job)
                self._told(job, outcome)

    def _waits(self, job: StepJob, outcome: StepOutcome) -> None:
        job.looks += 1
        job.retry_at = job.tried_at + look_again_s(job.looks)
        job.rests_since = job.rests_since or job.tried_at
        for each in job.members() if job.tried_at - job.rests_since > _OTHERS_S else ():
            each.slot.set_failed(each.generation, errno.ETIMEDOUT)
        self._note_written(job, outcome)
        if job.stored is not None:
            self._drop(job)
        self._told(job, outcome)

    def _committed(self, job: StepJob, outcome: StepOutcome) -> None:
        self._drop(job)
        # Who writes the last part of a step commits it: nothing is lost by waiting no longer for older ones.
        self._jobs = [
            each
            for each in self._jobs
            if each.snapshots or each.stored or each.attempt != job.attempt or each.step > job.step
        ]
        self._note_written(job, outcome)
        self._note(job, Event.COMMIT, outcome.attempt)
        # It may have written the constants that another snapshot shares.
        self._take_back()
        self._told(job, outcome)

    def _take_back(self) -> None:
        """Try what was given up for want of a region once more."""
        for job in self._jobs:
            if job.given_up and job.outcome is not None and job.outcome.lacks_region:
                job.given_up, job.retry_at = False, 0.0

    def _torn(self, job: StepJob, outcome: StepOutcome) -> None:
        ranks = list(job.snapshots)
        if outcome.void is Void.TORN:
            names = [name for _, name in outcome.leaves]
            log.warning("step %d in %s was discarded: %s", job.step, outcome.slot, outcome.message)
            told = {"slot": outcome.slot, "leaves": names[:MOST_NAMED], "count": len(names)}
            self._note(job, Event.TORN, outcome.attempt or None, message=outcome.message, **told)
            self._told(job, outcome)
        job.snapshots = {each.rank: each for each in job.members() if each.slot.name != outcome.slot}
        if job.snapshots and outcome.void is Void.TORN:
            # What the other ranks have of it will never be whole, and is in nobody's way.
            self._void(job, f"what {ranks_named([rank_of(outcome.slot)])} has of it is torn")
        else:
            self._drop(job)
        self._rescue_dead(ranks)

    def _failed(self, job: StepJob, outcome: StepOutcome) -> None:
        job.tries += 1
        pause = self._pauses(job.tries)
        job.retry_at = math.inf if pause is None else job.tried_at + pause
        if outcome.lacks_region and not self._is_living(job):
            # Nobody is left who could hand it over. The snapshot stays, and keeps no keeper for ever.
            job.given_up = True
        for each in job.members():
            each.slot.set_failed(each.generation, outcome.errno or errno.EIO)
        if job.tries == 1:
            log.error("step %d is not persisted: %s", job.step, outcome.message)
            why = {"errno": outcome.errno, "message": outcome.message}
            self._note(job, Event.ERROR, outcome.attempt or None, what="persist", **why)
        self._told(job, outcome)
        if not job.snapshots and pause is None:
            self._drop(job)
        if job.given_up:
            # An older one may hold its constants itself, and be newer than all that is committed.
            for rank in job.snapshots:
                self.rescue(rank)

    def _superseded(self, job: StepJob, outcome: StepOutcome) -> None:
        assert outcome.void is not None
        self._give_up(job, outcome.attempt or None, outcome.void.value, outcome.message)
        self._told(job, outcome)
        if not job.snapshots:
            self._drop(job)
        # An older one may be what the newer attempt has started from, and count as its.
        self._rescue_dead(job.snapshots.keys())

    def _rescue_dead(self, ranks: Collection[int]) -> None:
        for rank in set(ranks) - {rank for _, rank in self._living}:
            self.rescue(rank)

    def _is_living(self, job: StepJob) -> bool:
        return any(rank in job.snapshots for _, rank in self._living)

    def _note_written(self, job: StepJob, outcome: StepOutcome) -> None:
        """Once a step: that the parts of other nodes are waited for is no writing."""
        if job.is_noted or not outcome.num_bytes:
            return
        job.is_noted = True
        written = [[each.rank, round(each.seconds, 4), each.num_bytes] for each in outcome.written]
        how = {"seconds": round(outcome.seconds, 4), "direct": outcome.direct, "written": written}
        self._note(job, Event.PERSIST, outcome.attempt, num_bytes=outcome.num_bytes, **how)

    def _note(self, job: StepJob, event: Event, attempt: str | None, **fields: object) -> None:
        ranks = [each.rank for each in job.members()]
        named: dict[str, object] = {"step": job.step}
        if ranks:
            named |= {"rank": ranks[0], "slot": job.snapshots[ranks[0]].slot.name}
        if len(ranks) > 1:
            named |= {"ranks": ranks}
        self._ledger.add(attempt, event, **(named | self._by | fields))


_NOBODY = AttemptName(0, "0" * 8)
