"""Signals and notices that ask a loop to end: noted at once, obeyed at the next boundary.

Owns what has arrived, the grace period, and that each signal takes its course once. A handler notes and
no more: it may run in the middle of anything, so it takes no lock and does not log. A thread of its own
looks at the notice file and ends the grace period. Never captures anything, never holds the Checkpointer.
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

from flashckpt.options import Environment, Options, signal_numbers

log = logging.getLogger(__name__)

Frame = FrameType | None

# Launchers pass on what the scheduler has sent to every process of the job: one notice that comes twice.
_SAME_NOTICE_S = 2.0
_LOOK_S = 1.0
_LONGEST_RACE_S = 5.0
_CLOSED, _ARRIVED, _AGAIN = "closed", "arrived", "again"
_WORKER_LOST = "DataLoader worker (pid"


class Signals:
    """What asks the loops of one Checkpointer to end. `reason` names it: the signal, "notice file", or
    None as long as nothing has. `heard`: a signal that is to take its course was among it. `loops`: those in
    one another that run now. `deadline_s`: the monotonic time at which the grace period ends; infinity while
    nothing has arrived."""

    def __init__(self, options: Options) -> None:
        self._ending = signal_numbers(options.signals, "signals")
        self._warning, self._of_others_too = _warning_numbers(options)
        self._notice = NoticeFile(options.notice_file)
        self._grace_s = options.grace_s
        self._handlers = Handlers(self._hear)
        self.loops = 0
        self._ends = 0  # ends of loops in progress: they deliver by themselves
        self._stepping = self._closed = self._expired = False
        self._arrived: list[int] = []
        self._claims = [True]  # who takes it out lets the signals take their course; nobody else does
        self._first_s, self.deadline_s = 0.0, math.inf
        self._bell: queue.SimpleQueue[str] = queue.SimpleQueue()  # its put is allowed in a handler
        self._thread: threading.Thread | None = None
        self._said: set[object] = set()
        self.reason: str | None = None
        self.heard = False

    @property
    def pending(self) -> bool:
        """Whether a signal is still to take its course."""
        return bool(self._arrived)

    def hurry(self, patience_s: float) -> None:
        """From now on nothing waits longer than this, in seconds."""
        self.deadline_s = min(self.deadline_s, time.monotonic() + patience_s)

    # ---- around a loop, in its thread

    def enter(self) -> None:
        """A loop begins: a boundary is to come, so signals may wait for it."""
        self.loops += 1
        if self.loops > 1 or self.heard or self._closed:
            return
        self._handlers = Handlers(self._hear)
        if self._ending or self._warning:
            self._handlers.put((*self._ending, *self._warning), self._may_replace)
        if self._thread is None and (self._handlers or self._notice):
            self._thread = threading.Thread(target=self._run, name="flashckpt-signals", daemon=True)
            self._thread.start()

    def enter_steps(self) -> None:
        """The loop is one whose boundaries are marked by hand: it has no end that could be seen."""
        if not self._stepping:
            self._stepping = True
            self.enter()

    def hold(self) -> None:
        """The end of a loop begins, by whatever way: it delivers by itself."""
        self._ends += 1

    @contextlib.contextmanager
    def ending(self) -> Iterator[Signals]:
        """Around the end of a loop. What has arrived and was not delivered in it (the loop was left by an
        exception or a break) is sent again from beside: nothing can be raised out of a `__del__`."""
        self.hold()
        try:
            yield self
        finally:
            self._ends -= 1
            self._settle()

    def leave(self) -> None:
        """A loop has ended. After the outermost one signals are what they were before."""
        self.loops = max(0, self.loops - 1)
        if self.loops == 0:
            self._take_off()

    def deliver(self, let_go: Callable[[], None]) -> None:
        """Let what has arrived take its course, as if it arrived now and nothing had stood in its way.
        `let_go` is called before anything that ends the process. Returns where the user's handler does."""
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
        """Nothing is watched any more."""
        self._closed = True
        self._take_off()
        self._settle()

    def _deadly(self) -> list[int]:
        """The signals that have arrived and that end the process."""
        return [number for number in self._arrived if self._handlers.is_deadly(number)]

    def _take_off(self) -> None:
        """Put back the previous handlers, unless a signal has arrived that ends the process. With SIGINT's
        previous handler in its place, an interrupt would raise KeyboardInterrupt before that signal is sent
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
            return found is not signal.SIG_IGN  # as under nohup: what is ignored stays ignored
        return found is signal.SIG_DFL or self._of_others_too

    def _hear(self, number: int, frame: Frame) -> None:
        self._handlers.spare_workers()
        if number in self._warning:
            self._ask(number)
            if callable(self._handlers.replaced.get(number)):
                self._handlers.replaced[number](number, frame)
        elif not self.heard:
            # `heard` is set last: a signal that interrupts this is then another first one, and ends nothing.
            self._arrived.append(number)
            self._first_s = time.monotonic()
            self.deadline_s = self._first_s + self._grace_s
            self.heard = True
            self._ask(number)
        elif not self._is_same_notice(number):
            # Once more, or the grace period is over: at once, as without us.
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
            return False  # nobody types as launchers send
        return time.monotonic() - self._first_s < _SAME_NOTICE_S

    def _claim(self) -> bool:
        with suppress(IndexError):
            return self._claims.pop()
        return False

    def _act(self, frame: Frame) -> None:
        """Let all that has arrived take its course."""
        self._pass_on(lambda number: self._handlers.act(number, frame))

    def _pass_on(self, act: Callable[[int], None]) -> None:
        """Call `act` for all that has arrived, first for what ends the process. Until it has, our handlers
        stand and `_arrived` holds it, so that a signal which interrupts this ends the process as well."""
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
                word = self._bell.get(timeout=left_s if 0 < left_s < _LOOK_S else _LOOK_S)
            if word == _CLOSED:
                return
            if word == _AGAIN:
                self._send_again()
                return
            if self._handlers and self.pending and time.monotonic() >= self.deadline_s:
                self._expire()
                return
            self._look()

    def _look(self) -> None:
        if self._notice and self.reason is None and self._notice.has_come():
            self.reason = "notice file"
        if self.reason is not None:
            terms = f", within {self._grace_s:g} s, and then by the signal; once more ends it at once"
            self._say_once(
                "reason",
                "%s: the loop ends in order at its next boundary%s",
                self.reason,
                terms if self.heard else "",
            )
        for number in self._handlers.overruled():
            self._say_once(
                number,
                "%s has another handler since the loop began, which is left in its place. If it does not "
                "call the one that it replaced, let it call Checkpointer.stop() to end the loop in order",
                signal.Signals(number).name,
            )

    def _expire(self) -> None:
        """Nothing is forced in the middle of an iteration: what is sealed is the keeper's to persist."""
        number = self._arrived[0]
        if self._handlers.stands(number) and self._claim():
            self._expired = True
            self._handlers.send_again(number)

    def _send_again(self) -> None:
        if self._claim():
            self._pass_on(self._handlers.send_again)

    def _await_thread(self) -> None:
        """The grace period has ended in this very moment: the signal is on its way to this thread."""
        until_s = time.monotonic() + _LONGEST_RACE_S
        while self._arrived and time.monotonic() < until_s:
            time.sleep(0.001)

    def _say_once(self, key: object, text: str, *values: object) -> None:
        if key not in self._said:
            self._said.add(key)
            log.warning(text, *values)


