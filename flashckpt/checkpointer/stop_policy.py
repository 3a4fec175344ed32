"""Whether a loop ends at a boundary, and why. The one that is asked; it captures nothing and ends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.checkpointer.signals import Signals


class StopPolicy:
    """That of a rank alone: it stops at the first boundary after a signal, a notice, or a call of `stop()`.
    From its first yes on, the answer is yes."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._is_called = self._is_told = False

    @property
    def reason(self) -> str | None:
        """Why the loop is to end: a signal's name, "notice file", "stop"; None while it is not."""
        return self._signals.reason or ("stop" if self._is_called else None)

    @property
    def is_asked(self) -> bool:
        """Whether the loop is to end at a boundary to come, or has: from now on nothing waits for memory."""
        return self.reason is not None

    def ask(self) -> None:
        """The program asks for it."""
        self._is_called, self._is_told = True, False

    def stops_at(self, step: int) -> bool:
        """Whether the loop ends at the boundary of this step."""
        return self.is_asked

    def begins_at(self, step: int) -> bool:
        """The same, once: the boundary at which it begins to be so is the one to capture. A loop whose end is
        the program's own may go on after it."""
        begins = self.stops_at(step) and not self._is_told
        self._is_told = self._is_told or begins
        return begins
