"""Constants in a region of their own: to the byte, of every version, and refused if not."""

from __future__ import annotations

import struct
from array import array
from contextlib import nullcontext
from dataclasses import replace

import pytest

from flashckpt import _native
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format import metadata
from flashckpt.format.layout import Layout, Leaf, SlotImage
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName
from flashckpt.memory import region
from flashckpt.memory import region as page
from flashckpt.memory.region import Record, SlotHeader, SlotSize
from flashckpt.memory.slot import Slot
from tests.descriptors import closed_after
from tests.keeper.region import record_of, seal, write_constants, write_metadata
from tests.memory.test_slot import IDENTITY, LAYOUT, VALUES, fill, flip, make

NONCE = 0xAB54A98CEB1F0AD2
CONSTANTS = Layout.of([Leaf(name="z", dtype="int64", shape=(2,)), Leaf(name="y", dtype="uint8", shape=(9,))])
DATA = [bytes(range(leaf.num_bytes)) for leaf in CONSTANTS.leaves]
ATTEMPT = AttemptName(1, "00000007")


def fill_shared(slot: Slot, digests: array[int] | None = None, **changes: int) -> int:
    """Seal a snapshot that names a region; `changes` are to its record. Its generation."""
    generation = slot.begin(1)
    assert generation is not None
    plan = metadata.plan_bytes(SlotImage(LAYOUT, CONSTANTS))
    table = array("Q", [1, 2]) + (digests or array("Q", [3, 4]))
    places = write_metadata(slot.metadata_view, plan, table, VALUES)
    how = {"constants_bytes": CONSTANTS.num_bytes, "constants_nonce": NONCE, **changes}
    slot.write_record(record_of(ATTEMPT, 5, generation, LAYOUT, places, **how))
    seal(slot, 1, generation, places)
    return generation


@pytest.fixture
def slot() -> Slot:
    return closed_after(make())


@pytest.fixture
def filled() -> Slot:
    """A region that is sealed with DATA."""
    made = closed_after(make(nonce=NONCE, holds_constants=True))
    write_constants(made, 1, ATTEMPT, CONSTANTS, DATA)
    return made


def found_in(slot: Slot) -> Metadata:
    sealed = slot.sealed()
    assert sealed is not None
    return slot.metadata(sealed)


def fixed_bytes(magic: bytes, version: int) -> bytes:
    """The first 256 bytes of a region as they have always been written, by hand."""
    fields = struct.pack(
        "<8sIII4x16sQQQQQQ", magic, version, 3, 7, IDENTITY, NONCE, 4 * 4096, 4096, 4096, 8192, 8192
    ).ljust(240, b"\0")
    return fields + _native.xxh3_128(fields)


def test_a_page_is_read_and_written_to_the_byte() -> None:
    data = fixed_bytes(b"FLCKSLOT", 1)
    header = SlotHeader.unpacked(data)
    assert (header.holds_constants, header.name) == (False, f"slot-00007-3-{NONCE:016x}")
    assert header.packed() == data
    assert replace(header, holds_constants=True).packed() == fixed_bytes(b"FLCKCNST", 1)


def test_a_region_of_constants_is_told_by_its_magic() -> None:
    header = SlotHeader.unpacked(fixed_bytes(b"FLCKCNST", 1))
    assert header.holds_constants
    assert header.name == f"constants-00007-{NONCE:016x}"
    assert region.is_region_name(header.name)
    assert not region.is_region_name(header.name[:-1])
    with pytest.raises(DamagedError, match="does not begin as a slot"):
        SlotHeader.unpacked(fixed_bytes(b"FLCKCONS", 1))


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("magic", [b"FLCKSLOT", b"FLCKCNST"])
def test_other_versions_are_left(magic: bytes, version: int) -> None:
    with pytest.raises(FormatError, match="It was left"):
        SlotHeader.unpacked(fixed_bytes(magic, version))


def test_the_nonce_stands_behind_the_constants_of_the_record() -> None:
    names = [name for name in Record.__dataclass_fields__ if not name.startswith("constants")]
    record = Record(**dict.fromkeys(names, 0), constants_bytes=2, constants_nonce=NONCE)
    packed = record.packed()
    assert packed[88:104] == struct.pack("<2Q", 2, NONCE)
    assert packed[104:] == bytes(120)


