"""Iterables without a state of their own: taken up by drawing again, from the epoch's start, what was drawn.

Says so once, with its progress. Exact where the iterable gives the same batches again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from flashckpt.events import log
from flashckpt.state.loader.base import EpochSource, OnReplay
from flashckpt.state.loader.generators import Generators
from flashckpt.state.loader.position import Position


class ReplayedSource(EpochSource):
    """`kind` of its positions is "replayed". `on_replay(done, total)` counts batches drawn again."""

    kind = "replayed"

    def __init__(self, loader: Any, on_replay: OnReplay | None = None) -> None:
        # A DataLoader keeps its persistent workers: a copy has its own.
        own = copy.copy(loader) if isinstance(loader, DataLoader) else loader
        if own is not loader:
            vars(own)["_iterator"] = None
        super().__init__(own, Generators({"loader": loader}))
        self._on_replay = on_replay

    def _open(self) -> Iterator[Any]:
        return iter(self._loader)

    def _reopen(self, position: Position) -> None:
        assert position.start is not None
        total = position.batches_taken
        log.warning(
            "%s keeps no state, so %d batches of epoch %d are drawn again and dropped. Not exact if it draws "
            "random numbers batch by batch. Give it state_dict and load_state_dict to go on at once.",
            type(self._loader).__name__,
            total,
            position.epoch,
        )
        self._restore(position.start)
        self._iterator = iter(self._loader)
        for done in range(1, total + 1):
            try:
                next(self._iterator)
            except StopIteration:
                self._over = True
                return
            if self._on_replay is not None:
                self._on_replay(done, total)
