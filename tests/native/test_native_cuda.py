"""CUDA without a GPU: a stand-in for the driver, built here, tells what the engine asked of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cuda import build_driver, run

from flashckpt import _native

pytestmark = pytest.mark.process

PROGRAM = """
import os
from flashckpt import _native

def refused(call, *args):
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("not refused")

assert _native.cuda_available() == (os.environ["FAKE_CUDA_DEVICES"] != "0")
memory = bytearray(100)
b = _native.address_of(memory)
_native.cuda_register(b, 4096, 1)
assert "ALREADY (registered already)" in refused(_native.cuda_register, b, 13, 1)
assert "find device 7" in refused(_native.cuda_register, b, 4096, 7)
_native.cuda_unregister(b)
try:
    _native.cuda_unregister(b)
except ValueError as error:
    assert "no host memory" in str(error)
else:
    raise AssertionError("not refused")
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


def test_what_the_driver_is_asked(driver: Path) -> None:
    there = "context=1001 mode=2"
    assert run(driver, PROGRAM, 2) == [
        "retain 1 0 context=0 mode=2",
        f"register 4096 1 {there}",
        f"register 13 1 {there}",
        f"unregister 1 0 {there}",
    ]


def test_context_and_capture_mode_are_left_as_they_were(driver: Path) -> None:
    program = """
import ctypes
from flashckpt import _native
cuda = ctypes.CDLL("libcuda.so.1")
mode, context = ctypes.c_int(1), ctypes.c_void_p()
cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
cuda.cuCtxSetCurrent(ctypes.c_void_p(0x1001))
buffer = bytearray(64)
_native.cuda_register(_native.address_of(buffer), 64, 0)
try:
    _native.cuda_register(_native.address_of(buffer), 64, 5)
except RuntimeError:
    pass
cuda.cuCtxGetCurrent(ctypes.byref(context))
cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
assert (context.value, mode.value) == (0x1001, 1), (context, mode)
"""
    assert run(driver, program, 2)[-1] == "register 64 1 context=1000 mode=2"


LANE = """
import os
from array import array
from flashckpt import _native

def u64(*values):
    return array("Q", values)

def refused(call, *args, **named):
    try:
        call(*args, **named)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("not refused")

source, to = bytearray(os.urandom(100_000)), bytearray(100_000)
a, b = _native.address_of(source), _native.address_of(to)
lane = _native.CudaCopies(1, 40)
"""


def test_copies_are_enqueued_by_a_thread_of_their_own(driver: Path) -> None:
    program = (
        LANE
        + """
ticket = lane.submit(u64(a, a + 90), u64(b, b + 90), u64(90, 10), 1, 55)
lane.wait(ticket)
lane.hold(ticket, u64(8, 9))  # what has been copied holds nobody
assert source[:100] == to[:100]
lane.close()
lane.close()
"""
    )
    there = "context=1001 mode=2"
    assert run(driver, program, 2) == [
        "retain 1 0 context=0 mode=2",
        f"hold 77 55 {there}",
        *(f"copy {n} 77 {there}" for n in (40, 40, 10)),
        f"record 1001 77 {there}",
        f"copy 10 77 {there}",
        f"record 1002 77 {there}",
        f"wait 1002 0 {there}",
    ]


def test_many_copies_go_in_waves(driver: Path) -> None:
    """A stream takes about a thousand operations: the next call blocks, with the driver's locks."""
    program = (
        LANE
        + """
count = 2000
each = u64(*range(0, 8 * count, 8))
ticket = lane.submit(u64(*(a + i for i in each)), u64(*(b + i for i in each)), u64(*[8] * count), count)
lane.wait(ticket, first=True)
lane.wait(ticket)
assert source[:8 * count] == to[:8 * count]
lane.close()
"""
    )
    pending, most, behind = 0, 0, dict[str, int]()
    for line in run(driver, program, 2):
        what, event, *_ = line.split()
        if what == "copy":
            pending += 1
            most = max(most, pending)
        elif what == "record":
            behind[event] = pending
        elif what == "wait":
            pending -= behind[event]
            behind = {other: count - behind[event] for other, count in behind.items()}
    assert pending == 0
    assert most <= 512


