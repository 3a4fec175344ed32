"""Records made to harm, with checksums that are right: each is a DamagedError, in bounded time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.commit.lineage import resolve, steps
from flashckpt.commit.steps import read_step
from flashckpt.errors import DamagedError, FlashckptError, FormatError
from flashckpt.format.catalogue import Catalogue, Checkpoint, Folder
from flashckpt.format.checked_json import dump, parse
from flashckpt.format.manifest import File, FrozenFile, Manifest, PartFile, PartHead
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.format.owner import Alive, Owner
from flashckpt.format.records import Part
from tests.commit.runs import attempt_at, commit, name_of, new_run
from tests.format.test_checked_json import sealed
from tests.format.test_records import BASE, ID, A, B, part
from tests.run_view import folder_of, manifest_of

MAX = 1 << 24


def changed(record: Any, change: Callable[[dict[str, Any]], None]) -> bytes:
    obj = parse(record.to_bytes(), what="file", max_bytes=MAX)
    change(obj)
    return dumped(obj)


def dumped(obj: dict[str, Any]) -> bytes:
    """A file that says this, its head sealed as its end is."""
    body = {key: obj[key] for key in ("environment", "replicas", "ranks") if key in obj and "files" in obj}
    head = {key: value for key, value in obj.items() if key not in body and key != "head"}
    return dump(head, body if "head" in obj else None)


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change: the last of `path` takes the place that the others lead to."""
    *keys, last, value = path

    def change(obj: Any) -> None:
        for key in keys:
            obj = obj[key]
        obj[last] = value

    return change


