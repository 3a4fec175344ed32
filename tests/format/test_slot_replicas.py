"""Replicas in a slot's metadata: round trip, and refusal of contradictions."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from flashckpt.errors import DamagedError
from flashckpt.format.layout import PAGE, Layout, Leaf, SlotImage, ranks_of
from flashckpt.format.metadata import Metadata, ReplicaSet, plan_bytes
from tests.hostile.test_hostile_records import put
from tests.keeper.region import write_metadata

SHARD = Layout.of([Leaf(name=name, dtype="float32", shape=(3,)) for name in ("mine", "own", "theirs too")])
KEPT = Layout.of(
    [
        Leaf(name="kept", dtype="float32", shape=(5,), aliases=("tied",)),
        Leaf(name="wide", dtype="int64", shape=(2,)),
    ]
)
LEFT = Layout.of([Leaf(name="left", dtype="float32", shape=(4,))])
CONSTANTS = Layout.of([Leaf(name="frozen", dtype="int8", shape=(7,))])
IMAGE = SlotImage(SHARD, CONSTANTS, KEPT, LEFT)
FIRST, SECOND = ranks_of(range(4)), ranks_of((0, 2))
SETS = (
    ReplicaSet(FIRST, (0, 2, 4, 6), (1, None, 3, None), (1, None, 0, None)),
    ReplicaSet(SECOND, (3, 5), (2, 2), (None, 2)),
)


def block(plan: bytes) -> memoryview:
    data = memoryview(bytearray(8192))
    write_metadata(data, plan, range(10, 17))
    return data


def test_round_trip() -> None:
    found = Metadata.unpack(block(plan_bytes(IMAGE, SETS)))
    assert (found.image, found.sets) == (IMAGE, SETS)
    names = [leaf.name for leaf in found.leaves]
    assert names == ["mine", "own", "theirs too", "wide", "kept", "left", "frozen"]
    assert (IMAGE.first_left, IMAGE.first_constant) == (5, 6)
    assert found.divided() == [(4, 0), (5, 2), (0, 1)]
    assert list(found.constants_digests) == [16]
    first, second = found.replicas()
    assert [(leaf.name, digest, by) for leaf, digest, by in first.rows()] == [
        ("kept", 14, 3), ("mine", 10, 1), ("theirs too", 12, None), ("frozen", 16, None),
    ]  # fmt: skip
    assert [(leaf.name, digest, by) for leaf, digest, by in second.rows()] == [
        ("wide", 13, 2), ("left", 15, 2),
    ]  # fmt: skip


def test_kept_leaves_start_on_a_page_after_the_shard() -> None:
    """The shard's bytes equal its file: no other leaf is among them."""
    starts = dict(zip((leaf.name for leaf in IMAGE.leaves), IMAGE.starts(), strict=True))
    behind = -(-SHARD.num_bytes // PAGE) * PAGE
    assert starts["wide"] == behind + KEPT.data_start
    assert starts["kept"] == starts["wide"] + 16
    assert IMAGE.num_bytes == behind + KEPT.num_bytes, "what is left takes no room in the slot"
    assert starts["left"] == LEFT.data_start
    assert starts["frozen"] == CONSTANTS.data_start
    assert SlotImage(SHARD).num_bytes == SHARD.num_bytes


@pytest.mark.parametrize(
    "change",
    [
        put("kept", None),
        put("kept", "names", 1, "mine"),
        put("kept", "aliases", {"1": ["own"]}),
        put("kept", "aliases", {"1": ["frozen"]}),
        put("left", None),
        put("left", "names", 0, "kept"),
        put("left", "aliases", {"0": ["mine"]}),
        put("sets", None),
        put("sets", []),
        put("sets", [[[[0, 4, 1]], [0], [1], [1]]]),
        put("sets", 0, 0, [[0, 1 << 40, 1]]),
        put("sets", 0, 1, []),
        put("sets", 0, 1, 0, 7),
        put("sets", 0, 1, 0, True),
        put("sets", 0, 1, 0, 3),
        put("sets", 0, 2, [1]),
        put("sets", 0, 2, 0, 4),
        put("sets", 0, 2, 0, False),
        put("sets", 0, 2, 2, None),
        put("sets", 1, [[[0, 4, 1]]]),
        put("sets", 0, 3, 0, 4),
        put("sets", 1, 3, 1, None),
        put("sets", 1, 2, 1, None),
    ],
)
def test_contradictions_are_refused(change: Callable[[Any], None]) -> None:
    said = json.loads(plan_bytes(IMAGE, SETS))
    change(said)
    with pytest.raises(DamagedError):
        Metadata.unpack(block(json.dumps(said).encode()))


@pytest.mark.parametrize("said", [b"{", b"[]", b"{}", b"\xff"])
def test_an_empty_encoding_is_refused(said: bytes) -> None:
    with pytest.raises(DamagedError):
        Metadata.unpack(block(said))
