"""The run's ledger: RUN/events/<attempt>.jsonl, one JSON line an event. Where a store cannot append, lines go
into numbered objects that each writer has for itself: those of several nodes never overwrite one another's.

Owns those files, their size, and the thread that writes them. A ledger that cannot be written is counted
and never harms anything: no caller waits for it, none is told.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from flashckpt.errors import FlashckptError
from flashckpt.format.names import EVENTS, RUN
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 32 << 10
# An attempt's ledger is three files of at most this size: how it began, and its newest lines in two that
# take turns. Weeks of a step a second would otherwise fill the storage that checkpoints need.
FILE_BYTES = 8 << 20
# Keepers that append at once each find room for their own line: a file may be a little longer than its bound.
_READ_BYTES = 2 * FILE_BYTES
_MOST_WAITING = 10_000
# Where each write costs a request, and writes all of an object: lines wait for each other, objects are small,
# and of one writer those stay which it began with, and its newest.
_PAUSE_S = 5.0
_OBJECTS_A_FILE = 256
_FIRST_KEPT, _NEWEST_KEPT = 64, 192


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
    MIRROR = "mirror"
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


# What comes with each step, and may wait for what comes next. All else may be the last that is heard.
_OFTEN = frozenset(
    {Event.SNAPSHOT, Event.SKIP, Event.PERSIST, Event.COMMIT, Event.PRUNE, Event.MIRROR, Event.TIMES}
)
_Row = tuple[str, bytes, bool]  # the attempt, its line, and whether that may wait


def lines_of(store: Store, attempt: str) -> Iterator[dict[str, Any]]:
    """The events of an attempt that can be read, oldest first. Nothing hangs on a ledger."""
    names: list[str] = []
    with contextlib.suppress(OSError, FlashckptError):
        names = [entry.name for entry in store.list(EVENTS) if entry.name.startswith(f"{attempt}.")]
    lines = _lines(store, names)
    if set(names) <= {*file_names(attempt)}:
        yield from lines
    else:
        yield from sorted(lines, key=_time_of)


def _time_of(line: dict[str, Any]) -> float:
    time_s = line.get("time")
    return time_s if isinstance(time_s, (int, float)) else 0.0


def _lines(store: Store, names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        try:
            data = store.read(f"{EVENTS}/{name}", _READ_BYTES)
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
        self._waiting: queue.Queue[_Row | None] = queue.Queue(_MOST_WAITING)
        self.dropped = 0
        self._said = False
        self._objects = None if store.capabilities.appends else _Objects(store, file_bytes // _OBJECTS_A_FILE)
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
            self._waiting.put_nowait((attempt or "keeper", data, event in _OFTEN))
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
            rows, is_last = ([item], False) if self._objects is None else self._with_next(item)
            for attempt, data in _by_attempt(rows):
                try:
                    self._write(attempt, data)
                except Exception as error:  # nothing that a ledger meets may end the keeper
                    self.dropped += 1
                    if not self._said:
                        self._said = True
                        log.warning("the ledger cannot be written (%s); nothing else is harmed", error)
            if is_last:
                return

    def _with_next(self, item: _Row) -> tuple[list[_Row], bool]:
        """A line and those that come soon after it, and whether they are the last."""
        rows, until = [item], time.monotonic() + _PAUSE_S
        with contextlib.suppress(queue.Empty):
            while len(rows) < _MOST_WAITING:
                pause_s = max(0.0, until - time.monotonic()) if rows[-1][2] else 0.0
                row = self._waiting.get(timeout=pause_s) if pause_s else self._waiting.get_nowait()
                if row is None:
                    return rows, True
                rows.append(row)
        return rows, False

    def _write(self, attempt: str, data: bytes) -> None:
        if not self._stands():
            return
        if self._objects is not None:
            self._objects.add(attempt, data)
            return
        # To the first file while there is room in it, else to the recent one.
        first, previous, recent = (f"{EVENTS}/{name}" for name in file_names(attempt))
        if self._append(first, data) or self._append(recent, data):
            return
        # Where two keepers turn at once, the second takes lines away that nobody has missed yet.
        self._store.replace(previous, self._store.read(recent, _READ_BYTES), durable=False)
        self._store.remove(recent)
        self._append(recent, data)

    def _append(self, path: str, data: bytes) -> bool:
        return self._store.append(path, data, self._file_bytes)


class _Objects:
    """The numbered objects of one writer, each written anew with its newest lines until full. What could
    not be written comes with the next."""

    def __init__(self, store: Store, num_bytes: int) -> None:
        self._store, self._num_bytes, self._writer = store, num_bytes, secrets.token_hex(4)
        self._open: dict[str, tuple[int, bytes]] = {}

    def add(self, attempt: str, data: bytes) -> None:
        number, before = self._open.get(attempt, (0, b""))
        if before and len(before) + len(data) > self._num_bytes:
            number, before = number + 1, b""
        self._open[attempt] = number, before + data
        self._store.replace(self._path(attempt, number), before + data, durable=False)
        if not before and number >= _FIRST_KEPT + _NEWEST_KEPT:
            self._store.remove(self._path(attempt, number - _NEWEST_KEPT))

    def _path(self, attempt: str, number: int) -> str:
        return f"{EVENTS}/{attempt}.{self._writer}-{number:06d}.jsonl"


def _by_attempt(rows: list[_Row]) -> list[tuple[str, bytes]]:
    """The lines of each attempt together."""
    found: dict[str, list[bytes]] = {}
    for attempt, data, _ in rows:
        found.setdefault(attempt, []).append(data)
    return [(attempt, b"".join(lines)) for attempt, lines in found.items()]


def file_names(attempt: str) -> tuple[str, str, str]:
    """An attempt's files in the order of their lines: the first ones, then the newest in two files. Between
    the first two, lines may be missing. By name they are in that order, too."""
    return f"{attempt}.jsonl", f"{attempt}.previous.jsonl", f"{attempt}.recent.jsonl"
