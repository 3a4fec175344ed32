"""What a rank's slots are told of what rank 0 has decided."""

from collections.abc import Iterator

import pytest

from flashckpt.capture.schedule import Budget
from flashckpt.memory.slot import Slot, SlotRing
from flashckpt.ranks.joint_coordination import Snapshots
from flashckpt.ranks.messages import Announcement
from flashckpt.ranks.node_state import NodeState
from tests.memory.test_slot import fill, make


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    made = [make(index) for index in range(3)]
    yield made
    for slot in made:
        slot.close()


def test_what_all_went_on_from_stays_until_rank_0_has_announced_a_newer_one(slots: list[Slot]) -> None:
    node_state = NodeState(bytearray(NodeState.num_bytes(1)), (0,))
    node_state.format()
    snapshots, ring = Snapshots(node_state, node_state.row_of(0), 2, Budget(0.01)), SlotRing(slots)
    fill(slots[0], 70, attempt=1, boundary=7)
    ring.begin((1, 7), 2)
    for boundary, slot in enumerate(slots[1:], 1):
        fill(slot, 70 + boundary, attempt=2, boundary=boundary)
        snapshots.poll(slots, 3)
        assert ring.take() is not slots[0], "it may be nowhere else"
    assert {slot.complete for slot in slots} == {(1, 7)}
    assert node_state.announce(Announcement(number=1, decided=1, complete=(1,)))
    snapshots.poll(slots, 3)
    assert {slot.complete for slot in slots} == {(2, 1)}
    assert ring.take() is slots[0]