def _warning_numbers(options: Options) -> tuple[tuple[int, ...], bool]:
    """Which signals warn, and whether also those that the process handles or ignores by itself."""
    if options.warning_signals is not None:
        return signal_numbers(options.warning_signals, "warning_signals"), True
    named = signal.SIGUSR1 in signal_numbers(options.signals, "signals")
    if named or not Environment.read().under_slurm:
        return (), False
    return (signal.SIGUSR1,), False


class NoticeFile:
    """A file whose appearance says that this machine is about to go. One that was there already is
    none: a leftover must not end each restart's first step."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else os.fspath(path)
        self._before = self._identity()
        if self._before is not None:
            log.warning(
                "the notice file %s is there already and is taken for an old one: only one that is made or "
                "written from now on ends the loop",
                self.path,
            )

    def __bool__(self) -> bool:
        return self.path is not None

    def has_come(self) -> bool:
        """Whether a file is there that was not, or not so, in the beginning."""
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
    """Signal handlers put before those of the process, for the time of one loop: passes on what it does not
    take, puts everything back that is still its own, and is gone in a forked child. Handlers are told from
    others by being the same object, so each loop has its own: one that somebody has kept passes on what comes
    to it for ever. `hear(number, frame)` is called in the main thread for each signal that is watched."""

    def __init__(self, hear: Callable[[int, Frame], None]) -> None:
        self._hear = hear
        self._process = os.getpid()
        self._active = False
        self._handler, self._child_handler = self._on_signal, self._on_child
        self.replaced: dict[int, Any] = {}  # the handlers that were there, by signal
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

    def is_deadly(self, number: int) -> bool:
        """Whether the signal, taking its course now, ends the process."""
        is_default = self.replaced.get(number) is signal.SIG_DFL
        return is_default and (self.stands(number) or signal.getsignal(number) is signal.SIG_DFL)

    def act(self, number: int, frame: Frame) -> None:
        """What the signal would have done without us; to be called after `take_off`, unless it ends the
        process. A handler that came after ours has done what it does: to what it replaced it may have passed
        on, or not."""
        if callable(self.replaced.get(number)):
            self.replaced[number](number, frame)
        elif self.is_deadly(number):
            self._put_back(number)
            os.kill(os.getpid(), number)

    def send_again(self, number: int) -> None:
        """Called by another thread: let the signal come once more. One that ends the process does so even
        if the main thread is in native code and would not hear of it."""
        if self.stands(number) and self.replaced.get(number) is signal.SIG_DFL:
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
        if stood or callable(self.replaced.get(number)):
            self.act(number, frame)

    def _on_child(self, number: int, frame: Frame) -> None:
        try:
            self.replaced[number](number, frame)
        except RuntimeError as error:
            if not (self._active and str(error).startswith(_WORKER_LOST)):
                raise

    def _take(self, number: int, found: Any, ours: Any) -> None:
        # First the entry, then the handler: it may be called before signal() has returned.
        self.replaced[number], self._ours[number] = found, ours
        signal.signal(number, ours)

    def _put_back(self, number: int) -> None:
        if self.stands(number):
            signal.signal(number, self.replaced[number])

    def forked(self) -> None:
        """In a forked child: signals are what they are to any process."""
        self._active = False
        with suppress(ValueError):
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
