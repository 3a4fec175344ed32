"""The interpreter ends while daemon threads are in native code: the process ends as it meant to."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What is left to the end of all modules sleeps there: meanwhile the threads come back from native code.
_SCRIPT = """
import os, threading, time
from flashckpt import _native

class Last:
    def __del__(self):
        time.sleep(0.3)

last = Last()
size = 4 << 20
descriptor = os.memfd_create("exit")
_native.allocate(descriptor, 0, size)
mapping = _native.Mapping(descriptor, size)
address = _native.address_of(mapping)
running = threading.Event()

def work():
    while True:
        {deed}
        running.set()

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
running.wait()
raise SystemExit(7)
"""


@pytest.mark.parametrize(
    "deed",
    [
        "_native.populate(address, size, 2)",
        "_native.digest(address, size)",
        "other = _native.Mapping(descriptor, size); other.close()",
        "other = _native.Mapping(descriptor, size); del other",
    ],
)
def test_a_daemon_thread_in_native_code_does_not_abort_the_exit(deed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(deed=deed)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (7, "")
