"""What a slot's metadata says of replicas: there and back, and refused where it contradicts itself."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from flashckpt.errors import DamagedError
from flashckpt.format.layout import PAGE, Layout, Leaf, SlotImage
from flashckpt.format.metadata import (
    Metadata,
    ReplicaSet,
    geometry,
    header,
    plan_bytes,
    replicas_bytes,
)
from flashckpt.format.replicas import ranks_of
from tests.hostile.test_hostile_records import put

VALUES = b"{}"
SHARD = Layout.of([Leaf(name=name, dtype="float32", shape=(3,)) for name in ("mine", "own", "theirs too")])
KEPT = Layout.of(
    [
        Leaf(name="kept", dtype="float32", shape=(5,), aliases=("tied",)),
        Leaf(name="wide", dtype="int64", shape=(2,)),
    ]
)
CONSTANTS = Layout.of([Leaf(name="frozen", dtype="int8", shape=(7,))])
IMAGE = SlotImage(SHARD, CONSTANTS, KEPT)
FIRST, SECOND = ranks_of(range(4)), ranks_of((0, 2))
SETS = (
    ReplicaSet(FIRST, (0, 2, 4, 5), (1, None, 3, None)),
    ReplicaSet(SECOND, (3,), (2,)),
)


def block(replicas: bytes, constants: Layout | None = CONSTANTS, count: int = 6) -> bytes:
    plan, fixed = plan_bytes(SHARD), plan_bytes(constants) if constants is not None else b""
    sizes = len(plan), count, len(VALUES), len(fixed), len(replicas)
    places = geometry(*sizes)
    data = bytearray(places.num_bytes)
    data[:64] = header(*sizes)
    data[places.plan : places.plan + len(plan)] = plan
    data[places.constants : places.constants + len(fixed)] = fixed
    data[places.replicas : places.replicas + len(replicas)] = replicas
    data[places.table : places.values] = array("Q", range(10, 10 + count)).tobytes()
    data[places.values :] = VALUES
    return bytes(data)


def test_there_and_back() -> None:
    found = Metadata.unpack(block(replicas_bytes(KEPT, SETS)))
    assert (found.layout, found.constants, found.kept, found.sets) == (SHARD, CONSTANTS, KEPT, SETS)
    assert found.image == IMAGE
    assert [leaf.name for leaf in found.leaves] == ["mine", "own", "theirs too", "wide", "kept", "frozen"]
    assert list(found.constants_digests) == [15]
    first, second = found.replicas()
    assert [(leaf.name, digest, by) for leaf, digest, by in first.rows()] == [
        ("kept", 14, 3), ("mine", 10, 1), ("theirs too", 12, None), ("frozen", 15, None),
    ]  # fmt: skip
    assert [(leaf.name, digest, by) for leaf, digest, by in second.rows()] == [("wide", 13, 2)]


def test_without_replicas_nothing_is_said_of_them() -> None:
    found = Metadata.unpack(block(replicas_bytes(None, ()), count=4))
    assert (found.kept, found.sets, found.replicas()) == (None, (), ())
    assert replicas_bytes(None, ()) == b""


def test_what_is_kept_begins_on_a_page_behind_the_shard() -> None:
    """The shard's own bytes are what its file will be: nothing of another leaf stands among them."""
    starts = dict(zip((leaf.name for leaf in IMAGE.leaves), IMAGE.starts(), strict=True))
    behind = -(-SHARD.num_bytes // PAGE) * PAGE
    assert starts["wide"] == behind + KEPT.data_start
    assert starts["kept"] == starts["wide"] + 16
    assert IMAGE.num_bytes == behind + KEPT.num_bytes
    assert starts["frozen"] == CONSTANTS.data_start
    assert SlotImage(SHARD).num_bytes == SHARD.num_bytes


@pytest.mark.parametrize(
    "change",
    [
        put("kept", None),
        put("kept", "names", 1, "mine"),
        put("kept", "aliases", {"1": ["own"]}),
        put("kept", "aliases", {"1": ["frozen"]}),
        put("sets", None),
        put("sets", []),
        put("sets", [[[[0, 4, 1]], [0], [1]]]),
        put("sets", 0, 0, [[0, 1, 1]]),
        put("sets", 0, 0, [[0, 1 << 40, 1]]),
        put("sets", 0, 1, []),
        put("sets", 0, 1, 0, 6),
        put("sets", 0, 1, 0, -1),
        put("sets", 0, 1, 0, True),
        put("sets", 0, 1, 0, "0"),
        put("sets", 0, 1, 0, 3),
        put("sets", 0, 1, 0, 2),
        put("sets", 0, 2, [1]),
        put("sets", 0, 2, 0, 4),
        put("sets", 0, 2, 0, []),
        put("sets", 0, 2, 0, False),
        put("sets", 0, 2, 2, None),
        put("sets", 1, [[[0, 4, 1]]]),
    ],
)
def test_what_contradicts_itself(change: Callable[[Any], None]) -> None:
    said = json.loads(replicas_bytes(KEPT, SETS))
    change(said)
    with pytest.raises(DamagedError):
        Metadata.unpack(block(json.dumps(said).encode()))


@pytest.mark.parametrize("said", [b"{", b"[]", b"{}", b"\xff", b'{"kept":{},"sets":[]}'])
def test_what_says_nothing(said: bytes) -> None:
    with pytest.raises(DamagedError):
        Metadata.unpack(block(said))
