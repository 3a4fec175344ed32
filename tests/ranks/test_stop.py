"""A rank at the boundary that was promised for it: it ends with all, goes on with all, or ends by itself when
nobody answers; it never goes on alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from flashckpt.ranks.board import Board
from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import Announcement, NodeMessage, Stop, StopState
from flashckpt.ranks.stop import JointStop


class Asked:
    reason: str | None = None
    deadline_s = math.inf
    patience_s = math.inf

    def hurry(self, patience_s: float) -> None:
        self.patience_s = patience_s


class Rank:
    """One of two ranks of a node, with a clock of its own: whenever it sleeps, `meanwhile` is done."""

    def __init__(self) -> None:
        self.memory = bytearray(Board.num_bytes(2))
        self.board = Board(self.memory, (0, 1))
        self.board.format()
        self.leader, self.now_s, self.number = Leader(self.board), 0.0, 0
        self.asked, self.meanwhile = Asked(), lambda: None
        self.policy = JointStop(
            self.asked,
            Board(self.memory, (0, 1)),
            self.board.rows[1],
            60.0,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )
        self.ordinal = 0

    def sleep(self, seconds: float) -> None:
        self.now_s += 1.0
        self.meanwhile()

    def hear(self, state: StopState, ordinal: int, number: int = 1, reason: int = 15) -> None:
        self.number += 1
        self.leader.hear(Announcement(number=self.number, stop=Stop(number, ordinal, state, 0, reason)))

    def boundary(self) -> bool:
        self.ordinal += 1
        self.policy.enter(self.ordinal, self.ordinal)
        return self.policy.begins_at(self.ordinal)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def promised(rank: Rank, ordinal: int, meanwhile: Callable[[], None]) -> list[bool]:
    rank.hear(StopState.PROPOSED, ordinal)
    rank.meanwhile = meanwhile
    return [rank.boundary() for _ in range(ordinal)]


def test_it_ends_where_all_have_promised_to(rank: Rank) -> None:
    assert promised(rank, 3, lambda: rank.hear(StopState.CONFIRMED, 3)) == [False, False, True]
    assert rank.policy.is_near
    assert rank.policy.reason == "SIGTERM (rank 0)"
    assert not rank.boundary(), "whose program goes on after its loop is not ended, or captured, again"
    assert rank.policy.stops_at(4)


def test_it_goes_on_where_one_has_not(rank: Rank) -> None:
    assert promised(rank, 3, lambda: rank.hear(StopState.VOID, 3)) == [False] * 3
    assert rank.now_s == 1.0
    rank.hear(StopState.PROPOSED, 6, number=2)
    rank.meanwhile = lambda: rank.hear(StopState.CONFIRMED, 6, number=2)
    assert [rank.boundary() for _ in range(3)] == [False, False, True]


def test_it_never_goes_on_alone(rank: Rank) -> None:
    """Nobody answers: at the end of the grace period it ends where it has promised to."""
    assert promised(rank, 3, lambda: None) == [False, False, True]
    assert 60.0 <= rank.now_s < 63.0
    assert rank.policy.is_unconfirmed
    assert rank.asked.patience_s == 60.0


def test_it_waits_no_longer_than_a_signal_that_comes_meanwhile_allows(rank: Rank) -> None:
    def signal() -> None:
        rank.asked.deadline_s = 10.0

    assert promised(rank, 3, signal)[-1]
    assert rank.now_s < 13.0


def test_it_does_not_wait_where_rank_0_is_gone(rank: Rank) -> None:
    assert promised(rank, 3, lambda: rank.board.lose(True))[-1]
    assert rank.now_s < 3.0


@pytest.mark.parametrize("reason", ["stop", "notice file", "SIGTERM", "SIGUSR1"])
def test_whatever_asks_one_rank_ends_all_and_is_named(rank: Rank, reason: str) -> None:
    """By way of all that is said between them."""
    decider = Decider([(0, 1)], None, None, 0.01)

    def exchange() -> None:
        said = NodeMessage.unpacked(rank.leader.say().packed())
        told = decider.round([said], rank.now_s)
        rank.leader.hear(Announcement.unpacked(told.packed()))

    other = JointStop(
        Asked(), Board(rank.memory, (0, 1)), rank.board.rows[0], 60.0, sleep=lambda _: exchange()
    )
    exchange()
    if reason == "stop":
        rank.policy.ask()
    else:
        rank.asked.reason = reason
    rank.policy.look()
    assert rank.policy.is_asked
    assert not rank.policy.is_near
    for ordinal in range(1, 9):
        exchange()
        rank.meanwhile = exchange
        other.enter(ordinal, ordinal)
        if rank.boundary():
            break
    assert rank.policy.stops_at(ordinal)
    assert other.stops_at(ordinal)
    assert other.reason == f"{reason} (rank 1)"
    assert rank.policy.reason == reason
