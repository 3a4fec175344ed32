"""From a sealed slot to a committed step: pin, check, constants, write with audit, part, manifest.

Owns the order of these for one slot. Runs in a worker thread; what it did is in its Outcome, and only
the slot's own words are changed on the way.
"""

from __future__ import annotations

import contextlib
import errno
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from flashckpt import _native, crashpoints
from flashckpt.commit import attempts, lineage, steps
from flashckpt.errors import DamagedError, FlashckptError, KeeperError, SupersededError
from flashckpt.events import log
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import RUN, AttemptName, part_name, step_attempt_folder
from flashckpt.format.records import Contents, Part, RankRecord, ShardRecord
from flashckpt.keeper.audit import Stopped, Torn, check_header, differing, torn, unlike
from flashckpt.keeper.constants import ConstantsShards, RegionGone
from flashckpt.memory.page import Word
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.options import Keep
from flashckpt.store.base import Region, Store

_PIN_LOST = "the slot was taken from this keeper while it was written; another keeper has it now"


class Result(Enum):
    COMMITTED = "committed"
    WAITING = "waiting"
    TORN = "torn"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    GONE = "gone"
    SOUND = "sound"


@dataclass(frozen=True, kw_only=True)
class Order:
    """One snapshot to persist or to audit. `keep` is None where nothing may be pruned: no trainer has
    said what its user wants to keep. `constants` is the region that the snapshot shares with others.
    `is_alone`: no other keeper lives that could write for its attempt."""

    slot: Slot
    generation: int
    owner: int
    world: int = 1
    keep: Keep | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    constants: Slot | None = None
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of an order. Sizes in bytes, times in seconds; `leaves` are (index, name) of those that
    differed; `errno` is 0 where the system gave none. `lacks_region`: without the region that it names it can
    never be persisted."""

    result: Result
    slot: str
    generation: int
    step: int = -1
    attempt: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    direct: bool = True
    leaves: tuple[tuple[int, str], ...] = ()
    message: str = ""
    errno: int = 0
    lacks_region: bool = False


@dataclass(frozen=True)
class _Written:
    """What was written of a snapshot. `direct`: the page cache was bypassed."""

    num_bytes: int
    direct: bool


class Drain:
    """Writes slots to a store. `nonce` is this keeper's: with it no two keepers ever write one file. `stands`
    says whether the run is still in the store."""

    def __init__(
        self, store: Store, nonce: str, *, stands: Callable[[], bool] | None = None, threads: int = 2
    ) -> None:
        self._store = store
        self._stands = stands or (lambda: store.exists(RUN))
        self._nonce = nonce
        self._threads = threads
        self._files = 0
        self._progress = array("Q", [0])
        self._constants = ConstantsShards(store, threads, _native.address_of(self._progress))

    @property
    def progress_bytes(self) -> int:
        """Bytes written so far, by all orders; it moves while one is written."""
        return self._progress[0]

    def persist(self, order: Order) -> Outcome:
        """Persist a sealed snapshot and commit its step. Never raises: failure is an outcome."""
        slot, began = order.slot, time.monotonic()
        outcome = Outcome(result=Result.GONE, slot=slot.name, generation=order.generation)
        word = slot.state()
        try:
            sealed = slot.sealed()
        except DamagedError as error:
            return _discarded(slot, outcome, word, Torn(str(error)))
        if sealed is None or sealed.generation != order.generation:
            return outcome
        outcome = replace(outcome, step=sealed.step, attempt=str(attempt_of(sealed)))
        pinned = slot.pin(order.owner, sealed.word)
        if pinned is None:
            return outcome
        crashpoints.point("audit.pinned")
        try:
            outcome = self._persist_pinned(order, sealed, pinned, outcome)
        except Torn as found:
            return _discarded(slot, outcome, pinned, found)
        except SupersededError as error:
            outcome = replace(outcome, result=Result.SUPERSEDED, message=str(error))
        except (OSError, FlashckptError, ValueError) as error:
            outcome = _failure(outcome, error)
        if outcome.result is Result.COMMITTED and slot.holds(pinned):
            # Before the pin goes: a trainer that sees the slot sealed must see that it is done with.
            slot.set_persisted(order.generation)
            crashpoints.point("commit.marked")
        if not slot.unpin(pinned):
            outcome = replace(outcome, result=Result.FAILED, message=_PIN_LOST)
        return replace(outcome, seconds=time.monotonic() - began)

    def audit(self, order: Order, is_stopped: Callable[[], bool] = lambda: False) -> Outcome:
        """Compare a sealed snapshot's bytes with its digests, without pinning it: what is overwritten
        meanwhile is judged by nobody, nor is what was not looked at to its end."""
        slot = order.slot
        outcome = Outcome(result=Result.GONE, slot=slot.name, generation=order.generation)
        word = slot.state()
        try:
            sealed = slot.sealed()
            if sealed is None or sealed.word != word or sealed.generation != order.generation:
                return outcome
            outcome = replace(outcome, step=sealed.step, attempt=str(attempt_of(sealed)))
            metadata = slot.metadata(sealed)
            crashpoints.point("audit.begun")
            if metadata.shared and order.constants is None:
                return outcome  # not handed over yet, or gone: it is for whoever needs the bytes to say
            leaves = differing(slot, metadata, order.constants, is_stopped)
        except Stopped:
            return outcome
        except DamagedError as error:
            return _discarded(slot, outcome, word, Torn(str(error)))
        if slot.state() != word:
            return outcome
        if leaves:
            return _discarded(slot, outcome, word, torn(metadata, leaves))
        return replace(outcome, result=Result.SOUND)

    def _persist_pinned(self, order: Order, sealed: Sealed, pinned: Word, outcome: Outcome) -> Outcome:
        metadata = _checked(order.slot, sealed)
        if not self._stands():
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self._store.url)
        attempt, own = self.attempt_for(order.slot, sealed)
        while True:
            try:
                return self._persist_as(order, sealed, pinned, metadata, attempt, own, outcome)
            except SupersededError:
                # An attempt may have started meanwhile that went on from this very slot: then it is its.
                before, (attempt, own) = attempt, self.attempt_for(order.slot, sealed)
                if attempt == before:
                    raise

    def _persist_as(
        self,
        order: Order,
        sealed: Sealed,
        pinned: Word,
        metadata: Metadata,
        attempt: AttemptName,
        own: bool,
        outcome: Outcome,
    ) -> Outcome:
        outcome = replace(outcome, attempt=str(attempt))
        if self._is_done(sealed.step, attempt, order.slot.rank, metadata, loaded=not own):
            return replace(outcome, result=Result.COMMITTED)
        newer = attempts.started_after(self._store, attempt)
        if newer is not None:
            raise SupersededError(f"attempt {newer} has started; attempt {attempt} commits nothing more.")
        folder = step_attempt_folder(sealed.step, attempt)
        written = _Written(sealed.record.image_bytes, direct=True)
        # A part that stands was written by this keeper in an earlier try, or by the one before it.
        if self._store.exists(path := f"{folder}/{part_name(0)}"):
            part = Part.from_bytes(self._store.read(path, Part.MAX_BYTES), path)
            if not _is_of(part, order.slot.rank, metadata):
                raise _other_content(sealed.step, attempt)
        else:
            written = self._write(order, sealed, pinned, metadata, folder, attempt)
        found = steps.commit(self._store, sealed.step, attempt, order.world)
        if found is steps.Committed.BURIED:
            raise SupersededError(f"step {sealed.step} of attempt {attempt} was pruned meanwhile.")
        result = Result.COMMITTED if found else Result.WAITING
        return replace(outcome, result=result, direct=written.direct, num_bytes=written.num_bytes)

    def attempt_for(self, slot: Slot, sealed: Sealed) -> tuple[AttemptName, bool]:
        """Whose step a snapshot is, and whether its own attempt's. The slot that a started attempt says
        it was loaded from counts as that attempt's: it is never relabelled."""
        record, own = sealed.record, attempt_of(sealed)
        newest = attempts.newest_started(self._store)
        if newest is not None and newest.number > own.number:
            start = attempts.read_start(self._store, newest)
            if start is not None and start.loaded == slot.name and start.step == record.step:
                return newest, False
        return own, True

    def _is_done(
        self, step: int, attempt: AttemptName, rank: int, metadata: Metadata, *, loaded: bool
    ) -> bool:
        """Whether this very content is committed. SupersededError where the number is another one's."""
        if steps.is_committed(self._store, step, attempt):
            if not self._holds(step, attempt, rank, metadata):
                raise _other_content(step, attempt)
            return True
        if not loaded:
            return False
        visible = lineage.newest_first(self._store)
        found = next((each for each in visible if each.step <= step), None)
        if found is None or found.step != step:
            return False
        return self._holds(step, found.attempt, rank, metadata)

    def _holds(self, step: int, attempt: AttemptName, rank: int, metadata: Metadata) -> bool:
        return _is_of(steps.read_step(self._store, step, attempt).part_of(rank), rank, metadata)

    def _write(
        self,
        order: Order,
        sealed: Sealed,
        pinned: Word,
        metadata: Metadata,
        folder: str,
        attempt: AttemptName,
    ) -> _Written:
        """Constants shard, shard, part. On failure no shard of the step stays behind; a constants shard
        that is whole does, for the next try."""
        slot = order.slot

        def check_held() -> None:
            # The disk reads the region after the digests did: without the pin, perhaps something else.
            if not slot.holds(pinned):
                raise KeeperError(_PIN_LOST)

        # Before the part that names it: what is written here is debris until then, and nothing more.
        constants, constants_bytes = self._constants.shard_for(
            slot, metadata, order.constants, attempt, check_held, is_alone=order.is_alone
        )
        self._files += 1
        name = steps.shard_name(slot.rank, f"{self._nonce}{self._files:04x}")
        published = False
        try:
            shard, direct = self._write_shard(slot, metadata, folder, name)
            check_held()
            part = _part(order, sealed, metadata, shard, constants, attempt)
            published = steps.publish_part(self._store, part)
        finally:
            if not published:
                self._remove_debris(folder, name)
        return _Written(shard.num_bytes + constants_bytes, direct)

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

    def _remove_debris(self, folder: str, name: str) -> None:
        """Remove a shard unless a part stands: an error may have come after the part's own link."""
        with contextlib.suppress(OSError, FlashckptError):
            path = f"{folder}/{part_name(0)}"
            if self._store.exists(path):
                part = Part.from_bytes(self._store.read(path, Part.MAX_BYTES), path)
                if any(rank.shard.file == name for rank in part.ranks):
                    return
            self._store.remove(f"{folder}/{name}")


