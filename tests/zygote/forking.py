"""What a process does before its first fork, and a forked one before it becomes a program."""

import gc
import importlib
import os
import random
import sys
import tempfile
from collections.abc import Sequence

MESSAGE_BYTES = 1 << 18


def preload(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads run: nothing can be forked beside them"
    # Else each child's collections, and above all its last, would go through all that was imported.
    gc.collect()
    gc.freeze()


def forget() -> None:
    """What imports have made of the environment, and of chance."""
    from flashckpt import crashpoints
    from flashckpt.options import crash_at

    tempfile.tempdir = None
    crashpoints.arm(crash_at())
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
