"""Native threads without memory, and work that throws on them: an uncaught exception would end the
trainer."""

import shutil
import subprocess
from pathlib import Path

import pytest
from emulated_kernel import CSRC, HERE

pytestmark = pytest.mark.process

_SOURCES = (
    "base/error.cpp", "base/signals.cpp", "checksum/xxh3.cpp", "device/context.cpp", "device/copies.cpp",
    "digest/block_hash.cpp", "sync/bell.cpp", "sync/event.cpp", "sync/pool.cpp", "sync/sealer.cpp",
)  # fmt: skip


@pytest.mark.long
def test_threads_without_memory_end_no_process(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler here")
    program = tmp_path / "starved"
    includes = ["-I", CSRC, "-isystem", CSRC / "third_party/xxhash"]
    sources = [HERE / "starved_threads.cpp", *(CSRC / source for source in _SOURCES)]
    command = ["g++", "-std=c++20", "-O0", "-pthread", *includes, *sources, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
