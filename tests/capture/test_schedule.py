"""A capture that follows the terms of another rank: which steps it takes, and which of them are persisted."""

from __future__ import annotations

import pytest

from flashckpt import _native
from flashckpt.memory.slot import SlotRing

from .followed import Followed, Terms
from .test_host import Run, check


def following(ring: SlotRing | None, sealer: _native.Sealer, *terms: Terms) -> tuple[Run, Followed]:
    schedule = Followed(0.01)
    for each in terms:
        schedule.follow(each)
    return Run(ring, sealer, schedule=schedule), schedule


def taken(run: Run, until: int) -> list[int]:
    """The steps that are taken of those up to `until`."""
    found = []
    while run.step < until:
        if run.iterate().captured:
            found.append(run.step)
            run.landed()
    return found


def test_nothing_is_taken_before_there_are_terms(ring: SlotRing, sealer: _native.Sealer) -> None:
    run, schedule = following(ring, sealer)
    assert taken(run, 5) == []
    schedule.follow(Terms(from_step=8, capture_every=3))
    assert taken(run, 15) == [8, 11, 14]
    run.capture.close()


def test_a_rank_takes_and_persists_the_steps_of_the_terms(ring: SlotRing, sealer: _native.Sealer) -> None:
    run, _ = following(ring, sealer, Terms(from_step=2, capture_every=4, persist_at=7))
    found = []
    for _ in range(12):
        outcome = run.iterate()
        if outcome.captured:
            check(run, ring)
            newest = ring.newest_sealed()
            assert newest is not None
            found.append((run.step, newest[0].asked == newest[1].generation))
    assert found == [(2, False), (6, False), (7, True), (10, False)]
    run.capture.close()


def test_new_terms_take_effect_at_their_step(ring: SlotRing, sealer: _native.Sealer) -> None:
    run, schedule = following(ring, sealer, Terms(from_step=1, capture_every=2))
    assert taken(run, 3) == [1, 3]
    schedule.follow(Terms(from_step=8, capture_every=3))
    schedule.follow(Terms(from_step=15, capture_every=100, persist_at=16))
    schedule.follow(Terms(from_step=4, capture_every=1))  # late: newer ones are known
    assert taken(run, 20) == [5, 7, 8, 11, 14, 15, 16]
    run.capture.close()


def test_a_step_that_was_missed_is_not_taken_later(ring: SlotRing, sealer: _native.Sealer) -> None:
    """It is void for all ranks: the next one of the terms is taken, and no other."""
    run, schedule = following(None, sealer, Terms(from_step=2, capture_every=3, persist_at=4))
    assert taken(run, 5) == []  # no slots yet
    run.capture.set_slots(ring)
    assert taken(run, 10) == [8]
    # Learned too late: some of its steps are over.
    schedule.follow(Terms(from_step=9, capture_every=2, persist_at=10))
    assert taken(run, 15) == [11, 13, 15]
    run.capture.close()


def test_an_order_is_taken_whatever_the_terms_say(ring: SlotRing, sealer: _native.Sealer) -> None:
    run, _ = following(ring, sealer, Terms(from_step=100, capture_every=1))
    run.capture.order()
    assert taken(run, 3) == [1]
    run.capture.close()


@pytest.mark.parametrize(
    ("from_step", "capture_every", "persist_at"), [(0, 1, None), (1, 0, None), (5, 1, 4), (5, 1, 0)]
)
def test_terms_that_cannot_be_are_refused(from_step: int, capture_every: int, persist_at: int | None) -> None:
    with pytest.raises(ValueError, match="no schedule"):
        Terms(from_step=from_step, capture_every=capture_every, persist_at=persist_at)
