"""CUDA without a GPU: a stand-in for the driver, built here, tells what the engine asked of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import run

from flashckpt import _native

pytestmark = pytest.mark.process

SCENE = """
import ctypes, gc, mmap

def mapping(num_bytes=8192):
    descriptor = os.memfd_create("region")
    os.ftruncate(descriptor, num_bytes)
    made = _native.Mapping(descriptor, num_bytes)
    os.close(descriptor)
    return made

source, to = bytearray(os.urandom(100_000)), mmap.mmap(-1, 100_000)  # page-aligned
a, b = _native.address_of(source), _native.address_of(to)
lane = _native.CudaCopies(1, 64)
"""


def log_of(driver: Path, program: str, refuses: str = "") -> list[str]:
    return run(driver, SCENE + program, 2, refuses)


def test_registering_leaves_context_and_capture_mode_as_they_were(driver: Path) -> None:
    program = """
cuda = ctypes.CDLL("libcuda.so.1")
mode, context = ctypes.c_int(1), ctypes.c_void_p()
cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
cuda.cuCtxSetCurrent(ctypes.c_void_p(0x1001))
assert _native.cuda_available()
memory, small, other = _native.Mapping(4096), _native.Mapping(13), _native.Mapping(4096)
memory.register(0)
assert "13 of 13 bytes of host memory: ALREADY (registered already)" in refused(small.register, 0)
assert "find device 7" in refused(other.register, 7)
memory.close()
cuda.cuCtxGetCurrent(ctypes.byref(context))
cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
assert (context.value, mode.value) == (0x1001, 1), (context, mode)
"""
    there = "context=1000 mode=2"
    lines = [line.split() for line in log_of(driver, program)[1:]]  # behind the lane's own
    assert [" ".join([*line[:2], *line[3:]]) for line in lines] == [
        "retain 0 context=1001 mode=2",
        f"register 4096 {there}",
        f"register 13 {there}",
        f"unregister 1 {there}",
    ]
    assert lines[3][2] == lines[1][2], "the address that was registered"


def test_a_refused_run_stays_pageable_and_no_copy_spans_two_runs(driver: Path) -> None:
    program = """
GIB = 1 << 30
region = mapping(3 * GIB + 8192)
with memoryview(region) as view:
    base = _native.address_of(view)
