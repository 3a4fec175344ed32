"""The background thread of a node's leader: the board of its ranks on one side, the job's store on the other.

Twice a second at most over the network, and in one request each way, whatever the number of ranks; more
often while a stop is asked for. Owns the thread and the store's keys. A store that is gone (rank 0 has
died) stops no training and raises nothing: the schedule stays as it was, and the store is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flashckpt.errors import DamagedError
from flashckpt.ranks.board import Board
from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import Announcement, NodeMessage

log = logging.getLogger(__name__)

_ROUND_S, _ALONE_ROUND_S, _HURRIED_ROUND_S = 0.5, 0.05, 0.02
# Rank 0 does not come back in the same attempt; a network may.
_LOST_AFTER_S = 20.0
_LONGEST_PAUSE_S = 5.0
# How long the end of rank 0's run waits for the nodes that have not ended.
_PARTING_S = 5.0
_TOLD = "pace/announced"


class MessageStore(Protocol):
    """What is needed of a `TCPStore`."""

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def set(self, key: str, value: str, /) -> None: ...


class Exchange:
    """`leader`: the rank that leads this node. `decider`: on rank 0 alone, where `nodes` are all. `store`
    is None where there is one node: then nobody is to be told."""

    def __init__(
        self,
        board: Board,
        store: MessageStore | None,
        leader: int,
        decider: Decider | None,
        nodes: Sequence[tuple[int, ...]] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._store, self._key = board, store, _key(leader)
        self._others = [_key(ranks[0]) for ranks in nodes[1:]]
        self._leader, self._decider, self._clock = Leader(board), decider, clock
        self._round_s = _ROUND_S if store is not None else _ALONE_ROUND_S
        self._silent_since_s: float | None = None
        self._ended = threading.Event()
        self._failures, self._parting_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="flashckpt-ranks", daemon=True)

    def publish_first(self) -> None:
        """Rank 0, before any other rank begins: what is read must be there."""
        assert self._decider is not None
        self._tell(self._decider.announced)
        for key in self._others:
            self._set(key, b"")

    def start(self) -> None:
        self._thread.start()

    def close(self, *, in_order: bool) -> None:
        """One more round, so that the others hear that this node has ended. At the end of a run that is
        `in_order`, rank 0's stays a little for theirs."""
        self._parting_s = _PARTING_S if in_order and self._decider is not None else 0.0
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _PARTING_S)

    # ---- the thread

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s()):
            self.round()
        until_s = self._clock() + self._parting_s
        self.round()
        while self._clock() < until_s and not self._all_have_ended():
            time.sleep(_HURRIED_ROUND_S)
            self.round()

    def _pause_s(self) -> float:
        if self._failures:
            return float(min(self._round_s * 2**self._failures, _LONGEST_PAUSE_S))
        return _HURRIED_ROUND_S if self._leader.is_hurried else self._round_s

    def round(self) -> None:
        """Hear and say once. What is wrong with the store is logged, once it has lasted."""
        try:
            if self._decider is not None:
                self._decide()
            else:
                self._follow()
        except Exception as error:  # a store that is gone has many errors; none is the training's
            self._is_silent(error)
        else:
            if self._silent_since_s is not None and self._board.is_lost:
                log.warning("rank 0 answers again: snapshots of all ranks go on")
            self._silent_since_s, self._failures = None, 0
            self._board.lose(False)

    def _decide(self) -> None:
        assert self._decider is not None
        said = self._store.multi_get(self._others) if self._store is not None else []
        messages = [self._leader.say(), *map(_read, said)]
        before = self._decider.announced
        announced = self._decider.round(messages, self._clock())
        self._leader.hear(announced)
        if announced is not before:
            self._tell(announced)

    def _follow(self) -> None:
        assert self._store is not None
        [told] = self._store.multi_get([_TOLD])
        self._leader.hear(Announcement.unpacked(_bytes(told)))
        self._set(self._key, self._leader.say().packed())
        if self._board.announced.is_ended:
            self._ended.set()

    def _all_have_ended(self) -> bool:
        return self._decider is None or self._decider.all_have_ended

    def _tell(self, announced: Announcement) -> None:
        self._set(_TOLD, announced.packed())

    def _set(self, key: str, data: bytes) -> None:
        if self._store is not None:
            self._store.set(key, data.hex())

    def _is_silent(self, error: Exception) -> None:
        now = self._clock()
        self._failures += 1
        if self._silent_since_s is None:
            self._silent_since_s = now
            log.debug("the ranks' store cannot be reached: %s", error)
        elif now - self._silent_since_s > _LOST_AFTER_S and not self._board.is_lost:
            self._board.lose(True)
            log.warning(
                "rank 0 has not answered for %.0f s (%s): training goes on, and no further snapshot is known "
                "to be whole on all ranks until it does. What all had stays in memory.",
                now - self._silent_since_s,
                error,
            )


def _key(leader: int) -> str:
    return f"pace/{leader}"


def _bytes(text: bytes) -> bytes:
    return bytes.fromhex(text.decode())


def _read(text: bytes) -> NodeMessage | None:
    """None where a node has not said anything yet, or something that cannot be."""
    if not text:
        return None
    try:
        return NodeMessage.unpacked(_bytes(text))
    except (DamagedError, ValueError) as error:
        log.debug("what a node said is passed over: %s", error)
        return None
