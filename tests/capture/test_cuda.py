"""The device ways on a real CUDA device. Skipped without one."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture import Capture, Verdict, copies, devices
from flashckpt.capture.devices import devices_of
from flashckpt.capture.schedule import Pace
from flashckpt.memory.slot import Slot, SlotRing
from flashckpt.options import Options

from .conftest import make_slot
from .content import State, bytes_of, newest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


class Loop:
    """A small model on the device. The state at each boundary is cloned in stream order. `more`: further
    tensors of the state. `exact` counts the snapshots that were compared with the clones."""

    def __init__(
        self,
        sealer: _native.Sealer,
        optimizer: Any = torch.optim.AdamW,
        more: dict[str, Tensor] | None = None,
        **how: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 8)).cuda()
        self.optimizer = optimizer(self.model.parameters(), **how)
        self.state = State(model=self.model, optimizer=self.optimizer, more=more)
        self.sealer, self.step, self.exact = sealer, 0, 0
        self.inputs = torch.randn(64, 1024, device="cuda")

    def attach(self, ring: SlotRing, **options: Any) -> None:
        given = Options(**options)
        self.devices = devices_of((live.tensor for live in self.state.walk_now()), given.streams)
        self.capture = Capture(
            self.state, ring, self.sealer, given, self.devices, optimizers=[self.optimizer], schedule=Pace(1)
        )

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()

    def iterate(self, ring: SlotRing, *, behind: bool = False) -> None:
        """Run one iteration. behind: at the boundary, the device is far behind the host, which continues."""
        if behind:
            torch.cuda._sleep(100_000_000)
        self.train()
        reference = {live.name: live.tensor.detach().clone() for live in self.state.walk_now()}
        self.step += 1
        assert self.capture.boundary(self.step, lambda: b"{}", ordered=True).captured
        if behind:
            self.train()
        torch.cuda.synchronize()
        assert self.sealer.drain(240)
        content = newest(ring)
        assert content.step == self.step
        assert content.torn == []
        leaves = {k: v for k, v in content.leaves.items() if not k.startswith("gradients.")}
        assert leaves == {name: bytes_of(tensor.cpu()) for name, tensor in reference.items()}
        self.exact += 1

    def ways(self) -> set[str]:
        return {row[0] for row in self.capture.describe()}


@pytest.fixture
def large_ring() -> Iterator[SlotRing]:
    slots = [make_slot(i, 1 << 20, 64 << 20) for i in range(3)]
    yield SlotRing(slots)
    for slot in slots:
        slot.close()


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("memory", "ways"), [(1 << 30, {"clone", "host"}), (0, {"clone", "gate", "host"})])
def test_snapshots_are_exact(
    sealer: _native.Sealer, large_ring: SlotRing, behind: bool, memory: int, ways: set[str]
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
    assert loop.exact == 5
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
    assert sealer.drain(240)
    content = newest(large_ring)
    assert content.torn == []
    assert content.leaves["model.0.weight"] == bytes_of(expected.cpu())
    loop.capture.close()


def test_a_concurrent_graph_capture_stays_valid(sealer: _native.Sealer, large_ring: SlotRing) -> None:
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
        assert sealer.drain(240)
        content = newest(large_ring)
        if content.step == step and not content.torn:
            for name, tensor in reference.items():
                assert content.leaves[name] == bytes_of(tensor.cpu())
    assert content.step == 111
    loop.capture.close()


def test_a_graph_can_be_captured_while_copies_and_registrations_run(
    sealer: _native.Sealer, large_ring: SlotRing
) -> None:
    """Copies wait for a kernel while the graph is captured, and another thread registers a slot."""
    loop = Loop(sealer)
    loop.attach(large_ring)
    for _ in range(4):
        loop.iterate(large_ring)
    counted = torch.zeros(1000, device="cuda")
    ready = make_slot(7, 1 << 20, 64 << 20)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    loop.step += 1
    assert loop.capture.boundary(loop.step, lambda: b"{}", ordered=True).captured
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        counted.add_(1)
        registering = threading.Thread(target=loop.capture.register, args=([ready],))
        registering.start()
        registering.join()
        outcome = loop.capture.boundary(loop.step + 1, lambda: b"{}", due=True)
        graph.capture_end()
    assert outcome.verdict is not Verdict.CAPTURED
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert counted.eq(1).all()
    assert sealer.drain(240)
    content = newest(large_ring)
    assert (content.step, content.torn) == (loop.step, [])
    loop.step += 1
    loop.iterate(large_ring)
    loop.capture.close()
    ready.close()


def test_slots_are_registered_while_they_are_mapped(sealer: _native.Sealer, large_ring: SlotRing) -> None:
    """Addresses are reused: a stale registration would be refused, or would refer to other pages."""
    loop = Loop(sealer)
    loop.attach(large_ring)
    for number in range(12):
        slot = make_slot(10 + number, 1 << 20, (8 + number % 3) << 20)
        loop.capture.register([slot])
        if number % 2:
            slot.close()
        else:  # dropped without a close: the object unmaps the memory and keeps the descriptor
            os.close(slot.descriptor)
        del slot
    loop.iterate(large_ring)
    slots = [make_slot(30 + number, 1 << 20, 64 << 20) for number in range(3)]
    loop.capture.set_slots(SlotRing(slots))
    for slot in large_ring.slots:
        slot.close()
    for _ in range(3):
        loop.iterate(SlotRing(slots))
    assert loop.exact == 4
    loop.capture.close()
    for slot in slots:
        slot.close()


class _Refusing:
    def register(self, device: int) -> None:
        raise RuntimeError("CUDA refused to register host memory: OUT_OF_MEMORY")


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_a_registration_that_is_refused_costs_speed_and_no_snapshots(
    sealer: _native.Sealer,
    large_ring: SlotRing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    memory: int,
) -> None:
    monkeypatch.setattr(Slot, "mapping", _Refusing())
    loop = Loop(sealer)
    loop.attach(large_ring, device_memory=memory)
    for _ in range(5):
        loop.iterate(large_ring, behind=True)
    assert caplog.text.count("stays pageable") == 1
    loop.capture.close()


def test_without_the_kernel_snapshots_are_as_exact(
    sealer: _native.Sealer, large_ring: SlotRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "why_no_kernel", lambda index: "a test asked for it")
    odd = torch.randint(0, 255, (1_100_001,), dtype=torch.uint8, device="cuda")
    loop = Loop(sealer, more={"odd": odd, "shifted": odd[3:5000]})
    loop.attach(large_ring)
    for _ in range(5):
        loop.iterate(large_ring, behind=True)
    assert loop.ways() == {"host"}
    loop.capture.close()


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_tensors_of_every_kind(sealer: _native.Sealer, large_ring: SlotRing, memory: int) -> None:
    data = torch.randint(0, 255, (3_000_001,), dtype=torch.uint8, device="cuda")
    more = {
        "channels_last": torch.randn(64, 32, 8, 9, device="cuda").to(memory_format=torch.channels_last),
        "transposed": torch.randn(1000, 700, device="cuda").t(),
        "conjugated": torch.randn(500, dtype=torch.complex64, device="cuda").conj(),
        "shifted": data[1:2_000_000],
        "odd": data[5:1_500_000].clone(),
        "half": torch.randn(1_000_003, device="cuda").to(torch.bfloat16)[1:],
        "byte": data[7:8],
        "none": torch.empty(0, 5, device="cuda"),
        "host": torch.randn(77),
        "flags": torch.rand(12_345, device="cuda") > 0.5,
        "wide": torch.randn(9, dtype=torch.complex128, device="cuda"),
    }
    loop = Loop(sealer, more=more)
    loop.attach(large_ring, device_memory=memory)
    for _ in range(5):
        data.add_(1)
        loop.iterate(large_ring, behind=True)
    assert loop.exact == 5
    loop.capture.close()


def test_a_default_device_is_for_the_users_tensors(sealer: _native.Sealer, large_ring: SlotRing) -> None:
    loop = Loop(sealer, more={"turned": torch.randn(30, 20).t(), "there": torch.randn(30, 20).cuda().t()})
    with torch.device("cuda"):
        loop.attach(large_ring)
        for _ in range(3):
            loop.iterate(large_ring)
    assert loop.exact == 3
    loop.capture.close()


def test_memory_that_moves_patches_the_table(sealer: _native.Sealer, large_ring: SlotRing) -> None:
    loop = Loop(sealer)
    loop.attach(large_ring)
    for _ in range(6):
        loop.iterate(large_ring, behind=True)
        for parameter in loop.model.parameters():
            parameter.data = parameter.data.clone() + 1
    assert loop.exact == 6
    loop.capture.close()


def test_only_streams_of_the_state_are_checked_for_graph_captures(sealer: _native.Sealer) -> None:
    named, other = torch.cuda.Stream(), torch.cuda.Stream()
    [device] = devices_of([torch.zeros(1, device="cuda")], (named,))
    assert not device.capturing()
    for stream, expected in ((named, True), (other, False)):
        graph = torch.cuda.CUDAGraph()
        value = torch.zeros(10, device="cuda")
        torch.cuda.synchronize()
        found: list[bool] = []
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            value.add_(1)
            # Checked in another thread, on whose stream no graph is captured.
            asking = threading.Thread(target=lambda into=found: into.append(device.capturing()))
            asking.start()
            asking.join()
            assert device.capturing()  # here it is the current stream
            graph.capture_end()
        assert found == [expected]
    device.close()


def test_elapsed_time_does_not_invalidate_a_graph_of_another_thread() -> None:
    """The graph is on a stream that the library does not know, in the mode that forbids queries to all
    threads."""
    [device] = devices_of([torch.zeros(1, device="cuda")])
    start, end = device.new_mark(timing=True), device.new_mark(timing=True)
    device.mark(start)
    torch.cuda._sleep(1_000_000)
    device.mark(end)
    torch.cuda.synchronize()
    graph, value = torch.cuda.CUDAGraph(), torch.zeros(10, device="cuda")
    found: list[float | None] = []
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        value.add_(1)
        asking = threading.Thread(target=lambda: found.append(device.elapsed_s(start, end)))
        asking.start()
        asking.join()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert value.eq(1).all()
    [seconds] = found
    assert seconds is not None
    assert seconds > 0
    device.close()


@pytest.mark.parametrize("way", ["clone", "gate"])
def test_ten_thousand_leaves_do_not_block_the_training_thread(
    sealer: _native.Sealer,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
    way: str,
) -> None:
    """The device is busy at the boundary, and still is when the call returns."""
    monkeypatch.setattr(copies, "SMALL_BYTES", 256)
    calls: dict[int, float] = {}
    for count in (10, 10_000):
        slots = [make_slot(number, 16 << 20, 64 << 20, nonce=count) for number in range(3)]
        ring = SlotRing(slots)
        model = torch.nn.ParameterList([torch.full((128,), float(i), device="cuda") for i in range(count)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = State(model=model, optimizer=optimizer)
        devices = devices_of(model.parameters())
        memory = 0 if way == "gate" else 1 << 30
        capture = Capture(
            state,
            ring,
            sealer,
            Options(device_memory=memory),
            devices,
            optimizers=[optimizer],
            schedule=Pace(1),
        )
        for step in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            reference = [parameter.detach().clone() for parameter in model.parameters()]
            torch.cuda.synchronize()
            busy = torch.cuda.Event()
            torch.cuda._sleep(4_000_000_000 if step == 5 else 1000)  # two seconds, and more
            busy.record()
            began_s = time.perf_counter()
            assert capture.boundary(step, lambda: b"{}", ordered=True).captured
            calls[count] = time.perf_counter() - began_s
            if step == 5:
                assert not busy.query(), "the call waited for the device"
            torch.cuda.synchronize()
            assert sealer.drain(240)
            content = newest(ring)
            assert (content.step, content.torn) == (step, [])
        found = [content.leaves[f"model.{i}"] for i in range(count)]
        assert found == [bytes_of(tensor.cpu()) for tensor in reference]
        assert {row[0] for row in capture.describe()} == {way}
        capture.close()
        for slot in slots:
            slot.close()
    record_property("call_s", calls)


def test_the_kernel_equals_the_native_digest_at_every_alignment() -> None:
    assert devices.why_no_kernel(0) == ""
    data = torch.randint(0, 256, (6_000_000,), dtype=torch.uint8)
    live = data.cuda()
    sizes = [0, 1, 2, 3, 4, 7, 8, 63, 64, 65, 1000, 1023, 1024, 1025, 2047, 2048, 4096, 70_001, 5_000_001]
    places = [(start, size) for start in range(17) for size in sizes]
    leaves = [live[start : start + size] for start, size in places]
    room = sum(size + 64 for _, size in places)
    copied = torch.zeros(room, dtype=torch.uint8, device="cuda")
    starts, end = [], 0
    for number, (_, size) in enumerate(places):
        starts.append(end + number % 33)
        end += size + 64
    cloned = [bool(number % 3) and size > 0 for number, (_, size) in enumerate(places)]
    destinations = [copied.data_ptr() + start if is_cloned else 0 for start, is_cloned in zip(starts, cloned)]  # noqa: B905
    table = devices.CudaTable(0, leaves, np.array(destinations, dtype=np.uint64))
    out = torch.zeros(len(places), dtype=torch.int64, device="cuda")
    for _ in range(2):
        table.run(out)
    expected = [_native.digest(data.data_ptr() + start, size) for start, size in places]
    assert [digest % 2**64 for digest in out.tolist()] == expected
    result = copied.cpu()
    written = torch.zeros(room, dtype=torch.uint8)
    for (source, size), start, is_cloned in zip(places, starts, cloned, strict=True):
        if is_cloned:
            written[start : start + size] = data[source : source + size]
    assert torch.equal(result, written), "what is between the copies was not touched"


def test_the_digests_of_a_restore_equal_the_native_ones() -> None:
    from flashckpt.capture.devices import digest_tensors

    tensors = [torch.randn(1000, 33), torch.randn(40, 50).t(), torch.randn(7).to(torch.bfloat16)[1:]]
    there = [tensor.cuda() if tensor.is_contiguous() else tensor.t().cuda().t() for tensor in tensors]
    assert digest_tensors(there, 1) == digest_tensors(tensors, 1)
    assert digest_tensors(there + tensors, 1) == 2 * digest_tensors(tensors, 1)
