"""A test that leaves descriptors open, more than a few, fails: a worker runs thousands of tests, and may have
so many open and no more.

Owns that rule. Seen is what the tests' own process has, after all fixtures of the test.
"""

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests import zygote
from tests.descriptors import close_held

# A CUDA context opens these, some tens a device, and keeps them until the process exits.
_OF_THE_DRIVER = "/dev/nvidia"
# Made by threads of libraries (a store's server, a pool of connections), which close them in their time.
_OTHERS = (
    "/dev/null",
    "/dev/shm/pym-",
    "/dev/shm/torch_",
    "pipe:",
    "socket:",
    "anon_inode:[event",
    "anon_inode:[io_uring]",
)
_MOST_OF_OTHERS, _MOST_OF_OWN = 64, 4
# A thread may be about to close what it has.
_PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Set up before all others of the test, and torn down after them."""
    before = _opened()
    yield
    close_held()
    until_s = time.monotonic() + _PATIENCE_S
    while left := too_many(before, _opened()):
        if time.monotonic() > until_s:
            pytest.fail(f"descriptors stay open: {left}", pytrace=False)
        gc.collect()
        time.sleep(0.01)


def too_many(before: Counter[str], now: Counter[str]) -> dict[str, int]:
    """The descriptors of `now` that were not open `before`, where they are more than may stay; else none.
    Counts of open descriptors by the target of their link."""
    added = now - before
    left = Counter({link: count for link, count in added.items() if not link.startswith(_OF_THE_DRIVER)})
    own = Counter({link: count for link, count in left.items() if not link.startswith(_OTHERS)})
    if own.total() > _MOST_OF_OWN:
        return own
    return left if left.total() > _MOST_OF_OTHERS else {}


def _opened() -> Counter[str]:
    """What this process has open, and how often; without what all tests share, which is made when the first
    asks for it."""
    shared = zygote.shared_descriptors()
    found: Counter[str] = Counter()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if number not in shared:
                found[os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)")] += 1
    return found
