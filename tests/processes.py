"""Finding and ending the keepers that a test's processes leave behind, as they are meant to."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.descriptors import readable


def keepers_of(runtime: Path) -> list[int]:
    """The processes that serve a runtime folder, found by their environment."""
    wanted, found = f"FLASHCKPT_RUNTIME={runtime}".encode(), []
    for pid in _keepers():
        with contextlib.suppress(OSError):
            if wanted in _told(pid, "environ").split(b"\0"):
                found.append(pid)
    return found


def candidates(folder: str) -> list[int]:
    """The keepers that were started in a run's runtime folder, and are neither elected nor ended yet: they
    have no eventfd, which wakes the loop of an elected one."""
    found = []
    for pid in _keepers():
        with contextlib.suppress(OSError):
            is_here = os.readlink(f"/proc/{pid}/fd/1") == f"{folder}/keeper.log"
            if is_here and not any("[eventfd]" in path for path in _opened(pid)):
                found.append(pid)
    return found


def _opened(pid: int) -> Iterator[str]:
    for each in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as while modules are imported
            yield os.readlink(f"/proc/{pid}/fd/{each}")


def _keepers() -> Iterator[int]:
    # Asked after every test, and again and again while one waits: without a `Path` for every process.
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if b"keeper/__main__.py" in _told(pid, "cmdline"):
                yield pid


def _told(pid: int, what: str) -> bytes:
    with open(f"/proc/{pid}/{what}", "rb", buffering=0) as file:
        return file.read()


def is_stopped(pid: int) -> bool:
    """Whether a process stands still, as after SIGSTOP. False for one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _told(pid, "stat").rpartition(b")")[2].split()[0] == b"T"
    return False


def end(pids: list[int]) -> None:
    """Kill processes and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            ended = readable(descriptor)
            os.close(descriptor)
            assert ended, f"process {pid} was killed and does not end"
