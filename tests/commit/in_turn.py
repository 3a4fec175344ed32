"""Two who work on one run at once, call by call in an order that a test names; and objects in memory to do it
on, listed page by page as a server's are."""

from __future__ import annotations

import builtins
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from flashckpt.store.base import Entry
from flashckpt.store.objects import Found
from tests.crash.mortal import MortalSystem

PAGE_KEYS = 3


class Killed(BaseException):
    """One of the two is gone: nothing after it runs, no clean-up either."""


class Turns:
    """`order` says who makes the next call, by number; then the first goes on, then the second. Whoever has
    made one goes on alone until his next. `killed` is who dies at his call of that number (from 0), and
    where."""

    def __init__(self, order: Iterable[int] = (), killed: tuple[int, int] | None = None) -> None:
        self._order, self._killed = iter(order), killed
        self._change, self._numbers = threading.Condition(), dict[int, int]()
        self._next: int | None = None
        self._running: int | None = None
        self._begun = False
        self._ended = set[int]()
        self.calls = [0, 0]

    def call(self) -> None:
        """Comes back once it is this one's turn."""
        number = self._numbers.get(threading.get_ident())
        if number is None:
            return
        with self._change:
            self._stops()
            self._change.wait_for(lambda: self._begun and self._running is None and self._turn() == number)
            self._next, self._running = None, number
            self.calls[number] += 1
        if self._killed == (number, self.calls[number] - 1):
            raise Killed

    def _stops(self) -> None:
        self._running = None
        self._change.notify_all()

    def _turn(self) -> int:
        while self._next is None or self._next in self._ended:
            self._next = next(self._order, min({0, 1} - self._ended, default=0))
        return self._next

    def run(self, *operations: Callable[[], object]) -> list[object]:
        """What each has returned, or raised."""
        results: list[object] = [None] * len(operations)

        def run(number: int) -> None:
            self._numbers[threading.get_ident()] = number
            try:
                results[number] = operations[number]()
            except BaseException as error:
                results[number] = error
            with self._change:
                self._ended.add(number)
                self._stops()

        self._ended = set(range(2)) - set(range(len(operations)))
        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(operations))]
        for number, thread in enumerate(threads):
            with self._change:
                self._change.wait_for(lambda: self._running is None)
                self._running = number
            thread.start()
        with self._change:
            self._begun = True
            self._change.notify_all()
        for thread in threads:
            thread.join()
        return results


class SystemInTurn(MortalSystem):
    """The calls that change a folder; of the others it is not told."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def live(self) -> None:
        self._turns.call()


class ObjectsInTurn:
    """See ObjectClient in store/objects.py."""

    url, server, refusal = "held://run", "", ""

    def __init__(self, turns: Turns, held: dict[str, bytes]) -> None:
        self._turns, self.held = turns, held

    def brief(self) -> ObjectsInTurn:
        return self

    def put(self, key: str, data: memoryview, *, mark: str | None) -> str | None:
        self._turns.call()
        if mark is not None and key in self.held:
            return None
        self.held[key] = bytes(data)
        return ""

    def mark(self, key: str) -> str:
        return ""

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        self.put(key, memoryview(b"".join(parts)), mark=None)

    def get(self, key: str, max_bytes: int) -> tuple[bytes | int, str]:
        self._turns.call()
        data = self._found(key)
        return (data, "") if len(data) <= max_bytes else (len(data), "")

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        self._turns.call()
        return memoryview(self._found(key))[start:stop]

    def size(self, key: str) -> int:
        self._turns.call()
        return len(self._found(key))

    def _found(self, key: str) -> bytes:
        if key not in self.held:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return self.held[key]

    def list(self, prefix: str) -> builtins.list[Entry]:
        rests = {each.key.removeprefix(prefix): each.num_bytes for each in self.walk(prefix)}
        folders = {rest.partition("/")[0] for rest in rests if "/" in rest}
        files = [Entry(rest, False, size) for rest, size in rests.items() if "/" not in rest]
        return [Entry(name, True, 0) for name in folders] + files

    def keys(self, prefix: str) -> Iterator[str]:
        yield from (each.key for each in self.walk(prefix))

    def walk(self, prefix: str) -> Iterator[Found]:
        last = prefix
        while True:
            self._turns.call()
            keys = sorted(key for key in self.held if key.startswith(prefix) and key > last)[:PAGE_KEYS]
            yield from [Found(key, len(self.held[key])) for key in keys]
            if len(keys) < PAGE_KEYS:
                return
            last = keys[-1]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._turns.call()
            self.held.pop(key, None)
