"""The run's ledger: RUN/events/<attempt>.jsonl, one JSON line an event.

Owns those files, their size, and the thread that writes them. A ledger that cannot be written is counted
and never harms anything: no caller waits for it, none is told.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from flashckpt.errors import FlashckptError
from flashckpt.format.names import RUN
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

FOLDER = "events"
MAX_LINE_BYTES = 32 << 10
# An attempt's ledger is three files of at most this size: how it began, and its newest lines in two that
# take turns. Weeks of a step a second would otherwise fill the storage that checkpoints need.
FILE_BYTES = 8 << 20
# Keepers that append at once each find room for their own line: a file may be a little longer than its bound.
_READ_BYTES = 2 * FILE_BYTES
_MOST_WAITING = 10_000


class Event(str, Enum):
    """What can happen to a run: one line of the ledger each."""

    ATTACH = "attach"
    PLAN = "plan"
    SNAPSHOT = "snapshot"
    SKIP = "skip"
    TORN = "torn"
    PERSIST = "persist"
    COMMIT = "commit"
    PRUNE = "prune"
    DEATH = "death"
    ADOPT = "adopt"
    RESUME = "resume"
    ERROR = "error"
    RECOVER = "recover"
    TIMES = "times"
    SLOW = "slow"
    STUCK = "stuck"
    STOPPED = "stopped"
    GOES_ON = "goes-on"
    KILL = "kill"
    STOP = "stop"
    CLOSE = "close"


def lines_of(store: Store, attempt: str) -> Iterator[dict[str, Any]]:
    """The events of an attempt that can be read, oldest first. Nothing hangs on a ledger."""
    for name in file_names(attempt):
        try:
            data = store.read(f"{FOLDER}/{name}", _READ_BYTES)
        except (OSError, FlashckptError):
            continue
        for line in data.splitlines():
            # The last one may be half written.
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event


class Ledger:
    """Lines wait in a bounded queue; what does not fit is dropped and counted. `stands` says whether the run
    is still in the store: a run that was deleted is not begun again by its ledger."""

    def __init__(
        self, store: Store, *, stands: Callable[[], bool] | None = None, file_bytes: int = FILE_BYTES
    ) -> None:
        self._store, self._file_bytes = store, file_bytes
        self._stands = stands or (lambda: store.exists(RUN))
        self._waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MOST_WAITING)
        self.dropped = 0
        self._said = False
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)
        self._thread.start()

    def add(self, attempt: str | None, event: Event | str, /, **fields: Any) -> None:
        """Note what happened, with the wall clock's time. `attempt` None stands for the keeper itself."""
        line = {"time": round(time.time(), 3), "event": str(getattr(event, "value", event)), **fields}
        try:
            data = json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"
            if len(data) > MAX_LINE_BYTES:
                line = {"time": line["time"], "event": line["event"], "cut_bytes": len(data)}
                data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            self._waiting.put_nowait((attempt or "keeper", data))
        except (queue.Full, TypeError, ValueError):
            self.dropped += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most `timeout_s`: storage that hangs must not keep the keeper."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._write(*item)
            except Exception as error:  # nothing that a ledger meets may end the keeper
                self.dropped += 1
                if not self._said:
                    self._said = True
                    log.warning("the ledger cannot be written (%s); nothing else is harmed", error)

    def _write(self, attempt: str, data: bytes) -> None:
        if not self._stands():
            return
        # To the first file while there is room in it, else to the recent one.
        first, previous, recent = (f"{FOLDER}/{name}" for name in file_names(attempt))
        if self._append(first, data) or self._append(recent, data):
            return
        # Where two keepers turn at once, the second takes lines away that nobody has missed yet.
        self._store.replace(previous, self._store.read(recent, _READ_BYTES), durable=False)
        self._store.remove(recent)
        self._append(recent, data)

    def _append(self, path: str, data: bytes) -> bool:
        return self._store.append(path, data, self._file_bytes)


def file_names(attempt: str) -> tuple[str, str, str]:
    """An attempt's files in the order of their lines: the first ones, then the newest in two files. Between
    the first two, lines may be missing. By name they are in that order, too."""
    return f"{attempt}.jsonl", f"{attempt}.previous.jsonl", f"{attempt}.recent.jsonl"
