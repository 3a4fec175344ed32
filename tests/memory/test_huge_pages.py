"""Regions in huge pages: had where the kernel gives them, never at the cost of a byte, a SIGBUS or room."""

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt import _native
from flashckpt.memory import memory_budget, region
from flashckpt.memory.runtime import RuntimeFolder
from tests.memory.mounts import small_tmpfs

Memfd = Callable[..., int]
HUGE = _native.huge_page()
NAME = "slot-00000-0-0000000000000000"


@pytest.fixture(autouse=True)
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test goes by what huge pages took in another one."""
    monkeypatch.setattr(memory_budget, "huge_pages", memory_budget.HugePages())


@pytest.fixture
def given(memfd: Memfd) -> None:
    """Skips the test where the kernel gives this process no huge page of shared memory (one before 6.1, or
    `shmem_enabled` is deny): the other tests hold there all the same."""
    if not HUGE or not _native.allocate_huge(memfd(), 0, HUGE):
        pytest.skip("this kernel gives no huge pages of shared memory")


def smaps(address: int) -> dict[str, str]:
    """The fields of the mapping that begins at an address."""
    text = Path("/proc/self/smaps").read_text()
    [part] = re.findall(rf"^{address:x}-\S+ .*\n((?:\w+:.*\n)+)", text, re.MULTILINE)
    return dict(line.split(":", 1) for line in part.splitlines())


def mapped_huge(descriptor: int, num_bytes: int) -> int:
    """Bytes that a mapping has by huge pages, once all was read."""
    mapping = _native.Mapping(descriptor, num_bytes)
    address = _native.address_of(mapping)
    _native.digest(address, num_bytes)
    found = int(smaps(address)["ShmemPmdMapped"].split()[0]) << 10
    mapping.close()
    return found


@pytest.mark.parametrize("kind", [region.NAMED, region.MEMFD])
def test_a_region_is_held_and_mapped_in_huge_pages(folder: RuntimeFolder, given: None, kind: str) -> None:
    num_bytes = 3 * HUGE + 5 * 4096
    made = region.create(folder, NAME, num_bytes, kind)
    found = os.fstat(made.descriptor)
    assert made.kind == kind
    assert found.st_size == num_bytes
    assert found.st_blocks * 512 == num_bytes  # not a byte more, and none left to a later touch
    assert mapped_huge(made.descriptor, num_bytes) == 3 * HUGE
    assert not any(os.pread(made.descriptor, num_bytes, 0))
    os.close(made.descriptor)


@pytest.mark.parametrize("step_bytes", [HUGE + 4096, 4096 * 100])
def test_steps_need_not_end_where_huge_pages_do(memfd: Memfd, step_bytes: int) -> None:
    descriptor, num_bytes = memfd(), 7 * (HUGE or 1 << 21) + 4096
    memory_budget.take(descriptor, num_bytes, available=lambda: 1 << 40, step_bytes=step_bytes)
    found = os.fstat(descriptor)
    assert (found.st_size, found.st_blocks * 512) == (num_bytes, num_bytes)


@pytest.mark.process
def test_a_file_system_without_room_for_huge_pages_is_filled_to_its_last_byte() -> None:
    with small_tmpfs(5 << 20) as base, open(base / "beside", "wb") as beside:
        beside.write(bytes(4096 * 3))
        beside.flush()
        left = os.statvfs(base)
        num_bytes = left.f_bavail * left.f_frsize
        descriptor = os.open(base / "region", os.O_RDWR | os.O_CREAT, 0o600)
        memory_budget.take(descriptor, num_bytes, available=lambda: 1 << 40)
        assert os.fstat(descriptor).st_blocks * 512 == num_bytes
        mapping = _native.Mapping(descriptor, num_bytes)
        memoryview(mapping)[:] = bytes(num_bytes)  # a page that is not there would be SIGBUS
        mapping.close()
        with pytest.raises(OSError, match="reserve") as refused:
            memory_budget.take(descriptor, num_bytes + (4 << 20), available=lambda: 1 << 40)
        assert refused.value.errno == errno.ENOSPC
        os.close(descriptor)


def test_what_stands_in_a_file_stands_there_in_huge_pages_too(memfd: Memfd, given: None) -> None:
    descriptor, data = memfd(), os.urandom(2 * HUGE)
    os.pwrite(descriptor, data, 0)
    assert _native.allocate_huge(descriptor, 0, 2 * HUGE)
    assert mapped_huge(descriptor, 2 * HUGE) == 2 * HUGE
    assert os.pread(descriptor, 2 * HUGE, 0) == data


@pytest.mark.parametrize("limit", ["", "_SLOWEST_HUGE_STEP_S", "_MOST_HUGE_S"])
def test_a_refusal_and_what_takes_too_long_end_the_asking(
    memfd: Memfd, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Others wait for the node's lock meanwhile."""
    asked: list[int] = []

    def allocate(descriptor: int, offset: int, num_bytes: int) -> bool:
        asked.append(offset)
        return bool(limit)

    monkeypatch.setattr(_native, "allocate_huge", allocate)
    if limit:
        monkeypatch.setattr(memory_budget, limit, 1e-12)
    descriptor = memfd()
    memory_budget.take(descriptor, 3 << 20, available=lambda: 1 << 40, step_bytes=1 << 20)
    assert asked == [0]
    assert os.fstat(descriptor).st_blocks * 512 == 3 << 20