def _is_of(part: Part, rank: int, metadata: Metadata) -> bool:
    """Whether a part holds the content of a snapshot: its leaves by their digests, and its values."""
    found = next((each for each in part.ranks if each.rank == rank), None)
    if found is None:
        return False
    num_leaves = len(metadata.layout.leaves)
    then = {leaf.name: digest for leaf, digest in zip(found.leaves, found.digests, strict=True)}
    digests = metadata.digests[:num_leaves]
    now = {leaf.name: digest for leaf, digest in zip(metadata.layout.leaves, digests, strict=True)}
    return now == then and found.values == strict_loads(metadata.values, what="a slot's values")


def _other_content(step: int, attempt: AttemptName) -> SupersededError:
    return SupersededError(
        f"another snapshot of step {step} of attempt {attempt} is on disk, or on its way there, and stands; "
        "this one is not persisted. A run that is started again goes on from the one on disk.",
        step=step,
    )


def attempt_of(sealed: Sealed) -> AttemptName:
    """The attempt that captured a snapshot."""
    return AttemptName(sealed.record.attempt_number, f"{sealed.record.attempt_nonce:08x}")


def _checked(slot: Slot, sealed: Sealed) -> Metadata:
    """The metadata of a pinned slot, and proof that the image begins as its layout says."""
    try:
        metadata = slot.metadata(sealed)
    except DamagedError as error:
        raise Torn(str(error)) from error
    check_header(slot, 0, metadata.layout)
    return metadata


