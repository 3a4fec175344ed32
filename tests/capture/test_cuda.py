"""The device ways on a real CUDA device. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.device import devices_of
from flashckpt.capture.digests import LeafDigests
from flashckpt.memory.slots import SlotRing
from flashckpt.options import Options

from .conftest import make_slot
from .content import State, bytes_of, newest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


class Loop:
    """A small model on the device, with the state as it was at each boundary cloned in stream order."""

    def __init__(self, sealer: _native.Sealer, optimizer: Any = torch.optim.AdamW, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 8)).cuda()
        self.optimizer = optimizer(self.model.parameters(), **how)
        self.state = State(model=self.model, optimizer=self.optimizer)
        self.sealer, self.step = sealer, 0
        self.inputs = torch.randn(64, 1024, device="cuda")

    def attach(self, ring: SlotRing, **options: Any) -> None:
        given = Options(**options)
        self.capture = Capture(
            self.state, ring, self.sealer, given, devices_of(self.state, given),
            optimizers=[self.optimizer], every=1,
        )  # fmt: skip

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()

    def iterate(self, ring: SlotRing, *, behind: bool = False) -> None:
        """behind: the device is far behind the host when the boundary comes, and the host goes on."""
        if behind:
            torch.cuda._sleep(100_000_000)
        self.train()
        reference = {live.name: live.tensor.detach().clone() for live in self.state.walk_now()}
        self.step += 1
        assert self.capture.boundary(self.step, lambda: b"{}", ordered=True).captured
        if behind:
            self.train()
        torch.cuda.synchronize()
        assert self.sealer.drain(30)
        content = newest(ring)
        assert content.step == self.step
        assert content.torn == []
        leaves = {k: v for k, v in content.leaves.items() if not k.endswith(".grad")}
        assert leaves == {name: bytes_of(tensor.cpu()) for name, tensor in reference.items()}

    def ways(self) -> set[str]:
        return {row[0] for row in self.capture.describe()}


@pytest.fixture
def large_ring() -> Iterator[SlotRing]:
    slots = [make_slot(i, 1 << 20, 64 << 20) for i in range(3)]
    yield SlotRing(slots)
    for slot in slots:
        slot.close()


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("memory", "ways"), [(None, {"clone", "host"}), (0, {"clone", "gate", "host"})])
def test_snapshots_are_exact(
    sealer: _native.Sealer, large_ring: SlotRing, behind: bool, memory: int | None, ways: set[str]
) -> None:
    loop = Loop(sealer)
    loop.attach(large_ring, device_memory=memory)
    for _ in range(6):
        loop.iterate(large_ring, behind=behind)
    assert loop.ways() == ways
    loop.capture.close()


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"capturable": True}])
def test_every_kind_of_step(sealer: _native.Sealer, large_ring: SlotRing, how: dict[str, bool]) -> None:
    loop = Loop(sealer, **how)
    loop.attach(large_ring, device_memory=0)
    for _ in range(5):
        loop.iterate(large_ring, behind=True)
    loop.capture.close()


def test_a_named_stream_is_waited_for(sealer: _native.Sealer, large_ring: SlotRing) -> None:
    loop = Loop(sealer)
    named = torch.cuda.Stream()
    loop.attach(large_ring, streams=(named,))
    for _ in range(4):
        loop.iterate(large_ring)
    loop.train()
    torch.cuda.synchronize()
    expected = loop.model[0].weight.detach() * 2
    with torch.cuda.stream(named):
        torch.cuda._sleep(100_000_000)
        loop.model[0].weight.data.mul_(2)
    assert loop.capture.boundary(9, lambda: b"{}", ordered=True).captured
    torch.cuda.synchronize()
    assert sealer.drain(30)
    content = newest(large_ring)
    assert content.torn == []
    assert content.leaves["model.0.weight"] == bytes_of(expected.cpu())
    loop.capture.close()


def test_a_graph_that_is_captured_beside_it_is_not_broken(
    sealer: _native.Sealer, large_ring: SlotRing
) -> None:
    loop = Loop(sealer, capturable=True)
    loop.attach(large_ring)
    for _ in range(4):
        loop.iterate(large_ring)
    loop.optimizer.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.optimizer.zero_grad(set_to_none=False)
        loop.model(loop.inputs).square().mean().backward()
        loop.optimizer.step()
        assert not loop.capture.boundary(98, lambda: b"{}", ordered=True).captured
    for step in range(100, 112):
        graph.replay()
        reference = {live.name: live.tensor.detach().clone() for live in loop.state.walk_now()}
        loop.capture.boundary(step, lambda: b"{}", ordered=True)
        torch.cuda.synchronize()
        assert sealer.drain(30)
        content = newest(large_ring)
        if content.step == step and not content.torn:
            for name, tensor in reference.items():
                assert content.leaves[name] == bytes_of(tensor.cpu())
    assert content.step == 111
    loop.capture.close()


@pytest.mark.parametrize("count", [1, 1023, 1024, 5_000_001])
def test_digests_equal_the_native_ones(count: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    out = torch.zeros((), dtype=torch.int64, device="cuda")
    digests = LeafDigests(lambda n: torch.empty(n, dtype=torch.uint8, device="cuda"), 4 * count)
    digests.into(words.cuda(), out)
    assert out.item() % 2**64 == _native.digest(words.data_ptr(), 4 * count)
