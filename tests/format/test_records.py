"""Records there and back, and parts that are large."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashckpt._native import xxh3_128
from flashckpt.errors import DamagedError
from flashckpt.format.layout import DTYPES, Box, Layout, Leaf
from flashckpt.format.names import (
    AttemptName,
    CommitName,
    SnapshotId,
    claim_number,
    frozen_name,
    frozen_writer,
    parse_at,
    shard_name,
)
from flashckpt.format.records import (
    Alive,
    Claim,
    CommitRecord,
    Contents,
    FileRecord,
    Owner,
    Part,
    PartRecord,
    Quarantine,
    RankRecord,
    Run,
    ShardRecord,
    Start,
    Tombstone,
    newest_of,
)

A, B = AttemptName(2, "7fa3c1d2"), AttemptName(12345678, "00000000")
HOLDER = Owner(
    boot_id="b", runtime="/r", runtime_id="1:2", lock="l", host="h", pid=3, job_id="j", restart_count=4
)


def contents(file: str, leaves: list[Leaf]) -> Contents:
    layout = Layout.of(leaves)
    shard = ShardRecord(
        file=file,
        num_bytes=layout.num_bytes,
        data_start=layout.data_start,
        chunk_bytes=4096,
        checksums=bytes(range(16)) * -(-layout.num_bytes // 4096),
    )
    digests = tuple((i * 0x9E3779B97F4A7C15) % 2**64 for i in range(len(leaves)))
    return Contents(shard=shard, leaves=layout.leaves, digests=digests)


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
    shard = contents("shard-00001-5f2c.safetensors", leaves())
    rank = RankRecord(
        rank=1,
        shard=shard.shard,
        leaves=shard.leaves,
        digests=shard.digests,
        values={"deep": [{"k": [1, "x"]}]},
        constants=contents(frozen_name(A, 1, "5f2c"), [Leaf(name="frozen", dtype="int64", shape=(3,))]),
    )
    fields = {
        "step": 100,
        "attempt": A,
        "world": 2,
        "keeper": 3,
        "ranks": (rank,),
        "environment": {"torch": "2"},
    }
    return Part(**{**fields, **other})


COMMIT = CommitRecord(
    name=CommitName(1, A, 5),
    world=1,
    parts=(PartRecord(file="part-00000.json", num_bytes=9, checksum="0" * 32),),
    shards=(FileRecord(file="shard-00000-5f2c.safetensors", num_bytes=4096),),
    frozen=(FileRecord(file=frozen_name(A, 0, "5f2c"), num_bytes=8192),),
)
RECORDS = [
    Run(run_id="0123456789abcdef"),
    Claim(attempt=A, owner=HOLDER),
    Start(parent=None, step=0, world=1),
    Start(parent=SnapshotId(A, 2**34 - 1), step=10**12 - 1, world=7),
    Start(parent=SnapshotId(B, 7), step=5, world=7, before=(SnapshotId(A, 3),)),
    Alive(count=5),
    Alive(count=5, ended="dead"),
    Tombstone(id=SnapshotId(B, 1)),
    Quarantine(name=CommitName(1, B, 9), host="h", reason="chunk 3"),
    COMMIT,
    part(),
    Start(parent=SnapshotId(A, 7), step=5, world=1, again=3),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.KIND)
def test_round_trip(record: object) -> None:
    data = record.to_bytes()
    assert type(record).from_bytes(data, "file") == record
    assert type(record).from_bytes(data, "file").to_bytes() == data


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.KIND)
def test_no_record_is_taken_for_another(record: object) -> None:
    for other in {type(each) for each in RECORDS} - {type(record)}:
        with pytest.raises(DamagedError, match="instead of a"):
            other.from_bytes(record.to_bytes(), "file")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"parts": ()}, "no part"),
        ({"parts": COMMIT.parts * 2}, "a file twice"),
        ({"world": 2}, "one shard for each rank"),
        ({"shards": ()}, "one shard for each rank"),
        ({"frozen": COMMIT.frozen * 2}, "a file twice"),
    ],
)
def test_a_commit_record_that_contradicts_itself(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(DamagedError, match=why):
        CommitRecord.from_bytes(replace(COMMIT, **wrong).to_bytes(), "file")


def test_a_lineage_descends() -> None:
    start = Start(parent=SnapshotId(A, 7), step=5, world=1, before=(SnapshotId(B, 3),))
    with pytest.raises(DamagedError, match="out of order"):
        Start.from_bytes(start.to_bytes(), "file")
    assert start.ancestors == (SnapshotId(A, 7), SnapshotId(B, 3))
    assert SnapshotId(A, 2**34 - 1) <= newest_of(A)


def test_a_box_gives_the_position_in_the_whole_tensor() -> None:
    record = part()
    columns = record.to_dict()["ranks"][0]["shard"]["leaves"]
    where = columns["names"].index("rows")
    assert columns["shapes"][where] == [8, 4]
    assert columns["boxes"][str(where)] == [[6, 8], [0, 4]]
    assert sorted(columns["names"][int(i)] for i in columns["boxes"]) == ["no rows", "rows"]


def test_the_only_rank_has_no_boxes() -> None:
    piece = Leaf(name="w", dtype="int8", shape=(1,), box=Box(shape=(2,), start=(0,)))
    held = contents("shard-00000-5f2c.safetensors", [piece])
    rank = RankRecord(rank=0, shard=held.shard, leaves=held.leaves, digests=held.digests, values={})
    both = Part(step=1, attempt=A, world=2, keeper=0, ranks=(rank,))
    assert Part.from_bytes(both.to_bytes(), "file") == both
    with pytest.raises(DamagedError, match="no rank has the rest"):
        Part.from_bytes(Part(step=1, attempt=A, world=1, keeper=0, ranks=(rank,)).to_bytes(), "file")


def test_ten_thousand_leaves_are_about_a_megabyte() -> None:
    many = [
        Leaf(
            name=f"model.transformer.blocks.{i // 8}.attention.qkv.weight.{i % 8}.exp_avg",
            dtype="float32",
            shape=(64, 64),
        )
        for i in range(10_000)
    ]
    held = contents("shard-00000-5f2c.safetensors", many)
    rank = RankRecord(rank=0, shard=held.shard, leaves=held.leaves, digests=held.digests, values={})
    data = Part(step=1, attempt=A, world=1, keeper=0, ranks=(rank,)).to_bytes()
    shard_checksums = 2 * len(held.shard.checksums)
    assert len(data) - shard_checksums < 1_500_000
    assert Part.from_bytes(data, "file").ranks[0].leaves == held.leaves


def test_layout_follows_from_a_part() -> None:
    rank = Part.from_bytes(part().to_bytes(), "file").ranks[0]
    assert rank.layout() == Layout.of(leaves())
    assert [leaf.offset for leaf in rank.leaves] == [leaf.offset for leaf in rank.layout().leaves]


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
    assert (claim_number("000002.json"), claim_number("2.json"), claim_number("0000002.json")) == (
        2,
        None,
        None,
    )
    assert claim_number(".000002.json.00.tmp") is None
    assert shard_name(3, "5f2c") == "shard-00003-5f2c.safetensors"
    with pytest.raises(ValueError, match="out of range"):
        _ = CommitName(10**12, A, 0).path
    assert frozen_writer(frozen_name(A, 3, "5f2c0a1b0001")) == (A, "5f2c0a1b")
    assert frozen_writer(shard_name(3, "5f2c0a1b0001")) is None
    assert (parse_at(str(A)), parse_at(f"{A}:12"), parse_at("12")) == (A, SnapshotId(A, 12), None)


def test_parts_are_checked_as_a_whole() -> None:
    assert part().to_bytes()
    assert len(xxh3_128(part().to_bytes())) == 16
    with pytest.raises(DamagedError, match="a rank twice"):
        Part.from_bytes(part(ranks=part().ranks * 2).to_bytes(), "file")
    with pytest.raises(DamagedError, match="'rank'"):
        Part.from_bytes(part(world=1).to_bytes(), "file")


def test_no_leaf_has_the_name_reserved_by_safetensors() -> None:
    with pytest.raises(ValueError, match="__metadata__"):
        Layout.of([Leaf(name="__metadata__", dtype="uint8", shape=(1,))])
