"""A capture that follows the announcements of rank 0: the boundaries that it captures."""

from flashckpt import _native
from flashckpt.memory.slot import SlotRing
from flashckpt.ranks.joint_coordination import Followed
from flashckpt.ranks.messages import Announcement
from flashckpt.ranks.node_state import NodeState

from .test_host import Run, check


def following(
    ring: SlotRing | None, sealer: _native.Sealer, every: int = 0, also: int = 0
) -> tuple[Run, Followed]:
    node_state = NodeState(bytearray(NodeState.num_bytes(1)), (0,))
    node_state.format()
    schedule = Followed(node_state.rows[0], 0.01)
    schedule.follow(Announcement(every=every, also=also))
    return Run(ring, sealer, schedule=schedule), schedule


def taken(run: Run, until: int) -> list[int]:
    """Return the captured boundaries up to `until`."""
    found = []
    while run.step < until:
        run.capture.boundary_index += 1
        if run.iterate().captured:
            found.append(run.step)
            run.landed()
    return found


def test_no_boundary_is_captured_before_an_announcement(ring: SlotRing, sealer: _native.Sealer) -> None:
    run, schedule = following(ring, sealer)
    assert taken(run, 5) == []
    schedule.follow(Announcement(every=3))
    assert taken(run, 15) == [6, 9, 12, 15]
    schedule.follow(Announcement(every=5))
    assert taken(run, 26) == [20, 25]
    run.capture.close()


def test_a_rank_captures_the_announced_boundaries_and_persists_none(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    """Persisting is announced once all ranks have sealed."""
    run, _ = following(ring, sealer, 4, also=7)
    assert taken(run, 14) == [4, 7, 8, 12, 14]
    check(run, ring)
    assert all(slot.asked == 0 for slot in ring.slots)
    run.capture.close()


def test_a_missed_boundary_is_not_captured_later(ring: SlotRing, sealer: _native.Sealer) -> None:
    """It is incomplete for all ranks; the next announced boundary is captured instead."""
    run, _ = following(None, sealer, 3)
    assert taken(run, 7) == []  # no slots yet
    run.capture.set_slots(ring)
    assert taken(run, 10) == [9]
    run.capture.close()


def test_a_boundary_inside_an_accumulation_is_captured_at_its_end(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    """On all ranks, because none can capture in the middle."""
    run, schedule = following(ring, sealer, 6)
    assert [schedule.due(each, each) for each in (5, 6, 7)] == [False, True, True]
    schedule.qualifies()
    assert not schedule.due(8, 8)
    run.capture.close()
