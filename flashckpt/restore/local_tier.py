"""Snapshots at rest: a shard read into a slot, every chunk and every leaf verified on the way.

The slot then holds what the file held, and is sealed as the first snapshot of the new attempt.
"""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import Callable, Iterator

from flashckpt import _native
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.layout import Layout
from flashckpt.format.metadata import geometry, header, plan_bytes
from flashckpt.format.records import RankRecord
from flashckpt.format.typed import decode
from flashckpt.memory.page import Record, State, Word
from flashckpt.restore.memory_tier import Held
from flashckpt.restore.shard_reading import ShardReading
from flashckpt.restore.snapshot import Snapshot

SlotFor = Callable[[int, int, Callable[[int, int], None]], Held]
"""Takes bytes of metadata and of image; gives a slot of at least that size to read into. The third is told
of the region before it is whole: a descriptor, to be closed by it, and the offset of the image."""

_PATIENCE_S, _LOOK_S = 60.0, 0.05


def load(record: StepRecord, rank: int, slot_for: SlotFor, threads: int) -> tuple[Snapshot, Held]:
    """Read one rank's shard of a committed step into a slot, verified, sealed and pinned.

    Raises DamagedError where a byte is not what was committed, OSError where it cannot be read,
    OutOfRoomError where there is no memory for it, KeeperError where the memory to read it into fails:
    that says nothing of the step.
    """
    mine = record.rank(rank)
    layout = mine.layout()
    plan, values = plan_bytes(layout), json.dumps(dict(mine.values), separators=(",", ":")).encode()
    with contextlib.closing(ShardReading(record, mine, layout, threads)) as reading:
        room = geometry(len(plan), len(layout.leaves), len(values)).num_bytes, layout.num_bytes
        held = slot_for(*room, reading.begin)
        with _slot_faults(held):
            generation = _begin(held)
        try:
            reading.into(held)
            with _slot_faults(held):
                _seal(record, mine, layout, held, generation, plan, values)
        except BaseException:
            held.slot.abandon(held.owner, generation)
            raise
    with _slot_faults(held):
        held.sealed = held.slot.sealed()
        held.pinned = held.slot.pin(held.owner, held.slot.state())
    snapshot = Snapshot(
        step=record.step,
        attempt=record.attempt,
        tier="local",
        layout=layout,
        digests=mine.digests,
        values=decode(dict(mine.values)),
        image=held.slot.image_view,
    )
    return snapshot, held


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


def _seal(
    record: StepRecord,
    mine: RankRecord,
    layout: Layout,
    held: Held,
    generation: int,
    plan: bytes,
    values: bytes,
) -> None:
    """Describe what was read in the slot's metadata and record, and seal it like any other snapshot."""
    places = geometry(len(plan), len(layout.leaves), len(values))
    view = held.slot.metadata_view
    head = header(len(plan), len(layout.leaves), len(values))
    view[: len(head)] = head
    view[places.plan : places.plan + len(plan)] = plan
    view[places.table : places.values] = array("Q", mine.digests).tobytes()
    view[places.values : places.num_bytes] = values
    held.slot.write_record(
        Record(
            attempt_number=record.attempt.number,
            attempt_nonce=int(record.attempt.nonce, 16),
            step=record.step,
            generation=generation,
            plan_id=_native.xxh3_64(plan),
            plan_bytes=len(plan),
            table_count=len(layout.leaves),
            values_bytes=len(values),
            metadata_bytes=places.num_bytes,
            image_bytes=layout.num_bytes,
            data_start=layout.data_start,
            captured_ns=time.monotonic_ns(),
        )
    )
    sealer = _native.Sealer()
    try:
        sealer.submit(
            waits=[],
            word=held.slot.word_address,
            expected=Word(State.WRITING, held.owner, generation).packed(),
            desired=Word(State.SEALED, 0, generation).packed(),
            record=held.slot.record_address,
            metadata=held.slot.metadata_address,
            metadata_bytes=places.num_bytes,
            table=held.slot.metadata_address + places.table,
            table_count=len(layout.leaves),
        )
        if not sealer.drain(60.0) or held.slot.state().state is not State.SEALED:
            raise _unusable(held, f"it could not be sealed ({sealer.failures()})")
    finally:
        sealer.close()
