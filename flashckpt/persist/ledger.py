"""The run's ledger: RUN/events/<attempt>.jsonl, one JSON line an event. In a store without append, each
writer has numbered objects of its own, so that several nodes never overwrite each other's lines.

Owns those files, their size, and the thread that writes them. No caller waits for it; errors are counted and
affect nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from flashckpt.commit.view import has_run
from flashckpt.errors import FlashckptError
from flashckpt.format.names import EVENTS, AttemptName
from flashckpt.store.base import Store
from flashckpt.threads import start_thread

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 32 << 10
# An attempt's ledger is three files of at most this size: its first lines, and its newest lines in two files
# that take turns. Weeks of a step a second would otherwise fill the storage.
FILE_BYTES = 8 << 20
# Keepers that append at the same time may exceed the size of a file by their lines.
_READ_BYTES = 2 * FILE_BYTES
_MOST_WAITING = 10_000
# Each write to an object store costs a request, and writes the whole object: lines wait for each other,
# objects are small, and a writer keeps its first and its newest ones.
_PAUSE_S = 5.0
_OBJECTS_A_FILE = 256
_FIRST_KEPT, _NEWEST_KEPT = 64, 192


class Event(str, Enum):
    """The kinds of lines in the ledger."""

    ATTACH = "attach"
    PLAN = "plan"
    SNAPSHOT = "snapshot"
    SKIP = "skip"
    TORN = "torn"
    PERSIST = "persist"
    COMMIT = "commit"
    PRUNE = "prune"
    CACHE = "cache"
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


# Events of each step, which may wait for the next line. Any other may be the last line of the run.
_OFTEN = frozenset(
    {
        Event.SNAPSHOT,
        Event.SKIP,
        Event.PERSIST,
        Event.COMMIT,
        Event.PRUNE,
        Event.CACHE,
        Event.MIRROR,
        Event.TIMES,
    }
)
_Row = tuple[str, bytes, bool]  # attempt, line, and whether the line may wait


def lines_of(store: Store, attempt: str) -> Iterator[dict[str, Any]]:
    """The readable events of an attempt, oldest first."""
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


def attempts_of(store: Store) -> list[AttemptName]:
    """The attempts that have lines in the ledger, oldest first."""
    found = (AttemptName.parse(each.name.partition(".")[0]) for each in store.list(EVENTS))
    return sorted({each for each in found if each is not None})


def _lines(store: Store, names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        try:
            data = store.read(f"{EVENTS}/{name}", _READ_BYTES)
        except (OSError, FlashckptError):
            continue
        for line in data.splitlines():
            # The last line may be unfinished.
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event


class Ledger:
    """Writes lines from a bounded queue; drops and counts those that do not fit. `stands` returns whether the
    run still exists in the store: a ledger must not create a deleted run again."""

    def __init__(
        self, store: Store, *, stands: Callable[[], bool] | None = None, file_bytes: int = FILE_BYTES
    ) -> None:
        self._store, self._file_bytes = store, file_bytes
        self._stands = stands or (lambda: has_run(store))
        self._waiting: queue.Queue[_Row | None] = queue.Queue(_MOST_WAITING)
        self.dropped = 0
        self._has_warned = False
        self._objects = None if store.is_folder else _Objects(store, file_bytes // _OBJECTS_A_FILE)
        self._thread = start_thread("ledger", self._write_all)

    def add(self, attempt: str | None, event: Event | str, /, **fields: Any) -> None:
        """Add an event with the wall clock's time. `attempt` None: of the keeper itself."""
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
        """Write the queued lines, for at most `timeout_s`: the storage may hang."""
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
                except Exception as error:  # no error of a ledger may end the keeper
                    self.dropped += 1
                    if not self._has_warned:
                        self._has_warned = True
                        log.warning("the ledger cannot be written (%s); nothing else is affected", error)
            if is_last:
                return

    def _with_next(self, item: _Row) -> tuple[list[_Row], bool]:
        """A line and the lines that follow it soon, and whether they are the last."""
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
        # Into the first file until that is full, then into the recent one.
        first, previous, recent = (f"{EVENTS}/{name}" for name in file_names(attempt))
        if self._append(first, data) or self._append(recent, data):
            return
        # If two keepers turn at the same time, some lines are lost.
        self._store.replace(previous, self._store.read(recent, _READ_BYTES), durable=False)
        self._store.remove(recent)
        self._append(recent, data)

    def _append(self, path: str, data: bytes) -> bool:
        return self._store.append(path, data, self._file_bytes)


class _Objects:
    """The numbered objects of one writer, each rewritten with its newest lines until full. Lines that could
    not be written come with the next."""

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
    """The lines of each attempt, joined."""
    found: dict[str, list[bytes]] = {}
    for attempt, data, _ in rows:
        found.setdefault(attempt, []).append(data)
    return [(attempt, b"".join(lines)) for attempt, lines in found.items()]


def file_names(attempt: str) -> tuple[str, str, str]:
    """An attempt's files in the order of their lines, which is also that of their names. Lines may be missing
    between the first two."""
    return f"{attempt}.jsonl", f"{attempt}.previous.jsonl", f"{attempt}.recent.jsonl"
