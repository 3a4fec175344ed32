"""What tests do with descriptors: wait for them, whatever their numbers, and close what they have opened."""

import os
import select
from typing import IO, Any, Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> Any: ...


Held = TypeVar("Held", bound=Closable | int)
_held: list[Closable | int] = []


def readable(*descriptors: int | IO[str] | IO[bytes], timeout_s: float | None = 240.0) -> list[int]:
    """Which of them can be read, or are at their end, by then. Of any number: `select` takes none above
    1023."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def closed_after(held: Held) -> Held:
    """The same, closed when the test is over: for what has no `with` and no fixture."""
    _held.append(held)
    return held


def close_held() -> None:
    while _held:
        held = _held.pop()
        os.close(held) if isinstance(held, int) else held.close()
