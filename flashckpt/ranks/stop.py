"""Where a loop ends, and why: one `StopPolicy` is asked at each boundary.

Ranks that end at different boundaries hang in a collective. So among several a stop is proposed by rank 0
and promised by all before it holds (`decisions.py`); a rank that has promised waits at that boundary, and
never goes on alone. Owns the waiting; the promises are the node's leader's.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flashckpt.ranks.board import Board, RankRow

log = logging.getLogger(__name__)

_PAUSE_S = 0.001
# Beside the numbers of signals, which are below 65.
_CALLED, _NOTICE = 100, 101
_CALLED_WORD, _NOTICE_WORD = "stop", "notice file"


class Asked(Protocol):
    """What asks the loops of one process to end: a signal's name or "notice file", or None; and the monotonic
    time at which the grace period ends, infinity while nothing has."""

    reason: str | None
    deadline_s: float

    def hurry(self, patience_s: float, /) -> None:
        """From now on nothing waits longer than this, in seconds."""


class StopPolicy:
    """Whether a loop ends at a boundary, and why. A rank alone stops at the first boundary after a signal, a
    notice, or a call of `stop()`. From its first yes on, the answer is yes. Boundaries are named by their
    ordinals."""

    def __init__(self, signals: Asked) -> None:
        self._signals = signals
        self._is_called = self._is_told = False

    @property
    def reason(self) -> str | None:
        """Why the loop is to end: a signal's name, "notice file", "stop"; None while it is not."""
        return self._signals.reason or (_CALLED_WORD if self._is_called else None)

    @property
    def is_asked(self) -> bool:
        """Whether the loop is to end at a boundary to come, or has: from now on nothing waits for memory."""
        return self.reason is not None

    @property
    def is_near(self) -> bool:
        """Whether the loop ends at its next boundary, as far as is known, or has."""
        return self.is_asked

    def ask(self) -> None:
        """The program asks for it."""
        self._is_called, self._is_told = True, False

    def enter(self, ordinal: int, step: int) -> None:
        """A boundary is entered, each once and in their order."""

    def stops_at(self, ordinal: int) -> bool:
        """Whether the loop ends at this boundary, which was entered."""
        return self.is_asked

    def begins_at(self, ordinal: int) -> bool:
        """The same, once: the boundary at which it begins to be so is the one to capture. A loop whose end is
        the program's own may go on after it."""
        begins = self.stops_at(ordinal) and not self._is_told
        self._is_told = self._is_told or begins
        return begins


class JointStop(StopPolicy):
    """Of one of several ranks. Whichever is asked to stop, all end at one boundary, a few ahead of the
    fastest."""

    def __init__(
        self,
        signals: Asked,
        board: Board,
        row: RankRow,
        grace_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(signals)
        self._board, self._row, self._grace_s = board, row, grace_s
        self._clock, self._sleep = clock, sleep
        self._ends_at: int | None = None
        self.is_unconfirmed = False  # it ended without an answer: who did not give one may be dead

    @property
    def reason(self) -> str | None:
        own = super().reason
        if own is not None or self._ends_at is None:
            return own
        stop = self._board.announced.stop
        return None if stop is None else f"{_word(stop.reason)} (rank {stop.rank})"

    @property
    def is_asked(self) -> bool:
        return self._ends_at is not None or super().reason is not None

    @property
    def is_near(self) -> bool:
        return self._ends_at is not None

    def enter(self, ordinal: int, step: int) -> None:
        """At a promised boundary: waits until it is known whether all end there. Without an answer, at the
        end of the grace period or where rank 0 is gone, this rank ends there as well."""
        self.look()
        while not self._row.enter(ordinal, step):
            # The loop has ended, and its program goes on: what was promised has been kept.
            assert self._ends_at is not None, "a promised boundary was left before it was decided"
            self._row.lift(self._row.progress.limit)
        if self._ends_at is None and self._row.progress.limit == ordinal and self._awaits(ordinal):
            self._ends_at = ordinal

    def look(self) -> None:
        """Tell the node's leader that this rank is to stop. Any thread."""
        if super().reason is not None and not self._row.stop_asked:
            self._row.ask_stop(_code(super().reason or _CALLED_WORD))

    def stops_at(self, ordinal: int) -> bool:
        return self._ends_at is not None and ordinal >= self._ends_at

    def _awaits(self, ordinal: int) -> bool:
        """Whether the loop ends at the boundary that it waits at."""
        until_s = min(self._clock() + self._grace_s, self._signals.deadline_s)
        while self._row.progress.limit == ordinal:
            if self._board.confirmed == ordinal:
                return True
            if self._board.is_lost or self._clock() >= until_s:
                log.warning(
                    "the ranks' stop at this boundary was not confirmed (%s): this rank ends here, and never "
                    "goes on alone. What is sealed is whole; a step counts if all ranks have it",
                    "rank 0 is gone" if self._board.is_lost else "not all have answered in time",
                )
                self.is_unconfirmed = True
                self._signals.hurry(self._grace_s)
                return True
            self._sleep(_PAUSE_S)
            until_s = min(until_s, self._signals.deadline_s)  # a signal may come meanwhile
        return False


def _code(reason: str) -> int:
    if reason in (_CALLED_WORD, _NOTICE_WORD):
        return _CALLED if reason == _CALLED_WORD else _NOTICE
    return int(signal.Signals[reason])


def _word(code: int) -> str:
    if code in (_CALLED, _NOTICE):
        return _CALLED_WORD if code == _CALLED else _NOTICE_WORD
    try:
        return signal.Signals(code).name
    except ValueError:
        return f"reason {code}"
