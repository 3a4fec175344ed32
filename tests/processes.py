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
    # Asked after every test, and again and again while one waits: without a `Path` for every process.
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            is_keeper = b"keeper/__main__.py" in _told(pid, "cmdline")
            if is_keeper and wanted in _told(pid, "environ").split(b"\0"):
                found.append(pid)
    return found


def _told(pid: int, what: str) -> bytes:
    with open(f"/proc/{pid}/{what}", "rb", buffering=0) as file:
        return file.read()


def end(pids: list[int]) -> None:
    """Kill processes and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            ended = select.select([descriptor], [], [], 240)[0]
            os.close(descriptor)
            assert ended, f"process {pid} was killed and does not end"
