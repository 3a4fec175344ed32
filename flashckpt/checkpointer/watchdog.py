"""The trainer's part of the watchdog: what a run's own steps say, and a signal that writes its Python stacks.

Owns the history of step times (in the attendant's thread), and the signals that it takes. Measures nothing
and stops nothing: the heartbeat measures, the keeper's watchdog acts.
"""

from __future__ import annotations

import faulthandler
import functools
import heapq
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from flashckpt.capture.slot_writer import HeartbeatWriter
from flashckpt.errors import KeeperError
from flashckpt.events import Event, log
from flashckpt.memory import forks
from flashckpt.memory.runtime import RuntimeFolder, stacks_name
from flashckpt.options import Options, duration_s

_HISTORY = 1024
# A hang is many times what nearly all steps took, and a few times the longest: that may be a validation.
_TIMES_USUAL = 30.0
_TIMES_LONGEST = 3.0
_QUANTILE = 0.99
_LEAST_S = 600.0
# Until this many steps are known (they compile, they fill caches), and where a wrong judgement costs a
# process, it takes an hour at least.
_STEPS_NEEDED = 20
_LEAST_UNKNOWN_S = 3600.0

_SLOW_TIMES_MEDIAN = 10.0
# Of the longest step but one: what comes again and again, such as a validation, is told the first times.
_SLOW_TIMES_BAR = 2.0
_SLOW_LEAST_S = 1.0
_SLOW_PAUSE_S = 60.0

# Not the first ones: libraries that take a real-time signal begin there, or at the last.
_SKIPPED = 10

_idle: list[int] = []
_guard = threading.Lock()


@dataclass(frozen=True)
class Slow:
    """A step far slower than those before it."""

    step: int
    seconds: float
    usual_s: float


class StepTimes:
    """The lengths of the newest steps, in seconds."""

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=_HISTORY)

    def add(self, steps: list[tuple[int, float]]) -> list[Slow]:
        """Take up (step, seconds) of new steps. Those that are far slower than the ones before are
        returned."""
        slow = []
        for step, seconds in steps:
            # Most are short enough to need no comparison.
            if seconds > _SLOW_LEAST_S and len(self._lengths) >= _STEPS_NEEDED:
                usual, (bar, _) = median(self._lengths), heapq.nlargest(2, self._lengths)[::-1]
                if seconds > max(_SLOW_TIMES_MEDIAN * usual, _SLOW_TIMES_BAR * bar):
                    slow.append(Slow(step, seconds, usual))
            self._lengths.append(seconds)
        return slow

    def patience_s(self, *, kills: bool) -> float:
        """How long a boundary may be missing before it is a hang. `kills`: a hang ends the process."""
        if len(self._lengths) < _STEPS_NEEDED:
            return max(_LEAST_UNKNOWN_S, _TIMES_LONGEST * max(self._lengths, default=0.0))
        least = _LEAST_UNKNOWN_S if kills else _LEAST_S
        return max(least, _TIMES_USUAL * self._high(), _TIMES_LONGEST * max(self._lengths))

    def _high(self) -> float:
        ordered = sorted(self._lengths)
        return ordered[min(int(_QUANTILE * len(ordered)), len(ordered) - 1)]


