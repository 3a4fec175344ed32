"""Boxes of leaves, read from shards on every store: the chunks that hold them, verified, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Box, Leaf
from flashckpt.format.records import Contents
from flashckpt.restore.step_tensors import Piece, StepFile, TensorSlice
from flashckpt.restore.whole_tensors import take
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from flashckpt.store.read_plan import ReadPlan, Source
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
    image, contents = contents_of("rank-00000-5f2c0a1b.safetensors", LEAVES)
    write_shard(store, "shard", image, contents.layout())
    return contents


class Counted:
    """A store that records which bytes are requested."""

    def __init__(self, store: Store) -> None:
        self.url, self.read, self._store = store.url, list[tuple[int, int]](), store

    def read_chunks(
        self, path: str, plan: _native.FilePlan, *, threads: int = 2, progress: int = 0, cancel: int = 0
    ) -> None:
        self.read += plan.left()
        self._store.read_chunks(path, plan, threads=threads)


def box_of(source: Source, contents: Contents, leaf: Leaf, box: list[tuple[int, int]]) -> bytes:
    digests = dict(zip((each.name for each in contents.leaves), contents.digests, strict=True))
    region = TensorSlice(tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
    wanted = Leaf(
        name="box", dtype=leaf.dtype, shape=region.shape, box=Box(shape=leaf.shape, start=region.start)
    )
    into = memoryview(bytearray(wanted.num_bytes))
    piece = Piece(TensorSlice.of(leaf), 0, StepFile("shard", contents), leaf, digests[leaf.name])
    plan = ReadPlan()
    take(plan, wanted, into, 0, [(piece, region)] if region.num_elements else [])
    plan.run(source, 2)
    return bytes(into)


def test_leaves_come_whole(store: Store) -> None:
    contents = written(store)
    for leaf in contents.layout().leaves:
        box = [(0, size) for size in leaf.shape]
        assert box_of(store, contents, leaf, box) == LEAVES[leaf.name].tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = LocalStore(str(tmp_path_factory.mktemp("boxes")))
    contents = written(store)
    leaf = data.draw(st.sampled_from(contents.layout().leaves))
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in leaf.shape]
    box = [(start, stop) for start, stop in ends]
    expected = LEAVES[leaf.name][tuple(slice(*each) for each in box)]
    assert box_of(store, contents, leaf, box) == np.ascontiguousarray(expected).tobytes()


def test_only_chunks_of_the_box_are_read(store: Store) -> None:
    contents = written(store)
    counted = Counted(store)
    leaf = next(each for each in contents.layout().leaves if each.name == "whole chunks")
    box_of(counted, contents, leaf, [(2, 3), (290, 300), (0, 1000)])
    assert counted.read == [(1, 2)]


def test_damage_in_a_chunk_that_is_needed_is_found(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    contents = written(store)
    path, first = tmp_path / "shard", contents.shard.data_start
    data = bytearray(path.read_bytes())
    data[first] ^= 1
    path.write_bytes(data)
    leaf = next(each for each in contents.layout().leaves if each.name == "whole chunks")
    assert box_of(store, contents, leaf, [(2, 3), (290, 300), (0, 1000)])
    with pytest.raises(DamagedError, match="chunk 0"):
        box_of(store, contents, leaf, [(0, 1), (0, 1), (0, 1)])
    path.write_bytes(data[: first + 5])
    with pytest.raises(DamagedError):
        box_of(store, contents, leaf, [(0, size) for size in leaf.shape])
