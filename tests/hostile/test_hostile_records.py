"""Records made to harm, with checksums that are right: each is a DamagedError, in bounded time."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.commit.lineage import resolve, steps
from flashckpt.commit.steps import read_step
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.format.checked_json import dump, parse
from flashckpt.format.owner import Alive
from flashckpt.format.records import Part
from tests.catalogue.test_records import CATALOGUE, MANIFEST, A, B
from tests.commit.runs import attempt_at, commit, name_of, new_run
from tests.format.test_checked_json import sealed
from tests.format.test_records import part
from tests.run_view import folder_of, manifest_of

MAX = 1 << 24


def changed(record: Any, change: Callable[[dict[str, Any]], None]) -> bytes:
    obj = parse(record.to_bytes(), what="file", max_bytes=MAX)
    change(obj)
    return dumped(obj)


def dumped(obj: dict[str, Any]) -> bytes:
    """A file that says this, its head sealed as its end is."""
    body = {key: obj[key] for key in ("environment", "replicas", "contents") if key in obj}
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


SHARD = ("contents", 0, "shard")
LEAVES = (*SHARD, "leaves")
BAD_SHARDS: dict[str, list[object]] = {
    "file": [
        "../rank-00001-5f2c.safetensors", "/etc/passwd", "rank-00001-5f2c.safetensors/..",
        "node-00000-5f2c.json", "rank-00001-5f2c.safetensors\0", "rank-00001-5f2c.safetensors\n", "", None, 5,
        "frozen-00001-5f2c.safetensors", "rank-１2345-5f2c.safetensors",
    ],
    "num_bytes": [2**60, -1, 4096.0, True],
    "data_start": [0, 4097],
    "chunk_bytes": [0, 1, 4097],
    "checksums": ["", "zz" * 32, None, " 0" * 32],
}  # fmt: skip
BAD_LEAVES: dict[str, list[object]] = {
    "names": [[], "x" * 26, {}],
    "dtype": [[]],
    "shapes": [[]],
    "strides": [
        {"99": [1]}, {"-1": [1]}, {"0": [1]}, {"00": [3, 1]}, {"²": [3, 1]}, [], {"0": [-3, 1]},
        {"9" * 4000: [1]},
    ],
    "aliases": [{"0": []}, {"0": "name"}, {"0": [5]}, {"0": ["none"]}, {"0": ["new", "new"]}],
    "boxes": [
        [], {"0": "box"}, {"0": [[0, 2]]}, {"0": [[0, 2], [0, 3, 4]]}, {"0": [[0, 2], [0, 3]]},
        {"0": [[1, 3], [0, 3]]}, {"0": [[2, 1], [0, 3]]}, {"0": [[0, 1], [0, 3]]}, {"0": [[-1, 1], [0, 3]]},
    ],
}  # fmt: skip
BAD_FIRST_LEAF: dict[str, list[object]] = {
    "names": [5, "", "x" * 5000, "__metadata__", "\ud800"],
    "dtypes": ["object", None, "float32"],
    "dtype": [99, -1, True],
    # Of the first one, what follows is not aligned to its elements.
    "shapes": [[1], None, [2**62, 2**62], [-2, -3], [1] * 65, [2**48] * 60, [2, 4]],
}
BAD_PARTS: list[tuple[Any, ...]] = [
    *((*SHARD, key, value) for key, values in BAD_SHARDS.items() for value in values),
    *((*LEAVES, key, value) for key, values in BAD_LEAVES.items() for value in values),
    *((*LEAVES, key, 0, value) for key, values in BAD_FIRST_LEAF.items() for value in values),
    (*LEAVES, "names", 1, "rows"),  # twice
    *((*SHARD, "digests", value) for value in ("00", "zz", [])),
    ("contents", 0, "constants", "file", "rank-00001-5f2c.safetensors"),
    *(("contents", value) for value in ([], {})),
    ("contents", 0, None),
    *(("ranks", 0, 0, value) for value in (2, -1, 0.0)),
    ("ranks", []),
    ("ranks", 0, []),
    *(("ranks", 0, 1, 0, f"{name}.safetensors") for name in ("rank-00001-5f2d", "../rank-00001-5f2c")),
    *(("ranks", 0, 1, 1, value) for value in (4096, 2**60)),
    *(("ranks", 0, 2, value) for value in ("", None, [])),
    *(("ranks", 0, 2, *place) for place in ((0, "../x"), (0, f"{A}/../x"), (0, None), (1, "/etc/passwd"))),
    ("ranks", 0, 2, 1, "rank-00001-5f2c.safetensors"),
    ("ranks", 0, 2, 1, "frozen-00001-5f2d.safetensors"),  # another than its rank names
    *(("ranks", 0, 2, 2, value) for value in (0, 2**60)),
    *(("ranks", 0, 3, value) for value in (None, [0])),
    ("replicas", None),
    *(("tables", value) for value in (None, [{}])),
    *(("contents", 0, "values", value) for value in ([], None)),
    *(("world", value) for value in (0, 2**70)),
    ("contents", 0, "constants", 5),
    ("contents", 0, "constants", "leaves", "names", 0, "zero"),
    *(("id", 0, value) for value in ("../../x", "000002-7fa3c1d2/..", None)),
    *(("id", 1, value) for value in (-1, None)),
    *(("step", value) for value in (-1, 10**12)),
    *(("node", value) for value in (-1, 0)),
    ("environment", None),
    *(("kind", value) for value in ("manifest", [])),
]


def accepted(record: Any, changes: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The changes with which the record is read all the same."""
    found = []
    for change in changes:
        try:
            type(record).from_bytes(changed(record, put(*change)), "file")
        except DamagedError:
            continue
        found.append(change)
    return found


