"""Snapshots at rest: a shard, and the constants that its part names, read into a slot, every chunk and
every leaf verified on the way.

The slot then holds what the file held, and is sealed as the first snapshot of the new attempt.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashckpt import _native, crashpoints
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.layout import SlotImage
from flashckpt.format.metadata import Geometry, geometry, plan_bytes, write
from flashckpt.format.records import RankRecord
from flashckpt.format.typed import decode
from flashckpt.memory.control_page import Record
from flashckpt.restore.memory_tier import Held
from flashckpt.restore.shard_reading import File, ShardReading
from flashckpt.restore.snapshot import Snapshot

SlotFor = Callable[[int, int, Callable[[int, int], None]], Held]
"""Takes bytes of metadata and of image; gives a slot of at least that size to read into. The third is told
of the region before it is whole: a descriptor, to be closed by it, and the offset of the image."""

_PATIENCE_S, _LOOK_S = 60.0, 0.05


def load(record: StepRecord, rank: int, slot_for: SlotFor, threads: int) -> tuple[Snapshot, Held]:
    """Read one rank's files of a committed step into a slot, verified, sealed and pinned.

    Raises DamagedError where a byte is not what was committed, UnreadableShardError where the disk does not
    give it, OSError where it cannot be read for another reason, OutOfRoomError where there is no memory for
    it, KeeperError where the memory to read it into fails: that says nothing of the step.
    """
    mine = record.rank(rank)
    content = _Content.of(mine)
    with contextlib.closing(ShardReading(record, content.files(record), threads)) as reading:
        held = slot_for(content.places.num_bytes, content.image.num_bytes, reading.begin)
        with _slot_faults(held):
            generation = _begin(held)
        try:
            reading.into(held)
            crashpoints.point("resume.read")
            with _slot_faults(held):
                _seal(record, content, held, generation)
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
        layout=content.image,
        digests=content.digests,
        values=decode(dict(mine.values)),
        image=held.slot.image_view,
    )
    return snapshot, held


@dataclass(frozen=True)
class _Content:
    """What a slot gets for one rank: where its files stand in the image, and its metadata."""

    mine: RankRecord
    image: SlotImage
    plan: bytes
    constants_plan: bytes
    digests: tuple[int, ...]
    values: bytes

    @classmethod
    def of(cls, mine: RankRecord) -> _Content:
        constants = mine.constants
        image = SlotImage(mine.layout(), constants.layout() if constants is not None else None)
        return cls(
            mine=mine,
            image=image,
            plan=plan_bytes(image.shard),
            constants_plan=plan_bytes(image.constants) if image.constants is not None else b"",
            digests=mine.digests + (constants.digests if constants is not None else ()),
            values=json.dumps(dict(mine.values), separators=(",", ":")).encode(),
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return len(self.plan), len(self.digests), len(self.values), len(self.constants_plan)

    @property
    def places(self) -> Geometry:
        return geometry(*self.sizes)

    def files(self, record: StepRecord) -> list[File]:
        starts = 0, self.image.constants_start
        files = record.files(self.mine.rank)
        return [File(start, path, contents) for start, (path, contents) in zip(starts, files, strict=False)]


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


def _seal(record: StepRecord, content: _Content, held: Held, generation: int) -> None:
    """Describe what was read in the slot's metadata and record, and seal it like any other snapshot."""
    places, image = content.places, content.image
    write(held.slot.metadata_view, content.plan, content.digests, content.values, content.constants_plan)
    held.slot.write_record(
        Record(
            attempt_number=record.attempt.number,
            attempt_nonce=int(record.attempt.nonce, 16),
            step=record.step,
            generation=generation,
            plan_id=_native.xxh3_64(content.plan + content.constants_plan),
            plan_bytes=len(content.plan),
            table_count=len(content.digests),
            values_bytes=len(content.values),
            metadata_bytes=places.num_bytes,
            image_bytes=image.shard.num_bytes,
            data_start=image.shard.data_start,
            captured_ns=time.monotonic_ns(),
            constants_start=image.constants_start,
            constants_bytes=image.constants_bytes,
        )
    )
    why = held.slot.seal(held.owner, generation, places, len(content.digests))
    if why:
        raise _unusable(held, why)
