"""Constants in a region that slots share, attacked: what changes, what is refused, what it costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.shared import Shared
from flashckpt.memory.slots import SlotRing
from flashckpt.options import Options

from .accelerated import LARGE, Accelerated
from .conftest import make_slot
from .content import State


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
    assert loop.sealer.drain(20.0)
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
