"""Writes one snapshot of this node from its slots to storage: pin, check, frozen leaves, audited shards, one
part, commit record.

Owns this order, and which instance of the frozen leaves a part names. Runs in a worker thread; the result is
a StepOutcome, and meanwhile only words of the slots change. Never writes a file that another keeper has
created: a stopped one may wake up and write it. Deletes only its own files that no part names; see
commit/collect.py.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flashckpt import _native, crashpoints
from flashckpt.commit import attempts, commit_step
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.commit_step import Committed, Outcome
from flashckpt.commit.steps import heads_at_rest, is_whole, missing_frozen, read_record, read_step
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError, DivergedError, FlashckptError, KeeperError, SupersededError
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.layout import Layout
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import (
    ATTEMPTS,
    FROZEN_FOLDER,
    RUN,
    AttemptName,
    frozen_name,
    frozen_path,
    part_name,
    shard_name,
)
from flashckpt.format.records import Contents, FileRecord, Part, PartHead, PartRecord, RankRecord, ShardRecord
from flashckpt.persist.audit import Torn, UnreadableError, check_cached, check_header, discard, torn, unlike
from flashckpt.persist.job import (
    Incomplete,
    JobState,
    RankWrite,
    SealedSnapshot,
    StepJob,
    StepOutcome,
    refusal,
    stored_step,
    unlike_steps,
)
from flashckpt.store.base import MemoryRange, Store

log = logging.getLogger(__name__)

# All keepers of a few nodes gather the parts of a step: the one that writes the last part commits. Of many
# nodes four are picked by the boundary, so that the requests are spread: the first gathers at once, each
# further one after more polls without a record. In the end all do: dead keepers must not hold a step up.
_POLLS_BEFORE = (0, 3, 5, 7)
_POLLS_OF_ALL = 12
_MASK = (1 << 64) - 1


@dataclass
class _Try:
    """One try to write the part of a job. `names`: the shards that were begun, with `num_bytes`; `own`: the
    part once this process has created it."""

    job: StepJob
    contents: Sequence[PinnedContent]
    names: list[str] = field(default_factory=list)
    written: list[RankWrite] = field(default_factory=list)
    num_bytes: int = 0
    direct: bool = True
    own: tuple[PartRecord, PartHead] | None = None

    @property
    def folder(self) -> str:
        return self.job.id.data_folder

    @property
    def part_path(self) -> str:
        return f"{self.folder}/{part_name(self.contents[0].rank)}"


class Writer:
    """Writes snapshots to a store. nonce: of this process, so that no two processes write one file. stands:
    whether the run still exists in the store. guard: called before anything is published; raises if this
    process may not publish any more. gathers: gather the parts of other nodes at each poll."""

    def __init__(
        self,
        store: Store,
        nonce: str,
        *,
        gathers: bool = False,
        stands: Callable[[], bool] | None = None,
        guard: Callable[[], None] = lambda: None,
        threads: int = 2,
    ) -> None:
        self._store, self._nonce, self._threads, self._guard = store, nonce, threads, guard
        self._gathers = gathers
        self._stands = stands or (lambda: store.exists(RUN))
        self._files, self._progress = 0, array("Q", [0])
        self._began_ns = time.monotonic_ns()
        self._frozen = FrozenInstances(store, nonce, threads, _native.address_of(self._progress))

    @property
    def nonce(self) -> str:
        return self._nonce

    @property
    def progress_bytes(self) -> int:
        """Bytes written so far, of all steps, also of one that is being written."""
        return self._progress[0]

    def frozen_in_use(self) -> set[str]:
        """The frozen instances that the next part may name. Any thread may call this."""
        return self._frozen.in_use()

    def persist(self, job: StepJob) -> StepOutcome:
        """Commit a step, from its snapshots or its stored parts. Never raises: failure is an outcome."""
        if job.stored is not None:
            return self._tried(lambda: self._commit_stored(job), job)
        began = time.monotonic()
        if job.missing and job.has_part:
            # Waiting for the parts of other nodes needs no slots.
            outcome = self._tried(lambda: self._commit(job), job)
            for each in job.members() if outcome.state is JobState.COMMITTED else ():
                if each.take():
                    each.slot.set_persisted(each.generation)
            job.release()
            return outcome
        if not all([each.take() for each in job.members()]):
            job.release()
            return StepOutcome(JobState.INCOMPLETE, Incomplete.GONE)
        crashpoints.point("audit.pinned")
        outcome = self._tried(lambda: self._lacking(job) if job.lacks else self._persist_pinned(job), job)
        if outcome.state is JobState.COMMITTED and all(each.holds() for each in job.members()):
            # Before the pins go: a trainer that sees the slot sealed must see the word, too.
            for each in job.members():
                each.slot.set_persisted(each.generation)
            crashpoints.point("commit.marked")
        if not job.release() and outcome.incomplete is not Incomplete.TORN:
            outcome = replace(outcome, state=JobState.FAILED, message=PIN_LOST)
        return replace(outcome, seconds=time.monotonic() - began)

    def _tried(self, operation: Callable[[], StepOutcome], job: StepJob) -> StepOutcome:
        attempt = str(job.attempt)
        try:
            return operation()
        except Torn as found:
            snapshot = found.snapshot
            assert snapshot is not None
            assert snapshot.pin is not None
            pin, snapshot.pin = snapshot.pin, None
            return discard(snapshot.slot, pin, found, attempt)
        except SupersededError as error:
            return StepOutcome(
                JobState.INCOMPLETE, Incomplete.SUPERSEDED, attempt=attempt, message=str(error)
            )
        except DivergedError as error:
            return StepOutcome(
                JobState.INCOMPLETE,
                Incomplete.DIVERGED,
                attempt=attempt,
                message=str(error),
                diverged=error.leaves,
            )
        except (OSError, FlashckptError, ValueError) as error:
            log.debug("persisting failed", exc_info=True)
            unreadable = str(error.filename) if isinstance(error, UnreadableError) else ""
            return StepOutcome(
                JobState.FAILED,
                attempt=attempt,
                message=str(error) or type(error).__name__,
                errno=error.errno or 0 if isinstance(error, OSError) else 0,
                lacks_region=isinstance(error, RegionGone),
                slot=unreadable,
            )

    # ---- stored parts, and steps that this node lacks

    def _commit_stored(self, job: StepJob) -> StepOutcome:
        stored, attempt = job.stored, str(job.attempt)
        assert stored is not None
        if stored.has_failed:
            found = stored_step(self._store, job.id)
            stored = job.stored = replace(found, may_lack_start=stored.may_lack_start)
            job.step = stored.step
        why, is_damage = refusal(self._store, stored, read=job.reads_stored)
        if not why:
            try:
                return self._commit(job)
            except DamagedError as error:
                why, is_damage = str(error), True
        if stored.is_waiting:
            return StepOutcome(JobState.PART_WRITTEN, attempt=attempt, message=why)
        incomplete = Incomplete.TORN if is_damage else Incomplete.SUPERSEDED
        return StepOutcome(JobState.INCOMPLETE, incomplete, attempt=attempt, message=why)

    def _lacking(self, job: StepJob) -> StepOutcome:
        """The outcome of a step that not all ranks of this node have any more: committed if it was committed
        before, by a keeper that died before it marked all slots."""
        for each in job.members():
            _checked(each)
        if not is_whole(self._store, job.name):
            raise SupersededError(job.lacks, step=job.step)
        return self._reported(job, self._check_committed(job))

    # ---- pinned snapshots

    def _persist_pinned(self, job: StepJob) -> StepOutcome:
        contents = [_checked(each) for each in job.members()]
        if not self._stands():
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self._store.url)
        tried, has_part = _Try(job, contents), False
        if self._may_be_at_rest(tried):
            store = self._store.at_once()
            if store.exists(job.name.path):
                return self._reported(job, self._check_committed(job))
            has_part = store.exists(tried.part_path)
        # This listing of attempts may be some seconds old; it is repeated before the record is written.
        commit_step.check_due(self._store.at_once(ATTEMPTS), job.name)
        if has_part:
            # Written in an earlier try, or by the keeper before this one.
            tried.num_bytes = sum(rank.shard.num_bytes for rank in self._read_part(tried).ranks)
        else:
            self._write(tried)
        job.has_part = True
        outcome = self._commit(job, tried.own)
        written = tuple(tried.written)
        return replace(outcome, num_bytes=tried.num_bytes, direct=tried.direct, written=written)

    def _may_be_at_rest(self, tried: _Try) -> bool:
        """Whether an earlier try, or an earlier keeper, may have written the part. If a keeper that is being
        replaced writes it later, creating the part fails."""
        first_ns = min(each.captured_ns for each in tried.contents)
        # A cached snapshot may be older than the last reboot, and its time of another clock.
        is_cached = any(each.snapshot.slot.is_cached for each in tried.contents)
        return tried.job.outcome is not None or first_ns <= self._began_ns or is_cached

    def _read_part(self, tried: _Try) -> Part:
        return Part.from_bytes(self._store.read(tried.part_path, Part.MAX_BYTES), tried.part_path)

    def _write(self, tried: _Try) -> None:
        """Write the frozen instance and the shard of each rank, then the part that names them. On failure
        removes the shards; whole frozen instances stay for the next try."""
        job, contents, is_published = tried.job, tried.contents, False
        try:
            records = [self._write_rank(tried, each) for each in contents]
            for each in contents:
                check_held(each.snapshot)
            environment = contents[0].values.get("environment") or job.node.environment
            part = Part(
                step=job.step,
                attempt=job.attempt,
                boundary=job.boundary,
                world=self._world(job),
                keeper=contents[0].rank,
                ranks=tuple(records),
                environment=environment if isinstance(environment, dict) else dict(job.node.environment),
            )
            self._guard()
            row = commit_step.publish_part(self._store, part, is_written=True)
            is_published = row is not None
            tried.own = None if row is None else (row, part.head())
        except DamagedError:
            self._frozen.forget(job.snapshots)
            raise
        finally:
            if not is_published:
                self._remove_shards(tried)

    def _write_rank(self, tried: _Try, content: PinnedContent) -> RankRecord:
        """Write the shards of a rank, and audit the bytes on the way."""
        snapshot, metadata, layout = content.snapshot, content.metadata, content.metadata.layout
        began = time.monotonic()
        with _torn_in(snapshot):
            check_cached(snapshot.slot, metadata, range(metadata.image.first_left))
            # Before the part that names it: until then an instance is an orphan.
            frozen, num_bytes = self._frozen.instance_for(content, tried.job.attempt)
            self._files += 1
            name = shard_name(content.rank, f"{self._nonce}{self._files:04x}")
            tried.names.append(name)
            crashpoints.point("write.begun")
            written = self._store.write_shard(
                f"{tried.folder}/{name}",
                layout,
                MemoryRange(snapshot.slot.image_descriptor, snapshot.slot.image_offset),
                threads=self._threads,
                progress=_native.address_of(self._progress),
            )
            crashpoints.point("write.written")
            if leaves := unlike(metadata, written.digests):
                raise torn(metadata, leaves)
        shard = ShardRecord.of(name, layout, written.checksums)
        tried.num_bytes += num_bytes + shard.num_bytes
        seconds = time.monotonic() - began
        tried.written.append(RankWrite(content.rank, seconds, num_bytes + shard.num_bytes))
        tried.direct = tried.direct and written.direct
        digests = tuple(metadata.digests[: len(layout.leaves)])
        return RankRecord(
            rank=content.rank, shard=shard, leaves=layout.leaves, digests=digests, values=content.values,
            constants=frozen, replicas=metadata.replicas(),
        )  # fmt: skip

    def _remove_shards(self, tried: _Try) -> None:
        """Remove the shards that no part names: the error may have come after the part was linked."""
        with contextlib.suppress(OSError, FlashckptError):
            named = set()
            if self._store.exists(tried.part_path):
                named = {rank.shard.file for rank in self._read_part(tried).ranks}
            for name in tried.names:
                if name not in named:
                    self._store.remove(f"{tried.folder}/{name}")

    # ---- the commit

    def _commit(self, job: StepJob, own: tuple[PartRecord, PartHead] | None = None) -> StepOutcome:
        world = self._world(job)
        gathers = self._gathers or job.stored is not None
        if not gathers and job.polls < polls_before(job.boundary, job.node.ranks, world):
            return self._reported(job, self._check_committed(job))
        try:
            found = commit_step.commit(
                self._store, job.id, world, known=job.known, own=own, guard=self._guard
            )
        except DamagedError as error:
            self._check_may_be_whole(job, error)
            raise
        if found.state is Committed.WAITING and job.snapshots and not self._has_own_part(job):
            found = Outcome(Committed.DELETED)
        return self._reported(job, found)

    def _check_committed(self, job: StepJob) -> Outcome:
        """Whether another keeper has committed the step. Reads the record alone: that keeper has checked the
        files."""
        record = read_record(self._store, job.name)
        if record is None:
            return Outcome(Committed.WAITING)
        self._guard()
        return commit_step.check_committed(self._store, record)

    def _has_own_part(self, job: StepJob) -> bool:
        """Whether this node's part exists: retention may have deleted the snapshot since."""
        return self._store.exists(f"{job.id.data_folder}/{part_name(min(job.node.ranks))}")

    def _check_may_be_whole(self, job: StepJob, error: DamagedError) -> None:
        """Raise SupersededError if the parts of a step, which never change, make no step."""
        if str(error.path or "").startswith(f"{FROZEN_FOLDER}/"):
            self._frozen.forget(job.snapshots)
            raise SupersededError(
                f"step {job.step} names frozen leaves that are not there any more ({error.path}), and is not "
                "committed. The next step writes them again.",
                step=job.step,
            ) from error
        counted = {rank.rank: head.step for head in heads_at_rest(self._store, job.id) for rank in head.ranks}
        if len({*counted.values()}) > 1:
            raise SupersededError(unlike_steps(counted), step=job.step) from error

    def _reported(self, job: StepJob, found: Outcome) -> StepOutcome:
        """The outcome of a commit. After a claim by an attempt that has not started, living trainers wait for
        its start; snapshots of dead trainers count as saved, since the claimant waits for this keeper and
        lists the steps after that."""
        attempt = str(job.attempt)
        if found.state is Committed.DELETED:
            raise SupersededError(
                f"step {job.step} of attempt {attempt} was committed and deleted since, or has lost files.",
                step=job.step,
            )
        if found.state is Committed.WAITING:
            return StepOutcome(JobState.PART_WRITTEN, attempt=attempt)
        if found.state is Committed.CLAIMED and job.has_trainers:
            newest = found.catalogue.newest_claimed if found.catalogue is not None else None
            why = f"attempt {newest} has claimed the run, and may resume from an older step"
            return StepOutcome(JobState.PART_WRITTEN, attempt=attempt, message=why)
        return StepOutcome(JobState.COMMITTED, attempt=attempt, catalogue=found.catalogue)

    def _world(self, job: StepJob) -> int:
        """The number of ranks of the attempt that captured it; from start.json if its trainers are dead."""
        if job.stored is not None:
            return job.stored.heads[0].world
        if job.node.world is not None:
            return job.node.world
        start = attempts.read_start(self._store, job.attempt)
        return start.world if start is not None else 1


