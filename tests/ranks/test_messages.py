"""What ranks tell one another: comes back as it was said, and anything else is refused and changes
nothing."""

from __future__ import annotations

import random

import pytest

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.ranks.board import Board
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import (
    MOST_BYTES,
    MOST_OPEN,
    NONE,
    Announcement,
    Answer,
    Call,
    NodeMessage,
    Refused,
    Save,
    Stop,
    StopState,
    Terms,
)

SAID = NodeMessage(
    number=9,
    heard=8,
    entered_low=70,
    entered_high=71,
    judged=69,
    slots=4,
    missed=(60, 3),
    stop_asked=(15, 2),
    promise=(2, Answer.PROMISED),
    saves_since=5,
    withdrawn=(71, 1),
    offset=-4,
    plain_ns=10**9,
    cost_ns=5,
    landing_ns=6,
    persisted=50,
    failed=40,
    is_ended=True,
    sealed=tuple(range(40, 40 + MOST_OPEN)),
    steps=tuple(range(10**12, 10**12 + MOST_OPEN)),
    saves=(Save(70, Call.INSIDE, 0, NONE, True), Save(71, Call.OUTSIDE, 1, 0, False)),
)
TOLD = Announcement(
    number=12,
    decided=69,
    complete=tuple(range(40, 40 + MOST_OPEN)),
    persist=(41, 50),
    terms=(Terms(1, 10, 5), Terms(2, 80, 10, 90, 30)),
    stop=Stop(2, 75, StopState.PROPOSED, 2, 15),
    refused=(Refused(66, 1, NONE),),
    agreed=67,
    missed=(68, 3),
    is_ended=True,
    failed=61,
)


def test_messages_come_back_as_they_were_said() -> None:
    assert NodeMessage.unpacked(SAID.packed()) == SAID
    assert Announcement.unpacked(TOLD.packed()) == TOLD
    assert NodeMessage.unpacked(NodeMessage(number=1).packed()) == NodeMessage(number=1)
    assert Announcement.unpacked(Announcement().packed()) == Announcement()


@pytest.mark.parametrize("kind", [NodeMessage, Announcement])
def test_what_is_damaged_or_cannot_be_is_refused(kind: type[NodeMessage] | type[Announcement]) -> None:
    whole, chance = (SAID if kind is NodeMessage else TOLD).packed(), random.Random(1)
    for other in (b"", whole[:-1], whole + b"\0", (TOLD if kind is NodeMessage else SAID).packed()):
        with pytest.raises(DamagedError):
            kind.unpacked(other)
    for _ in range(300):
        data = bytearray(whole[:-8])
        data[chance.randrange(len(data))] = chance.randrange(256)
        data = data[: chance.randrange(len(data))] if chance.random() < 0.3 else data
        body = bytes(data)
        with pytest.raises(DamagedError):
            kind.unpacked(body + whole[-8:] if body != whole[:-8] else b"")
        # With a checksum that is right it is refused, or is a message as good as any.
        try:
            found = kind.unpacked(body + _native.xxh3_64(body).to_bytes(8, "little"))
        except DamagedError:
            continue
        assert kind.unpacked(found.packed()) == found
        assert len(found.packed()) <= MOST_BYTES


def test_what_is_late_or_comes_twice_changes_nothing() -> None:
    board = Board(bytearray(Board.num_bytes(2)), (4, 5))
    board.format()
    leader = Leader(board)
    leader.hear(TOLD)
    assert leader.say().promise == (2, Answer.PROMISED)
    before = Announcement(number=11, stop=Stop(2, 75, StopState.VOID, 2, 15))
    back = Announcement(number=13, decided=69, complete=(40,), terms=TOLD.terms, stop=TOLD.stop, agreed=67)
    for other in (TOLD, before, back):
        leader.hear(other)
        assert board.announced == TOLD
    assert [row.progress.limit for row in board.rows] == [75, 75]
    assert not SAID.follows(SAID)


def test_a_stop_is_promised_for_all_ranks_of_a_node_or_refused() -> None:
    board = Board(bytearray(Board.num_bytes(2)), (4, 5))
    board.format()
    leader = Leader(board)
    first, second = board.rows
    for ordinal in range(1, 6):
        assert first.enter(ordinal, ordinal + 100)
    leader.hear(Announcement(number=1, stop=Stop(1, 5, StopState.PROPOSED, 0, 15)))
    assert leader.say().promise == (1, Answer.REFUSED), "one rank is at it"
    leader.hear(Announcement(number=2, stop=Stop(1, 5, StopState.VOID, 0, 15)))
    assert all(row.progress.limit == NONE for row in board.rows)
    leader.hear(Announcement(number=3, stop=Stop(2, 8, StopState.PROPOSED, 0, 15)))
    assert leader.say().promise == (2, Answer.PROMISED)
    # That it was void is heard with the next one.
    leader.hear(Announcement(number=4, stop=Stop(3, 11, StopState.PROPOSED, 0, 15)))
    for ordinal in range(6, 12):
        assert first.enter(ordinal, ordinal + 100)
    assert not first.enter(12, 112)
    assert board.confirmed == 0
    leader.hear(Announcement(number=5, stop=Stop(3, 11, StopState.CONFIRMED, 0, 15)))
    assert board.confirmed == 11
    assert leader.say().offset == 100
    assert second.progress == (0, 11)