def test_where_they_are_dear_no_region_has_more_than_one_step_of_them(
    memfd: Memfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of a virtual machine that its host has not backed yet: ten times the time of small pages.
    The others' time, on a busy machine, is none of theirs."""
    asked: list[tuple[int, int]] = []
    spent_s = [0.0]

    def costs(seconds: float) -> Callable[[int, int, int], bool]:
        def ask(descriptor: int, offset: int, num_bytes: int) -> bool:
            asked.append((descriptor, offset))
            spent_s[0] += seconds * num_bytes / (1 << 30)
            return True

        return ask

    def take() -> int:
        descriptor = memfd()
        memory_budget.take(descriptor, 3 << 26, available=lambda: 1 << 40)
        assert os.fstat(descriptor).st_blocks * 512 == 3 << 26
        return descriptor

    monkeypatch.setattr(memory_budget, "huge_pages", memory_budget.HugePages(lambda: spent_s[0]))
    monkeypatch.setattr(_native, "allocate_huge", costs(0.25))
    first = take()
    assert asked == [(first, 0), (first, 1 << 26), (first, 2 << 26)]
    asked.clear()
    monkeypatch.setattr(_native, "allocate_huge", costs(2.5))
    second = take()
    take()
    assert asked == [(second, 0)]


class TestMapping:
    """A region's mapping: what `mmap.mmap` is, at an address that huge pages can be mapped at."""

    def test_it_lies_in_huge_pages_as_the_file_does(self, memfd: Memfd) -> None:
        descriptor = memfd(8 << 20)
        kept = [_native.Mapping(descriptor, num_bytes) for num_bytes in ((5 << 20) + 1, 2 << 20, 3 << 20) * 2]
        for mapping in kept:
            assert _native.address_of(mapping) % (HUGE or mmap.PAGESIZE) == 0
            flags = smaps(_native.address_of(mapping))["VmFlags"].split()
            assert {"sh", "dc", "dd"} <= set(flags)  # shared, and neither forked nor dumped
            mapping.close()

    def test_nothing_but_the_mapping_is_left_of_the_address_space_it_took(self, memfd: Memfd) -> None:
        descriptor = memfd(8 << 20)

        def taken() -> int:
            return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

        before = taken()
        kept = [_native.Mapping(descriptor, 8 << 20) for _ in range(8)]
        assert taken() - before == 64 << 20
        for mapping in kept:
            mapping.close()
        assert taken() == before

    def test_bytes_are_shared_with_other_mappings(self, memfd: Memfd) -> None:
        descriptor = memfd(8192)
        one, other = _native.Mapping(descriptor, 8192), _native.Mapping(descriptor, 4096)
        memoryview(one)[10:13] = b"abc"
        assert bytes(memoryview(other)[10:13]) == b"abc"
        assert (len(memoryview(one)), len(memoryview(other))) == (8192, 4096)

    def test_it_is_not_taken_away_under_a_view(self, memfd: Memfd) -> None:
        descriptor = memfd(4096)
        mapping = _native.Mapping(descriptor, 4096)
        address = _native.address_of(mapping)
        view = memoryview(mapping)[5:9]
        with pytest.raises(BufferError, match="viewed"):
            mapping.close()
        del mapping
        view[:] = b"last"
        assert os.pread(descriptor, 4, 5) == b"last"
        assert smaps(address)
        view.release()
        with pytest.raises(ValueError, match="unpack"):
            smaps(address)

    def test_one_that_is_closed_or_was_never_made_is_no_buffer(self, memfd: Memfd) -> None:
        mapping = _native.Mapping(memfd(4096), 4096)
        mapping.close()
        mapping.close()
        with pytest.raises((ValueError, BufferError), match="closed"):
            memoryview(mapping)
        with pytest.raises((ValueError, BufferError), match="never made"):
            memoryview(_native.Mapping.__new__(_native.Mapping))

    def test_memory_of_ones_own_is_zeros_that_no_child_and_no_core_dump_has(self) -> None:
        mapping = _native.Mapping(num_bytes=5 << 20)
        flags = smaps(_native.address_of(mapping))["VmFlags"].split()
        assert {"dc", "dd"} <= set(flags)
        assert "sh" not in flags
        assert bytes(mapping) == bytes(5 << 20)
        mapping.close()

    def test_what_cannot_be_mapped_is_an_error(self, memfd: Memfd) -> None:
        reader, writer = os.pipe()
        with pytest.raises(OSError, match="map 4096 bytes"):
            _native.Mapping(reader, 4096)
        with pytest.raises(OSError, match="map 0 bytes"):
            _native.Mapping(memfd(), 0)
        os.close(reader)
        os.close(writer)

    @pytest.mark.parametrize("goes", [_native.Mapping.close, id], ids=["at once", "with its last reference"])
    def test_other_threads_run_while_it_is_unmapped(
        self, memfd: Memfd, big: int, goes: Callable[[_native.Mapping], object]
    ) -> None:
        descriptor = memfd()
        _native.allocate(descriptor, 0, big)
        over, turns = threading.Event(), [0]
        other = threading.Thread(target=count_turns, args=(over, turns))
        other.start()
        most = 0
        for _ in range(3):
            mapping = _native.Mapping(descriptor, big)
            _native.populate(_native.address_of(mapping), big, 2)
            before = turns[0]
            goes(mapping)
            del mapping
            most = max(most, turns[0] - before)
        over.set()
        other.join()
        assert most > 100  # a few are to be had while the interpreter changes threads

    @pytest.mark.process
    def test_a_forked_child_that_drops_it_loses_nothing_of_its_own(self, memfd: Memfd) -> None:
        """The child has the object without the memory, and puts something else at its address."""
        descriptor = memfd(8 << 20)
        for goes, where in itertools.product((_native.Mapping.close, id), ([descriptor], [])):
            mapping = _native.Mapping(*where, 8 << 20)
            address = _native.address_of(mapping)
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    kept = put_at(address, 8 << 20)
                    with pytest.raises(ValueError, match="another process's"):
                        memoryview(mapping)
                    goes(mapping)
                    del mapping
                    ctypes.memset(kept, 1, 8 << 20)
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            mapping.close()


@pytest.fixture
def big() -> int:
    """Bytes that take the kernel longer to unmap, in small pages, than it takes to change threads."""
    if memory_budget.available_bytes() < 1 << 30:
        pytest.skip("too little memory here")
    return 1 << 28


def count_turns(over: threading.Event, turns: list[int]) -> None:
    while not over.is_set():
        turns[0] += 1
        time.sleep(0)


def put_at(address: int, num_bytes: int) -> int:
    """Map memory of this process's own at an address where it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access, anonymous = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found: int | None = libc.mmap(address, num_bytes, access, anonymous, -1, 0)
    assert found == address
    return address
