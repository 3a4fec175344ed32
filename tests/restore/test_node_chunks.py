"""What several ranks of a node need of a step one of them reads; and whatever it gives them, none loads a
wrong byte."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError
from flashckpt.memory import room
from flashckpt.restore import node_chunks
from flashckpt.restore.box_gathering import BLOCK_CHUNKS, Gathering
from flashckpt.restore.node_chunks import FileChunks, NodeChunks, divide
from flashckpt.restore.step_image import StepImage
from flashckpt.restore.step_leaves import BoxRegion
from flashckpt.restore.step_ranks import StepRanks
from flashckpt.restore.step_reading import StepReading
from flashckpt.store.base import Store
from tests.commit.runs import new_run
from tests.restore.node import Node
from tests.restore.sharded import CHUNK_BYTES, Counted, Held, committed, flip, partitions, taken, tensors
from tests.restore.test_other_layouts import wanted_layout

WHOLE = np.arange(64 * 1024, dtype="float32").reshape(64, 1024)
ALL = BoxRegion((0, 0), WHOLE.shape)


def reading_of(
    record: StepRecord, store: Store, wanted: Mapping[str, BoxRegion], rank: int, world: int
) -> StepReading:
    """A rank that takes these boxes; it gives their bytes by name."""
    ranks = StepRanks(record, rank, world)
    layout, parts = wanted_layout(ranks, wanted)
    into = memoryview(bytearray(layout.num_bytes))

    def made() -> Any:
        starts = {leaf.name: (layout.data_start + leaf.offset, leaf.num_bytes) for leaf in layout.leaves}
        return {name: bytes(into[start : start + size]) for name, (start, size) in starts.items()}

    image = StepImage(replace(record, store=store), rank, [into], [])
    return StepReading(image, Gathering.of(layout, parts), made)


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
    wanted: list[dict[str, BoxRegion]] = [{} for _ in range(now)]
    for name, whole in named.items():
        for rank, region in enumerate(data.draw(partitions(whole.shape, world))):
            ranks[rank].append(Held(name, whole, region))
        boxes = data.draw(partitions(whole.shape, now))
        for rank in range(now):
            # Cut among them, or whole on all of them.
            everywhere = BoxRegion((0,) * whole.ndim, whole.shape)
            wanted[rank][name] = boxes[rank] if rank < len(boxes) else everywhere
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store: Any = Counted(new_run(f"{folder}/run"))
        record = committed(store.store, ranks)
        readings = [reading_of(record, store, each, rank, now) for rank, each in enumerate(wanted)]
        found = Node(now).read(store, readings)
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
    holder = min((rank for rank, (is_held, _) in rows.items() if is_held), default=None)
    needs = {
        rank: {
            "f": FileChunks(8, length, rank == holder, [(c, c + 1) for c in sorted(chunks) if rank != holder])
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
            assert rank == holder or (holder is None and rows[rank][1].issuperset(own))
            given_.update(range(start, stop))
    wanted = Counter(c for rank, (_, chunks) in rows.items() if rank != holder for c in chunks)
    shared = {c for c, count in wanted.items() if count > 1 or holder is not None}
    assert given_ == Counter(b for c in shared for b in range(8 * c, min(8 * c + 8, length)))


# What goes wrong


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return Counted(new_run(tmp_path / "run"))


def replicas(store: Any, world: int = 3) -> tuple[StepRecord, list[StepReading]]:
    """Ranks that all need all of what two others had half of."""
    record = committed(store.store, [[Held("w", WHOLE, half(0))], [Held("w", WHOLE, half(1))]])
    return record, [reading_of(record, store, {"w": ALL}, rank, world) for rank in range(world)]


def half(which: int) -> BoxRegion:
    return BoxRegion((32 * which, 0), (32, WHOLE.shape[1]))


def shard_bytes(store: Any) -> int:
    return sum(path.stat().st_size for path in Path(store.url).rglob("*.safetensors"))


def test_ranks_read_as_much_as_one_and_divide_it(store: Any) -> None:
    _, readings = replicas(store)
    node = Node(3)
    assert node.read(store, readings) == [{"w": WHOLE.tobytes()}] * 3
    stored = [chunks.stored_bytes for chunks in node.chunks.values()]
    assert sum(stored) == sum(num_bytes for *_, num_bytes in store.shards) <= shard_bytes(store)
    assert max(stored) - min(stored) <= 2 * BLOCK_CHUNKS * CHUNK_BYTES
    assert not any("memfd:chunks" in link for link in links()), "nothing is left of it"


def links() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def harm(chunks: NodeChunks, rank: int) -> None:
    """Another writes late into what this rank has for others."""
    if rank == 1:
        descriptor = chunks._files[1].descriptor
        size = os.fstat(descriptor).st_size
        os.pwrite(descriptor, b"\xff" * 64, size - 4096)


def let_go(chunks: NodeChunks, rank: int) -> None:
    """Its memory is gone before the others have what they need of it."""
    if rank == 1:
        os.ftruncate(chunks._files[1].descriptor, 4096)


@pytest.mark.parametrize("fault", [harm, let_go])
def test_what_is_wrong_in_a_ranks_memory_is_read_from_storage(
    store: Any, fault: Callable[[NodeChunks, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    _, readings = replicas(store)
    assert Node(3, fault).read(store, readings) == [{"w": WHOLE.tobytes()}] * 3
    assert ("by this rank alone" in caplog.text) is (fault is harm)


def test_a_flipped_bit_on_disk_is_found_by_all_of_them(store: Any) -> None:
    record, readings = replicas(store)
    flip(store.store, record.shard_path(1), 3 * CHUNK_BYTES)
    found = Node(3).read(store, readings)
    assert [type(each) for each in found] == [DamagedError] * 3


def test_without_room_each_reads_all_of_it_and_that_is_said(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, readings = replicas(store)
    monkeypatch.setattr(room, "available_bytes", lambda: WHOLE.nbytes)
    assert Node(3).read(store, readings) == [{"w": WHOLE.tobytes()}] * 3
    assert set(chunks_read(store).values()) == {3}
    assert "for sharing them" in caplog.text


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
        create = os.memfd_create

        def refused(name: str) -> int:
            if name == "chunks-1":
                raise OSError(errno.ENOMEM, "no memory")
            return create(name)

        monkeypatch.setattr(node_chunks.os, "memfd_create", refused)
    else:
        publish = NodeChunks._publish

        def elsewhere(chunks: NodeChunks, needs: Any) -> Any:
            told = publish(chunks, needs)
            assert told is not None
            # As from another container: this number is another process's here, or nobody's.
            return [1 if chunks._rank == 1 else told[0], *told[1:]]

        monkeypatch.setattr(NodeChunks, "_publish", elsewhere)
    found = Node(3).read(store, lone)
    whole = {"w": WHOLE.tobytes()}
    assert found == [whole, None if fault == "no candidate" else whole, whole]
    most = {"no candidate": 1, "no memory": 2, "not seen": 3}[fault]
    assert max(chunks_read(store).values()) <= most


def test_a_share_that_cannot_be_read_is_tried_by_each(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server's hiccup, for one rank."""
    _, readings = replicas(store)
    read_bytes, failed = store.read_bytes, threading.Event()

    def failing(*what: Any) -> bytes:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "a hiccup")
        found: bytes = read_bytes(*what)
        return found

    store.read_bytes = failing
    assert Node(3).read(store, readings) == [{"w": WHOLE.tobytes()}] * 3
    assert "could not read its share" in caplog.text
