"""Modes of torch that are active at a boundary: a default device, inference mode."""

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.schedule import Pace
from flashckpt.memory.slot import SlotRing
from flashckpt.options import Options

from .accelerated import Accelerated
from .content import State, exact, newest


def test_leaves_in_host_memory(ring: SlotRing, sealer: _native.Sealer) -> None:
    """Leaves that are not row-major are read again into a new tensor."""
    state = State(more={"turned": torch.randn(30, 20).t(), "plain": torch.randn(5)})
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1))
    with torch.device("meta"):
        assert capture.boundary(1, lambda: b"{}").captured
    capture.wait()
    assert newest(ring).leaves == exact(state)
    assert not newest(ring).torn
    capture.close()


def test_leaves_on_a_device(ring: SlotRing, sealer: _native.Sealer) -> None:
    loop = Accelerated(ring, sealer)
    loop.add("turned", torch.randn(30, 20).t())
    for has_kernel in (True, False):
        loop.device.has_kernel = has_kernel
        loop.capture._planner.drop()
        for _ in range(2):
            loop.train()
            with torch.device("meta"):
                assert loop.boundary().captured
            assert loop.result() == "exact"
    loop.close()


@pytest.mark.parametrize("has_kernel", [True, False])
def test_boundaries_in_and_out_of_inference_mode(
    ring: SlotRing, sealer: _native.Sealer, has_kernel: bool
) -> None:
    """Tensors created at one boundary are written at another."""
    loop = Accelerated(ring, sealer)
    loop.device.has_kernel = has_kernel
    loop.add("turned", torch.randn(30, 20).t())
    loop.state.more["host"] = torch.randn(30, 20).t()
    with torch.inference_mode():
        loop.capture.set_slots(ring)
    for number in range(4):
        loop.train()
        with torch.inference_mode(number % 2 == 0):
            assert loop.boundary().captured
        assert loop.result() == "exact"
    loop.close()