SHARD = ("ranks", 0, "shard")
LEAVES = (*SHARD, "leaves")
BAD_PARTS = [
    *(
        put(*SHARD, "file", name)
        for name in (
            "../rank-00001-5f2c.safetensors",
            "/etc/passwd",
            "rank-00001-5f2c.safetensors/..",
            "node-00000-5f2c.json",
            "rank-00001-5f2c.safetensors\0",
            "rank-00001-5f2c.safetensors\n",
            "",
            None,
            5,
            "frozen-00001-5f2c.safetensors",
            "rank-１2345-5f2c.safetensors",
        )
    ),
    put("ranks", 0, "frozen", "file", "rank-00001-5f2c.safetensors"),
    put(*SHARD, "num_bytes", 2**60),
    put(*SHARD, "num_bytes", -1),
    put(*SHARD, "num_bytes", 4096.0),
    put(*SHARD, "num_bytes", True),
    put(*SHARD, "data_start", 0),
    put(*SHARD, "data_start", 4097),
    put(*SHARD, "chunk_bytes", 0),
    put(*SHARD, "chunk_bytes", 1),
    put(*SHARD, "chunk_bytes", 4097),
    put(*SHARD, "checksums", ""),
    put(*SHARD, "checksums", "zz" * 32),
    put(*SHARD, "checksums", None),
    put(*SHARD, "checksums", " 0" * 32),
    put(*SHARD, "digests", "00"),
    put(*SHARD, "digests", []),
    put(*LEAVES, "names", []),
    put(*LEAVES, "names", "x" * 26),
    put(*LEAVES, "names", {}),
    put(*LEAVES, "names", 0, 5),
    put(*LEAVES, "names", 0, ""),
    put(*LEAVES, "names", 0, "x" * 5000),
    put(*LEAVES, "names", 0, "__metadata__"),
    put(*LEAVES, "names", 0, "\ud800"),
    put(*LEAVES, "names", 1, "rows"),  # twice
    put(*LEAVES, "shapes", 0, [1]),  # what follows is not aligned to its elements
    put(*LEAVES, "dtypes", 0, "object"),
    put(*LEAVES, "dtypes", 0, None),
    put(*LEAVES, "dtypes", 0, "float32"),
    put(*LEAVES, "dtype", 0, 99),
    put(*LEAVES, "dtype", 0, -1),
    put(*LEAVES, "dtype", 0, True),
    put(*LEAVES, "dtype", []),
    put(*LEAVES, "shapes", []),
    put(*LEAVES, "shapes", 0, None),
    put(*LEAVES, "shapes", 0, [2**62, 2**62]),
    put(*LEAVES, "shapes", 0, [-2, -3]),
    put(*LEAVES, "shapes", 0, [1] * 65),
    put(*LEAVES, "shapes", 0, [2**48] * 60),
    put(*LEAVES, "shapes", 0, [2, 4]),
    put(*LEAVES, "strides", {"99": [1]}),
    put(*LEAVES, "strides", {"-1": [1]}),
    put(*LEAVES, "strides", {"0": [1]}),
    put(*LEAVES, "strides", {"00": [3, 1]}),
    put(*LEAVES, "strides", {"²": [3, 1]}),
    put(*LEAVES, "strides", []),
    put(*LEAVES, "strides", {"0": [-3, 1]}),
    put(*LEAVES, "strides", {"9" * 4000: [1]}),
    put(*LEAVES, "aliases", {"0": []}),
    put(*LEAVES, "aliases", {"0": "name"}),
    put(*LEAVES, "aliases", {"0": [5]}),
    put(*LEAVES, "aliases", {"0": ["none"]}),
    put(*LEAVES, "aliases", {"0": ["new", "new"]}),
    put(*LEAVES, "boxes", []),
    put(*LEAVES, "boxes", {"0": "box"}),
    put(*LEAVES, "boxes", {"0": [[0, 2]]}),
    put(*LEAVES, "boxes", {"0": [[0, 2], [0, 3, 4]]}),
    put(*LEAVES, "boxes", {"0": [[0, 2], [0, 3]]}),
    put(*LEAVES, "boxes", {"0": [[1, 3], [0, 3]]}),
    put(*LEAVES, "boxes", {"0": [[2, 1], [0, 3]]}),
    put(*LEAVES, "boxes", {"0": [[0, 1], [0, 3]]}),
    put(*LEAVES, "boxes", {"0": [[-1, 1], [0, 3]]}),
    put("ranks", []),
    put("ranks", {}),
    put("ranks", 0, None),
    put("files", 0, 0, 2),
    put("files", 0, 0, -1),
    put("files", 0, 0, 0.0),
    put("files", []),
    put("files", 0, []),
    put("files", 0, 1, "rank-00001-5f2d.safetensors"),
    put("files", 0, 1, "../rank-00001-5f2c.safetensors"),
    put("files", 0, 2, 4096),
    put("files", 0, 2, 2**60),
    put("files", 0, 3, ""),
    put("files", 0, 3, None),
    put("files", 0, 3, []),
    put("files", 0, 3, 0, "../x"),
    put("files", 0, 3, 1, "../x"),
    put("files", 0, 3, 1, None),
    put("files", 0, 3, 2, "/etc/passwd"),
    put("files", 0, 3, 2, "rank-00001-5f2c.safetensors"),
    put("files", 0, 3, 2, "frozen-00001-5f2d.safetensors"),  # another than its rank names
    put("files", 0, 3, 3, 0),
    put("files", 0, 3, 3, 2**60),
    put("files", 0, 4, None),
    put("files", 0, 4, [0]),
    put("replicas", None),
    put("tables", None),
    put("tables", [{}]),
    put("ranks", 0, "values", []),
    put("ranks", 0, "values", None),
    put("world", 0),
    put("world", 2**70),
    put("ranks", 0, "frozen", 5),
    put("ranks", 0, "frozen", "leaves", "names", 0, "zero"),
    put("attempt", "../../x"),
    put("attempt", "000002-7fa3c1d2/.."),
    put("attempt", None),
    put("boundary", -1),
    put("boundary", None),
    put("step", -1),
    put("step", 10**12),
    put("node", -1),
    put("node", 0),
    put("environment", None),
    put("kind", "manifest"),
    put("kind", []),
]


@pytest.mark.parametrize("change", BAD_PARTS)
def test_bad_parts(change: Callable[[dict[str, Any]], None]) -> None:
    data = changed(part(), change)
    with pytest.raises(DamagedError):
        Part.from_bytes(data, "file")


