"""save() on several ranks: what they have all called alike is persisted, however their calls come in."""

from __future__ import annotations

import pytest

from flashckpt.ranks.board import RankRow, Table
from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import Announcement, Call

from .test_board import board_of


class Job:
    """Ranks in one process, of which the boards and what rank 0 decides are real."""

    def __init__(self, *nodes: tuple[int, ...]) -> None:
        self.boards = [board_of(*ranks) for ranks in nodes]
        self.leaders = [Leader(each) for each in self.boards]
        self._decider = Decider(nodes, None, None, 0.01)
        self._now_s = 0.0

    @property
    def rows(self) -> list[RankRow]:
        return [row for board in self.boards for row in board.rows]

    def round(self) -> Announcement:
        self._now_s += 0.5
        return self._decider.round([each.say() for each in self.leaders], self._now_s)


NODES = pytest.mark.parametrize("nodes", [((0, 1),), ((0,), (1,))], ids=["one-node", "two-nodes"])


@NODES
def test_a_save_that_was_put_off_may_be_waited_for_before_its_boundary(
    nodes: tuple[tuple[int, ...], ...],
) -> None:
    """save() in the code after an epoch's batches is for the epoch's end; then wait() takes it at once."""
    job = Job(*nodes)
    for row in job.rows:
        row.call_save(5, Call.INSIDE)
    assert job.round().agreed == 0
    job.rows[0].call_save(5, Call.OUTSIDE)
    waits = job.round()
    assert (waits.agreed, waits.refused) == (0, ()), "the other one may come yet"
    job.rows[1].call_save(5, Call.OUTSIDE)
    assert job.round().agreed == 5


@NODES
def test_who_has_passed_the_boundary_does_not_come_any_more(nodes: tuple[tuple[int, ...], ...]) -> None:
    job = Job(*nodes)
    for row in job.rows:
        row.call_save(5, Call.INSIDE)
    job.rows[0].call_save(5, Call.OUTSIDE)
    assert job.round().refused == ()
    job.rows[1].enter(5, 5)
    [refused] = job.round().refused
    assert refused == (5, 0, 1)
    assert job.round().agreed == 0


def test_of_two_calls_for_a_boundary_the_later_one_holds_wherever_it_stands() -> None:
    [row] = board_of(0).rows
    row.call_save(1, Call.INSIDE)
    for ordinal in range(2, 12):
        row.call_save(ordinal, Call.INSIDE)
        row.call_save(ordinal, Call.OUTSIDE)
        assert row.saves[ordinal] is Call.OUTSIDE


def test_calls_that_come_faster_than_messages_are_answered_all_the_same() -> None:
    """Each message knows the newest calls of its node alone, and those of two nodes never meet."""
    job = Job((0,), (1,))
    asked = set[int]()
    for ordinal in range(1, 200):
        for row, at in zip(job.rows, (ordinal, ordinal - 8), strict=True):
            if at > 0:
                row.call_save(at, Call.INSIDE)
                row.enter(at, at)
                row.begin(at)
                row.settle(at)
                row.publish(at, {each: Table() for each in range(8, at + 1, 8) if each > at - 24})
        if ordinal % 8 == 7:
            asked |= {*job.round().persist}
            job.rows[0].persisted(max(asked, default=0))
    assert len(asked) > 5
