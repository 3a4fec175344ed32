"""One step of this node from its slots to storage: pin, check, constants, audited shards, one part, manifest.

Owns the order of these, and whether a constants shard is named again or written. Runs in a worker
thread; what it did is in its StepOutcome, and only the slots' own words are changed on the way.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flashckpt import _native, crashpoints
from flashckpt.commit import attempts, constants, lineage, steps
from flashckpt.commit.constants_files import check_records_of_buried
from flashckpt.errors import DamagedError, DivergedError, FlashckptError, KeeperError, SupersededError
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.layout import Layout
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import (
    ATTEMPTS,
    RUN,
    AttemptName,
    attempt_folder,
    part_name,
    shard_name,
    step_attempt_folder,
)
from flashckpt.format.records import Contents, Part, RankRecord, ShardRecord, Start
from flashckpt.format.replicas import Ranks, count_of, has_rank, place_in
from flashckpt.memory.slot import Slot
from flashckpt.persist.audit import Torn, check_header, discard, torn, unlike
from flashckpt.persist.job import JobState, RankWrite, SealedSnapshot, StepJob, StepOutcome, Void
from flashckpt.persist.stored_steps import refusal
from flashckpt.store.base import MemoryRange, Store, Written

log = logging.getLogger(__name__)

_NAMES_TRIED = 8
# Where a few nodes make a step, all of them gather its parts: who writes the last one commits. Of many, four
# are picked by the step's number, so that no keeper is asked more than others: the first gathers at once,
# each further one after more looks that found no manifest. In the end everybody does: keepers that died hold
# no step up.
_LOOKS_BEFORE = (0, 3, 5, 7)
_LOOKS_OF_ALL = 12
_MASK = (1 << 64) - 1
_STARTS_KEPT = 4
REGION_IS_GONE = (
    "the constants of this snapshot are not in this node's memory, and no committed step names them; "
    "committed steps are not touched"
)
_PIN_LOST = "the slot was taken from this keeper while it was written; another keeper has it now"


class RegionGone(KeeperError):
    """The region that a snapshot names is not here: only a trainer that has it could hand it over."""


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
        rows = [(leaf, digest) for _, leaf, digest in [*found.counted(), *found.elsewhere()]]
        then = {leaf.name: digest for leaf, digest in rows}
        return then == {leaf.name: digest for leaf, digest in self.metadata.counted()}


@dataclass
class _Try:
    """Contents to be saved as a step of `attempt`: of their own one, or of one that was loaded from them.
    `names` are the shards that were begun, `num_bytes` what they hold, `written` how long each rank took."""

    job: StepJob
    contents: Sequence[_PinnedContent]
    attempt: AttemptName
    own: bool
    names: list[str] = field(default_factory=list)
    written: list[RankWrite] = field(default_factory=list)
    num_bytes: int = 0
    direct: bool = True
    seen: Store | None = None  # the look by which the part was published, where it is the whole step

    @property
    def folder(self) -> str:
        return step_attempt_folder(self.job.step, self.attempt)

    @property
    def part_path(self) -> str:
        return f"{self.folder}/{part_name(self.contents[0].rank)}"

    def other_content(self) -> SupersededError:
        return SupersededError(
            f"another snapshot of step {self.job.step} of attempt {self.attempt} is on disk, or on its way "
            "there, and stands; this one is not persisted. A run that is started again goes on from the one "
            "on disk.",
            step=self.job.step,
        )


class Writer:
    """Writes steps to a store. `nonce` is this process's: with it no two ever write one file. `stands` says
    whether the run is still in the store; `guard` is asked before anything is published, and raises where
    this process may not any more. `gathers`: it looks for the parts of other nodes whoever's turn it is."""

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
        self._starts: dict[AttemptName, Start] = {}  # they never change
        self._constants = _ConstantsShards(store, threads, _native.address_of(self._progress))

    @property
    def progress_bytes(self) -> int:
        """Bytes written so far, of all steps; it moves while one is written."""
        return self._progress[0]

    def persist(self, job: StepJob) -> StepOutcome:
        """Commit a step, from its snapshots or its parts at rest. Never raises: failure is an outcome."""
        if job.stored is not None:
            return self._tried(lambda: self._commit_stored(job), job)
        began = time.monotonic()
        if job.missing and (part_of := job.part_of) is not None:
            # The parts of the other nodes are waited for, and the slots are not needed for that.
            outcome = self._tried(lambda: self._commit(job, part_of), job)
            for each in job.members() if outcome.state is JobState.COMMITTED else ():
                if each.take():
                    each.slot.set_persisted(each.generation)
            job.release()
            return outcome
        if not all([each.take() for each in job.members()]):
            job.release()
            return StepOutcome(JobState.VOID, Void.GONE)
        crashpoints.point("audit.pinned")
        outcome = self._tried(lambda: self._settled(job) if job.lacks else self._persist_pinned(job), job)
        if outcome.state is JobState.COMMITTED and all(each.holds() for each in job.members()):
            # Before the pins go: a trainer that sees the slot sealed must see that it is done with.
            for each in job.members():
                each.slot.set_persisted(each.generation)
            crashpoints.point("commit.marked")
        if not job.release() and outcome.void is not Void.TORN:
            outcome = replace(outcome, state=JobState.FAILED, message=_PIN_LOST)
        return replace(outcome, seconds=time.monotonic() - began)

    def _commit_stored(self, job: StepJob) -> StepOutcome:
        stored, attempt = job.stored, str(job.attempt)
        assert stored is not None
        why, is_damage = refusal(self._store, stored, read=job.reads_stored)
        if not why:
            try:
                return self._commit(job, job.attempt)
            except DamagedError as error:
                why, is_damage = str(error), True
        if stored.is_waiting:
            return StepOutcome(JobState.PART_WRITTEN, attempt=attempt, message=why)
        void = Void.TORN if is_damage else Void.SUPERSEDED
        return StepOutcome(JobState.VOID, void, attempt=attempt, message=why)

    def look(self, job: StepJob) -> StepOutcome:
        """What is known, before anything is written, of snapshots that are only looked at: committed, void,
        failed, or gathering where there is nothing against writing them."""

        def deed() -> StepOutcome:
            try:
                contents = [_checked(each) for each in job.members()]
            except Torn as found:
                raise DamagedError(str(found)) from found
            tried = _Try(job, contents, *self.attempt_for(job))
            is_settled = self._is_settled(tried, self._store.at_once(), self._store.at_once())
            state = JobState.COMMITTED if is_settled else JobState.GATHERING
            return StepOutcome(state, attempt=str(tried.attempt))

        return self._tried(deed, job)

    def attempt_for(self, job: StepJob, look: Store | None = None) -> tuple[AttemptName, bool]:
        """Whose step it is, and whether its own attempt's. What a started attempt says it went on from counts
        as that attempt's, on every rank of every node, and is never relabelled; where nodes have folders of
        their own it stays a step of its own attempt (see `attempts.superseded_by`)."""
        look = self._store.at_once() if look is None else look
        newest = attempts.newest_started(look)
        if newest is not None and newest.number > job.attempt.number:
            start = attempts.read_start(look, newest)
            if start is not None and start.took_up(job.attempt, job.step, job.boundary):
                return (newest if start.ranks is None else job.attempt), False
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
        except Torn as found:
            snapshot = found.snapshot
            assert snapshot is not None
            assert snapshot.pin is not None
            pin, snapshot.pin = snapshot.pin, None
            return discard(snapshot.slot, pin, found, attempt)
        except SupersededError as error:
            return StepOutcome(JobState.VOID, Void.SUPERSEDED, attempt=attempt, message=str(error))
        except DivergedError as error:
            return StepOutcome(
                JobState.VOID, Void.DIVERGED, attempt=attempt, message=str(error), diverged=error.leaves
            )
        except (OSError, FlashckptError, ValueError) as error:
            log.debug("persisting failed", exc_info=True)
            return StepOutcome(
                JobState.FAILED,
                attempt=attempt,
                message=str(error) or type(error).__name__,
                errno=error.errno or 0 if isinstance(error, OSError) else 0,
                lacks_region=isinstance(error, RegionGone),
            )

    def _settled(self, job: StepJob) -> StepOutcome:
        """Of a step that not all ranks of this node have any more: that it was committed before. A keeper may
        have died before it told all of them."""
        contents = [_checked(each) for each in job.members()]
        tried = _Try(job, contents, *self.attempt_for(job))
        if not self._is_settled(tried, self._store.at_once(), self._store.at_once()):
            raise SupersededError(job.lacks, step=job.step)
        return self._committed(job, tried.attempt)

    def _persist_pinned(self, job: StepJob) -> StepOutcome:
        contents = [_checked(each) for each in job.members()]
        if not self._stands():
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self._store.url)
        # The newest attempts may be some seconds old here: before the manifest they are looked at again.
        tried = _Try(job, contents, *self.attempt_for(job, self._store.at_once(ATTEMPTS)))
        while True:
            try:
                return self._persist_as(tried)
            except SupersededError:
                # An attempt may have started meanwhile that went on from this very slot: then it is its.
                before, tried = tried, _Try(job, contents, *self.attempt_for(job))
                if tried.attempt == before.attempt:
                    raise

    def _persist_as(self, tried: _Try) -> StepOutcome:
        look = self._store.at_once()
        if self._is_settled(tried, look, self._store.at_once(ATTEMPTS)):
            return self._committed(tried.job, tried.attempt)
        # A part that stands was written in an earlier try, or by the keeper before this one.
        if look.exists(tried.part_path):
            tried.num_bytes = sum(rank.shard.num_bytes for rank in self._own_part(tried).ranks)
        else:
            self._write(tried)
        tried.job.part_of = tried.attempt
        outcome = self._commit(tried.job, tried.attempt, tried.seen)
        written = tuple(tried.written)
        return replace(outcome, num_bytes=tried.num_bytes, direct=tried.direct, written=written)

    def _own_part(self, tried: _Try) -> Part:
        """This node's part, which is there. SupersededError where it is of another content."""
        part = self._read_part(tried)
        if not all(each.is_in(part) for each in tried.contents):
            raise tried.other_content()
        return part

    def _read_part(self, tried: _Try) -> Part:
        return Part.from_bytes(self._store.read(tried.part_path, Part.MAX_BYTES), tried.part_path)

    def _commit(self, job: StepJob, attempt: AttemptName, seen: Store | None = None) -> StepOutcome:
        self._guard()
        world = self._world(job, attempt)
        ranks = self._ranks_here(job, attempt, world)
        gathers = self._gathers or job.stored is not None
        if not gathers and job.looks < looks_before(job.step, job.node.ranks, world, ranks):
            found = steps.look(self._store, job.step, attempt)
        else:
            found = steps.commit(self._store, job.step, attempt, world, ranks, seen=seen)
        if found is steps.Committed.BURIED:
            raise SupersededError(f"step {job.step} of attempt {attempt} was pruned meanwhile.")
        waits = StepOutcome(JobState.PART_WRITTEN, attempt=str(attempt))
        return self._committed(job, attempt) if found else waits

    def _committed(self, job: StepJob, attempt: AttemptName) -> StepOutcome:
        """The outcome for a step whose manifest stands. Checks the attempts once more first: one that claims
        after this check finds the step, one that claimed before it may have listed the steps without it.

        Raises SupersededError where an attempt has started without the step. Where one has only claimed, a
        living trainer gets no report until that one starts; what dead trainers left counts as saved, since
        the claimant waits for this keeper and then lists the steps."""
        look = self._store.at_once()
        newest = attempts.newest_claimed(look) if job.has_trainers else None
        if newest is not None and (newest.number <= attempt.number or attempts.has_started(look, newest)):
            newest = None
        # Last: one that was found to have started may have done so without the step.
        steps.check_seen(look, job.step, attempt)
        if newest is not None:
            return StepOutcome(
                JobState.PART_WRITTEN,
                attempt=str(attempt),
                message=f"attempt {newest} has claimed the run, and may resume from an older step",
            )
        is_of_all = self._ranks_here(job, attempt, self._world(job, attempt)) is None
        return StepOutcome(JobState.COMMITTED, attempt=str(attempt), is_of_all=is_of_all)

    def _world(self, job: StepJob, attempt: AttemptName) -> int:
        """As many ranks as the attempt has that captured it, which a later one that went on from it may not
        have. Where its trainers are dead only its start.json says it."""
        if job.stored is not None:
            return job.stored.heads[0].world
        if job.node.world is not None:
            return job.node.world
        start = None
        # Where it is damaged, the attempt that went on from it says it as well, unless their worlds differ.
        with contextlib.suppress(*([DamagedError] if attempt != job.attempt else [])):
            start = attempts.read_start(self._store, job.attempt)
        start = start or attempts.read_start(self._store, attempt)
        return start.world if start is not None else 1

    def _ranks_here(self, job: StepJob, attempt: AttemptName, world: int) -> Ranks | None:
        """The ranks that commit in this folder, where others have folders of their own: those of the attempt
        as whose step it is written, unless that one has other ranks."""
        for each in (attempt, job.attempt):
            if each not in self._starts:
                with contextlib.suppress(DamagedError):
                    if (start := attempts.read_start(self._store, each)) is not None:
                        self._starts = {**dict(list(self._starts.items())[-_STARTS_KEPT:]), each: start}
            if each in self._starts and self._starts[each].world == world:
                return self._starts[each].ranks
        return None

    def _is_settled(self, tried: _Try, look: Store, above: Store) -> bool:
        """Whether these very contents are committed. SupersededError where they cannot be any more: the
        number is another content's, or a newer attempt has started. `look` shows steps, `above` attempts."""
        step, attempt = tried.job.step, tried.attempt
        if steps.is_committed(look, step, attempt):
            if not self._holds(tried, attempt):
                raise tried.other_content()
            return True
        if not tried.own:
            visible = lineage.newest_first(self._store)
            found = next((each for each in visible if each.step <= step), None)
            if found is not None and found.step == step and self._holds(tried, found.attempt):
                return True
        newer = attempts.superseded_by(above, attempt, step, tried.job.boundary)
        if newer is not None:
            raise SupersededError(f"attempt {newer} has started; attempt {attempt} commits nothing more.")
        return False

    def _holds(self, tried: _Try, attempt: AttemptName) -> bool:
        ranks = {each.rank for each in tried.contents}
        record = steps.read_step(self._store, tried.job.step, attempt, ranks)
        return all(each.is_in(record.part_of(each.rank)) for each in tried.contents)

    def _write(self, tried: _Try) -> None:
        """Constants shard and shard of each rank, then the one part that names them all. On failure no shard
        of the step stays behind; a constants shard that is whole does, for the next try."""
        job, contents, is_published = tried.job, tried.contents, False
        world = self._world(job, tried.attempt)
        is_alone = world == 1 and not job.has_others
        try:
            records = [self._write_rank(tried, each, is_alone=is_alone) for each in contents]
            for each in contents:
                _check_held(each.snapshot)
            environment = contents[0].values.get("environment") or job.node.environment
            part = Part(
                step=job.step,
                attempt=tried.attempt,
                boundary=job.boundary,
                world=world,
                keeper=contents[0].rank,
                ranks=tuple(records),
                environment=environment if isinstance(environment, dict) else dict(job.node.environment),
            )
            self._guard()
            look = self._store.at_once()
            is_published = steps.publish_part(look, part)
            is_whole = len(records) == count_of(
                self._ranks_here(job, tried.attempt, world) or (range(world),)
            )
            tried.seen = look if is_published and is_whole else None
        finally:
            if not is_published:
                self._remove_shards(tried)
        if not is_published:
            # Another keeper's was first: it stands, and may hold something else.
            self._own_part(tried)

    def _write_rank(self, tried: _Try, content: _PinnedContent, *, is_alone: bool) -> RankRecord:
        """A rank's shards, audited on the way."""
        snapshot, metadata, layout = content.snapshot, content.metadata, content.metadata.layout
        began = time.monotonic()
        with _torn_in(snapshot):
            # Before the part that names it: what is written here is debris until then, and nothing more.
            shared, num_bytes = self._constants.shard_for(content, tried.attempt, is_alone=is_alone)
            self._files += 1
            name = shard_name(content.rank, f"{self._nonce}{self._files:04x}")
            tried.names.append(name)
            crashpoints.point("write.begun")
            written = self._store.write_shard(
                f"{tried.folder}/{name}",
                layout,
                MemoryRange(snapshot.slot.descriptor, snapshot.slot.image_offset),
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
            constants=shared, replicas=metadata.replicas(),
        )  # fmt: skip

    def _remove_shards(self, tried: _Try) -> None:
        """Remove them unless a part names them: an error may have come after the part's own link."""
        with contextlib.suppress(OSError, FlashckptError):
            named = set()
            if self._store.exists(tried.part_path):
                named = {rank.shard.file for rank in self._read_part(tried).ranks}
            for name in tried.names:
                if name not in named:
                    self._store.remove(f"{tried.folder}/{name}")


