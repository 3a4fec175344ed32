"""What several ranks of a node need of a step one of them reads; and whatever it gives them, none loads a
wrong byte."""

from __future__ import annotations

import errno
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.commit.steps import FileLeaf, StepRecord
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Layout
from flashckpt.memory import memory_budget
from flashckpt.restore import step_image
from flashckpt.restore.node_chunks import _NEEDS, BLOCK_CHUNKS, FileChunks, divide
from flashckpt.restore.snapshot import StepReading
from flashckpt.restore.step_image import NOT_SHARED, StepImage, StepMemory
from flashckpt.restore.step_tensors import Parts, StepRanks, TensorSlice
from flashckpt.restore.whole_tensors import plan_of
from flashckpt.store.base import Store
from tests.commit.runs import new_run
from tests.restore.node import Node
from tests.restore.sharded import CHUNK_BYTES, Counted, Held, committed, flip, partitions, taken, tensors
from tests.restore.test_other_layouts import wanted_layout

WHOLE = np.arange(64 * 1024, dtype="float32").reshape(64, 1024)
ALL = TensorSlice((0, 0), WHOLE.shape)


def reading_of(
    record: StepRecord, store: Store, wanted: Mapping[str, TensorSlice], rank: int, world: int
) -> StepReading:
    """A rank that takes these boxes; it gives their bytes by name."""
    ranks = StepRanks(record, rank, world)
    layout, parts = wanted_layout(ranks, wanted)
    image = StepImage(replace(record, store=store), rank, StepMemory(record.step), held=[])
    whole, boxes = dict[str, FileLeaf](), dict[str, Parts]()
    for leaf, found in zip(layout.leaves, parts, strict=True):
        match found:
            case [(piece, common)] if common == piece.region:
                whole[leaf.name] = FileLeaf(piece.file.path, piece.file.contents, piece.leaf, piece.digest)
            case _:
                boxes[leaf.name] = found
    cut = Layout.of(leaf for leaf in layout.leaves if leaf.name in boxes)
    into = memoryview(bytearray(cut.num_bytes))

    def made() -> Any:
        places = {leaf.name: (into, cut.data_start + leaf.offset) for leaf in cut.leaves} | image.places
        sizes = {leaf.name: leaf.num_bytes for leaf in layout.leaves}
        return {name: bytes(view[at : at + sizes[name]]) for name, (view, at) in places.items()}

    plan = plan_of(cut, [boxes[leaf.name] for leaf in cut.leaves], into)
    return StepReading(image, made, whole, plan)


