"""Writes one snapshot of this node from its slots to storage: pin, check, frozen leaves, audited shards, one
part, commit.

Owns this order, and which file of frozen leaves a part names. Runs in a worker thread; the result is a
StepOutcome, and meanwhile only words of the slots change. Never writes a file that another keeper has
created: a stopped one may wake up and write it. Deletes only its own files that no part names.
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
from flashckpt.catalogue.changes import Committed
from flashckpt.commit import commit_step
from flashckpt.commit.commit_step import KEEP_ALL, Outcome
from flashckpt.commit.steps import heads_at_rest, is_whole, read_step
from flashckpt.commit.verification import verify_file
from flashckpt.commit.view import View
from flashckpt.errors import (
    DamagedError,
    DivergedError,
    FlashckptError,
    KeeperError,
    RunError,
    SupersededError,
)
from flashckpt.format.catalogue import EMPTY, Catalogue, Folder
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.layout import Layout
from flashckpt.format.manifest import frozen_name, shard_name
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.records import Contents, Part, RankRecord, ShardRecord
from flashckpt.options import Keep
from flashckpt.persist.audit import Torn, UnreadableError, check_cached, check_header, discard, torn, unlike
from flashckpt.persist.job import (
    JobState,
    RankWrite,
    SealedSnapshot,
    StepJob,
    StepOutcome,
    unlike_steps,
)
from flashckpt.store.base import MemoryRange, Store

log = logging.getLogger(__name__)

# All keepers of a few nodes gather the parts of a step: the one that writes the last part commits. Of many
# nodes only the keeper of rank 0's node does. If it is dead, the others do after so many polls.
_FEW_NODES = 4
_POLLS_OF_OTHERS = 12
_MANY_NODES = 8


@dataclass
class _Try:
    """One try to write the part of a job into a folder. `names`: the shards that were begun, with
    `num_bytes`."""

    job: StepJob
    contents: Sequence[PinnedContent]
    folder: Folder
    names: list[str] = field(default_factory=list)
    written: list[RankWrite] = field(default_factory=list)
    num_bytes: int = 0
    direct: bool = True


class Writer:
    """Writes snapshots to a store. nonce: of this process, so that no two processes write one file. stands:
    whether the run still exists in the store. guard: called before anything is published; raises if this
    process may not publish any more. gathers: gather the parts of other nodes at each poll. pinned: the
    step that is being copied to the mirror, which retention spares."""

    def __init__(
        self,
        store: Store,
        nonce: str,
        *,
        gathers: bool = False,
        stands: Callable[[], bool] | None = None,
        guard: Callable[[], None] = lambda: None,
        pinned: Callable[[], CommitName | None] = lambda: None,
    ) -> None:
        self._store, self._nonce, self._guard = store, nonce, guard
        self._gathers, self._pinned = gathers, pinned
        self._stands = stands or (lambda: True)
        self._known: Catalogue = EMPTY
        self._files, self._progress = 0, array("Q", [0])
        self._began_ns = time.monotonic_ns()
        self._frozen = FrozenFiles(store, nonce, _native.address_of(self._progress))

    @property
    def progress_bytes(self) -> int:
        """Bytes written so far, of all steps, also of one that is being written."""
        return self._progress[0]

    def persist(self, job: StepJob) -> StepOutcome:
        """Commit a step from its snapshots. Never raises: failure is an outcome."""
        began = time.monotonic()
        if job.missing and job.has_part:
            # Waiting for the parts of other nodes needs no slots.
            outcome = self._tried(lambda: self._commit(job, self._view()), job)
            for each in job.members() if outcome.state is JobState.COMMITTED else ():
                if each.take():
                    each.slot.set_persisted(each.generation)
            job.release()
            return outcome
        if not all([each.take() for each in job.members()]):
            job.release()
            return StepOutcome(JobState.GONE)
        crashpoints.point("audit.pinned")
        outcome = self._tried(lambda: self._lacking(job) if job.lacks else self._persist_pinned(job), job)
        if outcome.state is JobState.COMMITTED and all(each.holds() for each in job.members()):
            # Before the pins go: a trainer that sees the slot sealed must see the word, too.
            for each in job.members():
                each.slot.set_persisted(each.generation)
            crashpoints.point("commit.marked")
        if not job.release() and outcome.state is not JobState.TORN:
            outcome = replace(outcome, state=JobState.FAILED, message=PIN_LOST)
        return replace(outcome, seconds=time.monotonic() - began)

    def _tried(
        self, operation: Callable[[], StepOutcome], job: StepJob, *, is_again: bool = False
    ) -> StepOutcome:
        try:
            return operation()
        except Torn as found:
            snapshot = found.snapshot
            assert snapshot is not None
            assert snapshot.pin is not None
            pin, snapshot.pin = snapshot.pin, None
            return discard(snapshot.slot, pin, found)
        except SupersededError as error:
            was_resumed = self._was_resumed(job)
            if was_resumed and not is_again:
                return self._tried(operation, job, is_again=True)
            state = JobState.FAILED if was_resumed else JobState.SUPERSEDED
            return StepOutcome(state, message=str(error))
        except DivergedError as error:
            return StepOutcome(JobState.DIVERGED, message=str(error), diverged=error.leaves)
        except (OSError, FlashckptError, ValueError) as error:
            log.debug("persisting failed", exc_info=True)
            unreadable = str(error.filename) if isinstance(error, UnreadableError) else ""
            return StepOutcome(
                JobState.FAILED,
                message=str(error) or type(error).__name__,
                errno=error.errno or 0 if isinstance(error, OSError) else 0,
                lacks_region=isinstance(error, RegionGone),
                slot=unreadable,
            )

    def _view(self) -> View:
        """The newest version of the catalogue. RunError if another run, or an older catalogue, has replaced
        the one that is known; the next try begins with what is there then."""
        try:
            view = View.of(self._store, self._known)
        except RunError:
            self._known = EMPTY
            raise
        self._known = view.catalogue
        if not view.catalogue.version:
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self._store.url)
        return view

    def _was_resumed(self, job: StepJob) -> bool:
        """Whether a newer attempt has resumed from this snapshot, and so it must be written into its
        folder."""
        with contextlib.suppress(OSError, FlashckptError):
            view = self._view()
            is_due = not (view.catalogue.has(job.id) or commit_step.is_overtaken(view, job.id))
            return view.parent == job.id and is_due and not job.lacks
        return False

    # ---- steps that this node lacks

    def _lacking(self, job: StepJob) -> StepOutcome:
        """The outcome of a step that not all ranks of this node have any more: committed if it was committed
        before, by a keeper that died before it marked all slots."""
        for each in job.members():
            _checked(each)
        view = self._view()
        if not is_whole(view, job.name):
            raise SupersededError(job.lacks, step=job.step)
        return self._reported(job, Outcome(Committed.YES, view))

    # ---- pinned snapshots

    def _persist_pinned(self, job: StepJob) -> StepOutcome:
        contents = [_checked(each) for each in job.members()]
        if not self._stands():
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self._store.url)
        may_be_at_rest = self._may_be_at_rest(job, contents)
        # Where each listing is a request, the last version shows the writer; the commit lists anyway.
        is_known = self._known.attempt == job.attempt and not self._store.capabilities.is_folder
        view = View(self._known, self._store) if is_known and not may_be_at_rest else self._view()
        if view.catalogue.has(job.id):
            return self._reported(job, self._committed(job, view))
        folder = commit_step.folder_of(view, job.id)
        if commit_step.is_overtaken(view, job.id):
            return self._reported(job, Outcome(Committed.OVERTAKEN, view))
        tried = _Try(job, contents, folder)
        if not (job.folder == folder and job.has_part):
            # A part of an earlier attempt's folder does not count in that of the attempt which resumed it.
            job.folder, job.has_part = folder, False
            if may_be_at_rest:
                self._find_part(tried)
            if not job.has_part:
                self._write(tried, view)
        outcome = self._commit(job, view)
        written = tuple(tried.written)
        return replace(outcome, num_bytes=tried.num_bytes, direct=tried.direct, written=written)

    def _may_be_at_rest(self, job: StepJob, contents: Sequence[PinnedContent]) -> bool:
        """Whether an earlier try, or an earlier keeper, may have written the part."""
        first_ns = min(each.captured_ns for each in contents)
        # A cached snapshot may be older than the last reboot, and its time of another clock.
        is_cached = any(each.snapshot.slot.is_cached for each in contents)
        return job.outcome is not None or first_ns <= self._began_ns or is_cached

    def _find_part(self, tried: _Try) -> None:
        """Find a part of these ranks at rest, with its files: of an earlier try, or an earlier keeper. Remove
        the files of these ranks that a killed keeper has not finished. One that lives writes its own again.
        """
        job, ranks = tried.job, {each.rank for each in tried.contents}
        sizes = {each.name: each.num_bytes for each in self._store.list(tried.folder.path)}
        partial = tuple(f".{name}-{rank:05d}-" for rank in ranks for name in ("rank", "frozen"))
        unfinished = [each for each in sizes if each.startswith(partial) and each.endswith(".tmp")]
        self._store.remove_files(f"{tried.folder.path}/{name}" for name in unfinished)
        for name, head in heads_at_rest(self._store, tried.folder).items():
            is_whole = all(sizes.get(each.name) == each.num_bytes for each in head.files)
            if is_whole and {each.rank for each in head.ranks} == ranks:
                job.has_part, job.part = True, name
                tried.num_bytes = sum(each.num_bytes for each in head.files)
                return

    def _write(self, tried: _Try, view: View) -> None:
        """Write the frozen file and the shard of each rank, then the part that names them. On failure removes
        the shards; whole frozen files stay for the next try."""
        job, contents = tried.job, tried.contents
        try:
            records = [self._write_rank(tried, each, view) for each in contents]
            for each in contents:
                check_held(each.snapshot)
            environment = contents[0].values.get("environment") or job.node.environment
            part = Part(
                id=job.id,
                step=job.step,
                world=self._world(job, view),
                node=contents[0].rank,
                ranks=tuple(records),
                environment=environment if isinstance(environment, dict) else dict(job.node.environment),
            )
            self._guard()
            self._files += 1
            nonce = f"{self._nonce}{self._files:04x}"
            file = commit_step.publish_part(self._store, tried.folder, part, nonce)
            job.has_part, job.part = True, file.name
            job.known[file.name] = part.head()  # the committer need not read it
        except DamagedError:
            self._frozen.forget(job.snapshots)
            raise
        finally:
            if not job.has_part:
                self._remove_shards(tried)

    def _write_rank(self, tried: _Try, content: PinnedContent, view: View) -> RankRecord:
        """Write the shards of a rank, and audit the bytes on the way."""
        snapshot, metadata, layout = content.snapshot, content.metadata, content.metadata.layout
        began = time.monotonic()
        with _torn_in(snapshot):
            check_cached(snapshot.slot, metadata, range(metadata.image.first_left))
            frozen, num_bytes = self._frozen.file_for(content, tried.folder, view)
            self._files += 1
            name = shard_name(content.rank, f"{self._nonce}{self._files:04x}")
            tried.names.append(name)
            crashpoints.point("write.begun")
            written = self._store.write_shard(
                f"{tried.folder.path}/{name}",
                layout,
                MemoryRange(snapshot.slot.image_descriptor, snapshot.slot.image_offset),
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
            constants=None if frozen is None else frozen.contents,
            base=None if frozen is None else frozen.base, replicas=metadata.replicas(),
        )  # fmt: skip

    def _remove_shards(self, tried: _Try) -> None:
        """Remove the shards that no part names: the error may have come after the part was linked."""
        with contextlib.suppress(OSError, FlashckptError):
            heads = heads_at_rest(self._store, tried.folder).values()
            named = {file.name for head in heads for file in head.files}
            for name in tried.names:
                if name not in named:
                    self._store.remove(f"{tried.folder.path}/{name}")

    # ---- the commit

    def _commit(self, job: StepJob, view: View) -> StepOutcome:
        if view.catalogue.has(job.id):
            return self._reported(job, self._committed(job, view))
        folder = commit_step.folder_of(view, job.id)
        if folder != job.folder:
            raise SupersededError(
                f"step {job.step} of attempt {job.attempt} has a part in the folder of an older attempt.",
                step=job.step,
            )
        world = self._world(job, view)
        if not self._gathers and job.polls < polls_before(job.node.ranks, world):
            state = Committed.OVERTAKEN if commit_step.is_overtaken(view, job.id) else Committed.WAITING
            return self._reported(job, Outcome(state, view))
        pinned = self._pinned()
        try:
            found = commit_step.commit(
                view,
                folder,
                self._keep(job),
                known=job.known,
                in_use=frozenset() if pinned is None else frozenset([pinned.id]),
                is_of_many=world > _MANY_NODES * len(job.node.ranks),
                guard=self._guard,
            )
        except DamagedError as error:
            self._check_may_be_whole(job, folder, error)
            raise
        self._known = found.view.catalogue
        if found.state is Committed.WAITING and commit_step.is_overtaken(view, job.id):
            found = Outcome(Committed.OVERTAKEN, view)
        if found.state is Committed.WAITING and not self._store.exists(f"{folder.path}/{job.part}"):
            job.has_part = False
            raise FileNotFoundError(errno.ENOENT, "its part is gone", f"{folder.path}/{job.part}")
        return self._reported(job, found, is_ours=True)

    def _keep(self, job: StepJob) -> Keep:
        """What retention keeps with this commit. Only the keeper of rank 0's node drops steps: it knows which
        one is being copied to the mirror."""
        return job.node.keep if job.node.keep is not None and 0 in job.node.ranks else KEEP_ALL

    def _committed(self, job: StepJob, view: View) -> Outcome:
        """The outcome of a step that the catalogue has. SupersededError if its files are gone."""
        self._guard()
        if not is_whole(view, job.name):
            raise SupersededError(
                f"step {job.step} of attempt {job.attempt} was committed, and has lost files since.",
                step=job.step,
            )
        return Outcome(Committed.YES, view)

    def _check_may_be_whole(self, job: StepJob, folder: Folder, error: DamagedError) -> None:
        """Raise SupersededError if the parts of a step, which never change, make no step."""
        heads = heads_at_rest(self._store, folder).values()
        counted = {rank.rank: head.step for head in heads for rank in head.ranks}
        if len({*counted.values()}) > 1:
            raise SupersededError(unlike_steps(counted), step=job.step) from error

    def _reported(self, job: StepJob, found: Outcome, *, is_ours: bool = False) -> StepOutcome:
        """The outcome of a commit. `is_ours`: retention was applied with it."""
        match found.state:
            case Committed.WAITING:
                return StepOutcome(JobState.PART_WRITTEN)
            case Committed.OVERTAKEN:
                raise SupersededError(
                    f"a newer step was committed before step {job.step} of attempt {job.attempt} was whole.",
                    step=job.step,
                )
            case Committed.BASE_GONE:
                self._frozen.forget(job.snapshots)
                raise SupersededError(
                    f"step {job.step} names frozen leaves that are not there any more, and is not committed. "
                    "The next step writes them again.",
                    step=job.step,
                )
        is_applied = is_ours and self._keep(job) is not KEEP_ALL
        dropped = found.dropped if is_applied else None
        return StepOutcome(JobState.COMMITTED, view=found.view, dropped=dropped)

    def _world(self, job: StepJob, view: View) -> int:
        """The number of ranks of the attempt that captured it; from the catalogue if its trainers are
        dead."""
        return job.node.world if job.node.world is not None else view.catalogue.world


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


def polls_before(ranks: Collection[int], world: int) -> int:
    """How often the keeper of these ranks polls for the record of a step before it gathers the parts."""
    return 0 if 0 in ranks or world <= _FEW_NODES * len(ranks) else _POLLS_OF_OTHERS


_MAX_ATTEMPTS = 2  # whose newest step may have a file with the same leaves
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


@dataclass(frozen=True)
class FrozenLeaves:
    """A file with frozen leaves, and the folder that it is in."""

    base: Folder
    contents: Contents

    @property
    def path(self) -> str:
        return f"{self.base.path}/{self.contents.shard.file}"


def _named(view: View, rank: int) -> Iterator[tuple[SnapshotId, FrozenLeaves]]:
    """The files of a rank that the newest checkpoints of the newest attempt and of the one before it name,
    each with the checkpoint. Skips unreadable checkpoints."""
    seen = set()
    for name in view.newest_first():
        if name.attempt in seen:
            continue
        seen.add(name.attempt)
        try:
            record = read_step(view, name)
            constants = record.rank(rank).constants
            files = {each.name: each for each in record.manifest.frozen}
            if constants is not None and (file := files.get(constants.shard.file)) is not None:
                yield name.id, FrozenLeaves(file.base, constants)
        except (FlashckptError, OSError) as error:
            log.debug("the frozen leaves of step %d cannot be read: %s", name.step, error)
        if len(seen) == _MAX_ATTEMPTS or name.attempt != view.attempt:
            return


class FrozenFiles:
    """The files of frozen leaves that this keeper wrote or found, the newest of each rank. nonce: of the
    keeper; progress: the address of the word that counts written bytes.

    A part names a file in the folder of another snapshot only if a checkpoint names that folder: else the
    file could be deleted before the part is committed."""

    def __init__(self, store: Store, nonce: str, progress: int) -> None:
        self._store, self._nonce, self._progress = store, nonce, progress
        # Each with the attempt in whose folder the last part named it.
        self._known: dict[int, tuple[AttemptName, FrozenLeaves]] = {}
        self._files = 0

    def forget(self, ranks: Collection[int]) -> None:
        """Do not name the known files of these ranks again: they are missing."""
        for rank in ranks:
            self._known.pop(rank, None)

    def file_for(self, content: PinnedContent, folder: Folder, view: View) -> tuple[FrozenLeaves | None, int]:
        """The file that a part in `folder` names for a snapshot, and the bytes written for it: 0 if it exists
        already. None for a snapshot without frozen leaves.

        The digests in the slot are of the live tensors at its boundary, so a file with the same digests has
        its bytes. Otherwise the bytes in memory are needed: raises Torn if they are not those of the
        boundary, RegionGone if their region is missing, OSError, FlashckptError.
        """
        layout = content.metadata.constants
        if layout is None:
            return None, 0
        num_bytes, found = 0, self._existing(content, layout, folder, view)
        if found is None:
            found, num_bytes = self._written(content, layout, folder), layout.num_bytes
        self._known[content.rank] = folder.writer, found
        return found, num_bytes

    def _existing(
        self, content: PinnedContent, layout: Layout, folder: Folder, view: View
    ) -> FrozenLeaves | None:
        digests, usable = content.metadata.constants_digests, view.bases | {folder}
        writer, known = self._known.get(content.rank, (None, None))
        is_usable = known is not None and writer == folder.writer and known.base in usable
        if known is not None and is_usable and _is_of(known.contents, layout, digests):
            return known
        for id, found in _named(view, content.rank):
            if found.base in usable and _is_of(found.contents, layout, digests):
                is_known = id.attempt == view.attempt and self._is_there(found)
                if is_known or self._is_whole(found):
                    return found
        return None

    def _is_there(self, found: FrozenLeaves) -> bool:
        shard = found.contents.shard
        files = self._store.list(found.base.path)
        return any((each.name, each.num_bytes) == (shard.file, shard.num_bytes) for each in files)

    def _is_whole(self, found: FrozenLeaves) -> bool:
        """Whether the first step of a new attempt may name this file. Reads every byte of a local file, which
        may have rotted since; a server has compared the bytes when they were sent, and guards them."""
        path, contents = found.path, found.contents
        try:
            descriptor = self._store.descriptor(path, contents.shard.num_bytes)
        except (OSError, FlashckptError) as error:
            log.warning("%s cannot be opened: %s; the frozen leaves are written again", path, error)
            return False
        if descriptor is not None:
            os.close(descriptor)
        elif not self._store.capabilities.is_folder:
            return self._is_there(found)
        status, detail = verify_file(self._store, path, contents, progress_word=self._progress)
        if status != "ok":
            log.warning("%s is %s (%s): the frozen leaves are written again", path, status, detail)
        return status == "ok"

    def _written(self, content: PinnedContent, layout: Layout, folder: Folder) -> FrozenLeaves:
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
        name = frozen_name(snapshot.rank, f"{self._nonce}{self._files:04x}")
        path = f"{folder.path}/{name}"
        written = self._store.write_shard(
            path,
            layout,
            MemoryRange(region.image_descriptor, region.image_offset),
            progress=self._progress,
        )
        try:
            if leaves := unlike(metadata, written.digests, first):
                raise torn(metadata, leaves)
            check_held(snapshot)
        except BaseException:
            with contextlib.suppress(OSError, FlashckptError):
                self._store.remove(path)
            raise
        shard = ShardRecord.of(name, layout, written.checksums)
        digests = tuple(metadata.digests[first:])
        return FrozenLeaves(folder, Contents(shard=shard, leaves=layout.leaves, digests=digests))
