"""The records of the catalogue: their bytes, their names, and bytes made to harm."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest

from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import (
    Catalogue,
    Checkpoint,
    Folder,
    folders_of,
    parse_version,
    version_path,
)
from flashckpt.format.checked_json import JsonRecord, dump, parse
from flashckpt.format.manifest import (
    File,
    FrozenFile,
    Manifest,
    PartFile,
    PartHead,
    RankFiles,
    are_alike,
    part_name,
)
from flashckpt.format.names import AttemptName, SnapshotId

A, B = AttemptName(1, "7fa3c1d2"), AttemptName(2, "0badcafe")
ID, PARENT = SnapshotId(B, 7 << 24), SnapshotId(A, 3)
BASE = Folder(A, PARENT)
FROZEN = FrozenFile(BASE, "frozen-00001-5f2c.safetensors", 512)
ALIKE = ((range(2),), "ab" * 16)

HEAD = PartHead(
    id=ID,
    step=7,
    world=4,
    node=0,
    ranks=(
        RankFiles(0, File("rank-00000-5f2c.safetensors", 4096), None, (0,)),
        RankFiles(1, File("rank-00001-5f2c.safetensors", 999), FROZEN, (0,)),
    ),
    tables=(ALIKE,),
)
MANIFEST = Manifest(
    folder=Folder(B, ID),
    step=7,
    world=2,
    run_id="5eed" * 4,
    lineage=(PARENT,),
    parts=(PartFile(part_name(0, "5f2c"), 700, (0, 1)),),
    shards=(File("rank-00000-5f2c.safetensors", 4096), File("rank-00001-5f2c.safetensors", 4096)),
    frozen=(FROZEN,),
)
CATALOGUE = Catalogue(
    run_id="5eed" * 4,
    version=42,
    writer=B,
    attempt=B,
    ended=False,
    failed_starts=2,
    committed=ID,
    checkpoints=(
        Checkpoint(id=PARENT, step=3, writer=A, manifest="5f2c", num_bytes=9, bases=frozenset({BASE})),
        Checkpoint(id=ID, step=7, writer=B, manifest="5f2d", bases=frozenset({BASE, Folder(B, ID)})),
    ),
    lineages=((A, ()), (B, (PARENT,))),
    foreign=frozenset({AttemptName(3, "11111111")}),
    damaged=((PARENT, "host: two reads differ"),),
)
RECORDS: list[JsonRecord] = [HEAD, MANIFEST, CATALOGUE]
_by_kind = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.KIND)


@_by_kind
def test_round_trip(record: JsonRecord) -> None:
    data = record.to_bytes()
    assert type(record).from_bytes(data, "file") == record
    assert type(record).from_bytes(data, "file").to_bytes() == data
    for other in {type(each) for each in RECORDS} - {type(record)}:
        with pytest.raises(DamagedError):
            other.from_bytes(data, "file")


def test_a_head_is_read_from_the_first_bytes() -> None:
    data = HEAD.to_bytes()
    end = data.index(b'"head"') + 42
    assert PartHead.from_prefix(data[:end], "file") == HEAD
    assert PartHead.from_prefix(data[: end - 20], "file") is None


@_by_kind
def test_each_flipped_byte_is_found(record: JsonRecord) -> None:
    data = record.to_bytes()
    for place in range(len(data)):
        bad = bytearray(data)
        bad[place] ^= 1
        with pytest.raises(DamagedError):
            type(record).from_bytes(bytes(bad), "file")
    for cut in range(len(data)):
        with pytest.raises(DamagedError):
            type(record).from_bytes(data[:cut], "file")


JUNK: list[Any] = [
    None, -1, 2**70, 1.5, True, "", "x" * 5000, "../x", "000001-7fa3c1d2\n", [], [[]], [0], {}, {"a": 1},
    10**9 ]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


@_by_kind
def test_no_sealed_bytes_do_harm(record: JsonRecord) -> None:
    """Each value of the record is replaced by each of some others, under a right checksum: the record is
    refused, or is one that could be written."""
    obj = parse(record.to_bytes(), what="file", max_bytes=1 << 20)
    after = {} if isinstance(record, PartHead) else None
    obj.pop("head", None)
    refused = 0
    for path in _places(obj):
        for junk in JUNK:
            changed = copy.deepcopy(obj)
            inner: Any = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = junk
            try:
                found = type(record).from_bytes(dump(changed, after), "file")
            except DamagedError:
                refused += 1
                continue
            assert type(record).from_bytes(found.to_bytes(), "file") == found
    assert refused > 100


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoints", [[0, 3, 3, 0, "5f2c", 9, []]] * 2),
        ("checkpoints", [[9, 3, 3, 0, "5f2c", 9, []]]),
        ("checkpoints", [[0, 3, 3, 0, "5f2c", 9, [7]]]),
        ("lineages", []),
        ("lineages", [[0, []], [1, [[0, 3]]], [1, []]]),
        ("lineages", [[0, []], [1, [[1, 3]]]]),
        ("lineages", [[0, [[1, 1]]], [1, []]]),
        ("damaged", [[[1, 99], "it is not a checkpoint"]]),
        ("version", 0),
        ("committed", [0]),
    ],
)
def test_a_catalogue_that_contradicts_itself(key: str, value: Any) -> None:
    obj = parse(CATALOGUE.to_bytes(), what="file", max_bytes=1 << 20)
    with pytest.raises(DamagedError):
        Catalogue.from_bytes(dump({**obj, key: value}), "file")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shards", [["rank-00000-5f2c.safetensors", 4096]]),
        ("shards", [["rank-00000-5f2c.safetensors", 4096]] * 2),
        ("parts", [["node-00000-5f2c.json", 700, [0]]]),
        ("parts", [["node-00000-5f2c.json", 700, [0, 1]], ["node-00001-5f2c.json", 700, [1]]]),
        ("shards", [["rank-00000-5f2c.safetensors", 4096], ["../../rank-00001-5f2c.safetensors", 4096]]),
        ("frozen", [["000001-7fa3c1d2", "..", "frozen-00001-5f2c.safetensors", 1]]),
    ],
)
def test_a_manifest_that_contradicts_itself(key: str, value: Any) -> None:
    obj = parse(MANIFEST.to_bytes(), what="file", max_bytes=1 << 20)
    with pytest.raises(DamagedError):
        Manifest.from_bytes(dump({**obj, key: value}), "file")


def test_names() -> None:
    run = "5eed" * 4
    assert CATALOGUE.path == version_path(42, run) == f"catalogue/000000042-{run}"
    assert version_path(1, run) == "catalogue/000000001"
    texts = (
        f"000000042-{run}",
        "000000001",
        "000000042",
        f"000000001-{run}",
        f".000000042-{run}.tmp",
        f"42-{run}",
    )
    assert [parse_version(each) for each in texts] == [(42, run), (1, ""), None, None, None, None]
    folder = Folder(B, ID)
    assert folder.path == "data/000002-0badcafe/000002-0badcafe.00000000000117440512"
    assert Folder.parse(B, folder.name) == folder
    bad = ["000002-0badcafe.117440512", f"{folder.name}\n", "..", f"000000-0badcafe.{0:020d}"]
    names = [*bad, folder.name, Folder(B, PARENT).name]
    assert folders_of(B, names) == [Folder(B, PARENT), folder]
    with pytest.raises(ValueError, match="out of range"):
        version_path(0, run)


def test_replicas_are_alike_if_all_ranks_have_one_table() -> None:
    def head(rank: int, checksum: str) -> PartHead:
        files = RankFiles(rank, File(f"rank-{rank:05d}-5f2c.safetensors", 1), None, (0,))
        table = (range(2),), checksum
        return PartHead(id=ID, step=7, world=2, node=rank, ranks=(files,), tables=(table,))

    assert are_alike([head(0, "ab"), head(1, "ab")])
    assert not are_alike([head(0, "ab"), head(1, "cd")])
    assert not are_alike([head(0, "ab")])


def test_ten_thousand_checkpoints_are_small_and_fast() -> None:
    bases = frozenset({BASE})
    checkpoints = tuple(
        Checkpoint(
            id=SnapshotId(A, n << 24), step=n, writer=A, manifest="5f2c0a1b", num_bytes=1 << 40, bases=bases
        )
        for n in range(10_000)
    )
    catalogue = Catalogue(
        run_id="5eed" * 4, version=9, writer=A, attempt=A, checkpoints=checkpoints, lineages=((A, ()),)
    )
    seconds = []
    for _ in range(5):
        began = time.process_time()
        data = catalogue.to_bytes()
        assert Catalogue.from_bytes(data, "file") == catalogue
        seconds.append(time.process_time() - began)
    assert len(data) < 2_000_000
    print(f"{len(data)} bytes, written and read in {min(seconds):.3f} s of CPU")
    assert min(seconds) < 2
