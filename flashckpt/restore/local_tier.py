"""Snapshots at rest: a shard read into a slot, and the constants that its part names into a region, every
chunk and every leaf verified on the way.

They then hold what the files held, and are sealed as the first snapshot of the new attempt.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence

from flashckpt import _native, crashpoints
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.layout import SlotImage
from flashckpt.format.metadata import geometry, plan_bytes, write
from flashckpt.format.records import Contents
from flashckpt.format.typed import decode
from flashckpt.memory.constants import region_size, seal_region
from flashckpt.memory.control_page import Record, SlotSize
from flashckpt.restore.memory_tier import Held
from flashckpt.restore.shard_reading import ShardReading
from flashckpt.restore.snapshot import Snapshot

HoldFor = Callable[[int, int, Callable[[int, int], None]], Held]
"""Takes bytes of metadata and of image; gives memory of at least that size to read into. The third is told of
it before it is whole: a descriptor, to be closed by it, and the offset of the image."""

_PATIENCE_S, _LOOK_S = 60.0, 0.05


def load(
    record: StepRecord, rank: int, slot_for: HoldFor, region_for: HoldFor, threads: int
) -> tuple[Snapshot, Held]:
    """Read one rank's files of a committed step into a slot and, where it has constants, into a region that
    the slot names: verified, sealed and pinned.

    Raises DamagedError where a byte is not what was committed, UnreadableShardError where the disk does not
    give it, OSError where it cannot be read for another reason, OutOfRoomError where there is no memory for
    it, KeeperError where the memory to read it into fails: that says nothing of the step.
    """
    mine = record.rank(rank)
    layouts = [contents.layout() for _, contents in record.files(rank)]
    image = SlotImage(*layouts)
    digests = mine.digests + (mine.constants.digests if mine.constants is not None else ())
    # Constants first: no slot may be sealed that names a region which is not.
    region = _read_constants(record, rank, region_for, threads) if mine.constants is not None else None
    crashpoints.point("resume.constants")
    try:
        held = _read_shard(record, rank, image, digests, region, slot_for, threads)
    except BaseException:
        if region is not None:
            region.slot.free(region.slot.state())
        raise
    crashpoints.point("resume.sealed")
    with _slot_faults(held):
        held.sealed = held.slot.sealed()
        held.pinned = held.slot.pin(held.owner, held.slot.state())
    held.constants = region.slot if region is not None else None
    snapshot = Snapshot(
        step=record.step,
        attempt=record.attempt,
        boundary=record.boundary,
        tier="local",
        layout=image,
        digests=digests,
        values=decode(dict(mine.values)),
        image=held.slot.image_view,
        constants_image=region.slot.image_view if region is not None else None,
    )
    return snapshot, held


def _read_constants(record: StepRecord, rank: int, region_for: HoldFor, threads: int) -> Held:
    path, contents = record.files(rank)[1]
    layout = contents.layout()

    def sealed(held: Held, generation: int) -> str:
        found = held.slot, held.owner, generation, layout, contents.digests
        return seal_region(*found, record.attempt, record.step)

    return _read(record, path, contents, region_size(layout), region_for, threads, sealed)


def _read_shard(
    record: StepRecord,
    rank: int,
    image: SlotImage,
    digests: Sequence[int],
    region: Held | None,
    slot_for: HoldFor,
    threads: int,
) -> Held:
    path, contents = record.files(rank)[0]
    values = json.dumps(dict(record.rank(rank).values), separators=(",", ":")).encode()
    plan = plan_bytes(image.shard)
    constants_plan = plan_bytes(image.constants) if image.constants is not None else b""
    places = geometry(len(plan), len(digests), len(values), len(constants_plan))

    def sealed(held: Held, generation: int) -> str:
        crashpoints.point("resume.read")
        write(held.slot.metadata_view, plan, digests, values, constants_plan)
        held.slot.write_record(
            Record(
                attempt_number=record.attempt.number,
                attempt_nonce=int(record.attempt.nonce, 16),
                step=record.step,
                generation=generation,
                plan_id=_native.xxh3_64(plan + constants_plan),
                plan_bytes=len(plan),
                table_count=len(digests),
                values_bytes=len(values),
                metadata_bytes=places.num_bytes,
                image_bytes=image.shard.num_bytes,
                data_start=image.shard.data_start,
                captured_ns=time.monotonic_ns(),
                constants_bytes=image.constants_bytes,
                constants_nonce=region.slot.header.nonce if region is not None else 0,
                boundary=record.boundary,
            )
        )
        return held.slot.seal(held.owner, generation, places, len(digests))

    size = SlotSize(places.num_bytes, image.shard.num_bytes)
    return _read(record, path, contents, size, slot_for, threads, sealed)


def _read(
    record: StepRecord,
    path: str,
    contents: Contents,
    size: SlotSize,
    hold_for: HoldFor,
    threads: int,
    sealed: Callable[[Held, int], str],
) -> Held:
    """A file in memory, verified and sealed. `sealed` describes it, and says why it could not be sealed."""
    with contextlib.closing(ShardReading(record, path, contents, threads)) as reading:
        held = hold_for(*size, reading.begin)
        with _slot_faults(held):
            generation = _begin(held)
        try:
            reading.into(held)
            with _slot_faults(held):
                why = sealed(held, generation)
            if why:
                raise _unusable(held, why)
        except BaseException:
            held.slot.abandon(held.owner, generation)
            raise
    return held


@contextlib.contextmanager
def _slot_faults(held: Held) -> Iterator[None]:
    """What is damaged here is this node's memory: it must not be taken for damage of the step."""
    try:
        yield
    except DamagedError as error:
        raise _unusable(held, str(error)) from error


def _begin(held: Held) -> int:
    """Take the slot for writing, once a keeper that still reads what was in it is done."""
    until = time.monotonic() + _PATIENCE_S
    while (generation := held.slot.begin(held.owner)) is None:
        if time.monotonic() > until:
            raise _unusable(held, "another process has it")
        time.sleep(_LOOK_S)
    return generation


def _unusable(held: Held, why: str) -> KeeperError:
    return KeeperError(
        f"The slot {held.slot.name}, which the step was to be read into, cannot be used: {why}. Nothing was "
        "loaded or changed; the step itself is not in doubt. Start again; if it happens twice, end the run's "
        "keeper first, or look at this host's memory."
    )