@contextlib.contextmanager
def _torn_in(snapshot: SealedSnapshot) -> Iterator[None]:
    try:
        yield
    except Torn as found:
        found.snapshot = snapshot
        raise


def _checked(snapshot: SealedSnapshot) -> PinnedContent:
    """Read a pinned slot, and check that its image begins with the header of its layout."""
    with _torn_in(snapshot):
        try:
            sealed = snapshot.slot.sealed()
            if sealed is None:
                raise KeeperError(PIN_LOST)
            metadata = snapshot.slot.metadata(sealed)
            values = strict_loads(metadata.values, what="a slot's values")
        except DamagedError as error:
            raise Torn(str(error)) from error
        check_header(snapshot.slot, metadata.layout)
    return PinnedContent(snapshot, sealed.record.captured_ns, metadata, values)


def polls_before(boundary: int, ranks: Collection[int], world: int) -> int:
    """How often the keeper of these ranks polls for the record of a boundary before it gathers the parts."""
    if world <= len(_POLLS_BEFORE) * len(ranks):
        return 0
    for turn, polls in enumerate(_POLLS_BEFORE):
        if _mix(boundary * len(_POLLS_BEFORE) + turn) % world in ranks:
            return polls
    return _POLLS_OF_ALL


def _mix(number: int) -> int:
    """A 64-bit hash of a number (splitmix64 of Steele, Lea and Flood, 2014)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


_MAX_ATTEMPTS = 2  # whose newest step may name an instance
_REGION_IS_GONE = (
    "the constants of this snapshot are not in this node's memory, and no committed step names them; "
    "committed steps are not touched"
)
PIN_LOST = "the slot was taken from this keeper while it was written; another keeper has it now"


class RegionGone(KeeperError):
    """The region that a snapshot names is missing: only a trainer that has it could hand it over."""


@dataclass(frozen=True)
class PinnedContent:
    """A pinned snapshot with its metadata and values. `captured_ns`: CLOCK_MONOTONIC."""

    snapshot: SealedSnapshot
    captured_ns: int
    metadata: Metadata
    values: dict[str, object]

    @property
    def rank(self) -> int:
        return self.snapshot.rank


def check_held(snapshot: SealedSnapshot) -> None:
    """Raise KeeperError if the pin is lost: the bytes on disk were read after those of the digests, and may
    be others without the pin."""
    if not snapshot.holds():
        raise KeeperError(PIN_LOST)


def _is_of(contents: Contents, layout: Layout, digests: Sequence[int]) -> bool:
    return contents.leaves == layout.leaves and list(contents.digests) == list(digests)


def _named(store: Store, attempt: AttemptName, rank: int) -> Iterator[tuple[AttemptName, Contents]]:
    """The existing instances of a rank that the newest committed steps of `attempt` and of the attempt before
    it name, each with the attempt of its step. Skips unreadable steps."""
    seen: set[AttemptName] = set()
    for name in Catalogue.of(store).newest_first():
        if name.attempt in seen or name.attempt.number > attempt.number:
            continue
        seen.add(name.attempt)
        try:
            frozen = read_step(store, name, {rank}).rank(rank).constants
        except (FlashckptError, OSError) as error:
            log.debug("the frozen leaves of step %d cannot be read: %s", name.step, error)
            frozen = None
        if frozen is not None and not missing_frozen(store, [_row(frozen)]):
            yield name.attempt, frozen
        if len(seen) == _MAX_ATTEMPTS or name.attempt != attempt:
            return


def _row(contents: Contents) -> FileRecord:
    return FileRecord(contents.shard.file, contents.shard.num_bytes)


class FrozenInstances:
    """The instances that this keeper wrote or found named, the newest of each rank. nonce: of the keeper;
    progress: the address of the word that counts written bytes."""

    def __init__(self, store: Store, nonce: str, threads: int, progress: int) -> None:
        self._store, self._nonce, self._threads, self._progress = store, nonce, threads, progress
        self._known: dict[int, tuple[AttemptName, Contents]] = {}
        self._files, self._begun = 0, ""

    def in_use(self) -> set[str]:
        """The instances that a part of this keeper may name next, also one that is being written. For any
        thread."""
        begun = self._begun  # first: it is known before another is begun
        return {begun, *(contents.shard.file for _, contents in list(self._known.values()))}

    def forget(self, ranks: Collection[int]) -> None:
        """Do not name the known instances of these ranks again: they are missing, or being deleted."""
        for rank in ranks:
            self._known.pop(rank, None)

    def instance_for(self, content: PinnedContent, attempt: AttemptName) -> tuple[Contents | None, int]:
        """The instance that a part of `attempt` names for a snapshot, and the bytes written for it: 0 if it
        exists already. None for a snapshot without frozen leaves.

        The digests in the slot are of the live tensors at its boundary, so an instance with the same digests
        has its bytes. Otherwise the bytes in memory are needed: raises Torn if they are not those of the
        boundary, RegionGone if their region is missing, OSError, FlashckptError.
        """
        layout = content.metadata.constants
        if layout is None:
            return None, 0
        num_bytes, found = 0, self._existing(content, layout, attempt)
        if found is None:
            found, num_bytes = self._written(content, layout, attempt), layout.num_bytes
        self._known[content.rank] = attempt, found
        return found, num_bytes

    def _existing(self, content: PinnedContent, layout: Layout, attempt: AttemptName) -> Contents | None:
        digests = content.metadata.constants_digests
        known, contents = self._known.get(content.rank, (None, None))
        if contents is not None and known == attempt and _is_of(contents, layout, digests):
            return contents  # publish_part checks that it is there
        for source, contents in _named(self._store, attempt, content.rank):
            if _is_of(contents, layout, digests) and (source == attempt or self._is_whole(contents)):
                return contents
        return None

    def _is_whole(self, contents: Contents) -> bool:
        """Whether the first step of a new attempt may name this instance. Reads every byte of a local file,
        which may have rotted since; a server has compared the bytes when they were sent, and guards them."""
        path = frozen_path(contents.shard.file)
        try:
            descriptor = self._store.descriptor(path, contents.shard.num_bytes)
        except (OSError, FlashckptError) as error:
            log.warning("%s cannot be opened: %s; the frozen leaves are written again", path, error)
            return False
        if descriptor is not None:
            os.close(descriptor)
        elif self._store.capabilities.part_bytes:
            return True
        # A local file without a descriptor is compressed.
        status, detail = verify_file(
            self._store, path, contents, threads=self._threads, progress_word=self._progress
        )
        if status != "ok":
            log.warning("%s is %s (%s): the frozen leaves are written again", path, status, detail)
        return status == "ok"

    def _written(self, content: PinnedContent, layout: Layout, attempt: AttemptName) -> Contents:
        snapshot, metadata = content.snapshot, content.metadata
        first = metadata.image.first_constant
        region = next((each.region for each in snapshot.sources(metadata) if first in each.leaves), None)
        if region is None:
            raise RegionGone(_REGION_IS_GONE)
        if absent := region.not_held(metadata):
            raise torn(metadata, absent)
        check_header(region, layout)
        check_cached(region, metadata, range(first, len(metadata.leaves)))
        self._files += 1
        self._begun = name = frozen_name(attempt, snapshot.rank, f"{self._nonce}{self._files:04x}")
        written = self._store.write_shard(
            frozen_path(name),
            layout,
            MemoryRange(region.image_descriptor, region.image_offset),
            threads=self._threads,
            progress=self._progress,
        )
        try:
            if leaves := unlike(metadata, written.digests, first):
                raise torn(metadata, leaves)
            check_held(snapshot)
        except BaseException:
            with contextlib.suppress(OSError, FlashckptError):
                self._store.remove(frozen_path(name))
            raise
        shard = ShardRecord.of(name, layout, written.checksums)
        return Contents(shard=shard, leaves=layout.leaves, digests=tuple(metadata.digests[first:]))
