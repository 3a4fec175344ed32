"""One step of this node from its slots to storage: pin, check, constants, shards with audit, one part,
manifest.

Owns the order of these. Runs in a worker thread; what it did is in its StepOutcome, and only the
slots' own words are changed on the way.
"""

from __future__ import annotations

import contextlib
import errno
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from flashckpt import _native, crashpoints
from flashckpt.commit import attempts, lineage, steps
from flashckpt.errors import DamagedError, FlashckptError, KeeperError, SupersededError
from flashckpt.events import log
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import RUN, AttemptName, part_name, step_attempt_folder
from flashckpt.format.records import Part, RankRecord, ShardRecord
from flashckpt.memory.slot import Slot
from flashckpt.persist.audit import Torn, check_header, discard, torn, unlike
from flashckpt.persist.constants import ConstantsShards, RegionGone
from flashckpt.persist.job import JobState, SealedSnapshot, StepJob, StepOutcome, Void
from flashckpt.persist.stored_steps import refusal
from flashckpt.store.base import Region, Store

_PIN_LOST = "the slot was taken from this keeper while it was written; another keeper has it now"


@dataclass(frozen=True)
class _PinnedContent:
    """A pinned snapshot and what it says of itself."""

    snapshot: SealedSnapshot
    metadata: Metadata
    values: dict[str, object]

    @property
    def rank(self) -> int:
        return self.snapshot.rank

    def is_in(self, part: Part) -> bool:
        """Whether a part holds this content: every leaf by its digest, and the values."""
        found = next((each for each in part.ranks if each.rank == self.rank), None)
        if found is None or found.values != self.values:
            return False
        held = [found.contents] + ([found.constants] if found.constants is not None else [])
        pairs = [pair for each in held for pair in zip(each.leaves, each.digests, strict=True)]
        then = {leaf.name: digest for leaf, digest in pairs}
        mine = zip(self.metadata.leaves, self.metadata.digests, strict=True)
        return then == {leaf.name: digest for leaf, digest in mine}


