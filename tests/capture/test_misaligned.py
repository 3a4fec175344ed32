"""A device leaf whose memory moves to an odd address, as a view into a flat buffer does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashckpt import _native
from flashckpt.memory.slot import SlotRing

from .accelerated import LARGE, Accelerated


@pytest.fixture
def loop(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Accelerated]:
    """No memory for clones: leaves are digested and copied in place."""
    loop = Accelerated(ring, sealer, room=0)
    half = torch.nn.Parameter(torch.randn(4 * LARGE).to(torch.bfloat16), requires_grad=False)
    loop.model.register_parameter("early", half)
    loop.device.adopt(half)
    yield loop
    loop.close()


def test_every_leaf_keeps_its_own_digest(loop: Accelerated) -> None:
    for _ in range(2):
        loop.iterate()
        assert loop.result() == "exact"
    flat = torch.empty(4 * LARGE + 2, dtype=torch.bfloat16)
    moved = flat[1:-1]
    moved.copy_(loop.model.early.data)
    loop.device.adopt(moved)
    loop.model.early.data = moved
    for _ in range(3):
        loop.iterate()
        assert loop.result() == "exact"
