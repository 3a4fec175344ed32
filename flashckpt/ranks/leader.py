"""What a node's leader does for its ranks: says what their rows hold, acts on what rank 0 has announced.

Owns the promises of its ranks: their words are in shared memory, so that no rank has to be asked. Owns no
connection and no thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from flashckpt.capture.division import ALL_GROUPS
from flashckpt.ranks.board import Board, RankRow, Table
from flashckpt.ranks.messages import (
    MOST_OPEN,
    MOST_SAVES,
    NONE,
    Announcement,
    Answer,
    Call,
    Gone,
    NodeMessage,
    Save,
    StopState,
)

_LOOK_S = 0.5
# Ranks hear what they divide no more in different rounds: until all have, one that differs says nothing. On a
# busy machine that takes seconds.
_MOST_UNLIKE_S = 60.0


class Leader:
    """Of the node that the board is of."""

    def __init__(self, board: Board, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._number, self._clock = board, 0, clock
        self._answered = (0, Answer.NONE)
        self._limit = NONE
        self._died, self._looked_s = NONE, -math.inf
        self._compared, self._unlike_since_s, self._told_s = 0, math.inf, math.inf

    @property
    def is_hurried(self) -> bool:
        """Whether a stop is asked for or proposed, and not decided."""
        stop = self._board.announced.stop
        if stop is None or stop.state is StopState.VOID:
            return any(row.stop_asked for row in self._board.rows)
        return stop.state is StopState.PROPOSED

    # ---- what was announced

    def hear(self, announced: Announcement) -> None:
        """Act on it. One that is late, or comes twice, changes nothing."""
        if not self._board.announce(announced) or announced.stop is None:
            return
        stop = announced.stop
        if stop.number > self._answered[0]:
            self._lift()  # a newer one says that the one before is void
        if stop.state is StopState.PROPOSED and stop.number > self._answered[0]:
            promised = [row.is_ended or row.promise(stop.ordinal) for row in self._board.rows]
            self._answered = stop.number, Answer.PROMISED if all(promised) else Answer.REFUSED
            self._limit = stop.ordinal
        elif stop.state is StopState.VOID:
            self._lift()
        elif stop.state is StopState.CONFIRMED:
            self._board.confirm(stop.ordinal)

    def _lift(self) -> None:
        for row in self._board.rows if self._limit != NONE else ():
            row.lift(self._limit)
        self._limit = NONE

    # ---- what is said

    def say(self) -> NodeMessage:
        """What the rows hold now. Of each rank `judged` is read before what it has sealed, and `entered`
        before its calls of save(): what is said of a boundary then holds all that its rank has told of
        it."""
        rows, self._number = self._board.rows, self._number + 1
        judged = min(row.judged for row in rows)
        sealed = [row.sealed for row in rows]
        alike = sorted(_alike(sealed))[-MOST_OPEN:]
        self._compare(sealed)
        entered = [row.progress.entered for row in rows]
        saves = [row.saves for row in rows]
        saves_since = max(row.saves_since for row in rows)
        named, left_out = _saves(rows, entered, saves)
        slots, plain, cost, landing = zip(*(row.measures for row in rows), strict=True)
        return NodeMessage(
            number=self._number,
            heard=min(row.heard for row in rows),
            entered_low=min(entered),
            entered_high=max(entered),
            judged=judged,
            sealed=tuple(alike),
            steps=tuple(sealed[0][ordinal].step for ordinal in alike),
            missed=_missed(rows, sealed, judged),
            slots=min(slots),
            offset=rows[0].offset,
            plain_ns=min((each for each in plain if each), default=0),
            cost_ns=max(cost),
            landing_ns=max(landing),
            stop_asked=next(((row.stop_asked, row.rank) for row in rows if row.stop_asked), (0, NONE)),
            promise=self._answered,
            saves=named,
            saves_since=max(saves_since, left_out + 1),
            withdrawn=max(((row.withdrawn, row.rank) for row in rows if row.withdrawn), default=(0, NONE)),
            persisted=rows[0].newest_persisted,
            failed=rows[0].newest_failed,
            committed=tuple(sorted(rows[0].committed)),
            is_ended=all(row.is_ended for row in rows),
            gone=Gone(self._who_died(), next((row.rank for row in rows if row.is_ended), NONE)),
        )

    def _compare(self, sealed: Sequence[dict[int, Table]]) -> None:
        """What is divided no more: the groups in which the ranks differ where they divide alike; all of them
        where for long no boundary was the same, or where, long after that was told, ranks differ in a group
        once more: it is divided again but for what is known not to be alike in it. Each boundary once."""
        for ordinal in sorted(set.intersection(*map(set, sealed))):
            if ordinal <= self._compared:
                continue
            self._compared = ordinal
            tables = [of[ordinal]._replace(step=0) for of in sealed]
            self._divide_less(tables)

    def _divide_less(self, tables: Sequence[Table]) -> None:
        now_s, since_s, news = self._clock(), self._unlike_since_s, 0
        self._unlike_since_s = math.inf
        if all(table == tables[0] for table in tables):
            return
        if len({table.ground for table in tables}) == 1:
            by_group = zip(*(table.groups for table in tables), strict=True)
            news = sum(1 << g for g, each in enumerate(by_group) if len({*each}) > 1)
        if news & ~self._board.held_whole:
            self._board.hold_whole(news)
            self._told_s = now_s
            return
        self._unlike_since_s = min(since_s, now_s)
        if now_s - min(self._unlike_since_s, self._told_s if news else math.inf) >= _MOST_UNLIKE_S:
            self._board.hold_whole(ALL_GROUPS)

    def _who_died(self) -> int:
        """Asked of the system now and then: messages may follow one another fast."""
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._died = next((row.rank for row in self._board.rows if row.has_died), NONE)
        return self._died


def _alike(sealed: Sequence[dict[int, Table]]) -> set[int]:
    """The boundaries that all ranks have sealed with the same table of what they divide: of any other, what
    one rank has left to another may stand nowhere."""
    first = sealed[0].items()
    return {ordinal for ordinal, table in first if all(of.get(ordinal) == table for of in sealed)}


def _missed(rows: Sequence[RankRow], sealed: Sequence[dict[int, Table]], judged: int) -> tuple[int, int]:
    """The newest boundary that some ranks have sealed and one has missed, or sealed with another table, and
    that one."""
    for ordinal in sorted(set().union(*sealed), reverse=True):
        table = next(of[ordinal] for of in sealed if ordinal in of)
        pairs = zip(rows, sealed, strict=True)
        without = next((row.rank for row, of in pairs if of.get(ordinal) != table), None)
        if ordinal <= judged and without is not None:
            return ordinal, without
    return 0, NONE


def _saves(
    rows: Sequence[RankRow], entered: Sequence[int], saves: Sequence[dict[int, Call]]
) -> tuple[tuple[Save, ...], int]:
    """The newest boundaries for which a rank has called save(), and the newest of those that are left out."""
    found, called = [], sorted(set().union(*saves))
    for ordinal in called[-MOST_SAVES:]:
        # Who has called it in an iteration may yet wait for it, as others do.
        call = max(of[ordinal] for of in saves if ordinal in of)
        caller = next(row.rank for row, of in zip(rows, saves, strict=True) if of.get(ordinal) == call)
        without = [
            (at < ordinal, row.rank)
            for row, of, at in zip(rows, saves, entered, strict=True)
            if of.get(ordinal) != call
        ]
        to_come, absent = min(without, default=(True, NONE))
        found.append(Save(ordinal, call, caller, absent, not to_come))
    return tuple(found), max(called[:-MOST_SAVES], default=-1)