class Watch:
    """Keeps the heartbeat's patience up to date and tells of slow steps."""

    def __init__(
        self,
        heartbeat: HeartbeatWriter,
        options: Options,
        tell: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat, self._tell, self._clock = heartbeat, tell, clock
        self._kills = options.watchdog_action == "kill"
        self._times = StepTimes()
        self._auto = options.watchdog == "auto"
        self._slow: list[Slow] = []
        self._told_s = -_SLOW_PAUSE_S
        if self._auto:
            heartbeat.patience_s = self._times.patience_s(kills=self._kills)
        elif options.watchdog is not None:
            heartbeat.patience_s = duration_s(options.watchdog, "watchdog")

    def look(self, *, last: bool = False) -> None:
        """To be called every second or so by one thread, which may not be the training thread; once more
        when the run is let go (`last`)."""
        lengths, new = self._heartbeat.lengths, []
        while lengths:
            new.append(lengths.popleft())
        if new:
            self._slow += self._times.add(new)
            if self._auto:
                self._heartbeat.patience_s = self._times.patience_s(kills=self._kills)
        if self._slow and (last or self._clock() - self._told_s >= _SLOW_PAUSE_S):
            self._told_s = self._clock()
            self._say()

    def _say(self) -> None:
        """One line for all slow steps since the last one: the slowest of them, and how many there were."""
        worst, count = max(self._slow, key=lambda each: each.seconds), len(self._slow)
        self._slow.clear()
        log.warning(
            "step %d took %.1f s where steps take %.3g s%s",
            worst.step, worst.seconds, worst.usual_s,
            f" ({count} such steps since the last such line)" if count > 1 else "",
        )  # fmt: skip
        self._tell(
            Event.SLOW,
            step=worst.step,
            seconds=round(worst.seconds, 3),
            usual_seconds=round(worst.usual_s, 6),
            count=count,
        )


@dataclass(eq=False)
class Stacks:
    """A signal that writes all Python stacks into a file of its own; `signal_number` is what the keeper
    sends, 0 where there is none to be had.

    The handler is faulthandler's, in C: it needs neither the GIL nor a Python instruction, so that it works
    while the trainer is stuck in native code. It never takes a signal that anything else has a handler for,
    blocks or ignores, and never gives one back: the default action of a real-time signal that comes a moment
    too late is the end of the process.
    """

    signal_number: int
    name: str
    _descriptor: int = -1

    def __post_init__(self) -> None:
        forks.hold(self)

    def forked(self) -> None:
        if self._descriptor >= 0:
            if self.signal_number:
                # Nobody asks a child for its stacks: a signal must not write into what has the number next.
                faulthandler.register(self.signal_number, file=_nowhere(), all_threads=True, chain=False)
            forks.close(self._descriptor)
            self._descriptor = -1

    @classmethod
    def open(cls, folder: RuntimeFolder, lock: str) -> Stacks:
        """Take a signal, and make the file for the holder of the life lock `lock`. Without either the run
        goes on, and a hang is reported without stacks unless py-spy can read them."""
        name = stacks_name(lock)
        try:
            descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except (OSError, KeeperError) as error:
            log.warning("stacks of a stuck trainer will not be had: %s", error)
            return cls(0, name)
        taken = _take(descriptor)
        if taken == 0:
            log.debug("no real-time signal is free: stacks of a stuck trainer are had by py-spy alone")
        return cls(taken, name, descriptor)

    def close(self, folder: RuntimeFolder) -> None:
        """Remove the file. The signal stays taken and does nothing from now on."""
        if self._descriptor < 0:
            return
        if self.signal_number:
            with _guard:
                # Before the descriptor goes: a late signal must not write into whatever has its number next.
                faulthandler.register(self.signal_number, file=_nowhere(), all_threads=True, chain=False)
                _idle.append(self.signal_number)
        folder.remove(self.name)
        # Forgotten first: a child that is forked in between must not close what has the number next.
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


@functools.cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _take(descriptor: int) -> int:
    with _guard:
        number = _idle.pop() if _idle else _free()
        if number == 0:
            return 0
        try:
            faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        except (OSError, RuntimeError, ValueError) as error:
            log.debug("signal %d cannot be taken: %s", number, error)
            return 0
        return number


def _free() -> int:
    """A real-time signal that is neither caught, ignored nor blocked, by the kernel's own word."""
    used = 0
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
                used |= int(line.split()[1], 16)
    for number in range(signal.SIGRTMIN + _SKIPPED, signal.SIGRTMAX):
        if not used >> (number - 1) & 1:
            return number
    return 0
