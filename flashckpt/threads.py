"""Starts threads. Owns the error for a thread that the system refuses."""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial, wraps
from typing import Any, TypeVar, cast

from flashckpt.errors import OutOfSpaceError

_Found = TypeVar("_Found")
_Call = TypeVar("_Call", bound=Callable[..., Any])

_POLL_S = 0.1


def start_thread(name: str, run: Callable[[], object]) -> threading.Thread:
    """Call `run` in a daemon thread of this name. Raises OutOfSpaceError if the system refuses the thread."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if not str(error).startswith("can't"):
            raise  # the handler of a signal: of two in turn, threading makes a RuntimeError
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
    thread = start_thread(f"flashckpt-{name}", partial(_settle, done, work))
    while thread.is_alive():
        thread.join(_POLL_S)
        report()
    return done.result()


def results(
    name: str,
    calls: Iterable[Callable[[], _Found]],
    threads: int,
    most: int = 0,
    stop: Callable[[], object] = lambda: None,
) -> Generator[_Found, None, None]:
    """Make these calls in daemon threads, `threads` of them concurrently, and yield their results in order.
    `most`: how many are made, or wait for a thread, before the first result is taken; by default twice
    `threads`.

    After an error of a call, no other is made, and those in progress are waited for, once `stop` was called.
    Where the wait itself ends, by the handler of a signal, or the caller wants no more results, nothing waits
    for a call: neither this nor the end of the process. Storage may never answer it."""
    jobs: queue.SimpleQueue[tuple[Future[_Found], Callable[[], _Found]] | None] = queue.SimpleQueue()
    under_way = deque[Future[_Found]]()

    def serve() -> None:
        while (job := jobs.get()) is not None:
            _settle(*job)
            del job  # what a call holds is released when it has ended
        jobs.put(None)  # for the next thread

    def oldest() -> _Found:
        _wait([under_way[0]])
        if under_way[0].exception() is not None:
            stop()
            _wait([each for each in under_way if not each.cancel()])
        return under_way.popleft().result()

    try:
        for number, call in enumerate(calls):
            if number < threads:
                start_thread(f"flashckpt-{name}", serve)
            if len(under_way) == (most or 2 * threads):
                yield oldest()
            under_way.append(Future())
            jobs.put((under_way[-1], call))
            del call
        while under_way:
            yield oldest()
    finally:
        jobs.put(None)  # at once: the handler of another signal may end all that follows
        for each in under_way:
            each.cancel()


def _wait(futures: Sequence[Future[Any]]) -> None:
    """Wait until all have ended. In short waits: one that begins just after a signal is not ended by it."""
    while wait(futures, _POLL_S).not_done:
        pass


def _settle(future: Future[_Found], call: Callable[[], _Found]) -> None:
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
        del future, call  # the error holds this frame


def interruptible(call: _Call) -> _Call:
    """Make a function that, in the main thread, ends at once when the handler of a signal raises: its work is
    in another thread, and is left there. For what changes nothing."""

    @wraps(call)
    def begun(*args: Any, **named: Any) -> Any:
        work = partial(call, *args, **named)
        if threading.current_thread() is not threading.main_thread():
            return work()
        return next(results("request", [work], 1))

    return cast(_Call, begun)


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
