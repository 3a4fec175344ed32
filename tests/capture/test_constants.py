"""Constants: bytes written once a slot, a digest at every capture, one difference and they are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import safetensors.torch
import torch

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.pace import Pace
from flashckpt.memory.slot import SlotRing
from flashckpt.options import Options

from .accelerated import LARGE, Accelerated
from .content import Content, Live, State, bytes_of, newest


class Frozen(State):
    """A state with one parameter that has no gradient and is in no optimizer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.box = weight, {"w": weight}
        self.more: list[torch.Tensor] = []

    def walk(self, used_up):  # type: ignore[no-untyped-def]
        walk = super().walk(used_up)
        walk.leaves.append(Live("frozen.w", self.box["w"], "parameter", None, self.box, "w"))
        walk.guards.append((self.more, len(self.more)))
        for i, tensor in enumerate(self.more):
            walk.leaves.append(Live("frozen.more", tensor, "parameter", None, self.more, i))
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
    for target in loop.capture._targets.by_name.values():
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
    weight = torch.randn(LARGE)
    state = Frozen(weight)
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1))
    for step in range(1, 14):
        if step == 10:
            assert {row[0] for row in capture.describe()} == {"constant"}
            weight.numpy()[3] = 5.0
        assert capture.boundary(step, lambda: b"{}").captured
        assert sealer.drain(240)
        content = newest(ring)
        assert content.step == step
        assert content.torn == []
        assert content.leaves["frozen.w"] == bytes_of(weight)
    assert {row[0] for row in capture.describe()} == {"host"}
    capture.close()


def test_a_small_one_that_was_constant_when_resumed_is_stored_as_it_is(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    mask = torch.tensor([1.0, 0.0, 0.0, 1.0])
    state = Frozen(mask)
    capture = Capture(
        state, ring, sealer, Options(), schedule=Pace(1), constants={"frozen.w": digest_of(mask)}
    )
    for step in range(1, 14):
        if step == 10:
            mask.copy_(torch.tensor([0.0, 1.0, 1.0, 0.0]))
        content = captured(capture, ring, sealer, step)
        assert content.leaves["frozen.w"] == bytes_of(mask)
        assert constants_of(content) == []
    capture.close()


def test_another_plan_forgets_what_stands_in_the_slots(ring: SlotRing, sealer: _native.Sealer) -> None:
    state = Frozen(torch.randn(LARGE))
    first = state.named["a"] = {"a": torch.ones(3)}
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1))
    for step in range(1, 20):
        if step == 12:
            assert "constant" in {row[0] for row in capture.describe()}
            first["a"] = torch.ones(70)  # the constant keeps its index and moves in the image
        assert capture.boundary(step, lambda: b"{}").captured
        assert sealer.drain(240)
        content = newest(ring)
        assert content.torn == []
        assert content.leaves["frozen.w"] == bytes_of(state.weight)
    capture.close()


def digest_of(tensor: torch.Tensor) -> int:
    return _native.digest(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def captured(capture: Capture, ring: SlotRing, sealer: _native.Sealer, step: int) -> Content:
    assert capture.boundary(step, lambda: b"{}").captured
    assert sealer.drain(240)
    content = newest(ring)
    assert (content.step, content.torn) == (step, [])
    return content


def constants_of(content: Content) -> list[str]:
    constants = content.layout.constants
    return [leaf.name for leaf in constants.leaves] if constants is not None else []


def test_constants_stand_in_an_image_of_their_own(ring: SlotRing, sealer: _native.Sealer) -> None:
    state = Frozen(torch.randn(LARGE))
    state.named["a"] = {"a": torch.ones(3)}
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1))
    for step in range(1, 8):
        content = captured(capture, ring, sealer, step)
        assert content.leaves == {"frozen.w": bytes_of(state.weight), "a.a": bytes_of(torch.ones(3))}
        assert constants_of(content) == (["frozen.w"] if step > 3 else [])
    constants = content.layout.constants
    assert constants is not None
    start = content.layout.constants_start
    # As it stands there it is a file that the stock library opens.
    opened = safetensors.torch.load(content.image[start:])
    assert torch.equal(opened["frozen.w"], state.weight)
    assert set(safetensors.torch.load(content.image[: content.layout.shard.num_bytes])) == {"a.a"}
    capture.close()