class Writer:
    """Writes steps to a store. `nonce` is this process's: with it no two ever write one file. `stands` says
    whether the run is still in the store; `guard` is asked before anything is published, and raises where
    this process may not any more."""

    def __init__(
        self,
        store: Store,
        nonce: str,
        *,
        stands: Callable[[], bool] | None = None,
        guard: Callable[[], None] = lambda: None,
        threads: int = 2,
    ) -> None:
        self._store = store
        self._stands = stands or (lambda: store.exists(RUN))
        self._guard = guard
        self._nonce = nonce
        self._threads = threads
        self._files = 0
        self._progress = array("Q", [0])
        self._constants = ConstantsShards(store, threads, _native.address_of(self._progress))

    @property
    def progress_bytes(self) -> int:
        """Bytes written so far, of all steps; it moves while one is written."""
        return self._progress[0]

    def persist(self, job: StepJob) -> StepOutcome:
        """Persist a step whose snapshots are gathered, and commit it. Never raises: failure is an outcome."""
        began = time.monotonic()
        if not job.has_all and (part_of := job.part_of) is not None:
            # The parts of the other nodes are waited for, and the slots are not needed for that.
            outcome = self._tried(lambda: self._commit(job, part_of), job)
            for each in job.members() if outcome.state is JobState.COMMITTED else ():
                if each.take():
                    each.slot.set_persisted(each.generation)
            job.release()
            return outcome
        if not all([each.take() for each in job.members()]):
            job.release()
            return StepOutcome(state=JobState.VOID, void=Void.GONE)
        crashpoints.point("audit.pinned")
        outcome = self._tried(lambda: self._persist_pinned(job), job)
        if outcome.state is JobState.COMMITTED and all(each.holds() for each in job.members()):
            # Before the pins go: a trainer that sees the slot sealed must see that it is done with.
            for each in job.members():
                each.slot.set_persisted(each.generation)
            crashpoints.point("commit.marked")
        if not job.release() and outcome.void is not Void.TORN:
            outcome = replace(outcome, state=JobState.FAILED, message=_PIN_LOST)
        return replace(outcome, seconds=time.monotonic() - began)

    def finish(self, job: StepJob) -> StepOutcome:
        """Commit a step at rest whose parts are there, as its keeper would have. Never raises."""
        return self._tried(lambda: self._finish(job), job)

    def _finish(self, job: StepJob) -> StepOutcome:
        stored, told = job.stored, StepOutcome(state=JobState.VOID, attempt=str(job.attempt))
        assert stored is not None
        why, is_damage = refusal(self._store, stored, read=job.reads_stored)
        if not why:
            try:
                return self._commit(job, job.attempt)
            except DamagedError as error:
                why, is_damage = str(error), True
        if stored.is_waiting:
            return replace(told, state=JobState.PART_WRITTEN, message=why)
        return replace(told, void=Void.TORN if is_damage else Void.SUPERSEDED, message=why)

    def look(self, job: StepJob) -> StepOutcome:
        """What is known, before anything is written, of snapshots that are only looked at: committed, void,
        failed, or gathering where there is nothing against writing them."""

        def deed() -> StepOutcome:
            try:
                contents = [_checked(each) for each in job.members()]
            except _TornSlot as found:
                raise DamagedError(str(found)) from found
            attempt, own = self.attempt_for(job)
            is_settled = self._is_settled(job, contents, attempt, own=own)
            return StepOutcome(
                state=JobState.COMMITTED if is_settled else JobState.GATHERING, attempt=str(attempt)
            )

        return self._tried(deed, job)

    def attempt_for(self, job: StepJob) -> tuple[AttemptName, bool]:
        """Whose step it is, and whether its own attempt's. The slot that a started attempt says it was loaded
        from counts as that attempt's, and with it all that this node has of that step: never relabelled."""
        newest = attempts.newest_started(self._store)
        if newest is not None and newest.number > job.attempt.number:
            start = attempts.read_start(self._store, newest)
            names = [each.slot.name for each in job.members()]
            if start is not None and start.loaded in names and start.step == job.step:
                return newest, False
        return job.attempt, True

    def place_of(self, job: StepJob) -> lineage.VisibleStep:
        """Where a committed step rests: one that a newer attempt was loaded from may be either's."""
        attempt, _ = self.attempt_for(job)
        is_there = steps.is_committed(self._store, job.step, attempt)
        return lineage.VisibleStep(job.step, attempt if is_there else job.attempt)

    def _tried(self, deed: Callable[[], StepOutcome], job: StepJob) -> StepOutcome:
        attempt = str(job.attempt)
        try:
            return deed()
        except _TornSlot as torn_slot:
            snapshot = torn_slot.snapshot
            assert snapshot.pin is not None
            pin, snapshot.pin = snapshot.pin, None
            return discard(snapshot.slot, pin, torn_slot.found, attempt)
        except SupersededError as error:
            return StepOutcome(state=JobState.VOID, void=Void.SUPERSEDED, attempt=attempt, message=str(error))
        except (OSError, FlashckptError, ValueError) as error:
            log.debug("persisting failed", exc_info=True)
            return StepOutcome(
                state=JobState.FAILED,
                attempt=attempt,
                message=str(error) or type(error).__name__,
                errno=error.errno or 0 if isinstance(error, OSError) else 0,
                lacks_region=isinstance(error, RegionGone),
            )

    def _persist_pinned(self, job: StepJob) -> StepOutcome:
        contents = [_checked(each) for each in job.members()]
        if not self._stands():
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self._store.url)
        attempt, own = self.attempt_for(job)
        while True:
            try:
                return self._persist_as(job, contents, attempt, own=own)
            except SupersededError:
                # An attempt may have started meanwhile that went on from this very slot: then it is its.
                before, (attempt, own) = attempt, self.attempt_for(job)
                if attempt == before:
                    raise

    def _persist_as(
        self, job: StepJob, contents: Sequence[_PinnedContent], attempt: AttemptName, *, own: bool
    ) -> StepOutcome:
        told = StepOutcome(state=JobState.COMMITTED, attempt=str(attempt))
        if self._is_settled(job, contents, attempt, own=own):
            return told
        folder = step_attempt_folder(job.step, attempt)
        world = self._world(job, attempt)
        # A part that stands was written in an earlier try, or by the keeper before this one.
        if self._store.exists(f"{folder}/{part_name(contents[0].rank)}"):
            part = self._standing(job.step, contents, attempt, folder)
            told = replace(told, num_bytes=sum(rank.shard.num_bytes for rank in part.ranks))
        else:
            told = self._write(job, contents, attempt, world, folder, told)
        job.part_of = attempt
        return self._commit(job, attempt, told)

    def _standing(
        self, step: int, contents: Sequence[_PinnedContent], attempt: AttemptName, folder: str
    ) -> Part:
        """This node's part, which is there. SupersededError where it is of another content."""
        path = f"{folder}/{part_name(contents[0].rank)}"
        part = Part.from_bytes(self._store.read(path, Part.MAX_BYTES), path)
        if not all(each.is_in(part) for each in contents):
            raise _other_content(step, attempt)
        return part

    def _commit(self, job: StepJob, attempt: AttemptName, told: StepOutcome | None = None) -> StepOutcome:
        self._guard()
        told = told or StepOutcome(state=JobState.COMMITTED, attempt=str(attempt))
        found = steps.commit(self._store, job.step, attempt, self._world(job, attempt))
        if found is steps.Committed.BURIED:
            raise SupersededError(f"step {job.step} of attempt {attempt} was pruned meanwhile.")
        return replace(told, state=JobState.COMMITTED if found else JobState.PART_WRITTEN)

    def _world(self, job: StepJob, attempt: AttemptName) -> int:
        """As many ranks as the attempt has. Of one whose trainers are dead only its start.json says it."""
        if job.stored is not None:
            return job.stored.parts[0].world
        if job.node.world is not None and attempt == job.attempt:
            return job.node.world
        start = attempts.read_start(self._store, attempt)
        return start.world if start is not None else job.node.world or 1

    def _is_settled(
        self, job: StepJob, contents: Sequence[_PinnedContent], attempt: AttemptName, *, own: bool
    ) -> bool:
        """Whether the step is committed. SupersededError where it cannot be any more."""
        if self._is_done(job.step, attempt, contents, loaded=not own):
            return True
        newer = attempts.started_after(self._store, attempt)
        if newer is not None:
            raise SupersededError(f"attempt {newer} has started; attempt {attempt} commits nothing more.")
        return False

    def _is_done(
        self, step: int, attempt: AttemptName, contents: Sequence[_PinnedContent], *, loaded: bool
    ) -> bool:
        """Whether these very contents are committed. SupersededError where the number is another one's."""
        if steps.is_committed(self._store, step, attempt):
            if not self._holds(step, attempt, contents):
                raise _other_content(step, attempt)
            return True
        if not loaded:
            return False
        visible = lineage.newest_first(self._store)
        found = next((each for each in visible if each.step <= step), None)
        if found is None or found.step != step:
            return False
        return self._holds(step, found.attempt, contents)

    def _holds(self, step: int, attempt: AttemptName, contents: Sequence[_PinnedContent]) -> bool:
        record = steps.read_step(self._store, step, attempt)
        return all(each.is_in(record.part_of(each.rank)) for each in contents)

    def _write(
        self,
        job: StepJob,
        contents: Sequence[_PinnedContent],
        attempt: AttemptName,
        world: int,
        folder: str,
        told: StepOutcome,
    ) -> StepOutcome:
        """Constants shard and shard of each rank, then the one part that names them all. On failure no shard
        of the step stays behind; a constants shard that is whole does, for the next try."""
        names: list[str] = []
        records: list[RankRecord] = []
        is_published = False
        try:
            for each in contents:
                with _torn_in(each.snapshot):
                    is_alone = world == 1 and not job.has_others
                    record, told = self._write_rank(each, attempt, folder, names, told, is_alone=is_alone)
                    records.append(record)
            for each in contents:
                _check_held(each.snapshot)
            environment = contents[0].values.get("environment") or job.node.environment
            part = Part(
                step=job.step,
                attempt=attempt,
                world=world,
                keeper=contents[0].rank,
                ranks=tuple(records),
                environment=environment if isinstance(environment, dict) else dict(job.node.environment),
            )
            self._guard()
            is_published = steps.publish_part(self._store, part)
        finally:
            if not is_published:
                self._remove_debris(folder, part_name(contents[0].rank), names)
        if not is_published:
            # Another keeper's was first: it stands, and may hold something else.
            self._standing(job.step, contents, attempt, folder)
        return told

    def _write_rank(
        self,
        content: _PinnedContent,
        attempt: AttemptName,
        folder: str,
        names: list[str],
        told: StepOutcome,
        *,
        is_alone: bool,
    ) -> tuple[RankRecord, StepOutcome]:
        """A rank's shards. `names` is given the name of its shard before it is begun."""
        snapshot, metadata = content.snapshot, content.metadata
        # Before the part that names it: what is written here is debris until then, and nothing more.
        constants, num_bytes = self._constants.shard_for(
            snapshot, metadata, attempt, lambda: _check_held(snapshot), is_alone=is_alone
        )
        self._files += 1
        names.append(steps.shard_name(content.rank, f"{self._nonce}{self._files:04x}"))
        shard, direct = self._write_shard(snapshot.slot, metadata, folder, names[-1])
        num_bytes += shard.num_bytes + told.num_bytes
        record = RankRecord(
            rank=content.rank,
            shard=shard,
            leaves=metadata.layout.leaves,
            digests=tuple(metadata.digests[: len(metadata.layout.leaves)]),
            values=content.values,
            constants=constants,
        )
        return record, replace(told, num_bytes=num_bytes, direct=told.direct and direct)

    def _write_shard(
        self, slot: Slot, metadata: Metadata, folder: str, name: str
    ) -> tuple[ShardRecord, bool]:
        """The shard, audited on the way, and whether the page cache was bypassed."""
        layout = metadata.layout
        crashpoints.point("write.begun")
        written = self._store.write_shard(
            f"{folder}/{name}",
            layout,
            Region(slot.descriptor, slot.image_offset),
            threads=self._threads,
            progress=_native.address_of(self._progress),
        )
        crashpoints.point("write.written")
        leaves = unlike(metadata, written.digests)
        if leaves:
            raise torn(metadata, leaves)
        return ShardRecord.of(name, layout, written.checksums), written.direct

    def _remove_debris(self, folder: str, part_file: str, names: Sequence[str]) -> None:
        """Remove shards unless a part names them: an error may have come after the part's own link."""
        with contextlib.suppress(OSError, FlashckptError):
            path, named = f"{folder}/{part_file}", set()
            if self._store.exists(path):
                part = Part.from_bytes(self._store.read(path, Part.MAX_BYTES), path)
                named = {rank.shard.file for rank in part.ranks}
            for name in names:
                if name not in named:
                    self._store.remove(f"{folder}/{name}")