CHECKPOINT = Checkpoint(id=ID, step=100, writer=B, manifest="5f2c", num_bytes=9, bases=frozenset({BASE}))
CATALOGUE = Catalogue(
    run_id="5eed" * 4,
    version=42,
    writer=B,
    attempt=B,
    ended=False,
    committed=ID,
    checkpoints=(CHECKPOINT,),
    lineages=((A, ()), (B, (ID,))),
    damaged=((ID, "host: chunk 3"),),
    owner=Owner(boot_id="b", runtime="/r", runtime_id="1:2", lock="l", host="h", pid=3, job_id="j"),
    parent_step=100,
)
MANIFEST = Manifest(
    folder=Folder(B, ID),
    step=100,
    world=1,
    run_id="5eed" * 4,
    lineage=(SnapshotId(AttemptName(1, "7fa3c1d2"), 3),),
    parts=(PartFile("node-00000-5f2c.json", 700, (0,)),),
    shards=(File("rank-00000-5f2c.safetensors", 4096),),
    frozen=(FrozenFile(BASE, "frozen-00000-5f2c.safetensors", 8192),),
)
RECORDS = [CATALOGUE, MANIFEST, Alive(count=5), part()]
NAMES = [
    "../x",
    "/x",
    "a/b",
    "",
    "..",
    "node-00000-5f2c.json/../../x",
    "rank-00000-5f2c.safetensors\0",
    5,
    None,
    "x" * 10**6,
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize(
    "place", [("parts", 0, 0), ("shards", 0, 0), ("frozen", 0, 0), ("frozen", 0, 1), ("frozen", 0, 2)]
)
def test_names_in_a_manifest_never_leave_its_folders(name: object, place: tuple[Any, ...]) -> None:
    with pytest.raises(DamagedError):
        Manifest.from_bytes(changed(MANIFEST, put(*place, name)), "file")


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("place", [("checkpoints", 0, 4), ("attempts", 0), ("foreign", 0), ("run_id",)])
def test_names_in_a_catalogue_never_leave_its_folders(name: object, place: tuple[Any, ...]) -> None:
    whole = replace(CATALOGUE, foreign=frozenset({AttemptName(12345679, "00000000")}))
    with pytest.raises(DamagedError):
        Catalogue.from_bytes(changed(whole, put(*place, name)), "file")


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (CATALOGUE, put("version", 0)),
        (CATALOGUE, put("version", 10**9)),
        (CATALOGUE, put("writer", "x")),
        (CATALOGUE, put("attempt", None)),
        (CATALOGUE, put("world", 0)),
        (CATALOGUE, put("parent_step", 2**64)),
        (CATALOGUE, put("failed_starts", -1)),
        (CATALOGUE, put("ended", 1)),
        (CATALOGUE, put("owner", 5)),
        (CATALOGUE, put("owner", "pid", -1)),
        (CATALOGUE, put("owner", "lock", "x" * 300)),
        (CATALOGUE, put("owner", "restart_count", None)),
        (CATALOGUE, put("committed", [0])),
        (CATALOGUE, put("checkpoints", 0, 1, -1)),
        (CATALOGUE, put("checkpoints", 0, 0, 7)),
        (CATALOGUE, put("damaged", 0, 1, "x" * 5000)),
        (CATALOGUE, put("damaged", 0, 1, None)),
        (Alive(count=5), put("count", "5")),
        (Alive(count=5), put("phase", "maybe")),
        (MANIFEST, put("parts", [])),
        (MANIFEST, put("parts", 0, [])),
        (MANIFEST, put("parts", 0, 1, 2**60)),
        (MANIFEST, put("parts", 0, 2, [1])),
        (MANIFEST, put("shards", 0, 1, -1)),
        (MANIFEST, put("shards", [["rank-00000-5f2c.safetensors", 1]] * 2)),
        (MANIFEST, put("lineage", [["000001", 1]])),
        (MANIFEST, put("writer", None)),
    ],
)
def test_bad_small_records(record: Any, change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(DamagedError):
        type(record).from_bytes(changed(record, change), "file")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(RECORDS), st.data())
def test_anything_anywhere_is_read_or_damage(record: Any, data: st.DataObject) -> None:
    """One value of a record, however deep, becomes another: it is refused, or is a record all the same."""
    obj = parse(record.to_bytes(), what="file", max_bytes=MAX)
    place: Any = obj
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        found = type(record).from_bytes(dumped(obj), "file")
    except DamagedError:
        return
    assert type(record).from_bytes(found.to_bytes(), "file") == found


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    for kind in (Catalogue, Manifest, PartHead, Alive, Part):
        with pytest.raises((DamagedError, FormatError)):
            kind.from_bytes(data, "file")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "head",
    [b'{"a":' + b"[" * (1 << 22), b'{"a":' + b"9" * (1 << 22), b'{"a":"' + b"\\u0000" * (1 << 20)],
    ids="abc",
)
def test_large_hostile_files_end(head: bytes) -> None:
    """Endless or quadratic work here would run into the test's limit."""
    for data in (head, sealed(head)):
        with pytest.raises(DamagedError):
            Part.from_bytes(data, "file")


def test_a_run_with_links_in_it_is_refused(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")
    attempt = attempt_at(store)
    commit(store, 100, attempt)
    secret, name = tmp_path / "secret", name_of(100, attempt)
    shard = resolve(store).shard_path(0)
    part = read_step(store, name).part_path(0)
    paths = (manifest_of(store, name.id), part, shard, folder_of(store, name.id), "catalogue", "data")
    for path in paths:
        place = Path(store.url, path)
        place.rename(secret)
        place.symlink_to(secret)
        with pytest.raises(FlashckptError):
            resolve(store, 100)
        if path != shard:
            with pytest.raises(FlashckptError):
                read_step(store, name)
        place.unlink()
        secret.rename(place)
    assert steps(store) == [100]
