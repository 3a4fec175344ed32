"""A plan over several files, on each kind of store: what is wrong is found before what was read counts."""

import errno
import os
import signal
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.records import CHUNK_BYTES, Contents
from flashckpt.store.base import LengthError, Store
from flashckpt.store.local import LocalStore
from flashckpt.store.read_plan import MissingShardError, ReadPlan, UnreadableShardError, read_shard
from tests.commit.runs import contents_of, write_shard
from tests.contracts.flat_store import FlatStore
from tests.waiting import until

KINDS: dict[str, Callable[[Path], Store]] = {
    "local": lambda folder: LocalStore(str(folder)),
    "flat": lambda folder: FlatStore(f"flat://{folder}"),
}
NAMES = [f"rank-0000{number}-5f2c0a1b.safetensors" for number in range(3)]
Files = dict[str, tuple[bytes, Contents]]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return KINDS[request.param](tmp_path)


@pytest.fixture
def files(store: Store) -> Files:
    """The last one has thousands of small leaves; each has several chunks."""
    found: Files = {}
    for number, name in enumerate(NAMES):
        random = np.random.default_rng(number)
        leaves = {"large": random.standard_normal((1300, 1000)), "half": np.arange(9001, dtype="float16")}
        if number == 2:
            leaves |= {f"small{i}": random.standard_normal(1 + i % 40) for i in range(4000)}
        image, contents = contents_of(name, leaves)
        assert len(image) > 2 * CHUNK_BYTES
        write_shard(store, name, image, contents.layout())
        found[name] = image, contents
    return found


def plan_of(files: Files) -> tuple[ReadPlan, list[memoryview]]:
    """All leaves of all files, each to a place of its own, and the second file whole besides."""
    plan, places = ReadPlan(), list[memoryview]()
    for name, (_, contents) in files.items():
        for leaf, digest in zip(contents.layout().leaves, contents.digests, strict=True):
            places.append(memoryview(bytearray(leaf.num_bytes)))
            begin = contents.data_start + leaf.offset
            plan.copy(name, contents, begin, leaf.num_bytes, (), places[-1], 0)
            plan.digest(name, contents, leaf, digest)
    image, contents = files[NAMES[1]]
    places.append(memoryview(bytearray(len(image))))
    plan.whole_file(NAMES[1], contents, places[-1])
    return plan, places


