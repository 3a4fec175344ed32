"""Starts a keeper from a trainer: a new program, double fork, a session and streams of its own.

Owns the command line. Never waits until the keeper is ready: the client does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

from flashckpt.errors import KeeperError
from flashckpt.keeper.protocol import LOG_NAME, close_all
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.store import options_of

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_MAX_LOG_BYTES = 1 << 20
_STARTS_AT_ONCE = 8
# The longest pause in general, while a trainer waits, and at the end of a run, after which none would be
# started.
LONGEST_PAUSE_S, AWAITED_PAUSE_S, NO_PAUSE_S = 20.0, 1.0, 0.0
_LIVED_S = 60.0
_MOST_DOUBLINGS = 10


class Pauses:
    """When a keeper may be started again: at once after occasional deaths; after 1, 2, 4 … 20 s if keepers
    die over and over (no memory for them, an installation that broke during a run), since each begins its
    write again, on storage that the training needs, too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._starts = 0
        self._started_s = -_LIVED_S

    def started(self) -> None:
        """Note a start. The count begins again if the keeper before lived for a minute."""
        now = self._clock()
        self._starts = 1 if now - self._started_s >= _LIVED_S else self._starts + 1
        self._started_s = now

    def left_s(self, longest_s: float = LONGEST_PAUSE_S) -> float:
        """Seconds until the next start, 0 or less if it may be now. No pause is longer than `longest_s`."""
        beyond = self._starts - _STARTS_AT_ONCE
        # After a night of dying keepers two to their number would be no number.
        pause_s = 0.0 if beyond < 0 else min(2.0 ** min(beyond, _MOST_DOUBLINGS), longest_s)
        return self._started_s + pause_s - self._clock()


def start(run_path: str, runtime: RuntimeFolder) -> int:
    """Start a keeper for a run, which ends by itself if the run has one. Returns a descriptor, for the caller
    to close, that shows POLLHUP once the keeper's process has ended. Raises KeeperError."""
    if not sys.executable:
        raise KeeperError(
            "Python does not know its own program, so no keeper can be started. Training is not touched, "
            "but nothing would be persisted. Run under an ordinary python."
        )
    orders = {
        "paths": _import_path(), "run": run_path, "runtime": runtime.path, "starter": os.getpid(),
        # On its stdin: not in what `ps` shows.
        "storage": options_of(run_path),
    }  # fmt: skip
    log_file = runtime.open_file(LOG_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    reading = writing = -1
    try:
        reading, writing = os.pipe()
        bound_log(runtime, log_file)
        _start_program(run_path, json.dumps(orders).encode(), log_file, writing)
    except BaseException as error:
        close_all([reading])
        if isinstance(error, OSError):
            raise _start_error(str(error)) from error
        raise
    finally:
        close_all([log_file, writing])
    return reading


def _import_path() -> list[str]:
    """The folders of this process's import path, made absolute. Without the relative ones ('' is one) if the
    working directory was deleted."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return [path for path in sys.path if os.path.isabs(path)]
    return [os.path.normpath(os.path.join(here, path)) for path in sys.path]


def bound_log(runtime: RuntimeFolder, descriptor: int) -> None:
    """Truncate a keeper's log that is too long: it takes memory of slots. Leaves other files alone."""
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        is_log = runtime.inode(LOG_NAME) == (found.st_dev, found.st_ino)
        if is_log and found.st_size > _MAX_LOG_BYTES:
            os.ftruncate(descriptor, 0)


def survival_warnings(cgroup: str = "/proc/self/cgroup") -> list[str]:
    """The reasons why a keeper might not outlive this process, for a warning at attach."""
    warnings = []
    if os.getpid() == 1:
        warnings.append(
            "The training process is PID 1 of its container: its end takes the keeper along, and with it "
            "the snapshot in memory. Start the container with an init (docker run --init) to keep it."
        )
    try:
        with open(cgroup, encoding="utf-8", errors="replace") as file:
            paths = [line.strip().split(":", 2)[-1] for line in file if ":" in line]
    except OSError:
        paths = []
    parts = {part for path in paths for part in path.split("/")}
    if any(part.startswith(("slurm", "job_")) for part in parts):
        warnings.append(
            "The scheduler ends every process of the job's cgroup together: the keeper ends with the job, "
            "and uncommitted snapshots are lost. Ask for a warning signal (sbatch --signal)."
        )
    if any(path.endswith(".service") and "/user@" not in path for path in paths):
        warnings.append(
            "systemd ends every process of this service together: set KillMode=process for the keeper to "
            "outlive a killed trainer."
        )
    return warnings


def _start_program(run_path: str, orders: bytes, log_file: int, held: int) -> None:
    """Start the keeper's program and give it its orders. Raises KeeperError or OSError. held: a descriptor
    that the program has open as long as it lives, and never writes."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")
    child = subprocess.Popen(
        [sys.executable, "-I", program, run_path],
        stdin=subprocess.PIPE,
        stdout=log_file,
        stderr=log_file,
        cwd="/",
        start_new_session=True,
        close_fds=True,
        pass_fds=[held],
    )
    with child:
        _give_orders(child, orders)


def _give_orders(child: subprocess.Popen[bytes], orders: bytes) -> None:
    try:
        child.communicate(orders, timeout=_START_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        child.kill()
        raise _start_error(f"it did not begin within {_START_TIMEOUT_S:.0f} s") from error
    if child.returncode < 0:
        # A keeper may be killed at any moment: the next call starts another.
        log.warning("a keeper was ended by signal %d while it began", -child.returncode)
    elif child.returncode != 0:
        raise _start_error(f"it ended with status {child.returncode}")


def _start_error(reason: str) -> KeeperError:
    return KeeperError(
        f"The keeper could not be started: {reason}. Training is not touched, but nothing is persisted "
        "until it runs; it is tried again. Its log is in the runtime folder."
    )