def _part(
    order: Order,
    sealed: Sealed,
    metadata: Metadata,
    shard: ShardRecord,
    constants: Contents | None,
    attempt: AttemptName,
) -> Part:
    try:
        values = strict_loads(metadata.values, what="a slot's values")
    except DamagedError as error:
        raise Torn(str(error)) from error
    rank = RankRecord(
        rank=order.slot.rank,
        shard=shard,
        leaves=metadata.layout.leaves,
        digests=tuple(metadata.digests[: len(metadata.layout.leaves)]),
        values=values,
        constants=constants,
    )
    return Part(
        step=sealed.step,
        attempt=attempt,
        world=order.world,
        keeper=0,
        ranks=(rank,),
        environment=order.environment,
    )


def _discarded(slot: Slot, outcome: Outcome, word: Word, found: Torn) -> Outcome:
    """Free a snapshot that nobody may use, and tell its trainer; unless it is gone already."""
    if not slot.free(word):
        return outcome
    slot.set_torn(outcome.generation, [index for index, _ in found.leaves])
    return replace(outcome, result=Result.TORN, leaves=found.leaves, message=str(found))


def _failure(outcome: Outcome, error: Exception) -> Outcome:
    log.debug("persisting failed", exc_info=True)
    number = error.errno or 0 if isinstance(error, OSError) else 0
    lacks_region, message = isinstance(error, RegionGone), str(error) or type(error).__name__
    return replace(outcome, result=Result.FAILED, message=message, errno=number, lacks_region=lacks_region)
