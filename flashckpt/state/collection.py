"""Python's collection of garbage, held off while many small objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """A walk, or what a resume reads, is many small objects and no garbage: collections would be most of its
    time, and one of all that torch has made takes tens of milliseconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
