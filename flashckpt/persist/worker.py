"""Threads that do what may take long or hang, so that the keeper's loop never does.

Owns the threads and their queues; knows no job. Results come back to the loop, which alone changes
what the keeper knows.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


Done = Callable[[Any], None]


class Worker:
    """One thread. `busy` from `submit` until the result was collected."""

    def __init__(self, name: str, wake: int) -> None:
        self._wake = wake
        # What is to be called, and with what it returned what comes after.
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Done, Any]] = queue.SimpleQueue()
        # Whoever has the result may close the eventfd, whose number is another file's then.
        self._giving = threading.Lock()
        self.busy = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, run: Callable[[], Any], done: Done) -> None:
        """Call `run` in the thread, then, from `collect`, `done` with its result or its exception."""
        assert not self.busy
        self.busy = True
        self._jobs.put((run, done))

    def collect(self) -> None:
        """Hand a finished job's result over, in the calling thread."""
        try:
            with self._giving:
                done, result = self._results.get_nowait()
        except queue.Empty:
            return
        self.busy = False
        done(result)

    def wait(self, timeout_s: float = 0.1) -> None:
        """Until a job is done, or for that long: for who has no loop of his own."""
        poll = select.poll()  # not `select`, which takes no descriptor above 1023
        poll.register(self._wake, select.POLLIN)
        if poll.poll(timeout_s * 1000):
            os.eventfd_read(self._wake)

    def close(self) -> None:
        """End the thread once it has nothing to do."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result = job[0]()
            except BaseException as error:
                log.debug("a job of the keeper failed", exc_info=True)
                result = error
            with self._giving:
                self._results.put((job[1], result))
                os.eventfd_write(self._wake, 1)
