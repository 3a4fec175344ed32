"""What the keeper does to the run's folder besides persisting: the alive counter, its end, a look for
newer claims, and whether the run is still there. Owns no slot.

Runs in a worker of its own, so that storage that hangs delays nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flashckpt import crashpoints
from flashckpt.commit import attempts
from flashckpt.errors import FlashckptError
from flashckpt.format.names import AttemptName, attempt_folder
from flashckpt.store.base import Store

End = Literal["closed", "dead"]


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a round found. `claimed` is the newest attempt that claimed the run; `marked` are the ends
    that are written down now."""

    is_there: bool
    claimed: AttemptName | None
    marked: tuple[AttemptName, ...]
    problem: str = ""


class Chores:
    """`stands` says whether the run is still in the store."""

    def __init__(self, store: Store, stands: Callable[[], bool]) -> None:
        self._store = store
        self._stands = stands
        self._counts: dict[AttemptName, int] = {}

    def round(self, living: Sequence[AttemptName], ended: Sequence[tuple[AttemptName, End]]) -> Look:
        """Move the counters of living attempts on and write down the end of the others."""
        marked: list[AttemptName] = []
        claimed = None
        try:
            if not self._stands():
                return Look(is_there=False, claimed=None, marked=())
            for attempt in living:
                with self._unless_swept(attempt):
                    attempts.beat(self._store, attempt, self._next_count(attempt))
            for attempt, how in ended:
                crashpoints.point("end.marking")
                with self._unless_swept(attempt):
                    attempts.mark_ended(self._store, attempt, how)
                marked.append(attempt)
            claimed = attempts.newest_claimed(self._store)
        except (OSError, FlashckptError) as error:
            return Look(is_there=True, claimed=claimed, marked=tuple(marked), problem=str(error))
        return Look(is_there=True, claimed=claimed, marked=tuple(marked))

    @contextlib.contextmanager
    def _unless_swept(self, attempt: AttemptName) -> Iterator[None]:
        """A newer attempt may have committed and cleared this one's folder away: nobody looks there again."""
        try:
            yield
        except FileNotFoundError:
            if self._store.list(attempt_folder(attempt)):
                raise

    def _next_count(self, attempt: AttemptName) -> int:
        """On from where an earlier keeper's counter stood: it must never stand still or come back."""
        if attempt not in self._counts:
            before = attempts.alive(self._store, attempt)
            self._counts[attempt] = before.count if before is not None else 0
        self._counts[attempt] += 1
        return self._counts[attempt]