def test_a_copy_that_is_refused_has_no_snapshot_sealed_and_leaves_nothing_that_writes(driver: Path) -> None:
    program = (
        LANE
        + """
sealer = _native.Sealer()
memory = array("Q", [0] * 600)
base = _native.address_of(memory)
memory[0] = 1 | 4 << 8 | 9 << 16
ticket = lane.submit(u64(a, a, a), u64(b, b, b), u64(8, 17, 9), 3)
assert "FAULT" in refused(lane.wait, ticket, first=True)
assert "FAULT" in refused(lane.wait, ticket)
lane.hold(ticket, u64(8))  # nobody is held for what will never be read
sealer.submit(
    waits=[lane.handle], word=base, expected=memory[0], desired=memory[0] + 1, record=base + 512,
    metadata=base + 1024, metadata_bytes=64, table=base + 1024, table_count=3)
assert sealer.drain(60)
assert memory[0] == 9 << 16
assert "FAULT" in sealer.failures()[0][1]
# The next job is its own.
memory[0] = 1 | 4 << 8 | 9 << 16
lane.wait(lane.submit(u64(a), u64(b), u64(8), 0))
sealer.submit(
    waits=[lane.handle], word=base, expected=memory[0], desired=memory[0] + 1, record=base + 512,
    metadata=base + 1024, metadata_bytes=64, table=base + 1024, table_count=3,
    moves=u64(a, b + 500, 30, a + 30, b + 530, 1))
assert sealer.drain(60)
assert memory[0] == 2 | 4 << 8 | 9 << 16
assert to[500:531] == source[:31]
sealer.close()
lane.close()
"""
    )
    lines = [line.rsplit(" ", 2)[0] for line in run(driver, program, 2)]
    assert lines[1:4] == ["copy 8 77", "copy 17 77", "synchronize 77 0"]


def test_a_forked_child_has_no_copies(driver: Path) -> None:
    program = (
        LANE
        + """
ticket = lane.submit(u64(a), u64(b), u64(8), 1)
lane.wait(ticket)
child = os.fork()
if child == 0:
    for call in (lambda: lane.submit(u64(a), u64(b), u64(8), 1), lambda: lane.hold(1, u64(8))):
        try:
            call()
        except ValueError as error:
            assert "fork" in str(error)
        else:
            os._exit(1)
    lane.close()
    del lane
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
lane.close()
"""
    )
    copies = [line for line in run(driver, program, 2) if line.startswith("copy")]
    assert len(copies) == 1, "those of the parent"


def test_whether_a_graph_is_being_captured(driver: Path) -> None:
    program = (
        LANE
        + """
answers = [_native.cuda_capturing(u64(*streams), 0) for streams in ((0, 7), (7, 5), (6,))]
with open(os.environ["FAKE_CUDA_LOG"], "a") as log:
    print("answers", answers, file=log)
"""
    )
    assert run(driver, program, 2)[-1] == "answers [False, True, True]"


@pytest.mark.parametrize(("refuses", "seconds"), [("", "0.25"), ("elapsed", "None")])
def test_the_time_between_events_is_asked_in_relaxed_mode(driver: Path, refuses: str, seconds: str) -> None:
    """A query in any other mode makes a graph invalid that another thread captures."""
    program = (
        LANE
        + """
answers = [_native.cuda_elapsed_s(7, end, 1) for end in (8, 9)]
with open(os.environ["FAKE_CUDA_LOG"], "a") as log:
    print("answers", answers, file=log)
"""
    )
    there = "context=1001 mode=2"
    asked = [f"elapsed 7 8 {there}", f"elapsed 7 9 {there}", f"answers [{seconds}, None]"]
    assert run(driver, program, 2, refuses)[-3:] == asked


