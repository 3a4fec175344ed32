"""A capture that follows what rank 0 has announced: which boundaries it takes."""

from __future__ import annotations

from flashckpt import _native
from flashckpt.memory.slot import SlotRing
from flashckpt.ranks.board import Board
from flashckpt.ranks.messages import Terms
from flashckpt.ranks.schedule import Followed

from .test_host import Run, check


def following(ring: SlotRing | None, sealer: _native.Sealer, *terms: Terms) -> tuple[Run, Followed]:
    board = Board(bytearray(Board.num_bytes(1)), (0,))
    board.format()
    schedule = Followed(board.rows[0], 0.01, is_automatic=False)
    for each in terms:
        schedule.follow((each,))
    return Run(ring, sealer, schedule=schedule), schedule


def taken(run: Run, until: int) -> list[int]:
    """The boundaries that are taken of those up to `until`."""
    found = []
    while run.step < until:
        run.capture.ordinal += 1
        if run.iterate().captured:
            found.append(run.step)
            run.landed()
    return found


def test_nothing_is_taken_before_there_are_terms(ring: SlotRing, sealer: _native.Sealer) -> None:
    run, schedule = following(ring, sealer)
    assert taken(run, 5) == []
    schedule.follow((Terms(1, 8, 3),))
    assert taken(run, 15) == [8, 11, 14]
    run.capture.close()


def test_a_rank_takes_the_boundaries_of_the_terms_and_persists_none(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    """What is persisted is said once all ranks have it."""
    run, _ = following(ring, sealer, Terms(1, 2, 4, 7, 3))
    assert taken(run, 10) == [2, 6, 7, 10]
    check(run, ring)
    assert all(slot.asked == 0 for slot in ring.slots)
    run.capture.close()


def test_new_terms_take_effect_at_their_boundary(ring: SlotRing, sealer: _native.Sealer) -> None:
    run, schedule = following(ring, sealer, Terms(1, 1, 2))
    assert taken(run, 3) == [1, 3]
    schedule.follow((Terms(1, 1, 2), Terms(2, 8, 3)))
    assert taken(run, 12) == [5, 7, 8, 11]
    schedule.follow((Terms(2, 8, 3), Terms(3, 15, 100)))
    schedule.follow((Terms(1, 1, 2), Terms(2, 4, 1)))  # late: newer ones are known
    assert taken(run, 20) == [14, 15]
    run.capture.close()


def test_a_boundary_that_was_missed_is_not_taken_later(ring: SlotRing, sealer: _native.Sealer) -> None:
    """It is void for all ranks: the next one of the terms is taken, and no other."""
    run, schedule = following(None, sealer, Terms(1, 2, 3))
    assert taken(run, 5) == []  # no slots yet
    run.capture.set_slots(ring)
    assert taken(run, 10) == [8]
    # Learned too late: some of its boundaries are over.
    schedule.follow((Terms(2, 9, 2),))
    assert taken(run, 15) == [11, 13, 15]
    run.capture.close()


def test_one_that_falls_into_an_accumulation_is_taken_at_its_end(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    """On all ranks alike: none can take one in its midst."""
    run, schedule = following(ring, sealer, Terms(1, 6, 100))
    assert [schedule.due(each, each) for each in (5, 6, 7)] == [False, True, True]
    schedule.qualifies()
    assert not schedule.due(8, 8)
    run.capture.close()


def test_an_order_is_taken_whatever_the_terms_say(ring: SlotRing, sealer: _native.Sealer) -> None:
    run, _ = following(ring, sealer, Terms(1, 100, 1))
    run.capture.order()
    assert taken(run, 3) == [1]
    run.capture.close()
