"""The trainer's own sign of life: it moves the attempt's counter while no keeper does.

A keeper that is stopped, or that its node swaps out, must not make its trainer look dead to other nodes. Owns
one thread of the rank that leads, from its claim until the run is closed. Timing: `commit.holder`.
"""

from __future__ import annotations

import logging
import threading

from flashckpt.commit import holder
from flashckpt.commit.attempts import move_on
from flashckpt.errors import FlashckptError
from flashckpt.format.names import AttemptName
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

_CLOSE_S = 2.0


class LifeSign:
    """Reads the counter of `attempt` every STAND_IN_S, and moves it where it is as it was the last time."""

    def __init__(self, store: Store, attempt: AttemptName) -> None:
        self._store, self._attempt = store.brief(), attempt
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashckpt-life", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. A write under way is waited for: after the keeper has written down that the attempt
        ended it would make the next job watch a dead one."""
        self._closed.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        seen: int | None = None
        while not self._closed.wait(holder.STAND_IN_S):
            try:
                seen = move_on(self._store, self._attempt, seen)
            except (OSError, FlashckptError) as error:
                log.debug("the counter of %s could not be moved: %s", self._attempt, error)
