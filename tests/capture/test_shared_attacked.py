"""Constants in a region that slots share, attacked: what changes, what is refused, what it costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashckpt import _native
from flashckpt.capture.shared import Shared
from flashckpt.memory.slot import SlotRing

from .accelerated import LARGE, Accelerated
from .conftest import make_slot
from .content import newest

SLOT_BYTES = 28 << 20


class Shares(Accelerated):
    """With two parameters that nothing trains, on the device."""

    def __init__(self, ring: SlotRing, sealer: _native.Sealer) -> None:
        super().__init__(ring, sealer)
        for name in ("frozen", "still"):
            frozen = torch.nn.Parameter(torch.randn(LARGE), requires_grad=False)
            self.model.register_parameter(name, frozen)
            self.device.adopt(frozen)

    def backward(self) -> None:
        for parameter in (self.model.a, self.model.b):
            parameter.grad = torch.randn_like(parameter)
            self.device.adopt(parameter.grad)

    def share(self) -> Shared:
        """Once both are constants: they are left to a region from the next capture on."""
        for _ in range(12):
            self.iterate()
            self.finish()
        layout = self.capture.sharing_wanted()
        assert layout is not None
        assert [leaf.name for leaf in layout.leaves] == ["model.frozen", "model.still"]
        shared = Shared("constants-00000-0000000000000009", 9, layout, digests_of(self, layout.leaves))
        self.capture.share(shared)
        self.iterate()
        self.finish()
        assert self.named() == 9
        return shared

    def named(self) -> int:
        found = self.ring.newest_sealed()
        assert found is not None
        return found[1].record.constants_nonce


def digests_of(loop: Accelerated, leaves: object) -> tuple[int, ...]:
    found = loop.ring.newest_sealed()
    assert found is not None
    metadata = found[0].metadata(found[1])
    return tuple(metadata.constants_digests)


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    slots = [make_slot(i, 1 << 20, SLOT_BYTES) for i in range(3)]
    yield SlotRing(slots)
    for slot in slots:
        slot.close()


@pytest.fixture
def loop(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Shares]:
    loop = Shares(ring, sealer)
    yield loop
    loop.close()


def test_one_that_changed_is_not_taken_for_torn_where_the_keeper_was_faster(loop: Shares) -> None:
    """The keeper discards the snapshot: its region has other bytes. Nothing was written while it was copied,
    and no leaf need be waited for from then on."""
    loop.share()
    loop.kernel(lambda: loop.model.frozen.data.mul_(2))
    loop.train()
    loop.boundary()
    loop.device.side.release()
    loop.device.compute.release()
    loop.device.side.drain()
    loop.device.compute.drain()
    assert loop.sealer.drain(240)
    found = loop.ring.newest_sealed()
    assert found is not None
    slot, sealed = found
    assert sealed.step == loop.step
    names = [leaf.name for leaf in slot.metadata(sealed).leaves]
    slot.free(slot.state())
    slot.set_torn(sealed.generation, [names.index("model.frozen")])
    loop.finish()
    for _ in range(3):
        loop.iterate()
        loop.finish()
    ways = loop.ways()
    assert ways["model.still"] == "constant"
    assert ways["model.frozen"] not in ("constant", "wait")
    assert not loop.capture._ways.synchronised("model.frozen")
    assert loop.named() == 0


def test_slots_are_not_made_anew_to_spare_a_small_part_of_them(loop: Shares) -> None:
    for name in ("large", "larger"):
        loop.add(name, torch.zeros(8 * LARGE))
    loop.share()
    assert [slot.size.image_bytes for slot in loop.ring.slots] == [SLOT_BYTES] * 3
    assert loop.capture.room_to_spare() is None


def test_slots_that_are_mostly_constants_are(loop: Shares) -> None:
    loop.share()
    spare = loop.capture.room_to_spare()
    assert spare is not None
    assert spare.with_slack().image_bytes < SLOT_BYTES


def test_whether_a_region_could_be_taken_up_is_known_without_waiting(loop: Shares) -> None:
    loop.share()
    loop.device.side.hold()
    loop.iterate()
    assert loop.capture.is_copying
    loop.finish()
    assert not loop.capture.is_copying


def test_a_further_constant_is_copied_where_the_slots_are_too_small_for_all(loop: Shares) -> None:
    """Else nothing would be captured from then on, until there is memory for slots that hold all of them."""
    loop.share()
    third = torch.nn.Parameter(torch.randn(LARGE), requires_grad=False)
    loop.model.register_parameter("third", third)
    loop.device.adopt(third)
    small = SlotRing([make_slot(i, 1 << 20, 7 << 20, nonce=8) for i in range(3)])
    loop.capture.set_slots(small)
    loop.ring = small
    for _ in range(12):
        assert loop.iterate().captured
        loop.finish()
        assert loop.named() == 9
        assert set(newest(loop.ring).torn) <= {"model.frozen", "model.still"}, "those are elsewhere"
    assert loop.ways()["model.third"] != "constant"
    layout = loop.capture.sharing_wanted()
    assert layout is not None
    assert [leaf.name for leaf in layout.leaves] == ["model.frozen", "model.still", "model.third"]
    loop.capture.set_slots(None)
    for slot in small.slots:
        slot.close()


def test_a_region_with_a_constant_that_is_none_any_more_is_not_named_again(loop: Shares) -> None:
    loop.share()
    assert loop.capture.may_name_shared
    loop.kernel(lambda: loop.model.frozen.data.mul_(2))
    for _ in range(4):
        loop.iterate()
        loop.finish()
    assert not loop.capture.may_name_shared
    assert loop.named() == 0


def test_a_constant_that_has_left_the_state_is_waited_for_no_more(loop: Shares) -> None:
    """Else a region with what it already holds would be asked for, and filled, for ever."""
    loop.share()
    third = torch.nn.Parameter(torch.randn(LARGE), requires_grad=False)
    loop.model.register_parameter("third", third)
    loop.device.adopt(third)
    for _ in range(12):
        loop.iterate()
        loop.finish()
    layout = loop.capture.sharing_wanted()
    assert layout is not None
    assert len(layout.leaves) == 3
    del loop.model.third
    loop.iterate()
    loop.finish()
    assert loop.named() == 9
    assert loop.capture.sharing_wanted() is None