print(base, file=open(os.environ["FAKE_CUDA_LOG"] + ".base", "w"))
second = (base // GIB + 1) * GIB
os.environ["FAKE_CUDA_REFUSES"] = f"register {second}"
assert f"page-lock {GIB} of {3 * GIB + 8192} bytes of host memory: FAULT" in refused(region.register, 0)
source = mmap.mmap(-1, 80 << 20)
lane = _native.CudaCopies(0, 32 << 20)
for begin in (second - (20 << 20) - 5, second + GIB - (20 << 20) - 5):
    lane.wait(lane.submit(u64(_native.address_of(source)), u64(begin), u64(80 << 20), 1))
lane.close()
region.close()
"""
    lines = [line.split() for line in log_of(driver, program)]
    mib = 1 << 20
    pieces = [int(line[1]) for line in lines if line[0] == "copy"]
    assert pieces == 2 * [20 * mib + 5, 32 * mib, 28 * mib - 5]
    base = int((driver / "log.base").read_text())
    registered = [int(line[2]) for line in lines if line[0] == "register"]
    refused = (base // (1 << 30) + 1) << 30
    assert refused in registered
    assert len(registered) == 4, "the runs behind it are tried"
    gone = [int(line[2]) for line in lines if line[0] == "unregister"]
    assert gone == [address for address in registered if address != refused]


def test_a_separate_thread_enqueues_copies(driver: Path) -> None:
    program = """
ticket = lane.submit(u64(a, a + 140), u64(b + 8, b + 148), u64(140, 10), 1, 55)
lane.wait(ticket)
lane.hold(ticket, u64(8, 9))  # a finished copy holds no stream
assert source[:150] == to[8:158]
lane.close()
lane.close()
"""
    there = "context=1001 mode=2"
    assert log_of(driver, program) == [
        "retain 1 0 context=0 mode=2",
        f"hold 77 55 {there}",
        *(f"copy {n} 77 {there}" for n in (56, 64, 20)),
        f"record 1001 77 {there}",
        f"copy 10 77 {there}",
        f"record 1002 77 {there}",
        f"wait 1002 0 {there}",
    ]


def test_copies_are_enqueued_in_waves_of_some_hundred_and_few_bytes(driver: Path) -> None:
    """A stream takes about a thousand operations: the next call blocks, with the driver's locks. And with
    CUDA_DEVICE_MAX_CONNECTIONS=1 the loop's kernels wait behind all that is enqueued."""
    many = """
count = 2000
each = u64(*range(0, 8 * count, 8))
ticket = lane.submit(u64(*(a + i for i in each)), u64(*(b + i for i in each)), u64(*[8] * count), count)
lane.wait(ticket, first=True)
lane.wait(ticket)
assert source[:8 * count] == to[:8 * count]
lane.close()
"""
    assert 256 <= most_pending(log_of(driver, many), lambda num_bytes: 1) <= 512
    large = """
lane = _native.CudaCopies(0, 32 << 20)
source, to = mmap.mmap(-1, 33 << 20), mmap.mmap(-1, 96 << 20)
a, b = (_native.address_of(memory) for memory in (source, to))
b += -b % (32 << 20)
each = [32 << 20, (33 << 20) - 7, 5, 1 << 20] * 4
lane.wait(lane.submit(u64(*[a] * 16), u64(*[b] * 16), u64(*each), 3))
lane.close()
"""
    assert 64 << 20 <= most_pending(log_of(driver, large), lambda num_bytes: num_bytes) <= 128 << 20


def most_pending(lines: list[str], weight: Callable[[int], int]) -> int:
    """The most that was enqueued and not waited for, of copies by the weight of their bytes."""
    pending, most, behind = 0, 0, dict[str, int]()
    for line in lines:
        what, event, *_ = line.split()
        if what == "copy":
            pending += weight(int(event))
            most = max(most, pending)
        elif what == "record":
            behind[event] = pending
        elif what == "wait":
            pending -= behind[event]
            behind = {other: before - behind[event] for other, before in behind.items()}
    assert pending == 0
    return most


def test_a_refused_copy_seals_no_snapshot_and_leaves_no_writes(driver: Path) -> None:
    program = """
sealer = _native.Sealer()
memory = array("Q", [0] * 600)
base = _native.address_of(memory)

def seal(**landed):
    sealer.submit(
        waits=[lane.handle], word=base, expected=memory[0], desired=memory[0] + 1, record=base + 512,
        metadata=base + 1024, metadata_bytes=64, table=base + 1024, table_count=3, **landed)
    assert sealer.drain(60)

memory[0] = 1 | 4 << 8 | 9 << 16
ticket = lane.submit(u64(a, a, a), u64(b, b, b), u64(8, 17, 9), 3)
assert "FAULT" in refused(lane.wait, ticket, first=True)
assert "FAULT" in refused(lane.wait, ticket)
lane.hold(ticket, u64(8))  # no stream is held for a failed job, which reads nothing
seal()
assert memory[0] == 9 << 16
assert "FAULT" in sealer.failures()[0][1]
# The next job is its own.
memory[0] = 1 | 4 << 8 | 9 << 16
lane.wait(lane.submit(u64(a), u64(b), u64(8), 0))
seal(landed=u64(b, 8, 0))
assert memory[0] == 9 << 16 and memory[128] == _native.EMPTY_DIGEST, "not the digest of what was copied"
memory[0], memory[128] = 1 | 4 << 8 | 9 << 16, _native.digest(a, 8)
seal(landed=u64(b, 8, 0))
assert memory[0] == 2 | 4 << 8 | 9 << 16
sealer.close()
lane.close()
"""
    lines = [line.rsplit(" ", 2)[0] for line in log_of(driver, program)]
    assert lines[1:4] == ["copy 8 77", "copy 17 77", "synchronize 77 0"]


def test_a_forked_child_has_no_copies(driver: Path) -> None:
    program = """
ticket = lane.submit(u64(a), u64(b), u64(8), 1)
lane.wait(ticket)
child = os.fork()
if child == 0:
    for call in (lambda: lane.submit(u64(a), u64(b), u64(8), 1), lambda: lane.hold(1, u64(8))):
        assert "fork" in refused(call)
    lane.close()
    del lane
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
lane.close()
"""
    copies = [line for line in log_of(driver, program) if line.startswith("copy")]
    assert len(copies) == 1, "those of the parent"


@pytest.mark.parametrize(("refuses", "seconds"), [("", "0.25"), ("elapsed", "None")])
def test_graphs_and_the_time_between_events_are_queried_in_relaxed_mode(
    driver: Path, refuses: str, seconds: str
) -> None:
    """A query in any other mode makes a graph invalid that another thread captures."""
    program = """
capturing = [_native.cuda_capturing(u64(*streams), 0) for streams in ((0, 7), (7, 5), (6,))]
elapsed = [_native.cuda_elapsed_s(7, end, 1) for end in (8, 9)]
with open(os.environ["FAKE_CUDA_LOG"], "a") as log:
    print("answers", capturing, elapsed, file=log)
"""
    there = "context=1001 mode=2"
    answers = f"answers [False, True, True] [{seconds}, None]"
    asked = [f"elapsed 7 8 {there}", f"elapsed 7 9 {there}", answers]
    assert log_of(driver, program, refuses)[-3:] == asked


@pytest.mark.parametrize(
    "ending",
    [
        "it.close(); it.close()",
        "del it",
        "view = memoryview(it)\ntry:\n    it.close()\nexcept BufferError:\n    del it, view",
    ],
)
def test_registered_memory_is_unregistered_before_it_is_unmapped(driver: Path, ending: str) -> None:
    """If pages stayed registered at a reused address, later copies would go to freed memory."""
    program = "it = mapping()\nit.register(1)\nit.register(0)\n" + ending + "\ngc.collect()\n"
    lines = [line.split()[:2] for line in log_of(driver, program)]
    assert lines[0] == ["retain", "1"]
    assert sorted(lines[1:]) == [["register", "8192"], ["unregister", "1"]]


def test_a_refused_or_unregistered_mapping_unregisters_nothing(driver: Path) -> None:
    program = """
one, other = mapping(), mapping(13)
assert "ALREADY" in refused(other.register, 0)
child = os.fork()
if child == 0:
    one.close()
    os._exit(0)
os.waitpid(child, 0)
two = mapping()
two.register(0)
child = os.fork()
if child == 0:
    two.close()  # the child must not unregister the parent's pages
    os._exit(0)
os.waitpid(child, 0)
del one, other
"""
    lines = [line.split()[:2] for line in log_of(driver, program)]
    assert [line for line in lines if "unregister" in line] == [["unregister", "1"]]


def test_without_a_driver() -> None:
    if _native.cuda_available():
        pytest.skip("there is one here")
    with pytest.raises(RuntimeError, match="CUDA cannot be used"):
        _native.Mapping(4096).register(0)


def test_enqueued_copies_have_ended_even_if_the_wait_is_refused(driver: Path) -> None:
    program = """
assert "FAULT" in refused(lane.wait, lane.submit(u64(a), u64(b), u64(8), 0))
lane.close()
"""
    last = [line.split()[0] for line in log_of(driver, program, "wait") if not line.startswith("retain")][-2:]
    assert last == ["wait", "synchronize"]


def test_a_refused_copy_is_reported_when_memory_is_short(driver: Path) -> None:
    program = """
import resource
lane.wait(lane.submit(u64(a), u64(b), u64(8), 0))  # the thread is there
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (48 << 20),) * 2)
assert "out of memory" in refused(lane.wait, lane.submit(u64(a, a), u64(b, b), u64(8, 17), 0))
lane.wait(lane.submit(u64(a), u64(b), u64(8), 0))
lane.close()
"""
    copies = [line.split()[1] for line in log_of(driver, program, "memory for names") if line[:4] == "copy"]
    assert copies == ["8", "8", "17", "8"], "the one after it is made"
