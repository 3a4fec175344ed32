"""What stays in a rank's slots while the ranks of a new attempt have nothing yet that all of them hold."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashckpt.checkpointer.slots import Slots
from flashckpt.format.names import AttemptName
from flashckpt.keeper.client import SlotGrant
from flashckpt.memory.region import SlotSize
from flashckpt.memory.slot import Slot, SlotState
from flashckpt.options import Options
from tests.memory.test_slot import fill, make
from tests.waiting import until

SIZE = SlotSize(4096, 8192)


class Kept:
    """Four slots that survived, as the keeper sees them: of attempt 1 the boundaries 5, 7 and 8."""

    def __init__(self) -> None:
        self.slots = [make(index) for index in range(6)]
        for slot, boundary in zip(self.slots, (5, 7, 8), strict=False):
            fill(slot, boundary, boundary=boundary)
            slot.set_complete(1, 7)
        self.given = self.slots[:4]

    def grants(self, *_: object) -> list[SlotGrant]:
        given, self.given = self.given, self.slots[4:]
        return [SlotGrant(os.dup(each.descriptor), each.name, 1, "memfd", 4 * 4096) for each in given]


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    for slot in made.slots:
        slot.close()


def slots_of(kept: Kept, complete: tuple[int, int]) -> Slots:
    """Those of a trainer of attempt 2."""
    keeper = SimpleNamespace(slots=kept.grants, release=lambda _: None, available_bytes=0)
    session = SimpleNamespace(keeper=keeper, attempt=AttemptName(2, "0" * 8), complete=complete)
    capture = SimpleNamespace(region=None, numa_node=-1, register=lambda _: None, set_slots=lambda *_: None)
    made = Slots(cast(Any, session), cast(Any, capture), Options(), lambda *_: None, lambda: None)
    given(made)
    return made


def given(slots: Slots) -> None:
    slots.ask(SIZE)
    until(lambda: slots.tend() or slots.ready, "slots")
    slots.adopt()


def filled(slots: Slots, boundary: int) -> Slot | None:
    """The slot that takes this boundary of attempt 2."""
    slot = slots.ring.take()
    if slot is not None:
        fill(slot, 100 + boundary, attempt=2, boundary=boundary)
    return slot


def boundaries(kept: Kept) -> list[tuple[int, int]]:
    return sorted(each.order for slot in kept.slots if (each := slot.sealed()) is not None)


def test_what_all_went_on_from_stays_until_all_have_a_newer_one(kept: Kept) -> None:
    slots = slots_of(kept, (1, 7))
    assert kept.slots[2].state().state is SlotState.FREE, (
        "only this rank may have it, and nobody goes on there"
    )
    for boundary in (1, 2, 3):
        assert filled(slots, boundary) is not None
    assert boundaries(kept) == [(1, 7), (2, 1), (2, 2), (2, 3)]
    assert filled(slots, 4) is None, "each may be the next that all have"
    slots.ring.set_complete(2, 1)
    assert filled(slots, 4) is not None
    assert boundaries(kept) == [(2, 1), (2, 2), (2, 3), (2, 4)]
    slots.close()


def test_slots_that_come_later_know_what_is_complete_by_then(kept: Kept) -> None:
    slots = slots_of(kept, (1, 7))
    assert slots.ring is not None
    for boundary in (1, 2):
        filled(slots, boundary)
        slots.ring.set_complete(2, boundary)
    given(slots)
    assert {slot.complete for slot in slots.ring.slots} == {(2, 2)}
    slots.close()
