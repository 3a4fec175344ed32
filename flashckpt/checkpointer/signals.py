"""Signals and notices that ask a loop to end: recorded at once, obeyed at the next boundary.

Owns the signals that have arrived, the grace period, and that each signal takes its course once. A handler
may run in the middle of anything, so it only records: it takes no lock and does not log. A thread polls the
notice file and ends the grace period. Never captures anything, and never holds the Checkpointer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

from flashckpt.options import Environment, Options, signal_numbers, user_path
from flashckpt.threads import start_thread

log = logging.getLogger(__name__)

Frame = FrameType | None

# A launcher passes on a signal that the scheduler has also sent to each process of the job: one notice,
# twice.
_SAME_NOTICE_S = 2.0
_POLL_S = 1.0
_LONGEST_RACE_S = 5.0
_CLOSED, _ARRIVED, _AGAIN = "closed", "arrived", "again"
_WORKER_LOST = "DataLoader worker (pid"


class Signals:
    """The signals and notices for the loops of one Checkpointer.

    reason: the signal's name, "notice file", or None while nothing has arrived. heard: a signal that is to
    take its course was among it. loops: the number of nested loops that run now. deadline_s: the monotonic
    time at which the grace period ends; infinity while nothing has arrived.
    """

    def __init__(self, options: Options) -> None:
        self._ending = signal_numbers(options.signals, "signals")
        self._warning, self._of_others_too = _warning_numbers(options)
        self._notice = NoticeFile(options.notice_file)
        self._grace_s = options.grace_s
        self._handlers = Handlers(self._on_arrival)
        self.loops = 0
        self._ends = 0  # ends of loops in progress, which deliver by themselves
        self._stepping = self._closed = self._expired = False
        self._arrived: list[int] = []
        self._claims = [True]  # the thread that pops it lets the signals take their course
        self._first_s, self.deadline_s = 0.0, math.inf
        self._bell: queue.SimpleQueue[str] = queue.SimpleQueue()  # its put is allowed in a handler
        self._thread: threading.Thread | None = None
        self._warned: set[object] = set()
        self.reason: str | None = None
        self.heard = False

    @property
    def pending(self) -> bool:
        """Whether a signal has not taken its course yet."""
        return bool(self._arrived)

    def expedite(self, timeout_s: float) -> None:
        """Let no wait take longer than this from now on."""
        self.deadline_s = min(self.deadline_s, time.monotonic() + timeout_s)

    # ---- around a loop, in its thread

    def enter(self) -> None:
        """Watch the signals, because a loop begins, with boundaries for which they can wait."""
        self.loops += 1
        if self.loops > 1 or self.heard or self._closed:
            return
        self._handlers = Handlers(self._on_arrival)
        if self._ending or self._warning:
            self._handlers.put((*self._ending, *self._warning), self._may_replace)
        if self._thread is None and (self._handlers or self._notice):
            self._thread = start_thread("flashckpt-signals", self._run)

    def enter_steps(self) -> None:
        """Watch the signals of a loop whose boundaries step() marks, and whose end is unknown."""
        if not self._stepping:
            self._stepping = True
            self.enter()

    def hold(self) -> None:
        """Begin the end of a loop, which delivers by itself."""
        self._ends += 1

    @contextlib.contextmanager
    def ending(self) -> Iterator[Signals]:
        """A context around the end of a loop. A signal that was not delivered in it (the loop was left by an
        exception or a break) is sent again by the thread: nothing can be raised out of a `__del__`."""
        self.hold()
        try:
            yield self
        finally:
            self._ends -= 1
            self._settle()

    def leave(self) -> None:
        """End a loop. After the outermost one, the handlers are what they were before."""
        self.loops = max(0, self.loops - 1)
        if self.loops == 0:
            self._take_off()

    def deliver(self, let_go: Callable[[], None]) -> None:
        """Let the signals that have arrived take their course, as if they arrived now without this library.
        let_go is called before anything that ends the process. Returns if the user's handler does."""
        if not self._arrived:
            self.deadline_s = math.inf
            return
        if not self._claim():
            self._await_thread()
            return
        try:
            if self._deadly():
                let_go()
            self._act(sys._getframe(1))
        except BaseException:
            let_go()
            raise
        self.deadline_s = math.inf

    def close(self) -> None:
        """Watch nothing from now on."""
        self._closed = True
        self._take_off()
        self._settle()

    def _deadly(self) -> list[int]:
        """Return the signals that have arrived and that end the process."""
        return [number for number in self._arrived if self._handlers.is_deadly(number)]

    def _take_off(self) -> None:
        """Restore the previous handlers, unless a signal has arrived that ends the process: with SIGINT's
        previous handler in place, an interrupt would raise KeyboardInterrupt before that signal is sent
        again, and the signal would be lost."""
        if not self._deadly():
            self._handlers.take_off()

    def _settle(self) -> None:
        if self._ends == 0 and (self._closed or self.loops == 0):
            if self._arrived:
                self._bell.put(_AGAIN)
            elif self._closed:
                self._bell.put(_CLOSED)

    # ---- in handlers

    def _may_replace(self, number: int, found: Any) -> bool:
        if number in self._ending:
            return found is not signal.SIG_IGN  # as under nohup
        return found is signal.SIG_DFL or self._of_others_too

    def _on_arrival(self, number: int, frame: Frame) -> None:
        self._handlers.spare_workers()
        if number in self._warning:
            self._ask(number)
            if callable(self._handlers.replaced.get(number)):
                self._handlers.replaced[number](number, frame)
        elif not self.heard:
            # `heard` is set last, so that a signal that interrupts this counts as a first one, and ends
            # nothing.
            self._arrived.append(number)
            self._first_s = time.monotonic()
            self.deadline_s = self._first_s + self._grace_s
            self.heard = True
            self._ask(number)
        elif not self._is_same_notice(number):
            # A second signal, or the end of the grace period: at once, as without this library.
            self._claim()
            if not self._expired:
                self._arrived.append(number)
            self.deadline_s = 0.0
            self._act(frame)
        elif number not in self._arrived:
            self._arrived.append(number)

    def _ask(self, number: int) -> None:
        self.reason = self.reason or signal.Signals(number).name
        self._bell.put(_ARRIVED)

    def _is_same_notice(self, number: int) -> bool:
        if self._expired or (number == signal.SIGINT and number in self._arrived):
            return False  # typed twice: a launcher does not send it twice
        return time.monotonic() - self._first_s < _SAME_NOTICE_S

    def _claim(self) -> bool:
        with suppress(IndexError):
            return self._claims.pop()
        return False

    def _act(self, frame: Frame) -> None:
        """Let all signals that have arrived take their course."""
        self._pass_on(lambda number: self._handlers.act(number, frame))

    def _pass_on(self, act: Callable[[int], None]) -> None:
        """Call `act` for each signal that has arrived, first for those that end the process. Until then our
        handlers stay, and `_arrived` has the signal, so that a signal that interrupts this ends the process
        as well."""
        for number in self._deadly():
            act(number)
        self._handlers.take_off()
        numbers, self._arrived = self._arrived, []
        for number in numbers:
            act(number)

    # ---- the thread

    def _run(self) -> None:
        while True:
            word, left_s = "", self.deadline_s - time.monotonic()
            with suppress(queue.Empty):
                word = self._bell.get(timeout=left_s if 0 < left_s < _POLL_S else _POLL_S)
            if word == _CLOSED:
                return
            if word == _AGAIN:
                self._send_again()
                return
            if self._handlers and self.pending and time.monotonic() >= self.deadline_s:
                self._expire()
                return
            self._poll()

    def _poll(self) -> None:
        if self._notice and self.reason is None and self._notice.is_new():
            self.reason = "notice file"
        if self.reason is not None:
            limits = f", within {self._grace_s:g} s, and then by the signal; once more ends it at once"
            self._warn_once(
                "reason",
                "%s: the loop ends in order at its next boundary%s",
                self.reason,
                limits if self.heard else "",
            )
        for number in self._handlers.overruled():
            self._warn_once(
                number,
                "%s has another handler since the loop began, which is left in its place. If it does not "
                "call the one that it replaced, let it call Checkpointer.stop() to end the loop in order",
                signal.Signals(number).name,
            )

    def _expire(self) -> None:
        """End the grace period. Nothing is captured in the middle of an iteration; the keeper persists what
        is sealed."""
        number = self._arrived[0]
        if self._handlers.is_in_place(number) and self._claim():
            self._expired = True
            self._handlers.send_again(number)

    def _send_again(self) -> None:
        if self._claim():
            self._pass_on(self._handlers.send_again)

    def _await_thread(self) -> None:
        """Wait for the signal that the thread has just sent to this one, at the end of the grace period."""
        until_s = time.monotonic() + _LONGEST_RACE_S
        while self._arrived and time.monotonic() < until_s:
            time.sleep(0.001)

    def _warn_once(self, key: object, text: str, *values: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning(text, *values)


def _warning_numbers(options: Options) -> tuple[tuple[int, ...], bool]:
    """Return the signals that warn, and whether they include those that the process handles or ignores."""
    if options.warning_signals is not None:
        return signal_numbers(options.warning_signals, "warning_signals"), True
    named = signal.SIGUSR1 in signal_numbers(options.signals, "signals")
    if named or not Environment.read().under_slurm:
        return (), False
    return (signal.SIGUSR1,), False


class NoticeFile:
    """A file that announces the end of this machine. An old file is ignored: it would end each restart in its
    first step."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else user_path(path)
        self._before = self._identity()
        if self._before is not None:
            log.warning(
                "the notice file %s is there already and is taken for an old one: only one that is made or "
                "written from now on ends the loop",
                self.path,
            )

    def __bool__(self) -> bool:
        return self.path is not None

    def is_new(self) -> bool:
        """Whether the file is new, or has changed, since the start."""
        now = self._identity()
        return now is not None and now != self._before

    def _identity(self) -> tuple[int, int, int] | None:
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns


class Handlers:
    """Signal handlers in front of those of the process, for one loop. They pass on the signals that they do
    not take, restore the handlers that are still theirs, and are removed in a forked child. Each loop has
    handlers of its own, since they are recognized by identity: one that other code has kept passes signals on
    forever.

    on_arrival(number, frame): called in the main thread for each signal that is watched. replaced: signal ->
    the handler before.
    """

    def __init__(self, on_arrival: Callable[[int, Frame], None]) -> None:
        self._on_arrival = on_arrival
        self._process = os.getpid()
        self._active = False
        self._handler, self._child_handler = self._on_signal, self._on_child
        self.replaced: dict[int, Any] = {}
        self._ours: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self._active

    def put(self, numbers: Iterable[int], may_replace: Callable[[int, Any], bool]) -> None:
        """Take over the signals for which `may_replace(number, its handler)`; none outside of the main
        thread."""
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
        """Restore the previous handlers where ours are still in place."""
        self._active = False
        if threading.current_thread() is threading.main_thread():
            for number in self._ours:
                self._put_back(number)

    def is_in_place(self, number: int) -> bool:
        return signal.getsignal(number) is self._ours.get(number, self)

    def overruled(self) -> list[int]:
        """Return the signals whose handlers other code has replaced since."""
        return [number for number in self._ours if self._active and not self.is_in_place(number)]

    def is_deadly(self, number: int) -> bool:
        """Whether the signal, taking its course now, ends the process."""
        is_default = self.replaced.get(number) is signal.SIG_DFL
        return is_default and (self.is_in_place(number) or signal.getsignal(number) is signal.SIG_DFL)

    def act(self, number: int, frame: Frame) -> None:
        """Do what the signal would do without this library; to be called after `take_off`, unless it ends the
        process. A handler that came after ours has already run, and may or may not have called ours."""
        if callable(self.replaced.get(number)):
            self.replaced[number](number, frame)
        elif self.is_deadly(number):
            self._put_back(number)
            os.kill(os.getpid(), number)

    def send_again(self, number: int) -> None:
        """Send the signal again, from another thread. One that ends the process does so even if the main
        thread is in native code."""
        if self.is_in_place(number) and self.replaced.get(number) is signal.SIG_DFL:
            # Only the main thread may call signal.signal; the disposition is the process's.
            ctypes.CDLL(None).signal(number, ctypes.c_void_p(0))
        os.kill(os.getpid(), number)

    def spare_workers(self) -> None:
        """Suppress the error of a loader whose workers the same signal has ended: torch raises it in the main
        thread, out of SIGCHLD, and the iteration must reach its boundary."""
        found = signal.getsignal(signal.SIGCHLD)
        if callable(found) and signal.SIGCHLD not in self._ours:
            self._take(signal.SIGCHLD, found, self._child_handler)

    # ---- in handlers

    def _on_signal(self, number: int, frame: Frame) -> None:
        if self._active and os.getpid() == self._process:
            self._on_arrival(number, frame)
            return
        was_in_place = self.is_in_place(number)
        self._put_back(number)
        if was_in_place or callable(self.replaced.get(number)):
            self.act(number, frame)

    def _on_child(self, number: int, frame: Frame) -> None:
        try:
            self.replaced[number](number, frame)
        except RuntimeError as error:
            if not (self._active and str(error).startswith(_WORKER_LOST)):
                raise

    def _take(self, number: int, found: Any, ours: Any) -> None:
        # The entry first: the handler may be called before signal() returns.
        self.replaced[number], self._ours[number] = found, ours
        signal.signal(number, ours)

    def _put_back(self, number: int) -> None:
        if self.is_in_place(number):
            signal.signal(number, self.replaced[number])

    def forked(self) -> None:
        """Restore the handlers in a forked child."""
        self._active = False
        with suppress(ValueError):
            for number in self._ours:
                self._put_back(number)


_installed: list[weakref.ref[Handlers]] = []


def _in_child() -> None:
    # The newest first: each restores the handlers that it found.
    for each in reversed(_installed):
        handlers = each()
        if handlers is not None:
            handlers.forked()
    _installed.clear()


os.register_at_fork(after_in_child=_in_child)
