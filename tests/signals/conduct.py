"""What these programs do about signals themselves, and how they stand still for one. Without torch: the
programs that others are measured by have nothing of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def expect_interrupts() -> None:
    """Also where the tests run in the background of a shell, which ignores SIGINT for them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # a print may be interrupted by a handler that prints


def install(kind: str, run: Callable[[], Any]) -> None:
    """What people do in their own handlers."""

    def flag(number: int, frame: object) -> None:
        say(f"flag {signal.Signals(number).name}")

    def leave(number: int, frame: object) -> None:
        say("leave")
        sys.exit(7)

    def stop(number: int, frame: object) -> None:
        say("stop")
        run().stop()

    before = signal.getsignal(signal.SIGTERM)

    def chain(number: int, frame: object) -> None:
        say("chain")
        if callable(before):
            before(number, frame)

    chosen = {"flag": flag, "leave": leave, "chain": chain, "stop": stop, "ignore": signal.SIG_IGN}[kind]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, chosen)


def stand_still(go: Path) -> None:
    while not go.exists():
        time.sleep(0.002)
