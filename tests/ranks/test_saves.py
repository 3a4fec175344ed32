"""save() on several ranks: in an iteration one call is for all ranks; outside of one all ranks must call."""

import pytest

from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import Announcement, Refused
from flashckpt.ranks.node_state import RankRow, Table

from .test_node_state import board_of


class Job:
    """Ranks in one process. The words that they share and the decisions of rank 0 are real."""

    def __init__(self, *nodes: tuple[int, ...]) -> None:
        self.boards = [board_of(*ranks) for ranks in nodes]
        self.leaders = [Leader(each) for each in self.boards]
        self._decider = Decider(nodes, None, None, 0.01)
        self._now_s = 0.0

    @property
    def rows(self) -> list[RankRow]:
        return [row for node_state in self.boards for row in node_state.rows]

    def round(self) -> Announcement:
        self._now_s += 0.5
        for board, leader in zip(self.boards, self.leaders, strict=True):
            leader.act_on(self._decider.announced)
            for row in board.rows:
                row.acknowledged = board.announced.number
        return self._decider.round([each.message() for each in self.leaders], self._now_s)

    def train(self, until: int, *, sealed: dict[int, tuple[int, ...]]) -> None:
        """All ranks pass boundaries up to this one; `sealed`: the ranks that have sealed a boundary."""
        for row in self.rows:
            row.enter(until)
            row.settled = until
            row.publish(until, {at: Table() for at, ranks in sealed.items() if row.rank in ranks})


NODES = pytest.mark.parametrize("nodes", [((0, 1),), ((0,), (1,))], ids=["one-node", "two-nodes"])
Nodes = tuple[tuple[int, ...], ...]


@NODES
def test_an_announced_boundary_that_a_rank_misses_is_followed_by_one_further_ahead(nodes: Nodes) -> None:
    job = Job(*nodes)
    for boundary_index in range(1, 5):
        job.train(boundary_index, sealed={})
        job.round()
    job.rows[0].request_save(5)
    job.train(5, sealed={5: (0,)})
    leads, at = list[int](), job.round().save_at
    for _ in range(3):
        job.train(at, sealed={at: (0,)})
        after = job.round().save_at
        leads.append(after - at)
        at = after
    assert leads == sorted(leads)
    assert leads[0] < leads[-1]
    job.train(at + 7, sealed={at + 7: (0, 1)})
    assert job.round().persist == (at + 7,), "any later one that all have answers it"


@NODES
def test_outside_of_an_iteration_all_ranks_must_call(nodes: Nodes) -> None:
    job = Job(*nodes)
    job.rows[0].outside = 5
    waits = job.round()
    assert (waits.agreed, waits.refused) == (0, Refused()), "the other one may come yet"
    job.rows[1].outside = 5
    assert job.round().agreed == 5
    job.train(5, sealed={5: (0, 1)})
    assert job.round().persist == (5,)


@NODES
def test_a_rank_that_passes_the_boundary_refuses_it(nodes: Nodes) -> None:
    job = Job(*nodes)
    job.rows[0].outside = 5
    assert job.round().refused == Refused()
    job.rows[1].enter(5)
    found = job.round()
    assert (found.refused, found.agreed) == (Refused(5, 0, 1), 0)
    job.rows[1].outside = 6
    job.rows[0].outside = 6
    assert job.round().agreed == 6, "a later call counts again"


@NODES
def test_a_rank_that_waits_no_longer_refuses_it(nodes: Nodes) -> None:
    job = Job(*nodes)
    job.rows[1].outside = 5
    job.rows[1].withdrawn = 5
    assert job.round().refused == Refused(5, 1, 0)
    job.rows[0].outside = 5
    assert job.round().agreed == 0, "what is refused is not agreed on later"


def test_calls_that_come_faster_than_messages_are_answered_all_the_same() -> None:
    """Each message has only the newest calls of its node."""
    job = Job((0,), (1,))
    asked = set[int]()
    for boundary_index in range(1, 200):
        for row, at in zip(job.rows, (boundary_index, boundary_index - 8), strict=True):
            if at > 0:
                row.request_save(at)
                row.enter(at)
                row.begun = at
                row.settled = at
                row.publish(at, {each: Table() for each in range(8, at + 1, 8) if each > at - 24})
        if boundary_index % 8 == 7:
            asked |= {*job.round().persist}
            job.rows[0].persisted = max(asked, default=0)
    assert len(asked) > 5
