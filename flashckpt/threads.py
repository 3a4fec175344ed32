"""Starts threads. Owns the error for a thread that the system refuses."""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from flashckpt.errors import OutOfSpaceError

_Found = TypeVar("_Found")

_POLL_S = 0.1


def start_thread(name: str, run: Callable[[], object]) -> threading.Thread:
    """Call `run` in a daemon thread of this name. Raises OutOfSpaceError if the system refuses the thread."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OutOfSpaceError(
            f"The system refuses another thread to this process ({error}). Saved steps are unchanged. "
            "Raise the limits of address space, processes and memory (`ulimit -v`, `ulimit -u`, the "
            "cgroup's pids.max), or use fewer loader workers."
        ) from error
    return thread


def watched(name: str, work: Callable[[], _Found], report: Callable[[], object]) -> _Found:
    """Return what `work` returns. Runs it in a thread, for which an interrupt does not wait, and calls
    `report` until it is done."""
    done: Future[_Found] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = start_thread(f"flashckpt-{name}", run)
    while thread.is_alive():
        thread.join(_POLL_S)
        report()
    return done.result()


log = logging.getLogger(__name__)


Done = Callable[[Any], None]


class Worker:
    """One thread for operations that may take long or hang. `busy` from `submit` until the result was
    collected: results return to the loop that called `submit`. `wake`: an eventfd that a result makes
    readable."""

    def __init__(self, name: str, wake: int) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Done, Any]] = queue.SimpleQueue()
        # The thread that collects the result may close the eventfd, whose number another file may have then.
        self._giving = threading.Lock()
        self.busy = False
        start_thread(name, self._run)

    def submit(self, run: Callable[[], Any], done: Done) -> None:
        """Call `run` in the thread; then `collect` calls `done` with its result or its exception."""
        assert not self.busy
        self.busy = True
        self._jobs.put((run, done))

    def collect(self) -> None:
        """Call `done` with the result of a finished operation, in the calling thread."""
        try:
            with self._giving:
                done, result = self._results.get_nowait()
        except queue.Empty:
            return
        self.busy = False
        done(result)

    def wait(self, timeout_s: float = 0.1) -> None:
        """Wait until an operation is done: for callers without a loop."""
        poll = select.poll()  # not `select`, which takes no descriptor above 1023
        poll.register(self._wake, select.POLLIN)
        if poll.poll(timeout_s * 1000):
            os.eventfd_read(self._wake)

    def close(self) -> None:
        """End the thread after its operation."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job  # what an operation holds is released when it has ended

    def _do(self, run: Callable[[], Any], done: Done) -> None:
        try:
            result = run()
        except BaseException as error:
            log.debug("an operation of a worker failed", exc_info=True)
            result = error
        with self._giving:
            self._results.put((done, result))
            os.eventfd_write(self._wake, 1)
