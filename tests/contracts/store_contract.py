"""The contract of every store. A backend subclasses this and provides `store`."""

from __future__ import annotations

import errno
import multiprocessing
import os
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import PAGE
from flashckpt.format.records import Contents
from flashckpt.store.base import Entry, LengthError, MemoryRange, Store, write_once
from flashckpt.store.read_plan import ReadPlan, read_shard
from tests.commit.runs import image_of

MAX = 1 << 20
# A shard's name, since other files are never compressed.
SHARD = "shard.safetensors"
IN_STEP = f"data/1/{SHARD}"


@pytest.fixture(scope="module")
def shard() -> Iterator[Shard]:
    """For each module that has a store."""
    made = Shard()
    yield made
    os.close(made.region.descriptor)


class StoreContract:
    """The fixture `opener` opens an empty store whose root exists. It can be pickled."""

    @pytest.fixture
    def store(self, opener: Callable[[], Store]) -> Store:
        return opener()

    def test_created_files_are_read_back(self, store: Store) -> None:
        data = bytes(range(256)) * 999
        assert store.create("a/b/file.json", data)
        assert store.read("a/b/file.json", MAX) == data
        assert store.read_bytes("a/b/file.json", 1000, 77) == data[1000:1077]
        with pytest.raises(LengthError):
            store.read_bytes("a/b/file.json", len(data) - 1, 2)

    def test_the_first_creation_wins_and_no_other_file_is_left(self, store: Store) -> None:
        assert store.create("file", b"first")
        assert not store.create("file", b"second")
        assert store.read("file", MAX) == b"first"
        for durable in (True, False):
            store.replace("file", b"old")
            store.replace("file", b"new", durable=durable)
            assert store.read("file", MAX) == b"new"
        assert store.list("") == [Entry("file", False, 3)]

    @pytest.mark.process
    def test_one_of_many_creates(self, store: Store, opener: Callable[[], Store]) -> None:
        assert not store.is_read_only
        # Do not fork, since a client may have threads.
        context = multiprocessing.get_context("spawn")
        barrier, wins = context.Barrier(4), context.Queue()
        racers = [context.Process(target=_race, args=(opener, who, barrier, wins)) for who in range(4)]
        for racer in racers:
            racer.start()
        found = dict(wins.get(timeout=240) for _ in range(25))
        for racer in racers:
            racer.join()
            assert racer.exitcode == 0
        assert wins.empty()
        for turn in range(25):
            assert store.read(f"turn-{turn}/name", MAX) == f"{found[turn]}".encode() * 100

    def test_missing(self, store: Store) -> None:
        for path in ("nothing", "no/such/file"):
            for read in (
                lambda: store.read(path, MAX),  # noqa: B023
                lambda: store.read_bytes(path, 0, 1),  # noqa: B023
            ):
                with pytest.raises(FileNotFoundError):
                    read()
            assert not store.exists(path)
            store.remove(path)
        assert store.list("nothing") == []
        assert store.list("no/such") == []

    def test_reads_no_more_than_asked(self, store: Store) -> None:
        store.create("file", b"x" * 100)
        assert store.read("file", 100) == b"x" * 100
        with pytest.raises(DamagedError, match="at most 99"):
            store.read("file", 99)

    def test_lists_files_and_folders_by_name(self, store: Store) -> None:
        names = [f"file-{number:03d}" for number in range(30)]
        for name in [*names[::2], *names[1::2]]:
            store.create(f"z/{name}", name.encode())
        store.create("z/deep/er/file", b"1")
        store.create("z/also/file", b"1")
        store.create("z/also/file-2", b"1")
        found = store.list("z")
        assert [each for each in found if each.is_folder] == [Entry("also", True, 0), Entry("deep", True, 0)]
        assert [each for each in found if not each.is_folder] == [Entry(name, False, 8) for name in names]
        assert [each.name for each in found] == sorted(each.name for each in found)
        assert all(each.modified_s > 0 for each in found if not each.is_folder)

    def test_removes(self, store: Store) -> None:
        store.create("a/b/c/file", b"1")
        store.create("a/bc", b"1")
        for path in ("a/b/c/file", "a/b/c", "a/b"):
            store.remove(path)
        assert [entry.name for entry in store.list("a")] == ["bc"]
        store.remove("a")
        assert store.exists("a/bc"), "something is in it"
        assert not store.exists("a"), "it is no file"
        store.remove("a/bc")
        store.remove("a/bc")
        store.remove("a")
        store.remove("a")
        assert store.list("") == []
        assert store.create("a/b/c/file", b"1"), "its folders are made again"

    def test_removes_files_together(self, store: Store) -> None:
        for name in "abc":
            store.create(f"folder/{name}", b"1")
        store.remove_files(f"folder/{name}" for name in ("a", "missing", "c"))
        store.remove_files([])
        assert [entry.name for entry in store.list("folder")] == ["b"]

    def test_a_place_identifies_a_run(self, store: Store) -> None:
        assert store.place() == store.place()
        assert 0 < len(store.place()) < 4096

    @pytest.mark.parametrize(
        "path", ["../out", "/etc/passwd", "a/../../b", "a//b", "a/./b", "a/", "x\0y", "n" * 256]
    )
    def test_no_path_leads_out(self, store: Store, path: str, shard: Shard) -> None:
        for act in (
            lambda: store.read(path, MAX),
            lambda: store.read_bytes(path, 0, 1),
            lambda: store.create(path, b""),
            lambda: store.replace(path, b""),
            lambda: store.exists(path),
            lambda: store.remove(path),
            lambda: store.list(path),
            lambda: store.write_shard(path, shard.layout, shard.region),
            lambda: read_shard(store, path, shard.contents, None),
        ):
            with pytest.raises(ValueError, match="not a path inside a run"):
                act()

    # Shards

    def test_a_shard_is_never_replaced(self, store: Store, shard: Shard) -> None:
        store.create(IN_STEP, b"damaged")
        with pytest.raises(FileExistsError):
            store.write_shard(IN_STEP, shard.layout, shard.region)
        with pytest.raises(FileExistsError):
            store.write_parts(IN_STEP, [b"other"], 5)
        assert store.read(IN_STEP, MAX) == b"damaged"
        assert [each.name for each in store.list(IN_STEP.rpartition("/")[0])] == [IN_STEP.rpartition("/")[2]]

    def test_a_shard_is_written_and_audited(self, store: Store, shard: Shard) -> None:
        progress = array("Q", [5])
        written = store.write_shard(
            IN_STEP, shard.layout, shard.region, progress=_native.address_of(progress)
        )
        assert written.digests.tolist() == list(shard.contents.digests)
        assert written.checksums == shard.contents.checksums
        assert progress[0] == 5 + len(shard.image)
        assert store.list("data/1") == [Entry(SHARD, False, len(shard.image))]
        assert store.read_bytes(IN_STEP, 0, len(shard.image)) == shard.image

    def test_a_file_is_written_once(self, store: Store) -> None:
        for _ in range(2):
            write_once(store, "part", b"mine")
        for other in (b"else", b"longer", b"me"):
            with pytest.raises(FileExistsError):
                write_once(store, "part", other)
        assert store.read("part", MAX) == b"mine"

    def test_a_failed_write_leaves_no_shard(self, store: Store, shard: Shard) -> None:
        longer = replace(shard.layout, num_bytes=shard.layout.num_bytes + (64 << 20))
        with pytest.raises(OSError, match="region"):
            store.write_shard(IN_STEP, longer, shard.region)
        assert [entry.name for entry in store.list("data/1")] == []

    def test_a_shard_is_read_and_checked(self, store: Store, shard: Shard) -> None:
        store.write_shard(SHARD, shard.layout, shard.region)
        progress = array("Q", [0])
        pages, bare = memoryview(_native.Mapping(shard.num_pages * PAGE)), bytearray(1 + len(shard.image))
        for into in (None, pages, memoryview(bare)[1:]):
            read = read_shard(store, SHARD, shard.contents, into, progress=_native.address_of(progress))
            assert read.bad_chunks == []
            assert read.wrong_leaves(shard.contents) == []
        assert pages[: len(shard.image)] == shard.image
        assert bare[1:] == shard.image
        assert progress[0] == 3 * len(shard.image)

    def test_damage_of_a_shard_is_found(self, store: Store, shard: Shard) -> None:
        store.write_shard(SHARD, shard.layout, shard.region)
        contents, sums = shard.contents, shard.contents.checksums
        other = replace(contents, checksums=sums[:16] + bytes(16) + sums[32:])
        assert read_shard(store, SHARD, other, None).bad_chunks == [1]
        digests = (contents.digests[0] ^ 1, *contents.digests[1:])
        read = read_shard(store, SHARD, contents, None)
        assert read.wrong_leaves(replace(contents, digests=digests)) == [contents.leaves[0].name]
        with pytest.raises(FileNotFoundError):
            read_shard(store, "other", contents, None)
        store.create("short", b"12345")
        for into in (None, memoryview(bytearray(len(shard.image)))):
            with pytest.raises(LengthError, match="5 bytes, where"):
                read_shard(store, "short", contents, into)

    def test_a_closed_read_stops(self, store: Store, shard: Shard) -> None:
        store.write_shard(SHARD, shard.layout, shard.region)
        plan, room = ReadPlan(), memoryview(bytearray(len(shard.image)))
        plan.whole_file(SHARD, shard.contents, room)
        [native] = plan.native().values()
        _native.FilePlan.close([native])
        with pytest.raises(OSError, match="shard") as caught:
            store.read_chunks(SHARD, native)
        assert caught.value.errno == errno.ECANCELED
        assert not any(room)