@pytest.mark.parametrize("as_restored", [True, False])
def test_those_of_the_snapshot_that_was_restored_are_constants_at_once(
    ring: SlotRing, sealer: _native.Sealer, as_restored: bool
) -> None:
    state = Frozen(torch.randn(LARGE))
    known = {"frozen.w": digest_of(state.weight), "gone": 3}
    if not as_restored:
        state.weight[5] = 0.5
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1), constants=known)
    for step in range(1, 8):
        content = captured(capture, ring, sealer, step)
        assert content.leaves["frozen.w"] == bytes_of(state.weight)
        # One that differs is stored as it is in the first snapshot, and ordinary for good from the next on.
        assert constants_of(content) == (["frozen.w"] if as_restored or step == 1 else [])
    capture.close()


def test_one_that_is_trained_now_is_none_though_it_was_restored_as_one(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    model.bias.grad = torch.ones(4)
    known = {f"model.{name}": digest_of(each) for name, each in model.named_parameters()}
    state = State(model=model, optimizer=optimizer)
    capture = Capture(
        state, ring, sealer, Options(), schedule=Pace(1), optimizers=[optimizer], constants=known
    )
    assert capture.boundary(1, lambda: b"{}", ordered=True).captured
    assert sealer.drain(240)
    assert constants_of(newest(ring)) == []
    capture.close()


def test_one_that_changes_before_its_slot_comes_round_again_is_seen(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    """Each of three slots gets its first copy: no slot has an older one to compare with."""
    state = Frozen(torch.randn(LARGE))
    known = {"frozen.w": digest_of(state.weight)}
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1), constants=known)
    assert constants_of(captured(capture, ring, sealer, 1)) == ["frozen.w"]
    state.weight.numpy()[7] = 2.0
    assert captured(capture, ring, sealer, 2).leaves["frozen.w"] == bytes_of(state.weight)
    assert constants_of(captured(capture, ring, sealer, 3)) == []
    assert captured(capture, ring, sealer, 4).leaves["frozen.w"] == bytes_of(state.weight)
    capture.close()


def test_one_that_is_not_row_major_is_a_constant_too(ring: SlotRing, sealer: _native.Sealer) -> None:
    weight = torch.randn(800, 500).t()
    state = Frozen(weight)
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1))
    for step in range(1, 12):
        if step == 8:
            weight[2, 2] = 9.0
        content = captured(capture, ring, sealer, step)
        assert content.leaves["frozen.w"] == bytes_of(weight)
        assert constants_of(content) == (["frozen.w"] if 3 < step <= 8 else [])
    capture.close()


def test_on_a_device_too(loop: Accelerated) -> None:
    odd = torch.nn.Parameter(torch.randn(800, 500).t(), requires_grad=False)
    bytewise = torch.nn.Parameter(torch.full(((1 << 20) + 3,), 7, dtype=torch.uint8), requires_grad=False)
    for name, each in (("odd", odd), ("bytewise", bytewise)):
        loop.model.register_parameter(name, each)
        loop.device.adopt(each)
    constant(loop)
    assert {loop.ways()["model.odd"], loop.ways()["model.bytewise"]} == {"constant"}
    loop.kernel(lambda: odd.data.mul_(2))
    # Its bytes are copied each time: the snapshot in which the change is seen is exact.
    assert iterate(loop) == "exact"
    for _ in range(8):
        assert iterate(loop) == "exact"
    assert loop.ways()["model.odd"] == "clone"
    assert loop.ways()["model.bytewise"] == "constant"


def test_what_stands_between_the_last_leaf_and_a_constant_is_left_alone(loop: Accelerated) -> None:
    """A constant that is made row-major is cloned beside leaves, and its image's header lies between them."""
    odd = torch.nn.Parameter(torch.randn(800, 500).t(), requires_grad=False)
    loop.model.register_parameter("early", odd)  # the first of the constants
    loop.device.adopt(odd)
    constant(loop)
    assert loop.ways()["model.early"] == "constant"
    arrangement = loop.capture._following.current
    assert arrangement is not None
    arena, first = arrangement.transfers[0].arena, arrangement.plan.first_constant
    assert arena is not None
    assert {first - 1, first} <= set(arena.indexes)
    assert iterate(loop) == "exact"
    content = newest(loop.ring)
    assert content.layout.constants is not None
    start = content.layout.constants_start
    header = content.layout.constants.header
    assert content.image[start : start + len(header)] == header
