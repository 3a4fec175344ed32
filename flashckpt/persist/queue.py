"""The queue of the keeper: which snapshot is persisted or audited next, and what follows from the outcome.

Owns the jobs: which snapshots make one, their order, their retries, and the rescue of snapshots of dead
trainers. Bytes are the writer's, versions the committer's. For one thread, but for the operations of its two
workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flashckpt import crashpoints
from flashckpt.errors import DamagedError
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.memory.held_regions import HeldRegion, Regions
from flashckpt.memory.region import rank_of
from flashckpt.memory.slot import Sealed, Slot, SlotState, must_stay, newest_complete
from flashckpt.persist.audit import Torn, audit, discard
from flashckpt.persist.committer import Committer
from flashckpt.persist.job import (
    MOST_NAMED,
    JobState,
    NodeRanks,
    PauseAfter,
    Retry,
    SealedSnapshot,
    SlotKey,
    StepJob,
    StepOutcome,
    Trainer,
    job_of_one,
    pause_s,
    poll_pause_s,
    ranks_named,
    unlike_steps,
)
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.slot_cache import SlotCache
from flashckpt.persist.writer import Writer
from flashckpt.threads import Worker

log = logging.getLogger(__name__)

_AWAITED_RETRY_S = 1.0
_AUDIT_SHARE = 0.05  # of the time: an idle keeper must not slow the trainer down
_MIN_AUDIT_PAUSE_S = 1.0
_SCAN_PAUSE_S = 0.2
_OTHER_NODES_TIMEOUT_S = 60.0  # then a step that waits for other nodes holds no slot here any more

UNKNOWN = SnapshotId(AttemptName(0, "0" * 8), 0)
"""The id of a snapshot whose record is damaged."""


class Queue:
    """wake: an eventfd that becomes readable when an operation has ended. notify: called with each job and
    the outcome of its try, after the queue has acted on it. pauses: between failed tries. world_of: the
    number of ranks of an attempt without a known trainer. by: noted in the ledger. With a cache, snapshots
    are copied there first, and persisted from there. `sound`: the number of snapshots that audits found
    undamaged."""

    def __init__(
        self,
        regions: Regions,
        writer: Writer,
        committer: Committer,
        wake: int,
        ledger: Ledger,
        *,
        notify: Callable[[StepJob, StepOutcome], None] = lambda job, outcome: None,
        pauses: PauseAfter = pause_s,
        world_of: Callable[[AttemptName], int | None] = lambda attempt: None,
        by: str = "",
        cache: SlotCache | None = None,
    ) -> None:
        self._regions, self._writer, self._committer, self._ledger = regions, writer, committer, ledger
        self._writes, self._commits = Worker("writer", wake), Worker("commits", wake)
        self._notify, self._pauses, self._world_of = notify, pauses, world_of
        self._by = {"by": by} if by else {}
        self._cache = cache
        if cache is not None:
            cache.on_adopted = self._rescue_cached
        # The snapshot that is being copied into the cache, and its job if it has one.
        self._copied: SealedSnapshot | None = None
        self._copied_job: StepJob | None = None
        self._given_up: list[StepJob] = []  # jobs whose cached slots are still to be removed
        self._known: dict[tuple[AttemptName, int], NodeRanks] = {}
        self._living: set[tuple[AttemptName | None, int]] = set()
        self._jobs: list[StepJob] = []
        self._urgent: set[SlotKey] = set()
        self._audited: dict[str, int] = {}
        self._audit_at = 0.0
        self.sound = 0
        self._stops_audit = threading.Event()
        self.writing: StepJob | None = None
        self._committing: StepJob | None = None
        self._ignored: set[StepJob] = set()  # their tries in progress began before a repair

    # ---- orders

    def set_trainers(self, trainers: Iterable[Trainer]) -> None:
        """Set the living trainers. The settings of a dead one stay valid for its snapshots."""
        living = list(trainers)
        before, self._living = self._living, {(trainer.attempt, trainer.rank) for trainer in living}
        if self._living - before:
            self._retry_missing_regions()  # a new trainer may hand a region over
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
        """The ranks and settings of an attempt, None without a trainer that reported them."""
        return next((each for (of, _), each in self._known.items() if of == attempt), None)

    def rescue(self, rank: int) -> None:
        """Request the newest step that a dead or stuck trainer and the other ranks of its node have sealed,
        except steps that were given up. A newer request of a trainer that lives after all stands."""
        before = self._requested_generations()
        self._discard_damaged(rank)
        found = [
            rows for rows in self._complete(rank) if not any(self._is_given_up(each.key) for each in rows)
        ]
        node = self._node(found[0][0].attempt, rank) if found else NodeRanks(ranks=())
        in_memory = self._regions.sealed(rank)
        complete = newest_complete(in_memory or self._regions.snapshots(rank))
        # Of a job on several nodes this node may not know which step all of them hold: it is one of these.
        is_alone = complete is None if node.world is None else node.world == len(node.ranks)
        if not in_memory:
            complete = None  # not all ranks need have cached what all of them had in memory
        for rows in found[: 1 if is_alone else None]:
            if all(each.is_persisted for each in rows):
                return  # it is committed, and older steps are not needed
            order = rows[0].order
            if complete is not None and not is_alone and order < complete:
                continue  # all nodes have a newer one
            for each in rows:
                if each.is_persisted:
                    continue
                if complete in (None, order):
                    self._urgent.add(each.key)
                    if (job := self._job(each.key)) is not None:
                        job.is_urgent = True
                each.slot.request_persist_after(before[each.slot.name], each.generation)

    def _rescue_cached(self) -> None:
        """After the cache was adopted: rescue its ranks, except ranks that have begun to train, whose newest
        snapshot is in memory."""
        living = {attempt for attempt, _ in self._living}
        training = {each.slot.rank for each in self._regions.sealed() if each.attempt in living}
        for rank in sorted({held.slot.rank for held in self._regions.cached()} - training):
            self.rescue(rank)

    def resumed(self, snapshot: SnapshotId) -> None:
        """Request the snapshot that a new attempt has resumed from, even if it was given up before."""
        before = self._requested_generations()
        for each in self._regions.snapshots():
            if each.id != snapshot:
                continue
            job = self._job(each.key)
            if job is not None and not self._is_running(job):
                self._drop(job)
            each.slot.request_persist_after(before[each.slot.name], each.generation)

    def _requested_generations(self) -> dict[str, int]:
        """The generation that was requested last, by slot."""
        held = [*self._regions.slots(), *self._regions.cached()]
        return {each.slot.name: each.slot.asked for each in held}

    def next(self) -> None:
        """Begin the next commit, the next write, else an audit; and the next copy into the cache."""
        now = time.monotonic()
        if self._cache is not None:
            self._cache.next(now)
            self._fill_cache(self._cache)
        ready = self._ready(now)
        self._begin(ready, StepJob.order, self._first)
        if not all(job.is_to_commit for job in ready):
            self._stops_audit.set()  # the audit of a large state would take a run's grace
        elif now >= self._audit_at and not self._writes.busy:
            self._audit_newest()

    def _begin(
        self,
        ready: Collection[StepJob],
        order: Callable[[StepJob], Any],
        first_of: Callable[[StepJob], StepJob] = lambda job: job,
    ) -> None:
        """Begin the first commit and the first write of these jobs. A write begins after a commit in
        progress: it may name the frozen leaves of that step. So polls for other nodes come last, or they
        might leave no time for it. first_of: the job that is tried before one."""
        polls = {job: job.retry.due_at for job in ready if job.state is JobState.PART_WRITTEN}
        for job in sorted(ready, key=lambda job: (polls.get(job, 0.0), not job.is_to_commit, order(job))):
            if self._committing is None and (job.is_to_commit or not self._writes.busy):
                first = first_of(job)
                begin = self._commit if first.is_to_commit else self._write
                begin(first)

    def _first(self, chosen: StepJob) -> StepJob:
        """The job that is tried before this one: an older one that has failed, or waits for other nodes, is
        tried once more, since it can never be committed after a newer one."""
        if chosen.is_urgent:
            return chosen
        this_try = chosen.id, chosen.is_to_commit, chosen.polls
        older = [job for job in self._jobs if job.id < chosen.id and job.hastened_for != this_try]
        for job in sorted(older, key=lambda job: job.id):
            if job.state is JobState.FAILED and not job.given_up:
                can_be = job.is_to_commit or (not chosen.is_to_commit and self._can_be_written(job))
            else:
                can_be = job.state is JobState.PART_WRITTEN and chosen.is_to_commit
            if can_be:
                job.hastened_for = this_try
                return job
        return chosen

    def _can_be_written(self, job: StepJob) -> bool:
        return job.is_gathered and all(each.is_free() for each in job.members())

    def _is_running(self, job: StepJob) -> bool:
        return job in (self.writing, self._committing)

    @property
    def is_busy(self) -> bool:
        """Whether an operation is in progress, or its outcome still to be collected."""
        return self._writes.busy or self._commits.busy

    def collect(self) -> None:
        """Act on the outcomes of operations that have ended."""
        self._writes.collect()
        self._commits.collect()

    def close(self) -> None:
        """End the threads after their operations."""
        self._writes.close()
        self._commits.close()

    def run_to_idle(self, watch: Callable[[], None]) -> None:
        """Do all work that can be done now: poll once for other nodes, retry failures as often as the pauses
        allow. Calls `watch` repeatedly; an exception of it ends this once the workers are done, an interrupt
        at once, since storage may hang."""
        polls = {job: job.polls for job in self._jobs}
        try:
            while True:
                self.collect()
                now = time.monotonic()
                # Polled once: on a slow store the first step is due again before the last one was polled.
                if ready := [job for job in self._ready(now) if job.polls == polls.setdefault(job, 0)]:
                    # Oldest first: nothing is in a hurry, and after a newer commit none is left to make.
                    self._begin(ready, lambda job: job.id)
                elif not (self.is_busy or any(job.is_tried_after(now) for job in self._jobs)):
                    return
                watch()
                self._writes.wait()
        except Exception:
            while self.is_busy:
                self._writes.wait()
                self.collect()
            raise

    def try_again(self) -> None:
        """Retry all failures now, after a repair; ignore failures of the tries in progress."""
        for job in self._refresh():
            if self._is_running(job):
                self._ignored.add(job)
            elif not job.given_up:
                job.retry.succeeded()

    def expedite(self) -> None:
        """Retry failures soon: a trainer waits."""
        for job in self._refresh():
            if not job.given_up:
                job.retry.expedite(_AWAITED_RETRY_S)

    # ---- state

    @property
    def progress_bytes(self) -> int:
        return self._writer.progress_bytes

    @property
    def persisting(self) -> StepJob | None:
        """The step that is written, or else committed."""
        return self.writing or self._committing

    def waiting(self, *, for_others: bool = False) -> list[int]:
        """The requested steps that are not done; `for_others`: those that wait for other nodes."""
        jobs = [job for job in self._refresh() if not job.is_over]
        return [job.step for job in jobs if not for_others or job.state is JobState.PART_WRITTEN]

    def unsaved(self) -> list[CommitName]:
        """The requested snapshots of all ranks that are not committed."""
        return [job.name for job in self._refresh() if not job.is_over]

    def given_up(self) -> set[SlotKey]:
        """The slots of jobs that are never retried."""
        return {key for job in self._jobs if job.given_up for key in job.keys}

    def committed(self) -> list[tuple[SnapshotId, int]]:
        """The committed snapshots in slots, also of commits by an earlier keeper, each with its step."""
        return [(each.id, each.step) for each in self._regions.snapshots() if each.is_persisted]

    def cached(self) -> list[CommitName]:
        """The snapshots that all ranks of their node have in the cache, oldest first."""
        ranks: dict[SnapshotId, set[int]] = {}
        steps: dict[SnapshotId, int] = {}
        for held in self._regions.cached():
            if (sealed := held.sealed()) is not None and held.path:
                ranks.setdefault(sealed.id, set()).add(sealed.slot.rank)
                steps[sealed.id] = sealed.step
        some = {each.attempt: min(ranks[each]) for each in ranks}
        nodes = {attempt: {*self._node(attempt, rank).ranks} for attempt, rank in some.items()}
        whole = [each for each in ranks if ranks[each] >= nodes[each.attempt]]
        return [CommitName(steps[each], each.attempt, each.boundary) for each in sorted(whole)]

    def is_pending(self, attempt: AttemptName | None = None) -> bool:
        """Whether a snapshot (of an attempt) is still to be written by this keeper: not one that waits for
        other nodes, or for a rank that is dead."""
        jobs = [job for job in self._refresh() if attempt in (None, job.attempt)]
        return any(self._is_to_come(job) for job in jobs)

    def is_saved(self, rank: int) -> bool:
        """Whether the newest sealed snapshot of a rank is committed."""
        newest = self._newest(rank)
        return newest is not None and newest.is_persisted

    def is_settled(self, rank: int) -> bool:
        """Whether the newest snapshot of a rank is committed, cached or failed, or its part is written, or
        the rank has no snapshot."""
        newest = self._newest(rank)
        if newest is None or newest.is_persisted or newest.slot.failed == newest.generation:
            return True
        if newest.slot.is_cached:
            return True
        job = self._job(newest.key)
        return job is not None and (job.given_up or job.has_part)

    def is_needed(self, held: HeldRegion, sealed: Sealed) -> bool:
        """Whether a snapshot must stay in its slot, or is still to be persisted from there."""
        if must_stay(sealed, self._regions.sealed(held.slot.rank)):
            return True
        if self._regions.in_cache(sealed) is not None:
            return False
        return held.slot.wants_home(sealed.generation) and not self._is_given_up(sealed.key)

    def _newest(self, rank: int) -> Sealed | None:
        return max(self._regions.snapshots(rank), key=lambda each: each.age, default=None)

    def _complete(self, rank: int) -> list[list[Sealed]]:
        """The snapshots that all ranks of a rank's node hold, newest first."""
        steps, here = [], sorted(self._regions.snapshots(), key=lambda each: each.age)
        for own in reversed([each for each in here if each.slot.rank == rank]):
            ranks = self._node(own.attempt, rank).ranks
            same = [each for each in here if each.id == own.id]
            rows = {each.slot.rank: each for each in same if each.slot.rank in ranks} | {rank: own}
            if len(rows) == len(ranks):
                steps.append(list(rows.values()))
        return steps

    def _is_given_up(self, key: SlotKey) -> bool:
        job = self._job(key)
        return job is not None and job.given_up

    def _node(self, attempt: AttemptName, rank: int) -> NodeRanks:
        known = (each for (of, _), each in self._known.items() if of == attempt and rank in each.ranks)
        if (found := next(known, None)) is not None:
            return found
        # No trainer has reported it: the ranks with a snapshot of the attempt here, and the living ones that
        # may still report it. A part without one of them would be in the way of the whole one.
        ranks = {each.slot.rank for each in self._regions.snapshots() if each.attempt == attempt}
        ranks |= {rank, *self._living_of(attempt)}
        return NodeRanks(ranks=tuple(sorted(ranks)), world=self._world_of(attempt))

    def _living_of(self, attempt: AttemptName) -> set[int]:
        """The living ranks on this node that are, or may be, of an attempt."""
        known = {rank for of, rank in self._living if of in (None, attempt)}
        elsewhere = {rank for of, rank in self._living if of not in (None, attempt)}
        return known | (self._regions.living_ranks() - elsewhere)

    # ---- jobs

    def _job(self, key: SlotKey) -> StepJob | None:
        return next((job for job in self._jobs if key in job.keys), None)

    def _refresh(self) -> list[StepJob]:
        """All jobs, brought up to date with the words of the slots."""
        wanted: set[SlotKey] = set()
        known = {key for job in self._jobs for key in job.keys}
        for held in [*self._regions.cached(), *self._regions.slots()]:
            word = held.word()
            if word is None or not held.slot.wants_home(word.generation):
                continue
            key = held.slot.name, word.generation
            if not held.slot.is_cached and self._is_cached(held):
                continue  # it is persisted from there
            if key not in known:
                if (sealed := held.sealed()) is not None:
                    self._join(sealed)
                elif word.state is SlotState.SEALED:
                    self._discard_damaged(held.slot.rank)
            if word.state in (SlotState.SEALED, SlotState.PINNED):
                wanted.add(key)
        self._urgent &= wanted
        for job in self._jobs:
            if not job.keys <= wanted and not self._is_running(job):
                self._left(job, wanted)
        here: dict[SnapshotId, dict[int, Sealed]] = {}
        for each in self._regions.snapshots():
            here.setdefault(each.id, {})[each.slot.rank] = each
        for job in self._jobs:
            self._gather(job, here.get(job.id, {}))
        return self._jobs

    def _join(self, sealed: Sealed) -> None:
        """Put a snapshot into the job of its step."""
        rank, jobs = sealed.slot.rank, [job for job in self._jobs if job.state is JobState.GATHERING]
        same = [job for job in jobs if job.id == sealed.id and rank in job.missing]
        if not same:
            node, retry = self._node(sealed.attempt, rank), Retry(self._pauses)
            same = [StepJob(id=sealed.id, step=sealed.step, node=node, retry=retry)]
            self._jobs.append(same[0])
        same[0].snapshots[rank] = self._snapshot(sealed)
        same[0].is_urgent = same[0].is_urgent or sealed.key in self._urgent

    def _snapshot(self, sealed: Sealed) -> SealedSnapshot:
        index, region = self._regions.own_index(sealed.slot), self._regions.constants_named_by(sealed)
        regions = () if region is None else (region,)
        is_whole = bool(regions) or not sealed.record.constants_nonce
        return SealedSnapshot(
            sealed.slot, sealed.generation, index, regions, capture=sealed.capture, is_whole=is_whole
        )

    def _left(self, job: StepJob, wanted: set[SlotKey]) -> None:
        """Remove snapshots from a job that are gone or not wanted any more. A written part stays."""
        if not job.has_part or job.is_over:
            self._drop(job)
            return
        # Their slots may be unmapped from now on.
        here = [each for each in job.members() if (each.slot.name, each.generation) in wanted]
        job.snapshots = {each.rank: each for each in here}

    def _drop(self, job: StepJob) -> None:
        job.release()
        self._jobs = [each for each in self._jobs if each is not job]

    def _gather(self, job: StepJob, held: Mapping[int, Sealed]) -> None:
        """Pin the sealed snapshots of a step of several ranks until all have it or one never will. `held`:
        its snapshots that existed before this call, requested or not."""
        if job.state is not JobState.GATHERING or len(job.node.ranks) < 2 or job is self._copied_job:
            return
        absent = job.missing - held.keys()
        steps = {rank: each.step for rank, each in held.items()}
        if len({*steps.values()}) > 1:
            job.lacks = unlike_steps(steps)
        elif any(held[rank].is_persisted for rank in job.missing - absent):
            job.lacks = "another rank of this node has seen it committed, and it is not there"
        elif (why := self._why_never(job, absent)) and held.keys() == {
            each.slot.rank for each in self._regions.snapshots() if each.id == job.id
        }:
            # Read twice: a rank that has sealed it, and a later one, since the first reading has not missed
            # it.
            job.lacks = why
        elif self._may_come(job):
            for each in job.members():
                each.take()
        else:
            job.release()

    def _why_never(self, job: StepJob, absent: Collection[int]) -> str:
        """Why these ranks, which do not hold a snapshot, never will; empty if they may."""
        here = [each for each in self._regions.snapshots() if each.attempt == job.attempt]
        if passed := {each.slot.rank for each in here if each.boundary > job.boundary} & set(absent):
            return f"{ranks_named(passed)} of this node passed its boundary without a snapshot of it"
        if absent and (lost := set(absent) - self._living_of(job.attempt)):
            return f"{ranks_named(lost)} of this node ended before a snapshot of it was sealed"
        return ""

    def _give_up(self, job: StepJob, outcome: StepOutcome) -> None:
        """Never try a job again, and report it."""
        job.release()
        job.state, job.given_up = outcome.state, True
        self._mark(job, Slot.set_failed)
        if self._cache is not None:
            self._given_up.append(job)
        # Also after failed tries: this is the last report on the snapshot.
        log.warning("step %d is not persisted: %s", job.step, outcome.message)
        self._note(job, Event.ERROR, what=outcome.state.value, message=outcome.message)
        self._notify(job, outcome)

    def _is_to_come(self, job: StepJob) -> bool:
        if job.is_over or job.lacks or job.state is JobState.PART_WRITTEN:
            return False
        if job.is_gathered or job.state in (JobState.WRITING, JobState.COMMITTING):
            return job.retry.has_next
        return self._may_come(job)

    def _may_come(self, job: StepJob) -> bool:
        """Whether all ranks of the node that have not sealed it live."""
        return all((job.attempt, rank) in self._living for rank in job.missing)

    def _ready(self, now: float) -> list[StepJob]:
        jobs = [job for job in self._refresh() if not (self._is_running(job) or job.is_over)]
        due = [job for job in jobs if job.retry.is_due(now) and not self._is_to_be_cached(job)]
        return [job for job in due if job.is_to_commit or self._can_be_written(job)]

    # ---- the cache

    def _is_cached(self, held: HeldRegion) -> bool:
        """Whether the cache has a requested snapshot; then passes the request on to the cached slot."""
        sealed = held.sealed()
        cached = None if sealed is None else self._regions.in_cache(sealed)
        if cached is None:
            return False
        if (word := cached.word()) is not None and cached.slot.asked != word.generation:
            cached.slot.request_persist(word.generation)
        return True

    def _uncached(self, job: StepJob) -> list[SealedSnapshot]:
        """The snapshots that are copied into the cache before this job is written."""
        if job.is_over or job.is_to_commit or job in (self.writing, self._copied_job):
            return []
        return [each for each in job.members() if each.is_whole and not each.slot.is_cached]

    def _is_to_be_cached(self, job: StepJob) -> bool:
        if self._cache is None or not self._cache.is_usable:
            return False
        return job is self._copied_job or bool(self._uncached(job))

    def _fill_cache(self, cache: SlotCache) -> None:
        """Copy the next requested snapshot into the cache."""
        for job in self._given_up:
            self._remove_cached(cache, job)
        self._given_up = []
        if not cache.is_usable and cache.path:
            # Release the slots, which are to be overwritten: the disk may hang for ever.
            if self._copied is not None and self._copied_job is None:
                self._copied.release()
            for each in self._for_cache_alone():
                each.slot.set_failed(each.generation)
        if not cache.is_free or self._copied is not None:
            return
        for job in sorted(self._refresh(), key=StepJob.order):
            member = next((each for each in self._uncached(job) if each.take()), None)
            if member is not None:
                self._copy(cache, job, member)
                return
        for each in sorted(self._for_cache_alone(), key=lambda each: each.age, reverse=True):
            member = self._snapshot(each)
            if member.take():
                self._copy(cache, None, member)
                return

    def _for_cache_alone(self) -> list[Sealed]:
        """The snapshots in memory that were requested for the cache and not for the home."""
        found = []
        for each in self._regions.sealed():
            slot, generation = each.slot, each.generation
            is_requested = slot.wants_persist(generation) and not slot.wants_home(generation)
            if is_requested and slot.failed != generation and self._regions.in_cache(each) is None:
                found.append(each)
        return found

    def _copy(self, cache: SlotCache, job: StepJob | None, member: SealedSnapshot) -> None:
        self._copied_job, self._copied = job, member
        sealed = member.slot.sealed_or_none()
        # Regions of when the job was made may be gone.
        member.regions = () if sealed is None else self._snapshot(sealed).regions

        def done(held: HeldRegion | None) -> None:
            self._copied_job, self._copied = None, None
            sealed = None if held is None else held.sealed()
            is_written = job is not None and self._is_running(job)
            is_member = job is not None and job.snapshots.get(member.rank) is member
            if job is not None and sealed is not None and is_member and not is_written:
                job.snapshots[member.rank] = self._snapshot(sealed)
            if not is_written:
                # After the cached word: a trainer that sees the slot sealed must see that word, too.
                member.release()

        crashpoints.point("cache.pinned")
        cache.copy(member, done)

    def _remove_cached(self, cache: SlotCache, job: StepJob) -> None:
        """Remove the cached slots of a job that was given up, or only waits for other nodes. The job keeps
        the slots in memory with the same snapshots, so that they are not tried again."""
        for member in [each for each in job.members() if each.slot.is_cached]:
            twins = self._twins(member)
            cache.remove(member.slot.name)
            del job.snapshots[member.rank]
            if twins:
                job.snapshots[member.rank] = self._snapshot(twins[0])

    def _twins(self, member: SealedSnapshot) -> list[Sealed]:
        """The other slots of this node with the same snapshot: in memory, or its cached copy."""
        held = [*self._regions.slots(), *self._regions.cached()]
        found = [each.sealed() for each in held if each.slot is not member.slot]
        return [each for each in found if each is not None and each.capture == member.capture]

    def _mark(self, job: StepJob, mark: Callable[[Slot, int], None]) -> None:
        """Write a word for each snapshot of a job, in memory, for its trainer, and in the cache."""
        for member in job.members():
            mark(member.slot, member.generation)
            for each in self._twins(member):
                mark(each.slot, each.generation)

    # ---- running jobs

    def _write(self, job: StepJob) -> None:
        for each in [each for each in self._regions.snapshots() if each.key in job.keys]:
            # A region may have been handed over since.
            job.snapshots[each.slot.rank].regions = self._snapshot(each).regions
        job.state, self.writing = JobState.WRITING, job

        def done(outcome: StepOutcome | BaseException) -> None:
            self.writing = None
            found = self._ended(job, outcome)
            if found.state is not JobState.COMMITTING:
                self._follow(job, found)
                return
            job.state, job.written, job.retry.due_at = found.state, found, 0.0

        self._writes.submit(partial(self._writer.write, job), done)

    def _commit(self, job: StepJob) -> None:
        job.state, self._committing = JobState.COMMITTING, job

        def done(outcome: StepOutcome | BaseException) -> None:
            self._committing = None
            found, written = self._ended(job, outcome), job.written
            if written is not None:
                found = replace(
                    found,
                    num_bytes=written.num_bytes,
                    seconds=found.seconds + written.seconds,
                    direct=written.direct,
                    written=written.written,
                )
            self._follow(job, found)

        self._commits.submit(partial(self._committer.commit, job), done)

    def _ended(self, job: StepJob, outcome: StepOutcome | BaseException) -> StepOutcome:
        if not isinstance(outcome, BaseException):
            return outcome
        log.error("persisting step %d failed", job.step, exc_info=outcome)
        job.release()
        return StepOutcome(JobState.FAILED, message=f"{type(outcome).__name__}: {outcome}")

    def _audit_newest(self) -> None:
        self._audit_at = time.monotonic() + _SCAN_PAUSE_S
        for rank in {held.slot.rank for held in self._regions.slots()}:
            newest = self._newest(rank)
            # Cached slots are audited when they are used.
            if newest is None or newest.word.state is not SlotState.SEALED or newest.slot.is_cached:
                continue
            if newest.generation not in (self._audited.get(newest.slot.name), newest.slot.persisted):
                self._audit(newest)
                return

    def _audit(self, sealed: Sealed) -> None:
        snapshot, began = self._snapshot(sealed), time.monotonic()

        def done(found: StepOutcome | bool | BaseException) -> None:
            pause = (time.monotonic() - began) / _AUDIT_SHARE
            self._audit_at = time.monotonic() + max(pause, _MIN_AUDIT_PAUSE_S)
            if isinstance(found, BaseException):
                log.error("an audit failed", exc_info=found)
            elif isinstance(found, StepOutcome):
                job = self._job(sealed.key)
                # A part that is stored stays, and its commit may be in progress.
                self._torn(job_of_one(sealed) if job is None or job.is_to_commit else job, found)
            elif found:
                self.sound += 1
                self._audited[sealed.slot.name] = sealed.generation

        self._stops_audit.clear()
        self._writes.submit(partial(audit, snapshot, self._stops_audit.is_set), done)

    def _discard_damaged(self, rank: int) -> None:
        """Free the slots of a rank whose record does not match its checksum."""
        for held in self._regions.of_rank(rank):
            word = held.word()
            if word is None or word.state is not SlotState.SEALED:
                continue
            try:
                held.slot.sealed()
            except DamagedError as error:
                job = StepJob(id=UNKNOWN, step=-1, node=NodeRanks(ranks=(rank,)))
                job.snapshots[rank] = SealedSnapshot(held.slot, word.generation, 0)
                self._torn(job, discard(held.slot, word, Torn(str(error))))

    # ---- outcomes

    def _follow(self, job: StepJob, outcome: StepOutcome) -> None:
        job.state, job.outcome = outcome.state, outcome
        is_ignored = job in self._ignored
        self._ignored.discard(job)
        match outcome.state:
            case JobState.FAILED if is_ignored:
                job.retry.due_at = 0.0
            case JobState.GATHERING:
                job.has_part, job.written, job.retry.due_at = False, None, 0.0
            case JobState.COMMITTED:
                self._committed(job, outcome)
            case JobState.PART_WRITTEN:
                self._waits(job, outcome)
            case JobState.FAILED:
                self._failed(job, outcome)
            case JobState.SUPERSEDED | JobState.DIVERGED:
                self._superseded(job, outcome)
            case JobState.TORN:
                self._torn(job, outcome)
            case _:
                self._drop(job)
                self._notify(job, outcome)

    def _waits(self, job: StepJob, outcome: StepOutcome) -> None:
        """Only parts of other nodes are missing."""
        now = time.monotonic()
        job.polls += 1
        job.retry.wait(now, poll_pause_s(job.polls))
        job.rests_since = job.rests_since or now
        if now - job.rests_since > _OTHER_NODES_TIMEOUT_S:
            self._mark(job, Slot.set_failed)
        self._note_written(job, outcome)
        self._notify(job, outcome)

    def _committed(self, job: StepJob, outcome: StepOutcome) -> None:
        self._mark(job, Slot.set_persisted)
        for rank in job.snapshots:
            self._regions.committed(rank, (job.attempt.number, job.boundary))
        self._drop(job)
        if self._cache is not None:
            # Older parts that wait for other nodes: no start takes a step older than this one.
            older = [each for each in self._jobs if each.has_part and each.id < job.id]
            for each in [each for each in older if not self._is_running(each)]:
                self._remove_cached(self._cache, each)
        # The keeper that writes the last part of an older step commits it without this keeper.
        self._jobs = [each for each in self._jobs if each.snapshots or each.id > job.id]
        self._note_written(job, outcome)
        self._note(job, Event.COMMIT)
        self._retry_missing_regions()  # this step may have written the constants of another
        self._notify(job, outcome)
        if self._cache is not None:
            self._cache.committed(each.slot.name for each in job.members() if each.slot.is_cached)

    def _retry_missing_regions(self) -> None:
        """Retry jobs that were given up because a region was missing."""
        for job in self._jobs:
            if job.given_up and job.outcome is not None and job.outcome.lacks_region:
                job.given_up, job.retry.due_at = False, 0.0

    def _torn(self, job: StepJob, outcome: StepOutcome) -> None:
        if self._drop_bad_copy(job, outcome):
            return
        ranks, is_torn = list(job.snapshots), outcome.state is JobState.TORN
        if is_torn:
            names = [name for _, name in outcome.leaves]
            log.warning("step %d in %s was discarded: %s", job.step, outcome.slot, outcome.message)
            about = {"slot": outcome.slot, "leaves": names[:MOST_NAMED], "count": len(names)}
            self._note(job, Event.TORN, message=outcome.message, **about)
            self._notify(job, outcome)
        job.snapshots = {each.rank: each for each in job.members() if each.slot.name != outcome.slot}
        if job.snapshots and is_torn:
            # The snapshots of the other ranks will never make a whole step.
            why = f"the snapshot of {ranks_named([rank_of(outcome.slot)])} is torn"
            self._give_up(job, StepOutcome(JobState.SUPERSEDED, message=why))
        else:
            self._drop(job)
        self._rescue_dead(ranks)

    def _drop_bad_copy(self, job: StepJob, outcome: StepOutcome) -> bool:
        """Pass the cache by if a cached copy is damaged or cannot be read. Returns whether the snapshot is
        persisted from memory instead. An unreadable last copy stays."""
        copy = self._regions.cached_named(outcome.slot)
        if copy is None:
            return False
        rank, is_damaged = copy.slot.rank, outcome.state is not JobState.FAILED
        has_twin = bool(self._twins(job.snapshots[rank]))
        if is_damaged or has_twin:
            self._regions.drop_cached(copy)
        if self._cache is not None:
            self._cache.bad_copy(copy, job.step, outcome.message, is_damaged=is_damaged)
        if has_twin:
            del job.snapshots[rank]
            job.state, job.retry.due_at = JobState.GATHERING, 0.0
            if not job.snapshots:
                self._drop(job)
        return has_twin

    def _failed(self, job: StepJob, outcome: StepOutcome) -> None:
        if self._drop_bad_copy(job, outcome):
            return
        job.retry.failed(time.monotonic())
        is_living = any(rank in job.snapshots for _, rank in self._living)
        if outcome.lacks_region and not is_living:
            # No trainer is left that could hand it over. The snapshot stays, but no keeper waits for it.
            job.given_up = True
        self._mark(job, Slot.set_failed)
        if (copy := self._regions.cached_named(outcome.slot)) is not None:
            copy.slot.set_failed(0)  # the disk failed, and not the home: the snapshot stays in the cache
        if job.retry.tries == 1:
            log.error("step %d is not persisted: %s", job.step, outcome.message)
            about = {"errno": outcome.errno, "message": outcome.message}
            self._note(job, Event.ERROR, what="persist", **about)
        self._notify(job, outcome)
        if not job.snapshots and not job.retry.has_next:
            self._drop(job)
        if job.given_up:
            # An older one may hold its constants itself, and be newer than all commits.
            for rank in job.snapshots:
                self.rescue(rank)

    def _superseded(self, job: StepJob, outcome: StepOutcome) -> None:
        self._writer.forget_frozen(job.snapshots)
        self._give_up(job, outcome)
        if not job.snapshots:
            self._drop(job)
        # The newer attempt may have resumed from an older one.
        self._rescue_dead(job.snapshots.keys())

    def _rescue_dead(self, ranks: Collection[int]) -> None:
        for rank in set(ranks) - {rank for _, rank in self._living}:
            self.rescue(rank)

    def _note_written(self, job: StepJob, outcome: StepOutcome) -> None:
        """Note in the ledger, once a step, that this node's part was written."""
        if job.is_noted or not outcome.num_bytes:
            return
        job.is_noted = True
        written = [[each.rank, round(each.seconds, 4), each.num_bytes] for each in outcome.written]
        how = {"seconds": round(outcome.seconds, 4), "direct": outcome.direct, "written": written}
        self._note(job, Event.PERSIST, num_bytes=outcome.num_bytes, **how)

    def _note(self, job: StepJob, event: Event, **fields: object) -> None:
        ranks = [each.rank for each in job.members()]
        about: dict[str, object] = {"step": job.step, "boundary": job.boundary}
        if ranks:
            about |= {"rank": ranks[0], "slot": job.snapshots[ranks[0]].slot.name}
        if len(ranks) > 1:
            about |= {"ranks": ranks}
        attempt = None if job.id == UNKNOWN else str(job.attempt)
        self._ledger.add(attempt, event, **(about | self._by | fields))
