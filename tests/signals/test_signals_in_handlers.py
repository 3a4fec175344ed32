"""Further signals at every line of our own code that handles one. In forked processes, with real signals."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from flashckpt import Options
from flashckpt.checkpointer import signals as module
from flashckpt.checkpointer.signals import Signals

pytestmark = pytest.mark.process

_INTERRUPTED, _SURVIVED, _LIMIT_S = 3, 4, 120


def noting(signals: Signals) -> None:
    """The signal that ends the process is noted. The loop ends later, undisturbed."""
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
    with signals.ending():
        signals.leave()
        signals.deliver(signals.close)


def acting_at_once(signals: Signals) -> None:
    """A second signal does not wait for the end of the loop."""
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def ending_the_loop(signals: Signals) -> None:
    with signals.ending():
        signals.leave()
        signals.deliver(signals.close)


def leaving_the_loop(signals: Signals) -> None:
    """The loop is left by an exception: another thread sends the signal again."""
    with signals.ending():
        signals.leave()
    signals.close()
    sys.settrace(None)
    while True:
        signal.pause()


@pytest.mark.every_set
@pytest.mark.parametrize(
    ("course", "interrupts"),
    [(noting, 1), (acting_at_once, 1), (ending_the_loop, 2), (leaving_the_loop, 2)],
)
def test_interrupts_at_any_line_do_not_outdo_a_signal_that_ends_the_process(
    course: Callable[[Signals], None], interrupts: int
) -> None:
    line = 0
    while True:
        line += 1
        status, reached = _ended(course, line, interrupts)
        assert status == -signal.SIGTERM, f"with {interrupts} SIGINT at line {line} of {course.__name__}"
        if not reached:
            break
    assert line > 5, "no line was traced"


def _ended(course: Callable[[Signals], None], line: int, interrupts: int) -> tuple[int, bool]:
    """The status of a process that gets SIGINT at the given line, and whether it reached that line."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _interrupted(course, line, interrupts, writing)
        except KeyboardInterrupt:
            os._exit(_INTERRUPTED)
        finally:
            os._exit(_SURVIVED)
    os.close(writing)
    with open(reading, "rb") as said:
        reached = bool(said.read())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), reached


def _interrupted(course: Callable[[Signals], None], line: int, interrupts: int, writing: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(_LIMIT_S)
    signals, lines = Signals(Options()), 0
    signals.enter()
    if course is not noting:
        signal.raise_signal(signal.SIGTERM)

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        nonlocal lines
        if frame.f_code.co_filename != module.__file__:
            return None
        lines += event == "line"
        if event == "line" and lines == line:
            os.write(writing, b"reached")
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    course(signals)