@pytest.mark.parametrize(
    ("num_bytes", "nonce", "fits"),
    [
        (4096, 1, True), (1 << 40, 1, True), (4096, (1 << 64) - 1, True), (0, 0, True), (0, 1, False),
        (4096, 0, False),
    ],
)  # fmt: skip
def test_constants_have_a_region_and_take_no_room(num_bytes: int, nonce: int, fits: bool) -> None:
    names = [name for name in Record.__dataclass_fields__ if not name.startswith("constants")]
    fields = dict.fromkeys(names, 0) | {"image_bytes": 5000, "metadata_bytes": 4096}
    record = Record(**fields, constants_bytes=num_bytes, constants_nonce=nonce)
    assert record.fits(SlotSize(4096, 8192)) is fits
    assert not record.fits(SlotSize(4096, 4999))
    assert not record.fits(SlotSize(4095, 8192))
    sealed = bytes(16) + record.packed()
    sealed += _native.xxh3_128(sealed)
    with nullcontext() if fits else pytest.raises(DamagedError, match="contradicts its region"):
        assert Record.unpacked(sealed, 0, SlotSize(4096, 8192)) == record
    with pytest.raises(DamagedError, match="contradicts its region"):
        Record.unpacked(sealed, 1, SlotSize(4096, 8192))


def test_metadata_with_constants_comes_back(slot: Slot) -> None:
    fill_shared(slot)
    found = found_in(slot)
    assert (found.image.constants, list(found.constants_digests)) == (CONSTANTS, [3, 4])
    assert found.leaves == LAYOUT.leaves + CONSTANTS.leaves
    first, own = CONSTANTS.data_start, len(LAYOUT.leaves)
    assert found.image.starts()[own:] == [first + leaf.offset for leaf in CONSTANTS.leaves]
    assert found.counted() == list(zip(found.leaves, found.digests, strict=True))


def with_constants(shard: Layout, constants: Layout) -> Metadata:
    block = memoryview(bytearray(8192))
    digests = range(1, len(shard.leaves) + len(constants.leaves) + 1)
    places = write_metadata(block, metadata.plan_bytes(SlotImage(shard, constants)), digests)
    return Metadata.unpack(block[: places.num_bytes])


def test_of_a_constant_that_the_shard_has_too_the_shards_bytes_count() -> None:
    changed = replace(CONSTANTS.leaves[0], aliases=("w",), dtype="float32", shape=(5,))
    found = with_constants(Layout.of([changed]), CONSTANTS)
    assert found.image.outdated == {1}
    assert [(leaf.name, digest) for leaf, digest in found.counted()] == [("z", 1), ("y", 3)]
    # Under whichever of its names.
    renamed = replace(changed, name="w", aliases=("z",))
    assert with_constants(Layout.of([renamed]), CONSTANTS).image.outdated == {1}


def test_constants_that_are_all_outdated_or_have_the_name_of_another_leaf_are_refused() -> None:
    with pytest.raises(DamagedError, match="all its constants are outdated"):
        with_constants(Layout.of(CONSTANTS.leaves), CONSTANTS)
    tied = Layout.of([replace(CONSTANTS.leaves[0], aliases=("x",)), CONSTANTS.leaves[1]])
    with pytest.raises(DamagedError, match="another leaf"):
        with_constants(Layout.of([Leaf(name="x", dtype="int8", shape=(2,))]), tied)


def test_metadata_with_flags_is_refused(slot: Slot) -> None:
    fill(slot, 5)
    block = bytearray(slot.metadata_view[:4096])
    block[12] = 1
    with pytest.raises(DamagedError, match="flags"):
        Metadata.unpack(block)


@pytest.mark.parametrize(
    "changes",
    [
        {"constants_nonce": 0, "constants_bytes": 0}, {"constants_bytes": 1}, {"constants_bytes": 0},
        {"constants_nonce": 0},
    ],
)  # fmt: skip
def test_a_record_that_contradicts_its_metadata_is_refused(slot: Slot, changes: dict[str, int]) -> None:
    fill_shared(slot, **changes)
    with pytest.raises(DamagedError, match="contradicts"):
        found_in(slot)


def test_a_region_is_a_snapshots_own_by_plan_and_digests_while_it_is_sealed_and_sound(
    slot: Slot, filled: Slot
) -> None:
    own = found_in(filled).digests
    fill_shared(slot, own)
    found = found_in(slot)
    assert not filled.not_held(found)
    for digests in (array("Q", [3, 4]), own[::-1]):
        assert filled.not_held(replace(found, digests=found.digests[:2] + digests))
    renamed = Layout.of([replace(leaf, name=leaf.name * 2) for leaf in CONSTANTS.leaves])
    retyped = Layout.of([replace(leaf, dtype="int8", shape=(leaf.num_bytes,)) for leaf in CONSTANTS.leaves])
    for other in (renamed, retyped, Layout.of(CONSTANTS.leaves[:1])):
        assert filled.not_held(replace(found, image=SlotImage(LAYOUT, other)))
    for offset in (page.RECORD_OFFSET + 30, 4096 + 70):
        flip(filled, offset)
        assert filled.not_held(found)
        flip(filled, offset)
    assert not filled.not_held(found)
    assert filled.free(filled.state())
    assert filled.not_held(found)