class OneProcessContract(StoreContract):
    """For stores where a race between processes is impossible or adds nothing to one between threads."""

    def test_one_of_many_creates(self, store: Store, opener: Callable[[], Store]) -> None:
        stores = [store, *(opener() for _ in range(3))]
        with ThreadPoolExecutor(4) as pool:
            for turn in range(25):
                made = pool.map(lambda each: each.create(f"turn-{turn}/name", b"1"), stores)  # noqa: B023
                assert sorted(made) == [False, False, False, True]


def _race(opener: Callable[[], Store], who: int, barrier: Any, wins: Any) -> None:
    store = opener()
    for turn in range(25):
        barrier.wait(240)
        # Each of them may have to make the folder.
        if store.create(f"turn-{turn}/name", f"{who}".encode() * 100):
            wins.put((turn, who))


class Shard:
    """An image of some chunks in memory, with its expected sums."""

    def __init__(self, num_rows: int = 1000) -> None:
        random = np.random.default_rng(3)
        leaves = {
            "a": random.standard_normal((num_rows, 1000)),
            "b": random.integers(0, 255, 3_000_001).astype("uint8"),
            "empty": np.zeros((0, 3), "float32"),
        }
        self.image, self.layout, digests = image_of(leaves)
        size = len(self.image)
        chunks = [self.image[start : start + (4 << 20)] for start in range(0, size, 4 << 20)]
        sums = b"".join(map(_native.xxh3_128, chunks))
        self.contents = Contents.of("shard", self.layout, sums, digests)
        self.num_pages = -(-size // PAGE)
        # Not at the start of its file: metadata precede a slot's image.
        self.region = MemoryRange(os.memfd_create("shard"), PAGE)
        os.ftruncate(self.region.descriptor, (1 + self.num_pages) * PAGE)
        os.pwrite(self.region.descriptor, self.image, PAGE)
