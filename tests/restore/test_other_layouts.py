"""Boxes of tensors, put together from the pieces that another set of ranks has written."""

import tempfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.errors import DamagedError, MismatchError
from flashckpt.format.layout import Box, Leaf
from flashckpt.restore.step_reading import read_leaves
from flashckpt.restore.step_tensors import StepRanks, TensorSlice, overlapping
from flashckpt.restore.whole_tensors import WholeTensors
from flashckpt.runs import load
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.commit.runs import new_run
from tests.folders import flip
from tests.restore.sharded import CHUNK_BYTES, Counted, Held, committed, partitions, taken, tensors
from tests.state.image import raw_bytes

WHOLE = np.arange(6 * 4000, dtype="float32").reshape(6, 4000)


@pytest.fixture
def store(scratch: str) -> LocalStore:
    return new_run(f"{scratch}/run")


def rows(first: int, behind: int, whole: np.ndarray = WHOLE) -> TensorSlice:
    return TensorSlice((first, *(0 for _ in whole.shape[1:])), (behind - first, *whole.shape[1:]))


def begun(record: run_view.Record, store: Store | None = None) -> run_view.Record:
    """As a rank begins: no part was read."""
    return run_view.read(store or record.store, record.name)


def read(
    record: run_view.Record,
    wanted: dict[str, TensorSlice],
    store: Store | None = None,
    rank: int = 0,
    world: int = 1,
    *,
    is_large: bool = False,
) -> dict[str, bytes]:
    """The bytes of these boxes, as another layout reads them. is_large: parts are read as they are needed."""
    begins = begun(record) if is_large else record
    ranks = StepRanks(begins, rank, world, **({"small_bytes": 0} if is_large else {}))
    rows = []
    for name, region in wanted.items():
        ranks.look_for([name])
        tensor = ranks.leaves[name]
        box = None if region.shape == tensor.shape else Box(shape=tensor.shape, start=region.start)
        leaf = Leaf(name=name, dtype=tensor.dtype, shape=region.shape, box=box)
        rows.append((leaf, ranks.find([(name, region)])[0]))
    of_store = record if store is None else replace(record, store=store)
    return {name: raw_bytes(each) for name, each in read_leaves(rows, of_store, threads=2).items()}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tensors_cut_in_any_way_are_read_in_any_other(data: st.DataObject) -> None:
    world, now = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    named = {f"t{i}": whole for i, whole in enumerate(data.draw(st.lists(tensors(), min_size=1, max_size=4)))}
    ranks: list[list[Held]] = [[] for _ in range(world)]
    wanted: list[dict[str, TensorSlice]] = [{} for _ in range(now)]
    for name, whole in named.items():
        boxes = data.draw(partitions(whole.shape, world))
        order = data.draw(st.permutations(range(world)))
        for place, rank in enumerate(order):
            # Ranks beyond the boxes have nothing of it, or a replica.
            if place < len(boxes) or data.draw(st.booleans()):
                ranks[rank].append(Held(name, whole, boxes[place % len(boxes)]))
        for rank, region in zip(range(now), data.draw(partitions(whole.shape, now)), strict=False):
            wanted[rank][name] = region
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        record = committed(new_run(f"{folder}/run"), ranks)
        for rank, mine in enumerate(wanted):
            found = read(record, mine, rank=rank, world=now, is_large=data.draw(st.booleans()))
            for name, region in mine.items():
                assert found[name] == taken(named[name], region), (name, region)


