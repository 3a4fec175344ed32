"""Ranks of one node that read a step together, a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashckpt.errors import DamagedError
from flashckpt.restore.node_chunks import NodeChunks
from flashckpt.restore.snapshot import StepReading
from flashckpt.store.base import Store
from tests.ranks.together import LIMIT_S, on_threads


class Node:
    """Ranks of one node, a thread each. `before_taking` is called by each when all have read their shares."""

    def __init__(
        self, world: int, before_taking: Callable[[NodeChunks, int], None] = lambda *_: None
    ) -> None:
        self._barrier = threading.Barrier(world)
        self._rows: dict[str, dict[int, Any]] = {}
        self._before_taking, self.world = before_taking, world
        self.chunks: dict[int, NodeChunks] = {}

    def say(self, rank: int, what: str, mine: Any) -> Mapping[int, Any]:
        self._rows.setdefault(what, {})[rank] = mine
        self._barrier.wait(LIMIT_S)
        return dict(self._rows[what])

    def read(self, store: Store, readings: Sequence[StepReading | None]) -> list[Any]:
        """What each rank's reading gives, or raises."""
        found: list[Any] = [None] * self.world

        def run(rank: int) -> None:
            reading, chunks = readings[rank], NodeChunks(store, rank)
            self.chunks[rank] = chunks
            try:
                chunks.exchange(reading, lambda what, mine: self.say(rank, what, mine), 2)
                self._before_taking(chunks, rank)
                self._barrier.wait(LIMIT_S)
                if reading is not None:
                    reading.locate(chunks.place, 2)
                    found[rank] = reading.finish(chunks, 2)
            except DamagedError as error:
                found[rank] = error
            except BaseException:
                self._barrier.abort()
                raise
            self._barrier.wait(LIMIT_S)
            chunks.close()

        on_threads(run, range(self.world))
        return found
