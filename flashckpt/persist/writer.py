"""Writes one snapshot of this node from its slots to storage: pin, check, frozen leaves, audited shards, one
part.

Owns this order, and which file of frozen leaves a part names. Runs in a worker thread; the result is a
StepOutcome, and meanwhile only words of the slots change. Never writes a file that another keeper has
created: a stopped one may wake up and write it. Deletes only its own files that no part names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flashckpt import _native, crashpoints
from flashckpt.commit import commit_step
from flashckpt.commit.steps import heads_at_rest, read_step
from flashckpt.commit.verification import verify_file
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, FlashckptError, KeeperError
from flashckpt.format.catalogue import Folder
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.layout import Layout
from flashckpt.format.manifest import frozen_name, shard_name
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.format.records import Contents, Part, RankRecord
from flashckpt.persist.audit import Torn, check_cached, check_header, torn, unlike
from flashckpt.persist.committer import KnownRun
from flashckpt.persist.job import JobState, RankWrite, RegionGone, SealedSnapshot, StepJob, StepOutcome
from flashckpt.store.base import MemoryRange, Store

log = logging.getLogger(__name__)


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
    """Writes parts of snapshots to a run. nonce: of this process, so that no two processes write one file.
    guard: called before anything is published; raises if this process may not publish any more."""

    def __init__(
        self,
        run: KnownRun,
        nonce: str,
        *,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._store, self._nonce = run, run.store, nonce
        self._guard = guard
        self._files, self._progress = 0, array("Q", [0])
        self._began_ns = time.monotonic_ns()
        self._frozen = FrozenFiles(run.store, nonce, _native.address_of(self._progress))

    @property
    def progress_bytes(self) -> int:
        """Bytes written so far, of all steps, also of one that is being written."""
        return self._progress[0]

    def forget_frozen(self, ranks: Collection[int]) -> None:
        """Look for the frozen files of these ranks again before a part names one: a step that named them was
        not committed, and they may be gone."""
        self._frozen.forget(ranks)

    def write(self, job: StepJob) -> StepOutcome:
        """Write the part of a step from its snapshots, pinned meanwhile. Never raises: failure is an
        outcome."""
        began = time.monotonic()
        if not all([each.take() for each in job.members()]):
            job.release()
            return StepOutcome(JobState.GONE)
        crashpoints.point("audit.pinned")
        outcome = self._run.tried(lambda: self._write_pinned(job), job)
        if not job.release() and outcome.state is not JobState.TORN:
            outcome = replace(outcome, state=JobState.FAILED, message=PIN_LOST)
        return replace(outcome, seconds=time.monotonic() - began)

    def _write_pinned(self, job: StepJob) -> StepOutcome:
        contents = [_checked(each) for each in job.members()]
        self._run.check_stands()
        may_be_at_rest = self._may_be_at_rest(job, contents)
        # Where each listing is a request, the last version shows the writer; the commit lists anyway.
        view = self._run.view
        is_known = view.catalogue.attempt == job.attempt and not self._store.is_folder
        view = view if is_known and not may_be_at_rest else self._run.newest()
        if view.catalogue.has(job.id) or commit_step.is_overtaken(view, job.id):
            return StepOutcome(JobState.COMMITTING)
        tried = _Try(job, contents, commit_step.folder_of(view, job.id))
        # A part of an earlier attempt's folder does not count in that of the attempt which resumed it.
        job.folder, job.has_part = tried.folder, False
        if may_be_at_rest:
            self._find_part(tried)
        if not job.has_part:
            self._write(tried, view)
        written = tuple(tried.written)
        return StepOutcome(
            JobState.COMMITTING, num_bytes=tried.num_bytes, direct=tried.direct, written=written
        )

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
                world=job.world(view),
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
        snapshot, metadata, layout = content.snapshot, content.metadata, content.metadata.image.shard
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
        digests = metadata.digests[: len(layout.leaves)]
        shard = Contents.of(name, layout, written.checksums, digests)
        tried.num_bytes += num_bytes + shard.num_bytes
        seconds = time.monotonic() - began
        tried.written.append(RankWrite(content.rank, seconds, num_bytes + shard.num_bytes))
        tried.direct = tried.direct and written.direct
        return RankRecord(
            rank=content.rank, shard=shard, values=content.values,
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
        check_header(snapshot.slot, metadata.image.shard)
    return PinnedContent(snapshot, sealed.record.captured_ns, metadata, values)


_MAX_ATTEMPTS = 2  # whose newest step may have a file with the same leaves
_REGION_IS_GONE = (
    "the constants of this snapshot are not in this node's memory, and no committed step names them; "
    "committed steps are not touched"
)
PIN_LOST = "the slot was taken from this keeper while it was written; another keeper has it now"


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
        return f"{self.base.path}/{self.contents.file}"


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
            if constants is not None and (file := files.get(constants.file)) is not None:
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
        layout = content.metadata.image.constants
        if not layout.leaves:
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
        shard = found.contents
        files = self._store.list(found.base.path)
        return any((each.name, each.num_bytes) == (shard.file, shard.num_bytes) for each in files)

    def _is_whole(self, found: FrozenLeaves) -> bool:
        """Whether the first step of a new attempt may name this file. Reads every byte of a local file, which
        may have rotted since; a server has compared the bytes when they were sent, and guards them."""
        path, contents = found.path, found.contents
        try:
            descriptor = self._store.descriptor(path, contents.num_bytes)
        except (OSError, FlashckptError) as error:
            log.warning("%s cannot be opened: %s; the frozen leaves are written again", path, error)
            return False
        if descriptor is not None:
            os.close(descriptor)
        elif not self._store.is_folder:
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
        contents = Contents.of(name, layout, written.checksums, metadata.digests[first:])
        return FrozenLeaves(folder, contents)
