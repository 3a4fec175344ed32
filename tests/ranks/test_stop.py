"""A rank at the boundary that was promised for it: it ends with all, goes on with all, or ends by itself when
nobody answers; it never goes on alone."""

import math
from collections.abc import Callable

import pytest

from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.joint_coordination import JointStop
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import Announcement, NodeMessage, Stop, StopState
from flashckpt.ranks.node_state import NodeState


class Asked:
    reason: str | None = None
    deadline_s = math.inf
    timeout_s = math.inf

    def expedite(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s


class Rank:
    """One of two ranks of a node, with a clock of its own: whenever it sleeps, `meanwhile` is done."""

    def __init__(self) -> None:
        self.memory = bytearray(NodeState.num_bytes(2))
        self.node_state = NodeState(self.memory, (0, 1))
        self.node_state.format()
        self.leader, self.now_s, self.number = Leader(self.node_state), 0.0, 0
        self.asked, self.meanwhile = Asked(), lambda: None
        self.policy = JointStop(
            self.asked,
            NodeState(self.memory, (0, 1)),
            self.node_state.rows[1],
            60.0,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )
        self.boundary_index = 0

    def sleep(self, seconds: float) -> None:
        self.now_s += 1.0
        self.meanwhile()

    def hear(self, state: StopState, boundary_index: int, number: int = 1, reason: int = 15) -> None:
        self.number += 1
        self.leader.act_on(
            Announcement(number=self.number, stop=Stop(number, boundary_index, state, 0, reason))
        )

    def boundary(self) -> bool:
        self.boundary_index += 1
        self.policy.enter(self.boundary_index)
        return self.policy.begins_at(self.boundary_index)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def promised(rank: Rank, boundary_index: int, meanwhile: Callable[[], None]) -> list[bool]:
    rank.hear(StopState.PROPOSED, boundary_index)
    rank.meanwhile = meanwhile
    return [rank.boundary() for _ in range(boundary_index)]


def test_it_ends_where_all_have_promised_to(rank: Rank) -> None:
    assert promised(rank, 3, lambda: rank.hear(StopState.CONFIRMED, 3)) == [False, False, True]
    assert rank.policy.is_near
    assert rank.policy.reason == "SIGTERM (rank 0)"
    assert not rank.boundary(), "whose program goes on after its loop is not ended, or captured, again"
    assert rank.policy.stops_at(4)


def test_it_goes_on_where_one_has_not(rank: Rank) -> None:
    assert promised(rank, 3, lambda: rank.hear(StopState.INCOMPLETE, 3)) == [False] * 3
    assert rank.now_s == 1.0
    rank.hear(StopState.PROPOSED, 6, number=2)
    rank.meanwhile = lambda: rank.hear(StopState.CONFIRMED, 6, number=2)
    assert [rank.boundary() for _ in range(3)] == [False, False, True]


def test_it_never_goes_on_alone(rank: Rank) -> None:
    """Nobody answers: at the end of the grace period it ends where it has promised to."""
    assert promised(rank, 3, lambda: None) == [False, False, True]
    assert 60.0 <= rank.now_s < 63.0
    assert rank.policy.is_unconfirmed
    assert rank.asked.timeout_s == 60.0


def test_it_waits_no_longer_than_a_signal_that_comes_meanwhile_allows(rank: Rank) -> None:
    def signal() -> None:
        rank.asked.deadline_s = 10.0

    assert promised(rank, 3, signal)[-1]
    assert rank.now_s < 13.0


def test_it_does_not_wait_where_rank_0_is_gone(rank: Rank) -> None:
    assert promised(rank, 3, lambda: setattr(rank.node_state, "is_lost", 1))[-1]
    assert rank.now_s < 3.0


@pytest.mark.parametrize("reason", ["stop", "notice file", "SIGTERM", "SIGUSR1"])
def test_whatever_asks_one_rank_ends_all_and_is_named(rank: Rank, reason: str) -> None:
    """By way of all that is said between them."""
    decider = Decider([(0, 1)], None, None, 0.01)

    def exchange() -> None:
        said = NodeMessage.unpacked(rank.leader.message().packed())
        told = decider.round([said], rank.now_s)
        rank.leader.act_on(Announcement.unpacked(told.packed()))

    other = JointStop(
        Asked(), NodeState(rank.memory, (0, 1)), rank.node_state.rows[0], 60.0, sleep=lambda _: exchange()
    )
    exchange()
    if reason == "stop":
        rank.policy.ask()
    else:
        rank.asked.reason = reason
    rank.policy.poll()
    assert rank.policy.is_asked
    assert not rank.policy.is_near
    for boundary_index in range(1, 9):
        exchange()
        rank.meanwhile = exchange
        other.enter(boundary_index)
        if rank.boundary():
            break
    assert rank.policy.stops_at(boundary_index)
    assert other.stops_at(boundary_index)
    assert other.reason == f"{reason} (rank 1)"
    assert rank.policy.reason == reason