class _TornSlot(Exception):
    """A slot whose snapshot nobody may use, and why."""

    def __init__(self, snapshot: SealedSnapshot, found: Torn) -> None:
        super().__init__(str(found))
        self.snapshot, self.found = snapshot, found


@contextlib.contextmanager
def _torn_in(snapshot: SealedSnapshot) -> Iterator[None]:
    try:
        yield
    except Torn as found:
        raise _TornSlot(snapshot, found) from found


def _checked(snapshot: SealedSnapshot) -> _PinnedContent:
    """What a pinned slot says of its snapshot, and proof that the image begins as its layout says."""
    with _torn_in(snapshot):
        try:
            sealed = snapshot.slot.sealed()
            if sealed is None:
                raise KeeperError(_PIN_LOST)
            metadata = snapshot.slot.metadata(sealed)
            values = strict_loads(metadata.values, what="a slot's values")
        except DamagedError as error:
            raise Torn(str(error)) from error
        check_header(snapshot.slot, 0, metadata.layout)
    return _PinnedContent(snapshot, metadata, values)


def _check_held(snapshot: SealedSnapshot) -> None:
    # The disk reads the region after the digests did: without the pin, perhaps something else.
    if not snapshot.holds():
        raise KeeperError(_PIN_LOST)


def _other_content(step: int, attempt: AttemptName) -> SupersededError:
    return SupersededError(
        f"another snapshot of step {step} of attempt {attempt} is on disk, or on its way there, and stands; "
        "this one is not persisted. A run that is started again goes on from the one on disk.",
        step=step,
    )