MAPPING = """
import gc, mmap, os
from flashckpt import _native

def mapping(num_bytes=8192):
    descriptor = os.memfd_create("region")
    os.ftruncate(descriptor, num_bytes)
    made = _native.Mapping(descriptor, num_bytes)
    os.close(descriptor)
    return made
"""


@pytest.mark.parametrize(
    "ending",
    [
        "it.close(); it.close()",
        "del it",
        "view = memoryview(it)\ntry:\n    it.close()\nexcept BufferError:\n    del it, view",
        "view = memoryview(it)\ndel it\nview.release(); del view",
        "import traceback\ntry:\n    raise ValueError(it)\nexcept ValueError:\n    del it",
        "it = mapping(); it.register(1); del it",
    ],
)
def test_registered_memory_is_unregistered_before_it_is_unmapped(driver: Path, ending: str) -> None:
    """Pages that stay registered at an address that is used again send the next copies to nobody's memory."""
    program = MAPPING + "it = mapping()\nit.register(1)\nit.register(0)\n" + ending + "\ngc.collect()\n"
    lines = [line.split(" context")[0] for line in run(driver, program, 2)]
    times = ending.count("register(1)") + 1
    assert lines[0] == "retain 1 0"
    assert sorted(lines[1:]) == ["register 8192 1"] * times + ["unregister 1 0"] * times


def test_a_mapping_that_was_refused_or_never_registered_unregisters_nothing(driver: Path) -> None:
    program = (
        MAPPING
        + """
one, other = mapping(), mapping(13)
try:
    other.register(0)
except RuntimeError as error:
    assert "ALREADY" in str(error)
else:
    raise AssertionError
child = os.fork()
if child == 0:
    one.close()
    os._exit(0)
os.waitpid(child, 0)
two = mapping()
two.register(0)
child = os.fork()
if child == 0:
    two.close()  # the parent's pages are none of the child's
    os._exit(0)
os.waitpid(child, 0)
del one, other
"""
    )
    lines = [line.split(" context")[0] for line in run(driver, program, 2)]
    assert [line for line in lines if "unregister" in line] == ["unregister 1 0"]


def test_a_driver_without_devices(driver: Path) -> None:
    program = "from flashckpt import _native; assert not _native.cuda_available()"
    assert run(driver, program, 0) == []


def test_without_a_driver() -> None:
    if _native.cuda_available():
        pytest.skip("there is one here")
    with pytest.raises(RuntimeError, match="CUDA cannot be used"):
        _native.cuda_register(4096, 4096, 0)
    with pytest.raises(RuntimeError, match="CUDA cannot be used"):
        _native.cuda_unregister(4096)


def test_what_was_enqueued_has_ended_where_the_wait_for_it_is_refused(driver: Path) -> None:
    program = (
        LANE
        + """
assert "FAULT" in refused(lane.wait, lane.submit(u64(a), u64(b), u64(8), 0))
lane.close()
"""
    )
    last = [line.split()[0] for line in run(driver, program, 2, "wait") if not line.startswith("retain")][-2:]
    assert last == ["wait", "synchronize"]


def test_a_copy_that_is_refused_while_memory_is_short_is_told_all_the_same(driver: Path) -> None:
    program = (
        LANE
        + """
import resource
lane.wait(lane.submit(u64(a), u64(b), u64(8), 0))  # the thread is there
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (48 << 20),) * 2)
assert "out of memory" in refused(lane.wait, lane.submit(u64(a, a), u64(b, b), u64(8, 17), 0))
lane.wait(lane.submit(u64(a), u64(b), u64(8), 0))
lane.close()
"""
    )
    copies = [line.split()[1] for line in run(driver, program, 2, "memory for names") if line[:4] == "copy"]
    assert copies == ["8", "8", "17", "8"], "the one after it is made"
