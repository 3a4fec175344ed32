"""What ranks tell one another: comes back as it was said, and anything else is refused and changes
nothing."""

import random

import pytest

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import (
    MOST_BYTES,
    MOST_OPEN,
    NONE,
    Announcement,
    Answer,
    NodeMessage,
    Refused,
    Stop,
    StopState,
)
from flashckpt.ranks.node_state import NodeState

SAID = NodeMessage(
    number=9,
    acknowledged=8,
    entered_high=71,
    judged=69,
    slots=4,
    missed=(60, 3),
    stop_asked=(15, 2),
    promise=(2, Answer.PROMISED),
    outside=(72, 1),
    not_outside=(71, 0),
    withdrawn=71,
    plain_ns=10**9,
    cost_ns=5,
    landing_ns=6,
    persisted=50,
    failed=40,
    is_ended=True,
    sealed=tuple(range(40, 40 + MOST_OPEN)),
    steps=tuple(range(10**12, 10**12 + MOST_OPEN)),
    requests=(70, 71),
)
TOLD = Announcement(
    number=12,
    decided=69,
    complete=tuple(range(40, 40 + MOST_OPEN)),
    persist=(41, 50),
    every=10,
    also=30,
    stop=Stop(2, 75, StopState.PROPOSED, 2, 15),
    refused=Refused(66, 1, NONE),
    save_at=80,
    agreed=67,
    missed=(68, 3),
    is_ended=True,
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
    node_state = NodeState(bytearray(NodeState.num_bytes(2)), (4, 5))
    node_state.format()
    leader = Leader(node_state)
    leader.act_on(TOLD)
    assert leader.message().promise == (2, Answer.PROMISED)
    before = Announcement(number=11, stop=Stop(2, 75, StopState.INCOMPLETE, 2, 15))
    for other in (TOLD, before):
        leader.act_on(other)
        assert node_state.announced == TOLD
    assert [row.progress.limit for row in node_state.rows] == [75, 75]
