"""The interpreter ends while daemon threads are in native code: the process ends as it meant to."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

# What is left to the end of all modules sleeps there: meanwhile the threads come back from native code.
_SCRIPT = """
import os, sys, threading, time
from array import array
from flashckpt import _native

sys.setswitchinterval(1e-6)  # the lock changes hands in the middle of what is called

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

class Slow:
    # Any code of the user's: it is the interpreter that runs when the end comes.

    def __init__(self):
        self.held = object()

    @property
    def value(self):
        for _ in range(300):
            pass
        return self.held

    def __len__(self):
        return 1 if self.value else 0

    def __getitem__(self, key):
        return self.value

    data_ptr = stride = untyped_storage = __len__
    shape = dtype = value

slow = [Slow() for _ in range(8)]
addresses = array("Q", bytes(64))
tensors = [each.held for each in slow]
standing = _native.Standing([(each, 1) for each in slow], [(each, "value", each.held) for each in slow])

def work():
    while True:
        {operation}
        running.set()

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
running.wait()
raise SystemExit(7)
"""


@pytest.mark.parametrize(
    "operation",
    [
        "_native.populate(address, size, 2)",
        "other = _native.Mapping(descriptor, size); other.close()",
        "assert standing.stands()",
        "_native.Watch([(each, 'value') for each in slow], tensors).changed(addresses)",
    ],
)
def test_a_daemon_thread_in_native_code_does_not_abort_the_exit(operation: str) -> None:
    command = [sys.executable, "-c", _SCRIPT.format(operation=operation)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (7, "")