def test_only_the_chunks_that_hold_a_box_are_read_and_each_once(store: LocalStore) -> None:
    record = committed(store, [[Held("w", WHOLE, rows(2 * r, 2 * r + 2))] for r in range(3)])
    counted = Counted(store)
    # Two rows of 16,000 bytes, of which one is on each of two ranks.
    assert read(record, {"w": rows(3, 5)}, counted)["w"] == WHOLE[3:5].tobytes()  # type: ignore[arg-type]
    for rank, row in ((1, 1), (2, 0)):
        path = record.shard_path(rank)
        begin = record.rank(rank).shard.data_start + row * 16000
        chunks = {at // CHUNK_BYTES for at in range(begin, begin + 16000)}
        mine = [(offset, size) for file, offset, size in counted.shards if file == path]
        touched = [offset // CHUNK_BYTES + i for offset, size in mine for i in range(-(-size // CHUNK_BYTES))]
        assert sorted(touched) == sorted(chunks)
    assert {path for path, _, _ in counted.shards} == {record.shard_path(1), record.shard_path(2)}


def test_columns_leave_out_the_chunks_between_them(store: LocalStore) -> None:
    wide = np.arange(5 * 4096, dtype="uint16").reshape(5, 4096)
    record = committed(store, [[Held("w", wide, rows(0, 5, wide))]])
    counted = Counted(store)
    column = TensorSlice((0, 100), (5, 3))
    assert read(record, {"w": column}, counted)["w"] == taken(wide, column)  # type: ignore[arg-type]
    assert [size for _, _, size in counted.shards] == [CHUNK_BYTES] * 5


def test_a_flipped_bit_is_found_where_its_chunk_is_needed_and_there_alone(store: LocalStore) -> None:
    record = committed(store, [[Held("w", WHOLE, rows(3 * r, 3 * r + 3))] for r in range(2)])
    path, shard = record.shard_path(1), record.rank(1).shard
    begin = shard.data_start + 16000
    needed = range(begin // CHUNK_BYTES, -(-(begin + 16000) // CHUNK_BYTES))
    for chunk in range(-(-shard.num_bytes // CHUNK_BYTES)):
        flip(f"{store.url}/{path}", chunk * CHUNK_BYTES + 5)
        if chunk in needed:
            with pytest.raises(DamagedError, match=f"chunk {chunk} "):
                read(record, {"w": rows(4, 5)})
        else:
            assert read(record, {"w": rows(4, 5)})["w"] == WHOLE[4:5].tobytes()
        flip(f"{store.url}/{path}", chunk * CHUNK_BYTES + 5)


def test_a_piece_that_is_taken_whole_has_its_digest(store: LocalStore) -> None:
    """The checksums are right, and what was captured was something else."""
    other = Held("a", WHOLE[:2], rows(0, 2, WHOLE[:2]))
    record = committed(store, [[other, Held("w", WHOLE, rows(0, 6))]])
    assert read(record, {"w": rows(0, 6)})["w"] == WHOLE.tobytes()
    shard = record.rank(0).shard
    digests = [each ^ (leaf.name == "w") for each, leaf in zip(shard.digests, shard.leaves, strict=True)]
    object.__setattr__(shard, "digests", tuple(digests))
    with pytest.raises(DamagedError, match="w is not what was captured"):
        read(record, {"w": rows(0, 6)})


def unsaid(record: run_view.Record, region: TensorSlice, *words: str) -> list[str]:
    """Those of the words that the refusal to read this region of w does not say."""
    with pytest.raises(MismatchError) as raised:
        read(record, {"w": region})
    return [word for word in words if word not in str(raised.value)]


def test_holes_are_refused_where_they_are_wanted(store: LocalStore) -> None:
    held = [[Held("w", WHOLE, rows(0, 2))], [Held("w", WHOLE, rows(3, 6))]]
    record = committed(store, held)
    assert not unsaid(record, rows(1, 4), "w cannot", "[0:2, 0:4000] on rank 0", "on rank 1", "4000 of 12000")
    assert read(record, {"w": rows(3, 6)})["w"] == WHOLE[3:].tobytes()
    with pytest.raises(MismatchError, match="4000 of 24000"):
        WholeTensors(record)


def test_boxes_that_overlap_are_refused(store: LocalStore) -> None:
    record = committed(store, [[Held("w", WHOLE, rows(0, 4))], [Held("w", WHOLE, rows(3, 6))]])
    assert not unsaid(record, rows(0, 6), "rank 0", "rank 1", "overlap")


def test_replicas_that_differ_are_refused(store: LocalStore) -> None:
    other = WHOLE.copy()
    other[0, 0] = -1
    ranks = [[Held("w", whole, rows(a, a + 3))] for a in (0, 3) for whole in (WHOLE, other)]
    assert not unsaid(committed(store, ranks), rows(0, 1), "ranks 0 and 1 have different bytes", "diverged")


def test_replicas_are_read_from_the_own_number_else_from_the_first(store: LocalStore) -> None:
    ranks = [[Held("w", WHOLE, rows(0, 6))] for _ in range(3)]
    record = committed(store, ranks)
    for rank, from_rank in ((0, 0), (2, 2), (3, 0)):
        counted = Counted(store)
        found = read(record, {"w": rows(0, 6)}, counted, rank=rank, world=4)  # type: ignore[arg-type]
        assert found["w"] == WHOLE.tobytes()
        assert {path for path, _, _ in counted.shards} == {record.shard_path(from_rank)}


def test_a_replica_that_another_rank_wrote_is_found_in_its_file(store: LocalStore) -> None:
    """Two groups that hold the same halves, each half written once; and a tensor that all hold."""
    small, all_of_it = np.arange(5.0), TensorSlice((0,), (5,))
    ranks = [
        [
            Held("w", WHOLE, rows(3 * half, 3 * half + 3), writer=2 if half else 0),
            Held("b", small, all_of_it, writer=3),
        ]
        for half in (0, 1)
        for _ in range(2)
    ]
    record = committed(store, ranks)
    assert [leaf.name for leaf in record.rank(1).shard.leaves] == []
    for rank in range(4):
        found = read(record, {"w": rows(0, 6), "b": all_of_it}, rank=rank, world=3)
        assert found == {"w": WHOLE.tobytes(), "b": small.tobytes()}
    assert {leaf.name for leaf in WholeTensors(record).leaves} == {"w", "b"}
    assert load(store.url)["w"].numpy().tobytes() == WHOLE.tobytes()


def test_other_shapes_or_dtypes_on_other_ranks_are_refused(store: LocalStore) -> None:
    half = WHOLE.astype("float16")
    ranks = [[Held("w", WHOLE, rows(0, 3))], [Held("w", half, rows(3, 6))]]
    assert not unsaid(committed(store, ranks), rows(0, 1), "float32", "float16 (6, 4000) on rank 1")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_overlaps_are_found_whatever_the_boxes(data: st.DataObject) -> None:
    dimensions = data.draw(st.integers(0, 3))
    sizes = st.tuples(*[st.integers(1, 4)] * dimensions)
    starts = st.tuples(*[st.integers(0, 6)] * dimensions)
    regions = data.draw(st.lists(st.builds(TensorSlice, starts, sizes), max_size=8, unique=True))
    pairs = [
        {one, other}
        for i, one in enumerate(regions)
        for other in regions[:i]
        if one.common(other) is not None
    ]
    found = overlapping(regions)
    assert (set(found) in pairs) if found else not pairs


# Steps of so many ranks that not all parts are read

Mesh = tuple[int, ...]
"""Sizes: of replicas, and of what divides rows and columns."""


def on_mesh(rank: int, mesh: Mesh, order: tuple[int, ...], shape: tuple[int, int]) -> TensorSlice:
    """The box of a rank of a mesh whose dimensions stand in this order, the last one innermost."""
    at = dict.fromkeys(range(3), 0)
    for dimension in reversed(order):
        rank, at[dimension] = divmod(rank, mesh[dimension])
    sizes = [-(-n // parts) for n, parts in zip(shape, mesh[1:], strict=True)]
    start = [min(at[1 + d] * sizes[d], shape[d]) for d in range(2)]
    return TensorSlice(tuple(start), tuple(min(sizes[d], shape[d] - start[d]) for d in range(2)))


@pytest.mark.parametrize(
    ("mesh", "now"),
    [((1, 64, 1), (1, 1, 8)), ((4, 16, 1), (1, 32, 1)), ((2, 8, 4), (1, 4, 2))],
    ids=str,
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_a_rank_reads_the_parts_that_it_needs_and_few_others(
    store: LocalStore, mesh: Mesh, now: Mesh, order: tuple[int, ...]
) -> None:
    world, shape = int(np.prod(mesh)), (130, 12)
    tensors = {name: np.arange(130 * 12, dtype="int32").reshape(shape) + i for i, name in enumerate("wv")}
    ranks = [
        [Held(name, whole, on_mesh(rank, mesh, order, shape)) for name, whole in tensors.items()]
        for rank in range(world)
    ]
    record = committed(store, ranks, ranks_a_part=2)
    counts = []
    for rank in range(0, int(np.prod(now)), 5):
        region = on_mesh(rank, now, (0, 1, 2), shape)
        counted = Counted(store)
        begins = begun(record, counted)  # type: ignore[arg-type]
        begins.rank(rank % world)
        counted.parts.clear()
        ranks_ = StepRanks(begins, rank, int(np.prod(now)), small_bytes=0)
        found = ranks_.find([(name, region) for name in tensors])
        taken_from = {piece.rank // 2 for parts in found for piece, _ in parts}
        counts.append(len(counted.parts) - len(taken_from))
        assert sum(common.num_elements for _, common in found[0]) == region.num_elements
    # Of 32 parts: at most as many as it takes to find out how boxes go with ranks.
    assert max(counts) <= 8, counts
    assert sum(counts) / len(counts) <= 5, counts


def test_a_tensor_of_which_the_own_number_has_nothing_is_found(store: LocalStore) -> None:
    """A stage of a pipeline that only the last ranks have."""
    ranks = [[Held(f"stage{r // 3}.w", WHOLE, rows(r % 3 * 2, r % 3 * 2 + 2))] for r in range(12)]
    record = committed(store, ranks, ranks_a_part=1)
    for stage in range(4):
        found = read(record, {f"stage{stage}.w": rows(1, 6)}, rank=0, world=5, is_large=True)
        assert found[f"stage{stage}.w"] == WHOLE[1:].tobytes()
    ranks_ = StepRanks(begun(record), 0, 5, small_bytes=0)
    ranks_.look_for(["none"])
    assert ranks_.is_complete
    assert "none" not in ranks_.leaves


@pytest.mark.parametrize("sizes", [(3,), (3, 5, 2), (2, 2, 4)])
def test_ranks_are_read_that_are_apart_in_each_dimension_of_any_mesh(sizes: tuple[int, ...]) -> None:
    world = int(np.prod(sizes))
    whole = np.zeros(1, "float32")
    held = [[Held("w", whole, TensorSlice((0,), (1,)))] for _ in range(world)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        record = committed(new_run(f"{folder}/run"), held)
        ranks = StepRanks(begun(record), world - 1, world + 1, small_bytes=0)
        ranks.read_apart()
    assert len(ranks.known) <= 2 + world.bit_length()
    for places in zip(*(np.unravel_index(rank, sizes) for rank in ranks.known), strict=True):
        assert len(set(places)) > 1
