"""Snapshots at rest: a shard read into a slot, every chunk and every leaf verified on the way.

The slot then holds what the file held, and is sealed as the first snapshot of the new attempt.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flashckpt import _native, crashpoints
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.layout import Layout
from flashckpt.format.metadata import geometry, header, plan_bytes
from flashckpt.format.records import RankRecord
from flashckpt.format.typed import decode
from flashckpt.memory.page import Record, State, Word
from flashckpt.restore.memory_tier import Held
from flashckpt.restore.snapshot import Snapshot

_PATIENCE_S, _LOOK_S = 60.0, 0.05


def load(
    record: StepRecord, rank: int, slot_for: Callable[[int, int], Held], threads: int
) -> tuple[Snapshot, Held]:
    """Read one rank's shard of a committed step into a slot, verified, sealed and pinned.

    Raises DamagedError where a byte is not what was committed, OSError where it cannot be read,
    OutOfRoomError where there is no memory for it, KeeperError where the memory to read it into fails:
    that says nothing of the step.
    """
    mine = record.rank(rank)
    layout = mine.layout()
    plan, values = plan_bytes(layout), json.dumps(dict(mine.values), separators=(",", ":")).encode()
    held = slot_for(geometry(len(plan), len(layout.leaves), len(values)).num_bytes, layout.num_bytes)
    with _slot_faults(held):
        generation = _begin(held)
    try:
        _read(record, mine, layout, held, threads)
        crashpoints.point("resume.read")
        with _slot_faults(held):
            _seal(record, mine, layout, held, generation, plan, values)
    except BaseException:
        held.slot.abandon(held.owner, generation)
        raise
    crashpoints.point("resume.sealed")
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


@contextmanager
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


def _read(record: StepRecord, mine: RankRecord, layout: Layout, held: Held, threads: int) -> None:
    path = record.shard_path(mine.rank)
    try:
        digests, bad_chunks, _ = _native.read_file(
            path,
            held.slot.descriptor,
            held.slot.image_offset,
            num_bytes=mine.shard.num_bytes,
            chunk_bytes=mine.shard.chunk_bytes,
            checksums=mine.shard.checksums,
            leaf_offsets=array("Q", [layout.data_start + leaf.offset for leaf in layout.leaves]),
            leaf_sizes=array("Q", [leaf.num_bytes for leaf in layout.leaves]),
            threads=threads,
        )
    except ValueError as error:
        # The native reader's word for a file of another length, which it had when the step was listed.
        raise DamagedError(
            f"{path}: {error}. Nothing of it was loaded.", step=record.step, path=path
        ) from error
    wrong = [
        leaf.name
        for leaf, found, expected in zip(layout.leaves, array("Q", digests), mine.digests, strict=True)
        if found != expected
    ]
    if bad_chunks or wrong:
        where = f"chunks {bad_chunks[:5]}" if bad_chunks else f"leaves {', '.join(wrong[:5])}"
        raise DamagedError(
            f"{path} is not what was committed ({where}; a chunk is {mine.shard.chunk_bytes} bytes). "
            "Nothing of it was loaded; an older step is taken. Keep the file if the disk's fault is to be "
            "found.",
            step=record.step,
            path=path,
        )
    if bytes(held.slot.image_view[: layout.data_start]) != layout.header:
        raise DamagedError(
            f"{path}'s header is not that of its leaves. Nothing of it was loaded; an older step is taken.",
            step=record.step,
            path=path,
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