def test_bad_parts() -> None:
    assert accepted(part(), BAD_PARTS) == []


def test_the_size_of_a_chunk_is_bounded() -> None:
    """Each thread of a read has a buffer of one chunk."""

    def chunks_of(num_bytes: int) -> bytes:
        def change(obj: dict[str, Any]) -> None:
            shard = obj["contents"][0]["shard"]
            shard |= {"chunk_bytes": num_bytes, "checksums": shard["checksums"][:32]}

        return changed(part(), change)

    assert Part.from_bytes(chunks_of(16 << 20), "file").ranks[0].shard.chunk_bytes == 16 << 20
    for num_bytes in ((16 << 20) + 4096, 1 << 30):
        with pytest.raises(DamagedError, match="chunk_bytes"):
            Part.from_bytes(chunks_of(num_bytes), "file")


RECORDS = [CATALOGUE, MANIFEST, Alive(count=5), part()]
NAMES = [
    "../x", "/x", "a/b", "", "..", "node-00000-5f2c.json/../../x", "rank-00000-5f2c.safetensors\0", 5, None,
    "x" * 10**6,
]  # fmt: skip


def test_names_never_leave_their_folders() -> None:
    in_manifests = [("folder",), ("parts", 0, 0), ("shards", 0, 0), ("frozen", 0, 0), ("frozen", 0, 1)]
    assert accepted(MANIFEST, [(*place, name) for place in in_manifests for name in NAMES]) == []
    in_catalogues = [
        ("checkpoints", 0, 2),
        ("checkpoints", 0, 3),
        ("checkpoints", 0, 5, 0),
        ("foreign", 0),
        ("run_id",),
    ]
    assert accepted(CATALOGUE, [(*place, name) for place in in_catalogues for name in NAMES]) == []


BAD_CATALOGUES: list[tuple[Any, ...]] = [
    ("version", 0), ("version", 10**9), ("writer", "x"), ("attempt", None), ("world", 0),
    ("parent_step", 2**64), ("failed_starts", -1), ("ended", 1), ("owner", 5), ("owner", "pid", -1),
    ("owner", "lock", "x" * 300), ("owner", "restart_count", None), ("committed", [0]),
    ("checkpoints", 0, 1, -1), ("checkpoints", 0, 0, [7, 7]), ("damaged", 0, 1, "x" * 5000),
    ("damaged", 0, 1, None), ("damaged", [[[str(B), 99], "it is not a checkpoint"]]),
    ("checkpoints", [[[str(A), 3], 3, str(A), "5f2c", 9, []]] * 2),
    ("checkpoints", [[[str(A), 3], 3, str(A), "5f2c", 9, [7]]]),
    ("lineages", []), ("lineages", [[str(A), []], [str(B), [[str(A), 3]]], [str(B), []]]),
    ("lineages", [[str(A), []], [str(B), [[str(B), 3]]]]),
    ("lineages", [[str(A), [[str(B), 1]]], [str(B), []]]),
]  # fmt: skip
BAD_MANIFESTS: list[tuple[Any, ...]] = [
    ("parts", []), ("parts", 0, []), ("parts", 0, 1, 2**60), ("parts", 0, 2, [1]), ("shards", 0, 1, -1),
    ("shards", [["rank-00000-5f2c.safetensors", 1]] * 2), ("lineage", [["000001", 1]]), ("folder", None),
    ("shards", [["rank-00000-5f2c.safetensors", 4096]]),
    ("shards", 1, 0, "../../rank-00001-5f2c.safetensors"),
    ("parts", [["node-00000-5f2c.json", 700, [0]]]),
    ("parts", [["node-00000-5f2c.json", 700, [0, 1]], ["node-00001-5f2c.json", 700, [1]]]),
]  # fmt: skip


def test_bad_small_records() -> None:
    assert accepted(CATALOGUE, BAD_CATALOGUES) == []
    assert accepted(MANIFEST, BAD_MANIFESTS) == []
    assert accepted(Alive(count=5), [("count", "5"), ("phase", "maybe")]) == []


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "end", [b"[" * (1 << 22), b"9" * (1 << 22), b'"' + b"\\u0000" * (1 << 20)], ids="abc"
)
def test_large_hostile_files_end(end: bytes) -> None:
    """Endless or quadratic work here would run into the test's limit."""
    head = b'{"a":' + end
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
                read_step(store, name).check()
        place.unlink()
        secret.rename(place)
    assert steps(store) == [100]
