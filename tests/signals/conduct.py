"""What these programs do about signals themselves, and how they stand still for one."""

import os
import signal
import sys
import time
from pathlib import Path


def expect_interrupts() -> None:
    """Also where the tests run in the background of a shell, which ignores SIGINT for them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # a print may be interrupted by a handler that prints


def leave_by_signal() -> None:
    """A handler of the program's own that ends it."""

    def leave(number: int, frame: object) -> None:
        say("leave")
        sys.exit(7)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def stand_still(go: Path) -> None:
    while not go.exists():
        time.sleep(0.002)
