"""Boxes of leaves, read from shards on every store: the chunks that hold them, verified, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.errors import DamagedError
from flashckpt.format.layout import DTYPES
from flashckpt.format.records import Contents
from flashckpt.restore.box_reading import BoxReader
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit.runs import contents_of, write_shard
from tests.contracts.flat_store import FlatStore

RANDOM = np.random.default_rng(5)
LEAVES = {
    "whole chunks": RANDOM.standard_normal((3, 300, 1000)),
    "cube": RANDOM.integers(0, 255, (5, 4, 3, 7)).astype("uint8"),
    "vector": RANDOM.standard_normal(1000).astype("float32"),
    "scalar": np.array(7, "int16"),
    "empty": np.zeros((0, 3), "float16"),
}


@pytest.fixture(params=["local", "flat"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path)) if request.param == "local" else FlatStore(f"flat://{tmp_path}")


def written(store: Store) -> Contents:
    image, contents = contents_of("shard-00000-5f2c0a1b.safetensors", LEAVES)
    write_shard(store, "shard", image, contents.layout())
    return contents


class Counted:
    """A store that says which bytes were asked for."""

    def __init__(self, store: Store) -> None:
        self.url, self.read, self._store = store.url, [], store

    def read_bytes(self, path: str, offset: int, num_bytes: int, file_bytes: int | None = None) -> bytes:
        self.read.append((offset, num_bytes))
        return self._store.read_bytes(path, offset, num_bytes, file_bytes)


def test_leaves_come_whole(store: Store) -> None:
    contents = written(store)
    reader = BoxReader(store, "shard", contents)
    for leaf in contents.layout().leaves:
        assert bytes(reader.leaf(leaf))[: leaf.num_bytes] == LEAVES[leaf.name].tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = LocalStore(str(tmp_path_factory.mktemp("boxes")))
    contents = written(store)
    leaf = data.draw(st.sampled_from(contents.layout().leaves))
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in leaf.shape]
    box = [(start, stop) for start, stop in ends]
    expected = LEAVES[leaf.name][tuple(slice(*each) for each in box)]
    found = BoxReader(store, "shard", contents).box(leaf, box)
    assert bytes(found)[: expected.nbytes] == np.ascontiguousarray(expected).tobytes()
    assert len(found) == max(1, expected.nbytes)
    assert expected.nbytes == expected.size * DTYPES[leaf.dtype][0]


def test_no_chunk_is_read_that_holds_nothing_of_the_box(store: Store) -> None:
    contents = written(store)
    counted = Counted(store)
    leaf = next(each for each in contents.layout().leaves if each.name == "whole chunks")
    BoxReader(counted, "shard", contents).box(leaf, [(2, 3), (290, 300), (0, 1000)])  # type: ignore[arg-type]
    chunk = contents.shard.chunk_bytes
    assert counted.read == [(chunk, contents.shard.num_bytes - chunk)]


def test_damage_in_a_chunk_that_is_needed_is_found(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    contents = written(store)
    path, first = tmp_path / "shard", contents.shard.data_start
    data = bytearray(path.read_bytes())
    data[first] ^= 1
    path.write_bytes(data)
    reader = BoxReader(store, "shard", contents)
    leaf = next(each for each in contents.layout().leaves if each.name == "whole chunks")
    assert reader.box(leaf, [(2, 3), (290, 300), (0, 1000)])
    with pytest.raises(DamagedError, match="chunk 0"):
        reader.box(leaf, [(0, 1), (0, 1), (0, 1)])
    path.write_bytes(data[: first + 5])
    with pytest.raises(DamagedError):
        reader.leaf(leaf)