def expected(files: Files) -> Iterator[bytes]:
    for image, contents in files.values():
        for leaf in contents.layout().leaves:
            begin = contents.data_start + leaf.offset
            yield image[begin : begin + leaf.num_bytes]
    yield files[NAMES[1]][0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_ends_a_read_and_no_byte_is_copied_after_it(
    store: Store, files: Files, number: signal.Signals, fails: bool
) -> None:
    """Storage does not answer before it, also where the read of another file has failed."""
    answers, ended = threading.Event(), threading.Event()

    class Silent:
        url = store.url

        def read_chunks(self, path: str, plan: _native.FilePlan, **how: int) -> None:
            if path == NAMES[0] and fails:
                raise OSError(errno.ETIMEDOUT, "away")
            if path == NAMES[1]:
                until(lambda: plan.is_closed == fails, "the other file")
                signal.pthread_kill(threading.main_thread().ident or 0, number)
                try:
                    answers.wait(240)
                    plan.add(0, files[path][0])
                finally:
                    ended.set()

    def handler(*_: object) -> None:
        raise TimeoutError("of the program")

    plan, places = plan_of(files)
    before = signal.signal(number, handler)
    try:
        with pytest.raises(TimeoutError, match="of the program"):
            plan.run(Silent(), 3)
    finally:
        signal.signal(number, before)
    answers.set()
    assert ended.wait(240)
    assert not any(map(any, places))


@pytest.mark.parametrize("threads", [1, 5])
def test_all_goes_to_its_places(store: Store, files: Files, threads: int) -> None:
    plan, places = plan_of(files)
    plan.run(store, threads)
    assert places == list(expected(files))


def test_a_wrong_byte_of_any_chunk_is_found(files: Files, store: Store) -> None:
    """The bytes are right, and the record says others: so it is with every kind of store."""
    for name, (image, contents) in files.items():
        for chunk in range(-(-len(image) // CHUNK_BYTES)):
            sums = bytearray(contents.checksums)
            sums[16 * chunk] ^= 1
            wrong = replace(contents, checksums=bytes(sums))
            plan, _ = plan_of({**files, name: (image, wrong)})
            with pytest.raises(DamagedError, match=f"{name} is damaged: chunk {chunk} does not") as caught:
                plan.run(store, 2)
            assert caught.value.path == f"{store.url}/{name}"


@pytest.mark.parametrize("number", [0, 2])
def test_a_wrong_digest_of_any_leaf_is_found(files: Files, store: Store, number: int) -> None:
    image, contents = files[NAMES[number]]
    for index in range(0, len(contents.leaves), 2000):
        digests = list(contents.digests)
        digests[index] ^= 1
        plan, _ = plan_of({**files, NAMES[number]: (image, replace(contents, digests=tuple(digests)))})
        name = contents.leaves[index].name
        with pytest.raises(DamagedError, match=f"damaged: {name} is not what was captured"):
            plan.run(store, 2)
    plan, places = plan_of(files)
    plan.run(store, 2)
    assert places == list(expected(files))


def test_a_header_that_is_not_of_these_leaves_is_found(files: Files, store: Store) -> None:
    contents = files[NAMES[1]][1]
    other = replace(contents.leaves[0], name="another")
    wrong = replace(contents, leaves=(other, *contents.leaves[1:]))
    found = read_shard(store, NAMES[1], wrong, None)
    assert (found.bad_chunks, found.header) == ([], contents.layout().header)
    assert found.header != wrong.layout().header


def test_a_file_that_is_missing_is_not_said_to_be_wrong(files: Files, store: Store) -> None:
    store.remove(NAMES[2])
    plan, _ = plan_of(files)
    with pytest.raises(MissingShardError, match=f"{NAMES[2]} is damaged: it is missing"):
        plan.run(store, 2)


def test_a_file_that_was_cut_is_found(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    image, contents = contents_of(NAMES[0], {"w": np.arange(1 << 20)})
    write_shard(store, NAMES[0], image, contents.layout())
    os.truncate(tmp_path / NAMES[0], len(image) - 1)
    plan, into = ReadPlan(), memoryview(bytearray(8))
    plan.copy(NAMES[0], contents, contents.data_start, 8, (), into, 0)
    with pytest.raises(DamagedError, match=f"it has {len(image) - 1} bytes, where {len(image)} were written"):
        plan.run(store, 1)
    assert not any(into)


def test_a_file_that_is_cut_while_it_is_read_is_found(tmp_path: Path) -> None:
    """Read and not mapped: the process lives, and the error is of this file."""
    store, found = LocalStore(str(tmp_path)), list[object]()
    image, contents = contents_of(NAMES[0], {"w": np.zeros(8 << 20)})
    write_shard(store, NAMES[0], image, contents.layout())
    into, progress = memoryview(bytearray(len(image))), array("Q", [0])

    def read() -> None:
        try:
            counter = _native.address_of(progress)
            found.append(read_shard(store, NAMES[0], contents, into, threads=1, progress=counter))
        except (DamagedError, OSError) as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while not progress[0] and reader.is_alive():
        pass
    os.truncate(tmp_path / NAMES[0], CHUNK_BYTES)
    reader.join()
    assert isinstance(found[0], LengthError) or progress[0] == len(image)


@pytest.mark.parametrize(
    ("name", "is_lost"),
    [
        *((name, True) for name in ("EIO", "ENODATA", "EBADMSG", "EUCLEAN", "EILSEQ")),
        *((name, False) for name in ("ETIMEDOUT", "ESTALE", "EACCES", "EREMOTEIO", "ENOTCONN")),
    ],
)
def test_what_a_disk_has_lost_is_told_from_storage_that_is_away(name: str, is_lost: bool) -> None:
    class Failing:
        url = "failing"

        def read_chunks(self, path: str, plan: _native.FilePlan, **how: int) -> None:
            raise OSError(getattr(errno, name), "as a test wants", path)

    plan, into = ReadPlan(), memoryview(bytearray(8))
    _, contents = contents_of(NAMES[0], {"w": np.arange(1 << 10)})
    plan.copy(NAMES[0], contents, contents.data_start, 8, (), into, 0)
    with pytest.raises(OSError, match="as a test wants") as caught:
        plan.run(Failing(), 1)
    assert isinstance(caught.value, UnreadableShardError) is is_lost


def test_nothing_is_written_outside_of_its_memory() -> None:
    _, contents = contents_of(NAMES[0], {"w": np.arange(1 << 10)})
    room = memoryview(bytearray(64))
    for target, steps, into in (
        (57, (), room),
        (-1, (), room),
        (0, ((8, 64, 9),), room),
        (0, ((3, 64, 8), (2, 16, 48)), room),
        (0, (), memoryview(bytes(64))),
    ):
        with pytest.raises(ValueError, match="does not fit into its memory"):
            ReadPlan().copy(NAMES[0], contents, 0, 8, steps, into, target)
