"""How SIGTERM ends a run: by SystemExit, at once where the run waits, else after what must not be broken off.

An exception in the middle of an import leaves modules half imported: the picture of the report could not be
drawn afterwards, and the run would end with that error. Breaking off a cleanup leaves files and processes.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

_STATUS = 128 + signal.SIGTERM
_holding = 0
_is_stopped = False


def install() -> None:
    """Handle SIGTERM from here on. For the main thread."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(*_: object) -> None:
    global _is_stopped
    _is_stopped = True
    if not _holding:
        sys.exit(_STATUS)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Put a stop off until the end of the block, which raises SystemExit then."""
    global _holding
    _holding += 1
    try:
        yield
    finally:
        _holding -= 1
        if _is_stopped and not _holding:
            sys.exit(_STATUS)
