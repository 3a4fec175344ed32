"""Iterables without a state of their own: taken up by drawing again, from the epoch's start, what was drawn.

Says so once, with its progress. Exact where the iterable gives the same batches again.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from flashckpt.errors import BoundaryError, MismatchError
from flashckpt.events import log
from flashckpt.state import rng
from flashckpt.state.loader.base import Notes, Position, Source

_SECONDS_BETWEEN_LINES = 5.0
# Drawing again costs nothing and gives the same: no news. Exact types, since a subclass may do anything.
_AT_HAND = (range, list, tuple, deque, itertools.count, itertools.repeat)
# Iterators that are their own `iter()`, and were drawn from here: they cannot begin again.
_drawn_from = Notes()


class ReplayedSource(Source):
    """`kind` of its positions is "replayed". `on_replay(done, total)` hears of batches drawn again."""

    kind = "replayed"

    def __init__(self, loader: Any) -> None:
        # A DataLoader keeps its persistent workers: a copy has its own.
        own = copy.copy(loader) if isinstance(loader, DataLoader) else loader
        if own is not loader:
            vars(own)["_iterator"] = None
        super().__init__(own, rng.Generators({"loader": loader}))
        self.on_replay: Callable[[int, int], None] = ReplayLog()

    def _open(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._loader)
        if iterator is self._loader:
            if _drawn_from.get(iterator):
                log.warning(
                    "%s can be gone through once, and batches were drawn from it before: this epoch has only "
                    "what is left of it, so a run of more epochs or steps ends early. Pass an iterable that "
                    "begins anew at each iter(), such as a DataLoader or a list.",
                    type(iterator).__name__,
                )
            _drawn_from.set(iterator, True)
        return iterator

    def _reopen(self, position: Position) -> None:
        assert position.start is not None
        total = position.batches_taken
        self.generators.restore_all(position.start)
        iterator: Iterator[Any] = iter(self._loader)
        if iterator is self._loader:
            if _drawn_from.get(iterator):
                raise _half_used(iterator, total)
            _drawn_from.set(iterator, True)
        self._iterator = iterator
        if type(self._loader) in _AT_HAND:
            done = sum(1 for _ in itertools.islice(iterator, total))
            if done < total:
                raise _too_short(iterator, done, total)
            return
        log.warning(
            "%s keeps no state, so %d batches of epoch %d are drawn again and dropped. Not exact if it draws "
            "random numbers batch by batch. Give it state_dict and load_state_dict to go on at once.",
            type(self._loader).__name__,
            total,
            position.epoch,
        )
        for done in range(1, total + 1):
            try:
                next(iterator)
            except StopIteration:
                raise _too_short(iterator, done - 1, total) from None
            self.on_replay(done, total)


class ReplayLog:
    """An `on_replay` that logs a line every few seconds. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: float | None = None

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done == 1 or self._due is None:
            self._due = now + _SECONDS_BETWEEN_LINES
        if now >= self._due:
            self._due = now + _SECONDS_BETWEEN_LINES
            log.info("%d of %d batches drawn again.", done, total)


def _half_used(iterator: object, total: int) -> BoundaryError:
    return BoundaryError(
        f"The loop goes on after batch {total} of an iterator ({type(iterator).__name__}) from which this "
        "process has already drawn: dropping that many more would lose batches. The model and the rest of "
        "the state were put back; no batch was drawn. Make a new iterator, or pass an iterable that begins "
        "anew at each iter()."
    )


def _too_short(iterator: object, done: int, total: int) -> MismatchError:
    return MismatchError(
        f"{type(iterator).__name__} ended after {done} batches, and the checkpoint was taken after {total}: "
        "it does not give what it gave. The model and the rest of the state were put back; the loop was not "
        "begun. Pass the data that the run was begun with.",
        differences=(("batches of the loader", str(total), str(done)),),
    )
