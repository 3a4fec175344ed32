"""Recovering a run by hand: the keeper's queue, run to idle in this process, and a report.

    delete garbage → commit whole snapshots → save memory and cache → verify, mark → free memory
    → find the next resume

A region is freed last, once its snapshot is whole at rest. The next recovery repeats a stage that was killed.
A dry run audits what a recovery would save, and writes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace

from flashckpt.catalogue.requests import Stores
from flashckpt.commit import attempts, lineage
from flashckpt.commit.choice import Offer, Place, RankOffers, Stored
from flashckpt.commit.commit_step import folder_of
from flashckpt.commit.needed import needed_slots
from flashckpt.commit.steps import heads_at_rest, is_whole, lacking
from flashckpt.commit.view import HOME, View, check_writable, open_run, writers_in
from flashckpt.errors import DamagedError, FlashckptError, RunHeldError, UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, EMPTY
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.keeper import node_keepers
from flashckpt.keeper.node_keepers import keeper_of
from flashckpt.keeper.protocol import ELECTION_LOCK, Status, remove_names
from flashckpt.memory.cache_folder import CacheFolder, cached_paths, open_cached
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.region import rank_of
from flashckpt.memory.runtime import LifeLock
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.options import user_path
from flashckpt.persist.audit import Torn, check_header, differing, discard
from flashckpt.persist.committer import Committer, KnownRun
from flashckpt.persist.job import (
    JobState,
    SealedSnapshot,
    StepJob,
    StepOutcome,
    few_pauses_s,
)
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.queue import Queue
from flashckpt.persist.writer import Writer
from flashckpt.recovery.node import Hold, died_here, hold
from flashckpt.recovery.report import (
    Fate,
    Finding,
    Kind,
    RecoveryReport,
    Resume,
    Watcher,
)  # fmt: skip
from flashckpt.recovery.storage import Examined, clear_garbage, commit_whole, examine, quarantine
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

_SHOWN = 8
# Of the outcome of a try, in a recovery and in a dry run; of all others the snapshot is kept.
_FATES = {JobState.COMMITTED: Fate.COMMITTED, JobState.TORN: Fate.TORN, JobState.FAILED: Fate.FAILED}
_SEEN = {JobState.COMMITTED: Fate.SOUND, JobState.TORN: Fate.TORN}
_SAVED = frozenset({Fate.COMMITTED, Fate.WAS_COMMITTED})
_TIERS = {Place.MEMORY: "memory", Place.CACHE: "cache", Place.HOME: "local", Place.MIRROR: "remote"}


def recover(
    store: Store,
    *,
    dry_run: bool = False,
    read: bool = True,
    remote: Store | None = None,
    cache: str | None = None,
    watcher: Watcher | None = None,
) -> RecoveryReport:
    """Save what survived a crash, and find the step from which training resumes.

    dry_run: change nothing, and report what a recovery would find. read: verify every byte of the visible
    steps. remote: the mirror that the next start will name; it is only read. cache: a folder that the run had
    as its cache on this node; snapshots there are saved like those in memory.

    Raises RunHeldError while a job, or another recovery, has the run; NoSuchStepError and RunError if the
    folder is no run; KeeperError for a keeper that does not answer.
    """
    if not dry_run:
        check_writable(store)
    watcher = watcher or Watcher()
    run = _opened(store, dry_run=dry_run)
    watcher.stage("looking")
    stands = (lambda: False) if dry_run else None
    with hold(store, run, dry_run=dry_run) as held, closing(Ledger(store, stands=stands)) as ledger:
        _rebuild_if_older(held, run)
        keeper, status = _ask_keeper(held, watcher)
        # The keeper has the snapshots, and saves them itself. A dry run finds out what it would save.
        is_keepers = keeper is not None and not held.is_view
        with closing(_NodeSnapshots(held, watcher, ledger, is_keepers=is_keepers)) as node:
            node.adopt(cache)
            # Before memory is saved: it may need the room, and a newer step must not overtake a whole one.
            orphans = {each.place: each for each in clear_garbage(held, ledger)}
            parts = commit_whole(store, dry_run=dry_run, read=read)
            _save(node, status, dry_run=dry_run)
            watcher.stage("committing")
            held.guard()
            watcher.stage("verifying")
            examined = examine(store, watcher, read=read)
            if not dry_run:
                held.guard()
                quarantine(store, examined, ledger)
                if keeper is None:
                    _note_death(held, node.unsaved, ledger)
                watcher.stage("clearing")
                orphans |= {each.place: each for each in clear_garbage(held, ledger)}
            if not is_keepers:
                node.let_go(examined)
            watcher.stage("resume")
            found, problem = node.resume(examined.damaged, remote)
            report = RecoveryReport(
                run=store.url,
                run_id=run.run_id,
                dry_run=dry_run,
                verified=read,
                keeper=keeper,
                findings=(*node.snapshots.values(), *parts, *examined.findings, *orphans.values()),
                whole=len(examined.whole),
                num_bytes=examined.num_bytes,
                resume=found,
                resume_problem=problem,
                unseen=node.unseen,
            )
        ledger.add(None, Event.RECOVER, resume=found and found.step, problem=problem or None)
    return report


def _save(node: _NodeSnapshots, status: Status | None, *, dry_run: bool) -> None:
    """Save what memory and cache hold. `status`: of the keeper that has saved it, or None."""
    if status is not None:
        node.report(status)
        return
    with _without_log(dry_run):
        node.save()


def _rebuild_if_older(held: Hold, run: View) -> None:
    """Make the catalogue anew if it is older than the checkpoints beside it, as a restored one may be. Does
    nothing in a dry run."""
    known = run.catalogue
    if held.is_view or not (known.foreign or any(each > known.writer for each in writers_in(held.store))):
        return
    held.guard()
    held.newest = _rebuilt(held.store, run).attempt


def _opened(store: Store, *, dry_run: bool) -> View:
    """The run in a store. A lost catalogue is made anew from the checkpoints that are whole, once it is sure
    that no job trains the run."""
    try:
        return open_run(store, create=False)
    except (UnusableRunError, DamagedError):
        if dry_run:
            raise
    attempts.check_none_lives(store)
    return _rebuilt(store)


def _rebuilt(store: Store, before: View | None = None) -> View:
    """Make a version from the checkpoints that are whole. The newest view, if there is nothing to make."""
    rebuilt = View(Stores({HOME.store: store}).run(HOME.rebuild(secrets.token_hex(4))), store)
    if rebuilt != before:
        log.warning(
            "%s had lost its %s/, or had an older one than its checkpoints. A version was made from the "
            "%d checkpoints that are whole; a branch or a removal since the last readable version is lost",
            store.url, CATALOGUE, len(rebuilt.checkpoints),
        )  # fmt: skip
    return rebuilt


def _ask_keeper(held: Hold, watcher: Watcher) -> tuple[int | None, Status | None]:
    """Let a living keeper save what it has. Returns its process and its status; (None, None) if this process
    has taken its place. A dry run asks nothing."""
    if held.is_view:
        return keeper_of(held.runtime), None
    watcher.stage("draining")
    if held.election is not None:
        return None, None
    keeper = keeper_of(held.runtime)
    status = node_keepers.wait_until_saved(
        held.store.url, held.runtime, watcher.progress, watcher.say, held.guard
    )
    if status is not None:
        return keeper or 0, status
    held.election = LifeLock.acquire(held.runtime, ELECTION_LOCK)
    held.guard()
    if held.election is None:
        raise RunHeldError(
            f"Another keeper of {held.store.url} has begun on this machine. Nothing was changed. Run this "
            "again.",
            path=held.store.url,
        )
    return None, None


def _note_death(held: Hold, unsaved: Collection[AttemptName], ledger: Ledger) -> None:
    """Record that the newest attempt is dead, if it died on this node, so that the next job need not watch
    it; only once everything of it is saved."""
    name = died_here(held.store, held.runtime)
    # After the listing: a job that has begun meanwhile may be the newest, and lives.
    held.guard()
    if name is None or name in unsaved:
        return
    try:
        attempts.mark_ended(held.store, name, "dead")
    except OSError as error:
        log.warning("the end of attempt %s could not be recorded: %s", name, error)
    else:
        ledger.add(str(name), Event.DEATH, by="recover")


@contextlib.contextmanager
def _without_log(is_dry: bool) -> Iterator[None]:
    """Disable the log of the queue in a dry run: it would say that snapshots were discarded."""
    queue_log = logging.getLogger(Queue.__module__)
    before, queue_log.disabled = queue_log.disabled, is_dry
    try:
        yield
    finally:
        queue_log.disabled = before


class _NodeSnapshots:
    """The snapshots of a run in the named regions of this node and in its folder in a cache, given to the
    keeper's queue. `is_keepers`: a living keeper has them, and the queue gets none. `snapshots`: what was
    found, by slot. `unseen`: the ranks of the newest attempt with nothing here."""

    def __init__(self, held: Hold, watcher: Watcher, ledger: Ledger, *, is_keepers: bool) -> None:
        is_view = held.is_view or is_keepers
        self._hold, self._store, self._runtime = held, held.store, held.runtime
        self._watcher, self._is_view = watcher, is_view
        nonce = secrets.token_hex(4)
        self._regions = Regions(self._runtime, nonce, is_view=is_view)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        run = KnownRun(self._store)
        self._queue = Queue(
            self._regions,
            (_Auditor if held.is_view else Writer)(run, nonce, guard=held.guard),
            (_Outlook if held.is_view else Committer)(run, guard=held.guard, gathers=True),
            self._wake,
            ledger,
            notify=self._note_outcome,
            pauses=few_pauses_s,
            world_of=self._world_of,
            by="recover",
        )
        self.snapshots: dict[str, Finding] = {}
        self._sealed_in: dict[str, Sealed] = {}
        self._waiting: set[AttemptName] = set()
        self._cache: CacheFolder | None = None
        self._unread_files: set[str] = set()
        self.unseen: tuple[int, ...] = ()

    def adopt(self, cache: str | None) -> None:
        """Find the snapshots. KeeperError if another process uses the run's folder in `cache`."""
        self._regions.adopt_named()
        for name, why in self._regions.not_adopted.items():
            self._note(name, Fate.KEPT, why, damage=True)
        for path in [] if cache is None else self._open_cache(user_path(cache)):
            name = os.path.basename(path)
            try:
                slot = open_cached(path, self._runtime.identity)
            except DamagedError as error:
                self._note(name, Fate.TORN, str(error))
            except (FlashckptError, OSError) as error:
                # The file stays: it may be of another version, or its disk may fail.
                self._unread_files.add(name)
                fate = Fate.FAILED if isinstance(error, OSError) else Fate.KEPT
                self._note(name, fate, str(error), damage=True)
            else:
                self._regions.put_cached(slot, path)
        ranks = {held.slot.rank for held in self._regions.everything()}
        self.unseen = self._unseen(ranks.union(map(rank_of, self.snapshots)))

    def _open_cache(self, base: str) -> list[str]:
        """The files of the run in a cache, which is locked unless this is a view."""
        identity = os.path.basename(self._runtime.path)
        if not self._is_view:
            try:
                self._cache = CacheFolder.open(base, identity, create=False)
            except FileNotFoundError:
                return []
            self._cache.names()  # removes half-written files
        return cached_paths(base, identity)

    def _unseen(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The ranks of the newest attempt, if it did not end in order, that have nothing on this node: a
        recovery on their nodes saves theirs."""
        newest = View.of(self._store)
        if newest.attempt is None or newest.catalogue.world < 2:
            return ()
        if attempts.ending(newest, newest.attempt) == "closed":
            return ()
        return tuple(rank for rank in range(newest.catalogue.world) if rank not in ranks)

    @property
    def unsaved(self) -> set[AttemptName]:
        """Attempts with a snapshot that could not be saved, or that is not whole without other nodes."""
        failed = (each.attempt for each in self.snapshots.values() if each.outcome is Fate.FAILED)
        return {attempt for attempt in failed if attempt is not None} | self._waiting

    # ---- running the queue

    def save(self) -> None:
        """Persist and commit the snapshots that are needed; a dry run finds out what would become of them.
        Afterwards `snapshots` has a row for each."""
        self._regions.reclaim()
        self._list()
        for rank in sorted({held.slot.rank for held in (*self._regions.slots(), *self._regions.cached())}):
            self._queue.rescue(rank)
        before = self._queue.progress_bytes

        def watch() -> None:
            self._hold.guard()
            writing = self._queue.writing
            names = [each.slot.name for each in writing.members()] if writing is not None else []
            total = sum(self.snapshots[name].num_bytes for name in names if name in self.snapshots)
            self._watcher.progress(self._queue.progress_bytes - before, total)

        self._queue.run_to_idle(watch)
        for name, found in self.snapshots.items():
            if found.outcome is Fate.KEPT and not found.detail and found.attempt in self.unsaved:
                self._note(name, Fate.KEPT, "a newer one could not be saved")

    def _world_of(self, attempt: AttemptName) -> int | None:
        with contextlib.suppress(DamagedError):
            newest = View.of(self._store)
            if newest.attempt == attempt or (newest.parent and newest.parent.attempt == attempt):
                return newest.catalogue.world
        return None

    def _sealed(self) -> list[Sealed]:
        """The snapshots in slots, newest first; of two copies that in memory comes before that in the
        cache."""
        held = [*self._regions.slots(), *self._regions.cached()]
        found = [sealed for each in held if (sealed := each.sealed()) is not None]
        return sorted(found, key=lambda each: each.age, reverse=True)

    # ---- findings

    def _list(self) -> None:
        """Make a row for each slot with a snapshot."""
        self._sealed_in = {each.slot.name: each for each in self._sealed()}
        for name, sealed in self._sealed_in.items():
            outcome = Fate.WAS_COMMITTED if sealed.is_persisted else Fate.KEPT
            size = sealed.record.image_bytes + sealed.record.constants_bytes
            self.snapshots[name] = Finding(Kind.SNAPSHOT, outcome, name, sealed.id, sealed.step, size)
        for held in self._regions.slots():
            try:
                held.slot.sealed()
            except DamagedError as error:
                self._note(held.slot.name, Fate.TORN, str(error))

    def report(self, status: Status) -> None:
        """The slots of a living keeper, with what its status says of them."""
        reasons = dict.fromkeys(status.waiting, node_keepers.STILL)
        reasons |= dict.fromkeys(status.for_others, "its part is saved; those of other nodes are missing")
        reasons |= {each.step: each.message for each in status.failures}
        self._list()
        for name, sealed in self._sealed_in.items():
            outcome = self.snapshots[name].outcome
            if sealed.step in status.for_others:
                outcome = Fate.KEPT
            elif sealed.step in status.waiting and not sealed.is_persisted:
                outcome = Fate.FAILED
            self._note(name, outcome, reasons.get(sealed.step, "the keeper has it"))
        for torn in status.torn:
            why = f"not the bytes of its boundary: {', '.join(torn.leaves[:_SHOWN]) or 'its metadata'}"
            self.snapshots[torn.slot] = Finding(
                Kind.SNAPSHOT, Fate.TORN, torn.slot, step=torn.step, detail=why, damage=True
            )

    def _note_outcome(self, job: StepJob, outcome: StepOutcome) -> None:
        state, detail, torn = outcome.state, outcome.message, list[str]()
        if state is JobState.PART_WRITTEN:
            self._waiting.add(job.attempt)
            detail = detail or "its part is saved; it is committed once those of the other ranks are there"
        elif state is JobState.TORN:
            torn = self._copies(outcome.slot)
            if names := ", ".join(leaf for _, leaf in outcome.leaves[:_SHOWN]):
                detail = f"not the bytes of its boundary: {names}"
        fate = (_SEEN if self._hold.is_view else _FATES).get(state, Fate.KEPT)
        for name in (name for each in job.members() for name in self._copies(each.slot.name)):
            if torn and name not in torn:
                self._note(name, Fate.KEPT, f"what rank {rank_of(outcome.slot)} has of it is torn")
            else:
                self._note(name, fate, detail)

    def _copies(self, name: str) -> list[str]:
        """The slot and the one that has the same snapshot, in memory or in the cache."""
        found = self.snapshots.get(name)
        if found is None or found.id is None:
            return [name]
        mine = rank_of(name), found.id
        return [other for other, each in self.snapshots.items() if (rank_of(other), each.id) == mine]

    def _note(self, name: str, outcome: Fate, detail: str = "", *, damage: bool = False) -> None:
        found = self.snapshots.get(name, Finding(Kind.SNAPSHOT, outcome, name))
        damage = damage or outcome is Fate.TORN
        self.snapshots[name] = replace(found, outcome=outcome, detail=detail, damage=damage)

    # ---- freeing memory

    def let_go(self, examined: Examined) -> None:
        """Remove the regions whose snapshots are whole at rest, or not needed. `examined` are the steps at
        rest: the copy of a step that is damaged there stays."""
        stays = self._settle(examined)
        if self._hold.is_view:
            return
        for held in self._regions.slots():
            self._hold.guard()
            if held.slot.name not in stays:
                self._regions.remove(held)
        self._hold.guard()
        self._regions.drop_constants()
        if self._cache is None:
            return
        names = self._cache.names()
        kept = (stays | self._unread_files).intersection(names)
        for name in names:
            # A slot that stays may name constants, and so may a file that could not be read.
            if name in kept or (kept and not name.startswith("slot-")):
                continue
            self._hold.guard()
            if (cached := self._regions.cached_named(name)) is not None:
                self._regions.drop_cached(cached)
            self._cache.remove(name)
        if not kept:
            self._cache.discard()

    def _settle(self, examined: Examined) -> set[str]:
        """The names of the slots that stay: of those that are not torn, the ones that are not whole at rest,
        and still count. Notes the outcome of the others."""
        view, stays, committed, found = View.of(self._store), set[str](), set[str](), self.snapshots
        left = {name: each for name, each in self._sealed_in.items() if found[name].outcome is not Fate.TORN}
        for name, each in left.items():
            at_rest = CommitName(each.step, each.attempt, each.boundary)
            if found[name].outcome not in _SAVED:
                continue
            if at_rest in examined.damaged:
                stays.add(name)
                self._note(name, Fate.KEPT, "its copy at rest is not whole: training resumes from memory")
            elif is_whole(view, at_rest):
                committed.add(name)
        unsaved = left.keys() - committed
        stays |= {name for name in unsaved if left[name].attempt in self.unsaved}
        try:
            stays |= needed_slots(self._store, [*left.values()], committed) if unsaved else set()
        except (OSError, FlashckptError):
            stays |= unsaved
        for name in left.keys() - stays:
            if found[name].outcome is Fate.KEPT:
                found[name] = replace(found[name], outcome=Fate.DROPPED)
        return stays

    def close(self) -> None:
        """Let the next keeper find the slots that stay, and leave no other name behind. After an interrupt a
        busy worker keeps its files until the process ends."""
        if not self._queue.is_busy:
            self._regions.close()
            if self._cache is not None:
                self._cache.close()
            self._queue.close()
            os.close(self._wake)
        with contextlib.suppress(OSError, FlashckptError):
            if self._hold.election is not None and self._hold.election.stands(self._runtime):
                self._regions.remove_dead_locks()
                remove_names(self._runtime)

    # ---- the next resume

    def resume(self, damaged: Collection[CommitName], remote: Store | None) -> tuple[Resume | None, str]:
        """The step and tier of the next resume, or why there is none; neither for a run without steps.
        `damaged` are steps at rest that cannot be used. A snapshot in memory or cache is audited if it comes
        first."""
        there = None if remote is None else Stored(EMPTY, remote)
        torn = set[tuple[str, int]]()
        while True:
            held, offers = self._offers(torn)
            row = RankOffers.of(0, offers)
            try:
                broken = [each.id for each in damaged]
                choice = lineage.next_start(View.of(self._store), [row], there, damaged=broken)
            except (OSError, FlashckptError) as error:
                return None, f"the step is not known: {error}"
            if choice.refusal is not None or not choice.candidates:
                return None, str(choice.refusal or "")
            first = choice.candidates[0]
            place = first.places(row)[0]
            wrong = set[tuple[str, int]]()
            if place in (Place.MEMORY, Place.CACHE):
                wrong = {each.key for each in held[first.id] if any(_wrong_leaves(self._snapshot(each)))}
            if not wrong:
                of_all = not (self.unseen and place in (Place.MEMORY, Place.CACHE))
                attempt, tier = first.id.attempt, _TIERS[place]
                return Resume(step=first.step, attempt=attempt, tier=tier, of_all=of_all), ""
            torn |= wrong

    def _snapshot(self, sealed: Sealed) -> SealedSnapshot:
        region = self._regions.constants_named_by(sealed)
        regions: tuple[Slot, ...] = () if region is None else (region,)
        return SealedSnapshot(sealed.slot, sealed.generation, 0, regions)

    def _offers(
        self, torn: Collection[tuple[str, int]]
    ) -> tuple[dict[SnapshotId, list[Sealed]], list[Offer]]:
        """The copy of each snapshot that each rank would read, but for `torn` ones, and the offers. One that
        not all ranks of its attempt here have cannot be used: the ranks of a node resume from one boundary
        together."""
        ranks: dict[AttemptName, set[int]] = {}
        copies: dict[SnapshotId, dict[int, Sealed]] = {}
        for each in self._sealed():
            ranks.setdefault(each.attempt, set()).add(each.slot.rank)
            if each.key not in torn:
                copies.setdefault(each.id, {}).setdefault(each.slot.rank, each)
        held, offers = {id: [*of.values()] for id, of in copies.items()}, []
        for id, of in held.items():
            problem = "" if len(of) == len(ranks[id.attempt]) else "not all ranks of this node have it there"
            place = Place.CACHE if any(each.slot.is_cached for each in of) else Place.MEMORY
            offers.append(Offer(id=id, step=of[0].step, place=place, problem=problem))
        return held, offers


class _Auditor(Writer):
    """Of a dry run: finds out what would become of a step, and writes nothing."""

    def write(self, job: StepJob) -> StepOutcome:
        """The outcome of a try, if storage takes the bytes."""
        view = View.of(self._store)
        try:
            folder = folder_of(view, job.id)
            heads = heads_at_rest(self._store, folder)
            missing = {*lacking(heads, job.node.world or 1)}.difference(job.node.ranks)
        except FlashckptError as error:
            return StepOutcome(JobState.SUPERSEDED, message=str(error))
        for each in job.members():
            wrong, frozen = _wrong_leaves(each)
            if wrong:
                return discard(each.slot, each.slot.state(), Torn("", tuple(enumerate(wrong))))
            if frozen:
                why = f"frozen leaves in memory are missing or differ ({', '.join(frozen[:_SHOWN])})"
                why += ": it is saved if their file at rest is whole"
                return StepOutcome(JobState.FAILED, message=why, lacks_region=True)
        if missing and not view.catalogue.has(job.id):
            why = "its part would be saved; those of other ranks are missing"
            return StepOutcome(JobState.PART_WRITTEN, message=why)
        return StepOutcome(JobState.COMMITTED)


class _Outlook(Committer):
    """Of a dry run: is asked only for steps that not all ranks of this node have."""

    def commit(self, job: StepJob) -> StepOutcome:
        return StepOutcome(JobState.SUPERSEDED, message=job.lacks)


def _wrong_leaves(snapshot: SealedSnapshot) -> tuple[list[str], list[str]]:
    """The leaves of a snapshot whose bytes are not those of its boundary, and the frozen ones."""
    slot = snapshot.slot
    try:
        if (sealed := slot.sealed()) is None:
            return ["it was overwritten"], []
        metadata = slot.metadata(sealed)
        check_header(slot, metadata.image.shard)
        wrong = differing(metadata, snapshot.sources(metadata))
    except (DamagedError, Torn, OSError) as error:
        return [str(error)], []
    names = [metadata.leaves[index].name for index in wrong]
    count = sum(index < metadata.image.first_constant for index in wrong)
    return names[:count], names[count:]