def chunks_read(store: Counted) -> Counter[tuple[str, int]]:
    """How often each chunk was read from storage."""
    found: Counter[tuple[str, int]] = Counter()
    for path, offset, num_bytes in store.shards:
        found.update(
            (path, chunk) for chunk in range(offset // CHUNK_BYTES, -(-(offset + num_bytes) // CHUNK_BYTES))
        )
    return found


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ranks_of_a_node_read_no_chunk_twice_whatever_they_need_of_a_step(data: st.DataObject) -> None:
    world, now = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    named = {f"t{i}": whole for i, whole in enumerate(data.draw(st.lists(tensors(), min_size=1, max_size=4)))}
    ranks: list[list[Held]] = [[] for _ in range(world)]
    wanted: list[dict[str, TensorSlice]] = [{} for _ in range(now)]
    for name, whole in named.items():
        for rank, region in enumerate(data.draw(partitions(whole.shape, world))):
            ranks[rank].append(Held(name, whole, region))
        boxes = data.draw(partitions(whole.shape, now))
        for rank in range(now):
            # Cut among them, or whole on all of them.
            everywhere = TensorSlice((0,) * whole.ndim, whole.shape)
            wanted[rank][name] = boxes[rank] if rank < len(boxes) else everywhere
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store: Any = Counted(new_run(f"{folder}/run"))
        record = committed(store.store, ranks)
        readings = [reading_of(record, store, each, rank, now) for rank, each in enumerate(wanted)]
        found = Node(now).read(store, readings)
        for reading in readings:
            reading.drop()
        for rank, mine in enumerate(wanted):
            for name, region in mine.items():
                assert found[rank][name] == taken(named[name], region), (rank, name)
        assert set(chunks_read(store).values()) <= {1}


@given(
    st.dictionaries(
        st.integers(0, 5),
        st.tuples(st.booleans(), st.sets(st.integers(0, 30))),
        min_size=1,
    )
)
def test_what_more_than_one_rank_needs_is_divided_once(rows: dict[int, tuple[bool, set[int]]]) -> None:
    length = 31 * 8 - 3
    owner = min((rank for rank, (is_held, _) in rows.items() if is_held), default=None)
    needs = {
        rank: {
            "f": FileChunks(
                8,
                length,
                4096 if rank == owner else NOT_SHARED,
                [(c, c + 1) for c in sorted(chunks) if rank != owner],
            )
        }
        for rank, (_, chunks) in rows.items()
    }
    shares = divide(needs)
    assert shares == divide(dict(reversed(needs.items())))
    given_ = Counter[int]()
    for rank, ranges in shares.items():
        for _, start, stop in ranges:
            assert stop - start <= 8 * BLOCK_CHUNKS
            own = range(start // 8, -(-stop // 8))
            assert rows[rank][1].issuperset(own)
            given_.update(range(start, stop))
    wanted = Counter(c for rank, (_, chunks) in rows.items() if rank != owner for c in chunks)
    shared = {c for c, count in wanted.items() if count > 1 and owner is None}
    assert given_ == Counter(b for c in shared for b in range(8 * c, min(8 * c + 8, length)))


# What goes wrong


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return Counted(new_run(tmp_path / "run"))


def replicas(store: Any, world: int = 3, held: int = 2) -> tuple[StepRecord, list[StepReading]]:
    """Ranks that all need all of what one other had, or two had half of."""
    pieces = [half(0), half(1)] if held == 2 else [ALL]
    record = committed(store.store, [[Held("w", WHOLE, piece)] for piece in pieces])
    return record, [reading_of(record, store, {"w": ALL}, rank, world) for rank in range(world)]


def half(which: int) -> TensorSlice:
    return TensorSlice((32 * which, 0), (32, WHOLE.shape[1]))


def shard_bytes(store: Any) -> int:
    return sum(path.stat().st_size for path in Path(store.url).rglob("*.safetensors"))


@pytest.mark.parametrize("held", [1, 2], ids=["leaves", "parts of leaves"])
def test_ranks_read_as_much_as_one_and_divide_it(store: Any, held: int) -> None:
    _, readings = replicas(store, held=held)
    node = Node(3)
    assert node.read(store, readings) == [{"w": WHOLE.tobytes()}] * 3
    stored = [chunks.stored_bytes for chunks in node.chunks.values()]
    assert sum(stored) == sum(num_bytes for *_, num_bytes in store.shards) <= shard_bytes(store)
    assert max(stored) - min(stored) <= 2 * BLOCK_CHUNKS * CHUNK_BYTES
    files = [reading.image.memory.file for reading in readings]
    held_bytes = sum(os.fstat(file.descriptor).st_blocks * 512 for file in files if file is not None)
    assert held_bytes <= shard_bytes(store) + len(files) * 2 * CHUNK_BYTES, "one copy for all of them"
    for reading in readings:
        reading.drop()
    assert not any("memfd:chunks" in link for link in links()), "nothing is left of it"


def links() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def harm(readings: Sequence[StepReading]) -> None:
    """A rank writes late into what it has for others."""
    file = readings[1].image.memory.file
    assert file is not None
    size = os.fstat(file.descriptor).st_size
    os.pwrite(file.descriptor, b"\xff" * 64, size - 4096)


def let_go(readings: Sequence[StepReading]) -> None:
    """A rank has given its memory back before the others have used it."""
    readings[1].drop()


@pytest.mark.parametrize("held", [1, 2], ids=["leaves", "parts of leaves"])
@pytest.mark.parametrize("fault", [harm, let_go])
def test_what_is_wrong_in_a_ranks_memory_is_read_from_storage(
    store: Any, fault: Callable[[Sequence[StepReading]], None], caplog: pytest.LogCaptureFixture, held: int
) -> None:
    _, readings = replicas(store, held=held)
    node = Node(3, lambda _, rank: fault(readings) if rank == 1 else None)
    assert node.read(store, readings) == [{"w": WHOLE.tobytes()}] * 3
    assert "from storage" in caplog.text


def test_a_flipped_bit_on_disk_is_found_by_all_of_them(store: Any) -> None:
    record, readings = replicas(store)
    flip(store.store, record.shard_path(1), 3 * CHUNK_BYTES)
    found = Node(3).read(store, readings)
    assert [type(each) for each in found] == [DamagedError] * 3


def test_without_room_each_reads_all_of_it_and_that_is_said(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, readings = replicas(store)
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: WHOLE.nbytes // 2)
    assert Node(3).read(store, readings) == [{"w": WHOLE.tobytes()}] * 3
    assert set(chunks_read(store).values()) == {3}
    assert "to share them takes" in caplog.text


class Elsewhere(Node):
    """Rank 1 is in another container: its number is another process's here."""

    def say(self, rank: int, what: str, mine: Any) -> Mapping[int, Any]:
        return super().say(rank, what, [1, *mine[1:]] if rank == 1 and isinstance(mine, list) else mine)


class HalfSeen(Node):
    """Rank 0 alone cannot see rank 1, and divides otherwise than the others."""

    def say(self, rank: int, what: str, mine: Any) -> Mapping[int, Any]:
        heard = super().say(rank, what, mine)
        return {**heard, 1: None} if rank == 0 and what == _NEEDS else heard


def test_ranks_that_see_unlike_neighbours_read_what_they_miss(store: Any) -> None:
    _, readings = replicas(store)
    assert HalfSeen(3).read(store, readings) == [{"w": WHOLE.tobytes()}] * 3


@pytest.mark.parametrize("fault", ["no candidate", "no memory", "not seen"])
def test_a_rank_that_takes_no_part_hinders_none(
    store: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads by itself, if it reads; the others share."""
    _, readings = replicas(store)
    lone: list[StepReading | None] = list(readings)
    if fault == "no candidate":
        lone[1] = None
    elif fault == "no memory":
        create, refusals = os.memfd_create, iter([OSError(errno.ENOMEM, "no memory")])

        def refused(*how: Any) -> int:
            for error in refusals:
                raise error
            return create(*how)

        monkeypatch.setattr(step_image.os, "memfd_create", refused)
    node = Elsewhere(3) if fault == "not seen" else Node(3)
    found = node.read(store, lone)
    whole = {"w": WHOLE.tobytes()}
    assert found == [whole, None if fault == "no candidate" else whole, whole]
    most = {"no candidate": 1, "no memory": 2, "not seen": 3}[fault]
    assert max(chunks_read(store).values()) <= most


def test_a_share_that_cannot_be_read_is_tried_by_each(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server's hiccup, for one rank."""
    _, readings = replicas(store)
    read_chunks, failures = store.read_chunks, iter([OSError(errno.EIO, "a hiccup")])

    def failing(*what: Any, **how: Any) -> None:
        for error in failures:
            raise error
        read_chunks(*what, **how)

    store.read_chunks = failing
    assert Node(3).read(store, readings) == [{"w": WHOLE.tobytes()}] * 3
    assert "could not read its share" in caplog.text
