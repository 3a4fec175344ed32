"""Records there and back, and parts that are large."""

import json
from dataclasses import replace

import pytest

from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import Folder
from flashckpt.format.layout import DTYPES, Box, Layout, Leaf
from flashckpt.format.manifest import FROZEN, SHARD, frozen_name, part_name, shard_name
from flashckpt.format.names import AttemptName, SnapshotId, parse_at
from flashckpt.format.owner import Alive
from flashckpt.format.records import Contents, Part, RankRecord
from tests.catalogue.test_records import CATALOGUE, MANIFEST

A, B = AttemptName(2, "7fa3c1d2"), AttemptName(12345678, "00000000")
ID = SnapshotId(A, 5)
BASE = Folder(B, SnapshotId(A, 3))


def contents(file: str, leaves: list[Leaf]) -> Contents:
    layout = Layout.of(leaves)
    checksums = bytes(range(16)) * -(-layout.num_bytes // 4096)
    digests = ((i * 0x9E3779B97F4A7C15) % 2**64 for i in range(len(leaves)))
    return replace(Contents.of(file, layout, checksums, digests), chunk_bytes=4096)


def leaves() -> list[Leaf]:
    found = [Leaf(name=f"every.{dtype}", dtype=dtype, shape=(2, 3)) for dtype in DTYPES]
    found += [
        Leaf(name="zero", dtype="float32", shape=()),
        Leaf(name="none", dtype="int8", shape=(0, 5)),
        Leaf(name="last", dtype="float16", shape=(1, 2, 3, 4), stride=(24, 1, 8, 2)),
        Leaf(name="rows", dtype="float32", shape=(2, 4), box=Box(shape=(8, 4), start=(6, 0))),
        Leaf(name="no rows", dtype="float32", shape=(0, 4), box=Box(shape=(8, 4), start=(8, 0))),
        Leaf(name="tied ü", dtype="float32", shape=(4,), aliases=("head.weight", "other")),
    ]
    return found


def part(**other: object) -> Part:
    rank = RankRecord(
        rank=1,
        shard=contents("rank-00001-5f2c.safetensors", leaves()),
        values={"deep": [{"k": [1, "x"]}]},
        constants=contents(frozen_name(1, "5f2c"), [Leaf(name="frozen", dtype="int64", shape=(3,))]),
        base=BASE,
    )
    fields = {
        "id": ID,
        "step": 100,
        "world": 2,
        "node": 1,
        "ranks": (rank,),
        "environment": {"torch": "2"},
    }
    return Part(**{**fields, **other})


RECORDS = [Alive(count=5), Alive(count=5, phase="dead"), part(), MANIFEST, CATALOGUE]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.KIND)
def test_round_trip(record: object) -> None:
    data = record.to_bytes()
    assert type(record).from_bytes(data, "file") == record
    assert type(record).from_bytes(data, "file").to_bytes() == data
    for other in {type(each) for each in RECORDS} - {type(record)}:
        with pytest.raises(DamagedError, match="instead of a"):
            other.from_bytes(data, "file")


def test_a_box_gives_the_position_in_the_whole_tensor() -> None:
    record = part()
    columns = json.loads(record.to_bytes())["contents"][0]["shard"]["leaves"]
    where = columns["names"].index("rows")
    assert columns["shapes"][where] == [8, 4]
    assert columns["boxes"][str(where)] == [[6, 8], [0, 4]]
    assert sorted(columns["names"][int(i)] for i in columns["boxes"]) == ["no rows", "rows"]


def test_the_only_rank_has_no_boxes() -> None:
    piece = Leaf(name="w", dtype="int8", shape=(1,), box=Box(shape=(2,), start=(0,)))
    held = contents("rank-00000-5f2c.safetensors", [piece])
    rank = RankRecord(rank=0, shard=held, values={})
    both = Part(id=ID, step=1, world=2, node=0, ranks=(rank,))
    assert Part.from_bytes(both.to_bytes(), "file") == both
    with pytest.raises(DamagedError, match="no rank has the rest"):
        Part.from_bytes(Part(id=ID, step=1, world=1, node=0, ranks=(rank,)).to_bytes(), "file")


def test_names() -> None:
    assert str(A) == "000002-7fa3c1d2"
    for name in (A, B):
        assert AttemptName.parse(str(name)) == name
    for text in (
        "",
        "2-7fa3c1d2",
        "000002-7FA3C1D2",
        "000002-7fa3",
        "0000002-7fa3c1d2",
        "000000-7fa3c1d2",
        "../x",
    ):
        assert AttemptName.parse(text) is None
    assert shard_name(3, "5f2c") == "rank-00003-5f2c.safetensors"
    assert frozen_name(3, "5f2c") == "frozen-00003-5f2c.safetensors"
    assert part_name(3, "5f2c") == "node-00003-5f2c.json"
    for pattern, name in ((SHARD, shard_name(3, "5f2c")), (FROZEN, frozen_name(3, "5f2c"))):
        assert pattern.fullmatch(name)
        assert not pattern.fullmatch(f"{name}.zst"), "the names of parts are those of plain files"
        assert not pattern.fullmatch(f"../{name}")
    assert not SHARD.fullmatch(frozen_name(3, "5f2c"))
    assert (parse_at(str(A)), parse_at(f"{A}:12"), parse_at("12")) == (A, SnapshotId(A, 12), None)


def test_parts_are_checked_as_a_whole() -> None:
    with pytest.raises(DamagedError, match="a rank twice"):
        Part.from_bytes(part(ranks=part().ranks * 2).to_bytes(), "file")
    with pytest.raises(DamagedError, match="its world is 1"):
        Part.from_bytes(part(world=1).to_bytes(), "file")
