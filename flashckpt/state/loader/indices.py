"""The index sampler of a private loader: the user's own, with an epoch's first batches left out.

Draws from the user's sampler in the very order in which an uninterrupted run does. Never touches data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Indices:
    """What `DataLoader` takes its indices from.

    `DataLoader` calls `iter()` on its sampler once without workers and twice with them, and some samplers
    draw random numbers in that call: so each call is passed on at once, but the `skip` first batches are
    drawn and dropped only at the first `next()`, after the workers' base seed was drawn.

    skip: batches still to be dropped. closed: give out no more. hollow_first: the first `iter()` is one that
    an uninterrupted run would not make; it does not reach the user's sampler.
    """

    def __init__(self, sampler: Iterable[Any], *, skip: int = 0, hollow_first: bool = False) -> None:
        self._sampler = sampler
        self.skip = skip
        self.closed = False
        self.drawn = 0
        self.after_first_iter: Callable[[], None] | None = None
        self.after_draw: Callable[[int], None] | None = None
        self._hollow_first = hollow_first
        self._calls = 0
        self._draws: _Draws | None = None

    def __iter__(self) -> Iterator[Any]:
        self._calls += 1
        if self._hollow_first and self._calls == 1:
            return iter(())
        self._draws, self.drawn = _Draws(self, iter(self._sampler)), 0
        if self._calls == 1 and self.after_first_iter is not None:
            self.after_first_iter()
        return self._draws

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def prime(self) -> None:
        """Draw now what is to be skipped (without workers nothing is drawn ahead)."""
        if self._draws is not None:
            self._draws.prime()


class _Draws:
    def __init__(self, indices: Indices, inner: Iterator[Any]) -> None:
        self._indices = indices
        self._inner = inner

    def __iter__(self) -> _Draws:
        return self

    def __next__(self) -> Any:
        if self._indices.closed:
            raise StopIteration
        self.prime()
        return self._draw()

    def prime(self) -> None:
        while self._indices.skip:
            self._indices.skip -= 1
            try:
                self._draw()
            except StopIteration:
                self._indices.skip = 0

    def _draw(self) -> Any:
        drawn = next(self._inner)
        self._indices.drawn += 1
        if self._indices.after_draw is not None:
            self._indices.after_draw(self._indices.drawn)
        return drawn
