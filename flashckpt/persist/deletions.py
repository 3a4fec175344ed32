"""Deletions beside persisting: when the collector runs, and when unfinished files of dead keepers are
removed.

commit/collect.py decides what may go, and in which order. Of a dead keeper only shards go that no record and
no part names; none if one of those cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from flashckpt.commit import collect
from flashckpt.commit.catalogue import Catalogue, snapshots_with_data
from flashckpt.commit.collect import Done, Knowledge, Plan, has_lost_records
from flashckpt.commit.steps import heads_at_rest, read_record
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.names import AttemptName, CommitName, SnapshotId, frozen_path, shard_writer
from flashckpt.memory.held_regions import Regions
from flashckpt.options import Keep
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.writer import Writer
from flashckpt.store.base import Store
from flashckpt.threads import Worker

log = logging.getLogger(__name__)

_SCAN_INTERVAL_S = 1.0
_MAX_SWEEPS = 3
_MAX_NAMED = 20


class Deletions:
    """Runs one deletion at a time, for the newest of several commits. count: receives the name of each event
    and a number. pinned: returns the step that is being copied to the mirror."""

    def __init__(
        self,
        store: Store,
        regions: Regions,
        ledger: Ledger,
        worker: Worker,
        writer: Writer,
        count: Callable[[str, int], None],
        pinned: Callable[[], CommitName | None] = lambda: None,
    ) -> None:
        self._store, self._regions, self._ledger, self.worker = store, regions, ledger, worker
        self._writer, self._count, self._pinned_now = writer, count, pinned
        self._was_pinned = False
        self._wanted: tuple[AttemptName, Keep, Catalogue | None] | None = None
        self._last: tuple[AttemptName, Keep] | None = None
        self._whole: set[CommitName] = set()  # steps that were whole when this keeper committed them
        self._may_have_orphans = True  # data/ and frozen/ may hold files that no commit names
        self._later: SnapshotId | None = (
            None  # the oldest uncommitted one that goes once newer steps are kept
        )
        self._scanned_at = 0.0
        self._seen_dead: set[str] = set()
        self._dead: set[str] = set()
        self._sweeps: dict[str, int] = {}  # failed sweeps, by dead keeper
        self._has_failed = False

    @property
    def is_pending(self) -> bool:
        return self.worker.busy or self._wanted is not None or bool(self._seen_dead) or self._was_unpinned

    def committed(self, name: CommitName, keep: Keep, catalogue: Catalogue | None) -> None:
        """After a commit, delete the steps that `keep` does not keep; nothing after a commit of an attempt
        before the newest. `catalogue`: the listing by which the commit was checked."""
        if catalogue is not None and catalogue.newest_claimed != name.attempt:
            return
        if self._last is None or self._last[0] != name.attempt:
            # Keepers of other nodes may have left data of the attempt before.
            self._may_have_orphans = True
        self._whole.add(name)
        self._wanted, self._last = (name.attempt, keep, catalogue), (name.attempt, keep)

    def left_orphans(self) -> None:
        """Let the next deletion search for the files of a snapshot that will never be committed."""
        self._may_have_orphans = True

    @property
    def _was_unpinned(self) -> bool:
        """Whether the mirror has released a step."""
        return self._was_pinned and self._pinned_now() is None

    def next(self, now: float) -> None:
        """Begin the next deletion."""
        if self.worker.busy:
            return
        if now - self._scanned_at >= _SCAN_INTERVAL_S:
            self._scanned_at = now
            dead = {nonce for nonce, lives in self._regions.other_keepers().items() if not lives}
            # Seen dead twice: the file of a keeper's lock exists a moment before the lock is held.
            self._dead, self._seen_dead = dead & self._seen_dead, dead
        if self._dead:
            self._sweep(self._dead)
            self._dead = set()
            return
        if self._was_unpinned:
            self._was_pinned = False
            if self._wanted is None and self._last is not None:
                self._wanted = *self._last, None
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self._prune(*wanted)

    def _prune(self, attempt: AttemptName, keep: Keep, catalogue: Catalogue | None) -> None:
        with_uncommitted, self._may_have_orphans = self._may_have_orphans, False
        if catalogue is not None:
            self._whole.intersection_update(catalogue.commits)
        whole = set(self._whole)

        def prune() -> tuple[Plan, Done, bool]:
            pinned = self._pinned_now()
            self._was_pinned = self._was_pinned or pinned is not None
            knowledge = Knowledge(
                pinned=() if pinned is None else (pinned.id,),
                own=self._writer.nonce,
                in_hand=self._writer.frozen_in_use,
            )
            plan, deleted = collect.prune(
                self._store,
                attempt,
                keep,
                knowledge,
                catalogue=catalogue,
                whole=whole,
                with_uncommitted=with_uncommitted,
            )
            return plan, deleted, bool(deleted.released) and self._may_be_unnamed(deleted.released, catalogue)

        def done(found: tuple[Plan, Done, bool] | BaseException) -> None:
            if isinstance(found, BaseException):
                self._may_have_orphans |= with_uncommitted
                self._failed(attempt, found)
                return
            plan, deleted, has_released = found
            self._later = plan.later if with_uncommitted else self._later
            has_later = self._later is not None and plan.floor is not None and self._later < plan.floor.id
            if has_released or has_later:
                self._may_have_orphans = True
                self._wanted = self._wanted or (attempt, keep, None)
            if deleted.errors:
                self._may_have_orphans = True
                self._failed(attempt, deleted.errors[0])
            else:
                self._has_failed = False
            gone = [each for each in plan.expired if each.id in deleted.snapshots]
            if gone:
                self._count("pruned", len(gone))
                self._ledger.add(str(attempt), Event.PRUNE, steps=[each.step for each in gone])

        self.worker.submit(prune, done)

    def _may_be_unnamed(self, frozen: set[str], catalogue: Catalogue | None) -> bool:
        """Whether the newest step does not name all of these instances, which deleted steps named."""
        catalogue = Catalogue.of(self._store) if catalogue is None else catalogue
        newest = catalogue.newest_first()[:1]
        record = read_record(catalogue.store, newest[0]) if newest else None
        return record is None or not frozen.issubset(each.file for each in record.frozen)

    def _failed(self, attempt: AttemptName, error: BaseException) -> None:
        level = logging.DEBUG if self._has_failed else logging.WARNING
        log.log(level, "expired steps could not be deleted, and fill the storage: %s", error)
        self._has_failed = True
        self._count("prune_failed", 1)
        self._ledger.add(str(attempt), Event.ERROR, what="prune", message=str(error))

    def _sweep(self, dead: set[str]) -> None:
        gone, errors = list[str](), list[OSError]()
        self._may_have_orphans = True

        def done(failed: BaseException | None) -> None:
            failed = failed or (errors[0] if errors else None)
            if failed is not None and any(nonce not in self._sweeps for nonce in dead):
                log.warning("files of dead keepers could not be removed: %s", failed)
            for nonce in dead:
                self._sweeps[nonce] = self._sweeps.get(nonce, 0) + 1
                if failed is None or self._sweeps[nonce] >= _MAX_SWEEPS:
                    # A keeper must not wait for ever for failing storage: the files go with their step.
                    self._regions.forget_keeper(nonce)
                    self._seen_dead.discard(nonce)
                    self._sweeps.pop(nonce)
            if gone:
                log.info("removed unfinished files of dead keepers: %s", ", ".join(gone[:_MAX_NAMED]))
                self._ledger.add(None, Event.PRUNE, unfinished=gone[:_MAX_NAMED], count=len(gone))

        def sweep() -> None:
            for each in half_written(self._store, dead):
                try:
                    remove(self._store, each)
                    gone.append(each.path)
                except OSError as error:
                    errors.append(error)
            frozen = remove_frozen_of(self._store, dead)
            gone.extend(frozen_path(file) for file in frozen.frozen)
            errors.extend(frozen.errors)

        self.worker.submit(sweep, done)


# ---- files of dead keepers


def remove_frozen_of(store: Store, writers: Collection[str]) -> Done:
    """Delete the frozen instances of these dead keepers that no step names: the next instance may need their
    space. OSError if they cannot be listed."""
    catalogue = Catalogue.of(store)
    if not writers or catalogue.newest_claimed is None:
        return Done()
    knowledge = Knowledge(frozen=collect.frozen_instances(store, catalogue), dead_writers=writers)
    plan = Plan(frozen=collect.collect(catalogue, None, knowledge).frozen)
    return collect.execute(store, plan, catalogue, catalogue.newest_claimed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """A file that no step will ever name."""

    path: str
    num_bytes: int
    id: SnapshotId
    why: str = "its write was interrupted"


def half_written(store: Store, writers: Collection[str]) -> list[Unused]:
    """The shards of these dead keepers that no record or part names, in all attempts.

    A shard's name begins with the nonce of its keeper, and only that keeper ever names it in a part: this
    needs no newest attempt and no commit. Finds nothing where the records are lost."""
    found = list[Unused]()
    if not writers:
        return found
    catalogue = Catalogue.of(store)
    if has_lost_records(store, catalogue):
        return found
    for snapshot in sorted(snapshots_with_data(store)):
        folder = snapshot.data_folder
        begun = [each for each in store.list(folder) if shard_writer(each.name) in writers]
        named = _named_shards(store, catalogue, snapshot) if begun else None
        found += [
            Unused(path=f"{folder}/{each.name}", num_bytes=each.num_bytes, id=snapshot)
            for each in begun
            if named is not None and each.name not in named
        ]
    return found


def remove(store: Store, each: Unused) -> None:
    """Delete a file, and its folder if that is empty. OSError."""
    store.remove(each.path)
    store.remove(each.id.data_folder)


def _named_shards(store: Store, catalogue: Catalogue, snapshot: SnapshotId) -> set[str] | None:
    """The shards that a record or a part names. None if one of those cannot be read: it may name any."""
    try:
        name = catalogue.named(snapshot)
        record = None if name is None else read_record(store, name)
        heads = heads_at_rest(store, snapshot)
    except (DamagedError, FormatError, FileNotFoundError):
        return None
    named = set() if record is None else {each.file for each in record.shards}
    return named | {rank.shard.file for head in heads for rank in head.ranks}
