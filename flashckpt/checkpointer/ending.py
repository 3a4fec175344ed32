"""The end of a loop: what it has to persist, then the signal that asked for it. Owns their order.

A signal that ends the process does so only here, after the run was closed. What could not be persisted
does not keep it from its course: it is said, and what is sealed is the keeper's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from flashckpt.errors import FlashckptError
from flashckpt.events import Event, log

if TYPE_CHECKING:
    from flashckpt.checkpointer.facade import Checkpointer


# How long the interpreter's end may wait for a keeper that is silent, in seconds.
_EXIT_PATIENCE_S = 5.0
_held: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def watch_exit(checkpointer: Checkpointer) -> None:
    """Let the run go before the interpreter is taken down, if it is still held then: a thread that is in
    native code at that moment would abort the process, and with it the exit status."""
    _held.add(checkpointer)


def end_loop(checkpointer: Checkpointer, close: Callable[[], None], *, at_boundary: bool = True) -> None:
    """End a loop by `close`, which raises what it could not do. `at_boundary`: nothing that belongs to an
    iteration or an epoch is still to come, so that a signal may take its course here."""
    signals = checkpointer._signals
    signals.hold()
    try:
        try:
            in_order = _closed(checkpointer, close, at_boundary)
        finally:
            signals.leave()
        if at_boundary:
            signals.deliver(partial(checkpointer._release, closed=in_order))
    finally:
        signals.left()


def stop_at_marked(checkpointer: Checkpointer) -> None:
    """After a boundary that was marked by hand outside of `.batches`: the loop's end is the user's, so only
    a signal does anything here."""
    signals = checkpointer._signals
    signals.enter_steps()
    if signals.pending:
        signals.hold()
        try:
            # It may have to wait for a slot, or for storage: no boundary is missed while it does.
            with checkpointer._capture.pulse.resting():
                in_order = _closed(checkpointer, lambda: None, at_boundary=True)
            signals.deliver(partial(checkpointer._release, closed=in_order))
        finally:
            signals.left()


def _closed(checkpointer: Checkpointer, close: Callable[[], None], at_boundary: bool) -> bool:
    """Whether the loop could be closed in order. Raises what kept it from it if there is no signal."""
    signals = checkpointer._signals
    if at_boundary and signals.is_first_end():
        checkpointer._attendant.event(Event.STOP, step=checkpointer.completed, reason=signals.reason)
    try:
        close()
        if at_boundary and signals.pending and not checkpointer._closed and checkpointer.completed > 0:
            checkpointer._boundaries.capture_now(persist=True)
            checkpointer.wait()
    except FlashckptError as error:
        if not signals.heard:
            raise
        log.error("%s takes its course, and not everything is persisted: %s", signals.reason, error)
        return False
    return True


def _at_exit() -> None:
    for checkpointer in list(_held):
        if checkpointer._process != os.getpid():
            continue  # a forked child ends: the run and its signals are the parent's
        signals = checkpointer._signals
        signals.hurry(_EXIT_PATIENCE_S)
        signals.hold()  # and delivered here: no thread's signal would be heard any more
        # The process ends already, as its program or an exception would have it.
        with contextlib.suppress(BaseException):
            checkpointer._release()
        with contextlib.suppress(BaseException):
            signals.deliver(lambda: None)


atexit.register(_at_exit)
