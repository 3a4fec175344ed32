"""The trainer's part of the watchdog: a signal that writes all Python stacks into a file of its own.

Owns the signals that it takes. The handler is faulthandler's, in C: it needs neither the GIL nor a Python
instruction, so that it works while the trainer is stuck in native code. It never takes a signal that
anything else has a handler for, blocks or ignores, and never gives one back: the default action of a
real-time signal that comes a moment too late is the end of the process.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import threading
from dataclasses import dataclass

from flashckpt.errors import KeeperError
from flashckpt.events import log
from flashckpt.memory import forks
from flashckpt.memory.runtime import RuntimeFolder, stacks_name

# Not the first ones: libraries that take a real-time signal begin there, or at the last.
_SKIPPED = 10

_idle: list[int] = []
_guard = threading.Lock()


@dataclass(eq=False)
class Stacks:
    """`signal_number` is what the keeper sends; 0 where there is none to be had."""

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
