"""Files that several ranks of a node need are fetched once, and every rank verifies what it uses."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.records import CHUNK_BYTES, Contents
from flashckpt.memory import memory_budget
from flashckpt.memory.forks import OwnDescriptor
from flashckpt.restore import node_copies
from flashckpt.restore.node_copies import fetched
from flashckpt.store.local import LocalStore
from flashckpt.store.read_plan import ReadPlan, Source
from tests.commit.runs import new_run

RANKS = 3


class Node:
    """Ranks of a node as threads, whose store counts the bytes that are read of each file."""

    def __init__(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.reads = store, Counter[str]()
        self._barrier, self._rows = threading.Barrier(RANKS, timeout=60), dict[str, dict[int, Any]]()
        read, lock = LocalStore.read_chunks, threading.Lock()

        def read_chunks(store: LocalStore, path: str, plan: _native.FilePlan, **how: Any) -> None:
            with lock:
                self.reads[path] += 1
            read(store, path, plan, **how)

        monkeypatch.setattr(LocalStore, "read_chunks", read_chunks)

    def exchange(self, rank: int) -> Callable[[str, Any], Mapping[int, Any]]:
        def exchange(what: str, mine: Any) -> Mapping[int, Any]:
            self._rows.setdefault(what, {})[rank] = mine
            self._barrier.wait()
            return self._rows[what]

        return exchange

    def read(self, needs: Mapping[int, Mapping[str, Contents]]) -> dict[int, dict[str, bytes | str]]:
        """The bytes of the files that each rank needs, or why it could not read them."""

        def of(rank: int) -> dict[str, bytes | str]:
            with fetched(self.store, rank, needs[rank], self.exchange(rank), 2) as source:
                found = {path: self._bytes(path, contents, source) for path, contents in needs[rank].items()}
                self._barrier.wait()
                return found

        with ThreadPoolExecutor(RANKS) as pool:
            return dict(zip(needs, pool.map(of, needs), strict=True))

    def _bytes(self, path: str, contents: Contents, source: Source) -> bytes | str:
        plan, into = ReadPlan(), bytearray(contents.num_bytes)
        plan.copy(path, contents, 0, len(into), (), memoryview(into), 0)
        try:
            plan.run(source, 2)
        except DamagedError as error:
            return str(error)
        return bytes(into)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(new_run(tmp_path / "run"), monkeypatch)


@pytest.fixture
def files(node: Node) -> dict[str, Contents]:
    """Four files; what is in them is random."""
    found = {}
    for number in range(4):
        data = np.random.default_rng(number).integers(0, 256, CHUNK_BYTES + 5000, np.uint8).tobytes()
        name = f"shard-{number}.safetensors"
        Path(node.store.url, name).write_bytes(data)
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        found[name] = Contents(
            file=name, num_bytes=len(data), data_start=4096,
            checksums=b"".join(map(_native.xxh3_128, chunks)), leaves=(), digests=(),
        )  # fmt: skip
    return found


def needs_of(files: Mapping[str, Contents]) -> dict[int, dict[str, Contents]]:
    """All ranks need the first two files, two ranks the third, one the last."""
    names = list(files)
    return {rank: {name: files[name] for name in names[: RANKS + 1 - rank]} for rank in range(RANKS)}


def stored(node: Node, needs: Mapping[int, Mapping[str, Contents]]) -> dict[int, dict[str, bytes | str]]:
    return {
        rank: {path: Path(node.store.url, path).read_bytes() for path in each} for rank, each in needs.items()
    }


def test_each_file_is_read_from_storage_once(node: Node, files: dict[str, Contents]) -> None:
    needs = needs_of(files)
    assert node.read(needs) == stored(node, needs)
    assert node.reads == dict.fromkeys(files, 1)
    held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not any("memfd:shard-0" in each for each in held), "its memory is released with the last rank"


@pytest.mark.parametrize("why", ["no memory", "another container"])
def test_what_cannot_be_shared_each_rank_reads_by_itself(
    node: Node, files: dict[str, Contents], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = needs_of(files)
    if why == "no memory":
        monkeypatch.setattr(memory_budget, "available_bytes", lambda: RANKS * CHUNK_BYTES)
    else:
        monkeypatch.setattr(node_copies, "_opened", lambda place, num_bytes: None)
    assert node.read(needs) == stored(node, needs)
    fetches = 0 if why == "no memory" else 1
    assert [node.reads[name] for name in files] == [3 + fetches, 3 + fetches, 2 + fetches, 1]


def test_a_copy_that_has_changed_is_not_used(
    node: Node, files: dict[str, Contents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of another rank is verified as a file is."""
    make = node_copies._fetched

    def harmed(*arguments: Any) -> OwnDescriptor | None:
        copy = make(*arguments)
        byte = os.pread(copy.descriptor, 1, CHUNK_BYTES + 1)[0]
        os.pwrite(copy.descriptor, bytes([byte ^ 1]), CHUNK_BYTES + 1)
        return copy

    monkeypatch.setattr(node_copies, "_fetched", harmed)
    found = node.read(needs_of(files))
    for rank, each in found.items():
        assert ["chunk 1 does not have its checksum" in str(each[path]) for path in each] == [
            True, True, True, False
        ][: RANKS + 1 - rank]  # fmt: skip
