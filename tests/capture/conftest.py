"""Slots and a small state for the tests of the capture."""

from collections.abc import Iterator

import pytest

from flashckpt import _native
from flashckpt.memory.slot import SlotRing

from .accelerated import Accelerated, Maker
from .content import make_slot


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    slots = [make_slot(i, 1 << 20, 16 << 20) for i in range(3)]
    yield SlotRing(slots)
    for slot in slots:
        slot.close()


@pytest.fixture
def sealer() -> Iterator[_native.Sealer]:
    sealer = _native.Sealer()
    yield sealer
    sealer.close()


@pytest.fixture
def make(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Maker]:
    made: list[Accelerated] = []

    def maker(**options: object) -> Accelerated:
        made.append(Accelerated(ring, sealer, **options))
        return made[-1]

    yield maker
    for each in made:
        each.close()
