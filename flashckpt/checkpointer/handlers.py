"""Signal handlers put before those of the process, for the time of one loop.

Owns what it has replaced: passes on what it does not take, puts everything back that is still its own,
and is gone in a forked child. Never decides what a signal means. Handlers are told from others by being
the same object, so each loop has its own: one that somebody has kept passes on what comes to it for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from flashckpt.events import log

Frame = FrameType | None

_WORKER_LOST = "DataLoader worker (pid"


class Handlers:
    """`hear(number, frame)` is called in the main thread for each signal that is watched."""

    def __init__(self, hear: Callable[[int, Frame], None]) -> None:
        self._hear = hear
        self._process = os.getpid()
        self._active = False
        self._handler, self._child_handler = self._on_signal, self._on_child
        self._replaced: dict[int, Any] = {}
        self._ours: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self._active

    def put(self, numbers: Iterable[int], may_replace: Callable[[int, Any], bool]) -> None:
        """Take signals over, each if `may_replace(number, its handler)`. Nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "signals are not watched, because the loop does not run in the main thread: they do what "
                "they would do without flashckpt. Call Checkpointer.stop() to end the loop in order."
            )
            return
        self._active = True
        for number in numbers:
            found = signal.getsignal(number)
            if found is None:
                name = signal.Signals(number).name
                log.warning("%s is not watched: native code handles it, and is left in its place", name)
            elif may_replace(number, found):
                self._take(number, found, self._handler)
        _installed[:] = [each for each in _installed if each() is not None]
        _installed.append(weakref.ref(self))

    def take_off(self) -> None:
        """Put back what was there, where it is still ours that stands there."""
        self._active = False
        if threading.current_thread() is threading.main_thread():
            for number in self._ours:
                self._put_back(number)

    def stands(self, number: int) -> bool:
        return signal.getsignal(number) is self._ours.get(number, self)

    def overruled(self) -> list[int]:
        """Signals whose handler somebody has replaced since."""
        return [number for number in self._ours if self._active and not self.stands(number)]

    def replaced(self, number: int) -> Any:
        """The handler that was there."""
        return self._replaced.get(number)

    def is_deadly(self, number: int) -> bool:
        """Whether the signal, taking its course now, ends the process."""
        return self.replaced(number) is signal.SIG_DFL and signal.getsignal(number) is signal.SIG_DFL

    def act(self, number: int, frame: Frame) -> None:
        """What the signal would have done without us; to be called after `take_off`. A handler that came
        after ours has done what it does: to what it replaced it may have passed on, or not."""
        if callable(self.replaced(number)):
            self.replaced(number)(number, frame)
        elif self.is_deadly(number):
            os.kill(os.getpid(), number)

    def send_again(self, number: int) -> None:
        """Called by another thread: let the signal come once more. One that ends the process does so even
        if the main thread is in native code and would not hear of it."""
        if self.stands(number) and self.replaced(number) is signal.SIG_DFL:
            # signal.signal is the main thread's alone; the disposition is the process's.
            ctypes.CDLL(None).signal(number, ctypes.c_void_p(0))
        os.kill(os.getpid(), number)

    def spare_workers(self) -> None:
        """A scheduler that signals every process of a job ends the loader's workers as well. torch raises
        that in the main thread, out of SIGCHLD: from here on the iteration is let come to its end."""
        found = signal.getsignal(signal.SIGCHLD)
        if callable(found) and signal.SIGCHLD not in self._ours:
            self._take(signal.SIGCHLD, found, self._child_handler)

    # ---- in handlers

    def _on_signal(self, number: int, frame: Frame) -> None:
        if self._active and os.getpid() == self._process:
            self._hear(number, frame)
            return
        stood = self.stands(number)
        self._put_back(number)
        if stood or callable(self.replaced(number)):
            self.act(number, frame)

    def _on_child(self, number: int, frame: Frame) -> None:
        try:
            self._replaced[number](number, frame)
        except RuntimeError as error:
            if not (self._active and str(error).startswith(_WORKER_LOST)):
                raise

    def _take(self, number: int, found: Any, ours: Any) -> None:
        # First the entry, then the handler: it may be called before signal() has returned.
        self._replaced[number], self._ours[number] = found, ours
        signal.signal(number, ours)

    def _put_back(self, number: int) -> None:
        if self.stands(number):
            signal.signal(number, self._replaced[number])

    def forked(self) -> None:
        """In a forked child: signals are what they are to any process."""
        self._active = False
        with contextlib.suppress(ValueError):
            for number in self._ours:
                self._put_back(number)


_installed: list[weakref.ref[Handlers]] = []


def _in_child() -> None:
    # The newest first: each puts back what it found.
    for each in reversed(_installed):
        handlers = each()
        if handlers is not None:
            handlers.forked()
    _installed.clear()


os.register_at_fork(after_in_child=_in_child)
