"""A region of constants as a trainer fills it, natively: sealed once, with whatever bytes a test wants."""

import time
from array import array
from collections.abc import Sequence

from flashckpt import _native
from flashckpt.format import metadata
from flashckpt.format.layout import Layout, SlotImage
from flashckpt.format.names import AttemptName
from flashckpt.memory.region import Record
from flashckpt.memory.slot import Slot

VALUES = b"{}"


def write_metadata(
    view: memoryview, plan: bytes, digests: Sequence[int], values: bytes = VALUES
) -> metadata.Geometry:
    """Write a whole block: a plan as `plan_bytes` gives it. Returns where its parts stand."""
    sizes = len(plan), len(digests), len(values)
    places, head = metadata.geometry(*sizes), metadata.header(*sizes)
    view[: len(head)] = head
    view[places.plan : places.plan + len(plan)] = plan
    view[places.table : places.values] = array("Q", digests).tobytes()
    view[places.values : places.num_bytes] = values
    return places


def record_of(
    attempt: AttemptName, step: int, generation: int, layout: Layout, places: metadata.Geometry, **more: int
) -> Record:
    fields = {
        "attempt_number": attempt.number, "attempt_nonce": int(attempt.nonce, 16), "step": step,
        "generation": generation, "plan_id": 1, "table_count": _count(places),
        "values_bytes": places.num_bytes - places.values, "metadata_bytes": places.num_bytes,
        "image_bytes": layout.num_bytes, "data_start": layout.data_start, "captured_ns": time.monotonic_ns(),
    }  # fmt: skip
    return Record(**{**fields, **more})


def _count(places: metadata.Geometry) -> int:
    """The number of digests."""
    return (places.values - places.table) // 8


def seal(
    slot: Slot, owner: int, generation: int, places: metadata.Geometry, *, confirms: bool = False
) -> None:
    sealer = _native.Sealer()
    slot.submit(sealer, owner, generation, places, _count(places), confirms=confirms)
    assert sealer.drain(240)
    sealer.close()


def write_constants(
    region: Slot, owner: int, attempt: AttemptName, layout: Layout, data: Sequence[bytes]
) -> None:
    """Write and seal a region: the bytes of each leaf, at the place that the layout gives it."""
    found = [bytearray(each) for each in data]
    digests = array("Q", [_native.digest(_native.address_of(each), len(each)) for each in found])
    plan = metadata.plan_bytes(SlotImage(layout))
    generation = region.begin(owner)
    assert generation is not None
    region.image_view[: layout.data_start] = layout.header
    for leaf, each in zip(layout.leaves, found, strict=True):
        start = layout.data_start + leaf.offset
        region.image_view[start : start + len(each)] = each
    places = write_metadata(region.metadata_view, plan, digests)
    region.write_record(record_of(attempt, 0, generation, layout, places))
    seal(region, owner, generation, places)
