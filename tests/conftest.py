"""What every test gets: a runtime folder of its own, whose keepers are ended and whose regions go."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


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


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder in shared memory, of this test alone."""
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    monkeypatch.setenv("FLASHCKPT_RUNTIME", str(folder))
    yield folder
    end(keepers_of(folder))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def kill_keepers(runtime: Path) -> Callable[..., None]:
    """Kill the keepers of this test; with remove_regions, what they held in memory goes too."""

    def kill(*, remove_regions: bool = False) -> None:
        end(keepers_of(runtime))
        if remove_regions:
            for entry in runtime.iterdir():
                shutil.rmtree(entry)

    return kill