@contextlib.contextmanager
def _torn_in(snapshot: SealedSnapshot) -> Iterator[None]:
    try:
        yield
    except Torn as found:
        found.snapshot = snapshot
        raise


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
        check_header(snapshot.slot, metadata.layout)
    return _PinnedContent(snapshot, metadata, values)


def _check_held(snapshot: SealedSnapshot) -> None:
    # The disk reads the region after the digests did: without the pin, perhaps something else.
    if not snapshot.holds():
        raise KeeperError(_PIN_LOST)


class _ConstantsShards:
    """Constants shards that this keeper wrote, or found named by a step. `progress`: an address."""

    def __init__(self, store: Store, threads: int, progress: int) -> None:
        self._store, self._threads, self._progress = store, threads, progress
        # The newest of each rank alone: an older one may be deleted once no part names it.
        self._known: dict[int, tuple[AttemptName, Contents]] = {}

    def shard_for(
        self, content: _PinnedContent, attempt: AttemptName, *, is_alone: bool
    ) -> tuple[Contents | None, int]:
        """The constants shard with a snapshot's constants, as a part of `attempt` names it, and the bytes
        written for it: 0 where it stood already, in this attempt's folder or in an older one's. None for a
        snapshot without constants.

        The digests in the slot are of the live tensors at its boundary, so a file with the same digests
        has its bytes. `is_alone`: nobody else may name a constants shard of the attempt. Then those that
        keepers left which died go before another is written: they may be the room for it. Raises Torn where
        the bytes in memory are needed and are not those of the boundary, RegionGone where they are needed and
        their region is not here, OSError, FlashckptError.
        """
        layout, rank = content.metadata.constants, content.rank
        if layout is None:
            return None, 0
        digests = tuple(content.metadata.constants_digests)
        found = self._standing(attempt, rank, layout, digests)
        num_bytes = 0
        if found is None:
            check_records_of_buried(self._store, attempt)
            if is_alone:
                self._clear(attempt, content.snapshot)
            found = self._written(content, layout, attempt)
            num_bytes = layout.num_bytes
            try:
                _check_held(content.snapshot)
            except BaseException:
                self._remove(attempt, found.shard.file)
                raise
        self._known[rank] = attempt, found
        return found, num_bytes

    def _standing(
        self, attempt: AttemptName, rank: int, layout: Layout, digests: tuple[int, ...]
    ) -> Contents | None:
        known, contents = self._known.get(rank, (None, None))
        is_mine = contents is not None and known == attempt and constants.is_of(contents, layout, digests)
        if contents is not None and is_mine and constants.is_there(self._store, attempt, contents):
            return contents
        for source, contents in constants.named(self._store, attempt, rank):
            if not constants.is_of(contents, layout, digests):
                continue
            if source == attempt:
                is_good = constants.is_there(self._store, attempt, contents)
            else:
                is_good = constants.is_whole(
                    self._store, attempt, contents, threads=self._threads, progress_word=self._progress
                )
            if is_good:
                return contents
        return None

    def _written(self, content: _PinnedContent, layout: Layout, attempt: AttemptName) -> Contents:
        snapshot, metadata = content.snapshot, content.metadata
        first = metadata.image.first_constant
        region = next((each.region for each in snapshot.sources(metadata) if first in each.leaves), None)
        if region is None:
            raise RegionGone(REGION_IS_GONE)
        if absent := region.not_held(metadata):
            raise torn(metadata, absent)
        check_header(region, layout)
        name, written = self._create(region, layout, snapshot.rank, attempt)
        leaves = unlike(metadata, written.digests, first)
        if leaves:
            self._remove(attempt, name)
            raise torn(metadata, leaves)
        shard = ShardRecord.of(name, layout, written.checksums)
        return Contents(shard=shard, leaves=layout.leaves, digests=tuple(metadata.digests[first:]))

    def _create(self, region: Slot, layout: Layout, rank: int, attempt: AttemptName) -> tuple[str, Written]:
        """Write the image under a name that nobody has: a stopped keeper may wake up and write its own."""
        for _ in range(_NAMES_TRIED):
            name = constants.fresh_name(self._store, attempt, rank)
            try:
                return name, self._store.write_shard(
                    f"{attempt_folder(attempt)}/{name}",
                    layout,
                    MemoryRange(region.descriptor, region.image_offset),
                    threads=self._threads,
                    progress=self._progress,
                )
            except FileExistsError:
                continue
        raise FileExistsError(f"{attempt_folder(attempt)}: every name for a constants shard was taken")

    def _clear(self, attempt: AttemptName, snapshot: SealedSnapshot) -> None:
        names = constants.unnamed_of(self._store, attempt, snapshot.rank)
        # After the look: what stood then was begun before any keeper that has replaced this one could begin.
        _check_held(snapshot)
        # A keeper of a later attempt, on another machine, may name one of them since.
        with contextlib.suppress(OSError, FlashckptError):
            if names:
                # The newest number is among them: else whoever has decided on it, and slept, would name with
                # it what is written next.
                constants.remove(self._store, attempt, names, keeps_names=True)

    def _remove(self, attempt: AttemptName, name: str) -> None:
        with contextlib.suppress(OSError, FlashckptError):
            self._store.remove(f"{attempt_folder(attempt)}/{name}")


def looks_before(step: int, ranks: Collection[int], world: int, here: Ranks | None = None) -> int:
    """How often the keeper of these ranks, of `world`, looks for the manifest of a step in vain before it
    gathers the parts itself. 0: it does so at once. `here`: the ranks that commit in this folder, None for
    all."""
    count = world if here is None else count_of(here)
    if count <= len(_LOOKS_BEFORE) * len(ranks):
        return 0
    places = ranks if here is None else {place_in(here, rank) for rank in ranks if has_rank(here, rank)}
    for turn, looks in enumerate(_LOOKS_BEFORE):
        if _mix(step * len(_LOOKS_BEFORE) + turn) % count in places:
            return looks
    return _LOOKS_OF_ALL


def _mix(number: int) -> int:
    """64 bits that depend on all of a number's (splitmix64 of Steele, Lea and Flood, 2014)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
