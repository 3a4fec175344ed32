"""A commit that somebody waits for: whether it is there, and when it is not to be waited for any longer.

Owns the judgement of the keeper's answers; asks nothing itself and knows no thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flashckpt.keeper.protocol import Failure, Status

# An answer of the round that was under way when the wait began may be older than what was asked for.
_FRESH_ROUNDS = 2
# Keepers that one commit may cost before what they write counts for nothing.
_MOST_KEEPERS = 4


def is_committed(status: Status, step: int) -> bool:
    newest = status.newest_committed
    return step in status.committed or (newest is not None and newest >= step)


class CommitWait:
    """One wait for the snapshot of `step`, for at most `patience_s` seconds of failing.

    A failure of storage may pass (a server's hiccup, a disk that somebody makes room on): the keeper tries
    again, so its first failure ends no wait. What ends one is a snapshot that was torn, one that the keeper
    has given up, and tries that go on failing. A try under way is waited for: it may be the one that works.
    `generation` None takes any snapshot of the step; `before` is the keeper's answer before the wait.
    """

    def __init__(
        self,
        step: int,
        generation: int | None,
        patience_s: float,
        before: Status,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step, self._generation = step, generation
        self._patience_s, self._clock = patience_s, clock
        self._torn_before = before.torn
        self._failing_since_s: float | None = None

    def refusal(self, status: Status, rounds: int) -> str | None:
        """Why to wait no longer, in words; None while it is worth it. `rounds`: answers since the wait
        began."""
        for torn in status.torn:
            if torn.step == self._step and torn not in self._torn_before:
                return f"its bytes are not those of its boundary ({', '.join(torn.leaves) or 'metadata'})"
        failure = self._failure(status)
        if failure is None:
            return None
        if self._failing_since_s is None:
            self._failing_since_s = self._clock()
        if status.persisting == self._step:
            return None
        given_up = rounds >= _FRESH_ROUNDS and self._step not in status.waiting
        if given_up or self._clock() - self._failing_since_s > self._patience_s:
            return failure.message
        return None

    def last_failure(self, status: Status) -> str | None:
        """What the keeper says of its last try in vain."""
        failure = self._failure(status)
        return None if failure is None else failure.message

    def _failure(self, status: Status) -> Failure | None:
        mine = (
            each
            for each in reversed(status.failures)
            if each.step == self._step and self._generation in (None, each.generation)
        )
        return next(mine, None)


class Advance:
    """Whether keepers get on with what is waited for: they write, or commit.

    One that is killed at each try (no memory left for it) writes as well before it is, and so does the next
    one: after a few of them without a commit only a commit counts, or the wait would never end.
    """

    def __init__(self, status: Status) -> None:
        self._newest = status.newest_committed
        self._keepers = {status.keeper}
        self._seen = self._seen_of(status)

    def has_come(self, status: Status) -> bool:
        """Whether there was any since the last call."""
        newest = status.newest_committed
        if newest is not None and (self._newest is None or newest > self._newest):
            self._newest = newest
            self._keepers.clear()
        self._keepers.add(status.keeper)
        before, self._seen = self._seen, self._seen_of(status)
        return before != self._seen

    def _seen_of(self, status: Status) -> object:
        if len(self._keepers) > _MOST_KEEPERS:
            return self._newest
        return status.keeper, status.committed, status.progress_bytes
