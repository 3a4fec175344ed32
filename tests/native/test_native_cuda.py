"""CUDA without a GPU: a stand-in for the driver, built here, tells what the engine asked of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt import _native

PROGRAM = """
import os
from array import array
from flashckpt import _native

def u64(*values):
    return array("Q", values)

def refused(call, *args):
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("not refused")

assert _native.cuda_available() == (os.environ["FAKE_CUDA_DEVICES"] != "0")
source, to = bytearray(os.urandom(100)), bytearray(100)
a, b = _native.address_of(source), _native.address_of(to)
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
_native.cuda_copy_to_host(77, u64(a, a + 100, a + 90), u64(b, b + 100, b + 90), u64(90, 0, 10), 40, 1)
assert source == to

memory = (array("Q", [0] * 600))
base = _native.address_of(memory)
sealer, host = _native.Sealer(), _native.HostEvent()
host.set()
assert _native.cuda_event_handle(150, 1) == _native.cuda_event_handle(150, 1)
for i, events in enumerate(((5, 150), (5, 250))):
    memory[i] = 1 | 4 << 8 | 9 << 16
    sealer.submit(
        waits=[host.handle, *(_native.cuda_event_handle(event, 1) for event in events)], word=base + 8 * i,
        expected=memory[i], desired=memory[i] + 1, record=base + 512, metadata=base + 1024, metadata_bytes=64,
        table=base + 1024, table_count=3)
    assert sealer.drain(60)
assert memory[0] == 2 | 4 << 8 | 9 << 16
assert memory[1] == 9 << 16
[(word, reason)] = sealer.failures()
assert word == base + 8 and "FAULT" in reason, reason
sealer.close()
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


def run(driver: Path, program: str, devices: int) -> list[str]:
    log = driver / "log"
    log.write_text("")
    changed = {"LD_LIBRARY_PATH": str(driver), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_DEVICES": str(devices)}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **changed}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


def test_what_the_driver_is_asked(driver: Path) -> None:
    there = "context=1001 mode=2"
    assert run(driver, PROGRAM, 2) == [
        "retain 1 0 context=0 mode=2",
        f"register 4096 1 {there}",
        f"register 13 1 {there}",
        f"unregister 0 0 {there}",
        f"copy 40 77 {there}",
        f"copy 40 77 {there}",
        f"copy 10 77 {there}",
        f"copy 10 77 {there}",
        f"query 150 0 {there}",
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


def test_a_driver_without_devices(driver: Path) -> None:
    program = "from flashckpt import _native; assert not _native.cuda_available()"
    assert run(driver, program, 0) == []


def test_without_a_driver() -> None:
    if _native.cuda_available():
        pytest.skip("there is one here")
    with pytest.raises(RuntimeError, match="CUDA cannot be used"):
        _native.cuda_register(4096, 4096, 0)
    with pytest.raises(RuntimeError, match="CUDA cannot be used"):
        _native.cuda_event_handle(1, 0)
