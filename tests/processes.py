"""Finding and ending the keepers that a test's processes leave behind, as they are meant to."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path


def keepers_of(runtime: Path) -> list[int]:
    """The processes that serve a runtime folder, found by their environment."""
    wanted, found = f"FLASHCKPT_RUNTIME={runtime}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if b"keeper/boot.py" not in (entry / "cmdline").read_bytes():
                    continue
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end(pids: list[int]) -> None:
    """Kill processes and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], 10)
            os.close(descriptor)
