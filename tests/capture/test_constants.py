"""Constants: bytes written once a slot, a digest at every capture, one difference and they are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.memory.slots import SlotRing
from flashckpt.options import Options

from .accelerated import LARGE, Accelerated
from .content import Live, State, bytes_of, newest


class Frozen(State):
    """A state with one parameter that has no gradient and is in no optimizer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.box = weight, {"w": weight}

    def walk(self, used_up):  # type: ignore[no-untyped-def]
        walk = super().walk(used_up)
        walk.leaves.append(Live("frozen.w", self.box["w"], "parameter", None, self.box, "w"))
        return walk


@pytest.fixture
def loop(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Accelerated]:
    loop = Accelerated(ring, sealer)
    frozen = torch.nn.Parameter(torch.randn(LARGE), requires_grad=False)
    loop.model.register_parameter("frozen", frozen)
    loop.device.adopt(frozen)
    yield loop
    loop.close()


def iterate(loop: Accelerated) -> str:
    for parameter in (loop.model.a, loop.model.b):
        parameter.grad = torch.randn_like(parameter)
        loop.device.adopt(parameter.grad)
    loop.optimizer.step()
    loop.boundary()
    return loop.result()


def constant(loop: Accelerated) -> None:
    for _ in range(12):
        assert iterate(loop) == "exact"
    assert loop.ways()["model.frozen"] == "constant"
    assert "constant" not in {loop.ways()["model.a"], loop.ways()["optimizer.0.momentum"]}


def test_a_constant_is_copied_once_a_slot(loop: Accelerated) -> None:
    constant(loop)
    loop.device.side.hold()
    iterate_begins(loop)
    pieces = [loop.device.side.pending()]
    # Without its copy there are fewer pieces by those of the leaf: 1.2 MB in pieces of 128 KiB.
    for target in loop.capture._targets.values():
        target.kept.clear()
    loop.finish()
    loop.device.side.hold()
    iterate_begins(loop)
    pieces.append(loop.device.side.pending())
    assert pieces[1] - pieces[0] == -(-4 * LARGE // (128 << 10))
    assert loop.result() == "exact"


def iterate_begins(loop: Accelerated) -> None:
    loop.optimizer.step()
    loop.device.compute.drain()
    assert loop.boundary().captured


def test_a_constant_that_changes_is_never_believed_and_ordinary_from_then_on(loop: Accelerated) -> None:
    constant(loop)
    loop.kernel(lambda: loop.model.frozen.data.mul_(2))
    assert iterate(loop) in ("none", "torn")
    for _ in range(8):
        assert iterate(loop) == "exact"
    assert loop.ways()["model.frozen"] != "constant"


def test_on_the_host_a_changed_constant_is_seen_at_once(ring: SlotRing, sealer: _native.Sealer) -> None:
    weight = torch.randn(1000)
    state = Frozen(weight)
    capture = Capture(state, ring, sealer, Options(), every=1)
    for step in range(1, 14):
        if step == 10:
            assert {row[0] for row in capture.describe()} == {"constant"}
            weight.numpy()[3] = 5.0
        assert capture.boundary(step, lambda: b"{}").captured
        assert sealer.drain(10)
        content = newest(ring)
        assert content.step == step
        assert content.torn == []
        assert content.leaves["frozen.w"] == bytes_of(weight)
    assert {row[0] for row in capture.describe()} == {"host"}
    capture.close()


def test_another_plan_forgets_what_stands_in_the_slots(ring: SlotRing, sealer: _native.Sealer) -> None:
    state = Frozen(torch.randn(1000))
    first = state.named["a"] = {"a": torch.ones(3)}
    capture = Capture(state, ring, sealer, Options(), every=1)
    for step in range(1, 20):
        if step == 12:
            assert "constant" in {row[0] for row in capture.describe()}
            first["a"] = torch.ones(70)  # the constant keeps its index and moves in the image
        assert capture.boundary(step, lambda: b"{}").captured
        assert sealer.drain(10)
        content = newest(ring)
        assert content.torn == []
        assert content.leaves["frozen.w"] == bytes_of(state.weight)
    capture.close()
