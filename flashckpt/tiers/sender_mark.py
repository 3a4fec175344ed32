"""That a sender is still at a step: its mark in the step's folder in the remote.

Owns when one is written and for how long it holds. Only who takes long writes any, and each holds for longer
than the one before: it costs few requests, and one of a dead sender goes out by itself. No clock of another
node counts: the length of a mark in bytes says for how many minutes it holds, and whoever looks counts them
from when it first saw that length. No two that follow each other have the same.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from flashckpt.errors import FlashckptError
from flashckpt.store.base import Entry, Store

_MARK = re.compile(r"\.sending\.[0-9a-f]{16}\.tmp")
# After so long the first, each further one after as long again as all before it took.
_FIRST_S, _LONGEST_S = 1200.0, 6 * 3600.0
# Where nothing has moved since the last one, or the remote did not take it.
_AGAIN_S = 60.0


def is_mark(entry: Entry) -> bool:
    """Whether it is one, in the folder of a step."""
    return not entry.is_folder and _MARK.fullmatch(entry.name) is not None


def holds_s(marks: Iterable[Entry]) -> float:
    """How long these hold, from when each was first seen with its length. 0 where there are none."""
    return min(max((60.0 * each.num_bytes for each in marks), default=0.0), 2.0 * _LONGEST_S)


class SenderMark:
    """That of one sender of one step. `keeper`: the lowest of its ranks. `moved`, which any thread may call,
    gives something else once bytes were read or sent: a sender that stands still does not renew its mark."""

    def __init__(self, store: Store, folder: str, keeper: int, moved: Callable[[], object]) -> None:
        self._store, self._moved, self.folder = store, moved, folder
        self._path = f"{folder}/.sending.{keeper:016x}.tmp"
        self._began_s = time.monotonic()
        self._due_s, self._before, self._count = self._began_s + _FIRST_S, moved(), 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the step is sent. After a failed request, which is made again, it stays, and the time before
        it counts."""
        ended = threading.Event()
        thread = threading.Thread(target=self._renew, args=(ended,), name="flashckpt-sender", daemon=True)
        thread.start()
        is_to_go_on = False
        try:
            yield
        except OSError:
            is_to_go_on = True
            raise
        finally:
            ended.set()
            thread.join()
            if self._count and not is_to_go_on:
                with suppress(OSError):
                    self._store.remove(self._path)

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(max(0.0, self._due_s - time.monotonic())):
            now, moved = time.monotonic(), self._moved()
            self._due_s = now + _AGAIN_S
            if moved == self._before:
                continue
            next_s = min(max(now - self._began_s, _FIRST_S), _LONGEST_S)
            # Twice as long as to the next: a server may be away just then.
            length = math.ceil(2.0 * next_s / 60.0) + self._count
            with suppress(OSError, FlashckptError):
                self._store.replace(self._path, bytes(length), durable=False)
                self._due_s, self._before, self._count = now + next_s, moved, self._count + 1
