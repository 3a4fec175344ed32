"""Whether another rank lives: on this node by its process, on another node by its leader's counter; and
whether a process group reports an error.

A process is a pid with a start time, so a reused pid is another process. A process that cannot be checked
(another pid namespace, no /proc) counts as living: timeouts decide then.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from flashckpt.threads import start_thread

log = logging.getLogger(__name__)

BEAT_S = 2.0
SILENT_S = 60.0
# The most a single check adds to a silence: after a stop of the checker itself it has missed messages.
_LONGEST_STEP_S = 5.0
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat after the name
_ENDED_STATES = (b"Z", b"X", b"x")


class ProcessId(NamedTuple):
    """started: in ticks since the boot; 0 if unknown."""

    pid: int
    started: int
    namespace: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return a process of this namespace."""
        return cls(pid, _started(pid) or 0, _namespace())

    @property
    def has_ended(self) -> bool:
        if not (self.started and self.namespace) or self.namespace != _namespace():
            return False
        found = _started(self.pid)
        return found is None or found not in (0, self.started)


def _started(pid: int) -> int | None:
    """Return the start time of a process; None if it does not exist or is a zombie; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[_STATE] in _ENDED_STATES else int(fields[_STARTED])
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, ValueError, IndexError):
        return 0


@functools.cache
def _namespace() -> int:
    """Return the pid namespace; 0 if /proc belongs to another namespace."""
    try:
        is_ours = os.readlink("/proc/self") == str(os.getpid())
        return os.stat("/proc/self/ns/pid").st_ino if is_ours else 0
    except OSError:
        return 0


class KeyValues(Protocol):
    """The methods used of a `torch.distributed.TCPStore`, or of the default group's store. An expired wait
    raises DistStoreError, a lost store another RuntimeError."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...


class Beat:
    """A thread that increments a counter over a connection of its own: a wait occupies the other one."""

    def __init__(self, connect: Callable[[], KeyValues], key: str) -> None:
        self._connect, self._key = connect, key
        self._ended = threading.Event()
        self._thread = start_thread("flashckpt-beat", self._run)

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        try:
            store, count = self._connect(), 0
            while not self._ended.wait(BEAT_S):
                count += 1
                store.set(self._key, str(count))
        except RuntimeError as error:  # rank 0, which reads the counter, is gone
            log.debug("the counter of this node ends: %s", error)


class Silence:
    """The time for which counters have not changed while this process was running."""

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._updated_s = clock()
        self._values: list[object] = [None] * count
        self._silent_s = [0.0] * count

    def update(self, values: Sequence[object]) -> list[int]:
        """Take the present values of all counters; return the indexes of the silent ones."""
        now_s = self._clock()
        passed_s, self._updated_s = min(now_s - self._updated_s, _LONGEST_STEP_S), now_s
        for index, value in enumerate(values):
            is_same = value == self._values[index]
            self._silent_s[index] = self._silent_s[index] + passed_s if is_same else 0.0
            self._values[index] = value
        return [index for index, silent_s in enumerate(self._silent_s) if silent_s > SILENT_S]


# ---- aborted collectives
#
# ProcessGroupNCCL's watchdog records an error (`get_error`: a timeout, a failed communicator, an error of
# another rank) before it aborts the communicators of that group. So while no group reports one, no watchdog
# has aborted anything. Reading it starts no collective and calls nothing of CUDA.


def group_failure() -> str:
    """Return why a collective may have been aborted; "" if no process group reports an error.

    A backend without `get_error` reports none: gloo, which raises its errors, and NCCL before torch 2.7."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    return failure_of(list(getattr(world, "pg_map", ())))


def failure_of(groups: Iterable[Any]) -> str:
    """Return the same for these process groups."""
    for group in groups:
        for kind in getattr(group, "_device_types", ()):
            try:
                error = group._get_backend(kind).get_error()
            except (AttributeError, RuntimeError):
                continue
            if error.name != "SUCCESS":
                return (
                    f"a process group reports {error.name}, and its collectives may have been aborted with "
                    "half of their result. See the log of torch.distributed, and start all ranks again"
                )
    return ""
