"""Whether another rank still lives: on this node by its process, on another by its leader's counter.

A process is one pid with one start time, so that a pid that was given away again is not taken for it. Where
nothing can be known (another pid namespace, no /proc) it counts as living: patience decides then.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

log = logging.getLogger(__name__)

BEAT_S = 2.0
SILENT_S = 60.0
# Of the time between two looks: whoever was stopped himself has not heard the others meanwhile.
_LONGEST_LOOK_S = 5.0
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat after the name
_ENDED_STATES = (b"Z", b"X", b"x")


class ProcessId(NamedTuple):
    """`started` in ticks since the boot; 0 where it cannot be told."""

    pid: int
    started: int
    namespace: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """A process of this namespace."""
        return cls(pid, _started(pid) or 0, _namespace())

    @property
    def has_ended(self) -> bool:
        if not (self.started and self.namespace) or self.namespace != _namespace():
            return False
        found = _started(self.pid)
        return found is None or found not in (0, self.started)


def _started(pid: int) -> int | None:
    """None where there is no such process, or nothing but what its parent has not asked for yet."""
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
    """0 where /proc is not that of this process: then it says nothing of others."""
    try:
        is_ours = os.readlink("/proc/self") == str(os.getpid())
        return os.stat("/proc/self/ns/pid").st_ino if is_ours else 0
    except OSError:
        return 0


class Counters(Protocol):
    """What is needed of a store."""

    def set(self, key: str, value: str, /) -> None: ...


class Beat:
    """A thread that moves a counter on, over a connection of its own: that of the thread that waits is kept
    by each wait."""

    def __init__(self, connect: Callable[[], Counters], key: str) -> None:
        self._connect, self._key = connect, key
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashckpt-beat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        try:
            store, count = self._connect(), 0
            while not self._ended.wait(BEAT_S):
                count += 1
                store.set(self._key, str(count))
        except RuntimeError as error:  # rank 0 is gone, and so is whoever would look at it
            log.debug("no more is said of this node: %s", error)


class Silence:
    """How long counters have stood still, as far as whoever looks was awake."""

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._values: list[object] = [None] * count
        self._silent_s = [0.0] * count

    def look(self, values: Sequence[object]) -> list[int]:
        """Takes what all counters say now; which of them are silent."""
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        for index, value in enumerate(values):
            is_same = value == self._values[index]
            self._silent_s[index] = self._silent_s[index] + passed_s if is_same else 0.0
            self._values[index] = value
        return [index for index, silent_s in enumerate(self._silent_s) if silent_s > SILENT_S]
