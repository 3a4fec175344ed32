"""What a stuck trainer is doing: its Python stacks, and what the kernel says of its process.

Owns the signal that asks for stacks and its safety: it is sent to nobody but the process that holds the
trainer's life lock, and only if that process has a handler for it. Runs in a worker: it may take seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flashckpt.errors import KeeperError
from flashckpt.memory.runtime import RuntimeFolder, holder_of, stacks_name

# How long stacks are waited for, and how long they must have stood still to be whole.
_SIGNAL_LIMIT_S = 10.0
_SETTLED_S = 0.5
_LOOK_S = 0.05
_PY_SPY_LIMIT_S = 30.0
_MOST_READ_BYTES = 256 << 10
# A ledger's line has 32 KiB.
_MOST_TOLD_BYTES = 20 << 10
_MOST_LINE = 500


@dataclass(frozen=True)
class Evidence:
    """`stacks` are lines of text, `source` is "faulthandler" or "py-spy", "" where nothing could be read:
    then `reason` says why."""

    stacks: tuple[str, ...]
    source: str
    reason: str = ""


@dataclass(frozen=True)
class Condition:
    """What the kernel says of a process. `held_still`: stopped by a signal, or by a debugger."""

    state: str = ""
    held_still: bool = False
    caught: int = 0


def condition(pid: int) -> Condition:
    """All empty for a process that is gone or cannot be seen."""
    state, tracer, caught = "", 0, 0
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key == "State":
                    state = value.strip()[:1]
                elif key == "TracerPid":
                    tracer = int(value)
                elif key == "SigCgt":
                    caught = int(value, 16)
    except (OSError, ValueError):
        return Condition()
    return Condition(state, state in ("T", "t") or tracer != 0, caught)


@contextlib.contextmanager
def held(folder: RuntimeFolder, lock: str) -> Iterator[tuple[int, int] | None]:
    """(pid, pidfd) of the process that holds a life lock, None where it is gone or not to be named. The
    descriptor means that very process: it held the lock before and after it was opened."""
    pid = holder_of(folder, lock)
    descriptor = _opened(pid) if pid is not None and pid > 0 and pid != os.getpid() else -1
    if pid is None or descriptor < 0:
        yield None
        return
    try:
        yield (pid, descriptor) if holder_of(folder, lock) == pid else None
    finally:
        os.close(descriptor)


def _opened(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def collect(folder: RuntimeFolder, lock: str, signal_number: int) -> Evidence:
    """The stacks of the holder of a life lock: by its own signal handler, else by py-spy."""
    try:
        with held(folder, lock) as process:
            if process is None:
                return Evidence((), "", "its process is gone, or of another pid namespace")
            pid, pidfd = process
            text, reason = _by_signal(folder, lock, pid, pidfd, signal_number)
            if text:
                return Evidence(_bounded(text), "faulthandler")
            text, why = _by_py_spy(pid)
            if text and holder_of(folder, lock) == pid:
                return Evidence(_bounded(text), "py-spy")
            return Evidence((), "", f"{reason}; {why}")
    except (OSError, KeeperError) as error:
        return Evidence((), "", str(error))


def _by_signal(folder: RuntimeFolder, lock: str, pid: int, pidfd: int, signal_number: int) -> tuple[str, str]:
    """The text, or why there is none."""
    # Without a handler a real-time signal is the process's end.
    if not signal_number or not condition(pid).caught >> (signal_number - 1) & 1:
        return "", "it has no signal handler for stacks"
    try:
        descriptor = folder.open_file(stacks_name(lock), os.O_RDWR)
    except (OSError, KeeperError) as error:
        return "", f"its file for stacks cannot be opened: {error}"
    try:
        os.ftruncate(descriptor, 0)
        signal.pidfd_send_signal(pidfd, signal_number)
        _settle(descriptor)
        text = os.pread(descriptor, _MOST_READ_BYTES, 0).decode(errors="replace")
        os.ftruncate(descriptor, 0)
        return text, "its signal handler wrote nothing"
    finally:
        os.close(descriptor)


def _settle(descriptor: int) -> None:
    """Wait until stacks are written and no more come."""
    now = time.monotonic()
    until, size, grown = now + _SIGNAL_LIMIT_S, 0, now
    while now < until and (size == 0 or now - grown < _SETTLED_S):
        time.sleep(_LOOK_S)
        now = time.monotonic()
        found = os.fstat(descriptor).st_size
        if found != size:
            size, grown = found, now


def _by_py_spy(pid: int) -> tuple[str, str]:
    """The text, or why there is none. It reads the process from outside, without pausing it."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PY_SPY_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {error}"
    if done.returncode != 0:
        return "", f"py-spy: {done.stderr[:_MOST_LINE].decode(errors='replace').strip()}"
    return done.stdout[:_MOST_READ_BYTES].decode(errors="replace"), ""


def _bounded(text: str) -> tuple[str, ...]:
    """As many threads as a line of the ledger holds: the one that answered first, then the main thread
    (faulthandler writes it last), then the others."""
    threads = [block for block in text.replace("\nThread ", "\n\nThread ").split("\n\n") if block.strip()]
    last = threads[-1:]
    current = [block for block in threads[:-1] if block.startswith("Current thread")]
    rest = [block for block in threads[:-1] if block not in current]
    lines: list[str] = []
    num_bytes = 0
    for index, block in enumerate(current + last + rest):
        added = [line[:_MOST_LINE] for line in block.strip("\n").split("\n")]
        num_bytes += sum(len(json.dumps(line)) + 1 for line in added)
        if num_bytes > _MOST_TOLD_BYTES and lines:
            lines.append(f"… {len(threads) - index} more threads")
            break
        lines += added
    return tuple(lines)
