"""The number of operations at a boundary is the same for a thousand leaves as for ten. A CUDA stream takes
about a thousand operations; the next call blocks the training thread."""

from collections.abc import Callable, Iterator

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Capture, copies
from flashckpt.capture.devices import Copies, StreamMark
from flashckpt.capture.schedule import Pace
from flashckpt.memory.slot import SlotRing
from flashckpt.options import Options
from tests.capture.simulated import SimulatedCopying, SimulatedDevice

from .accelerated import Descent
from .conftest import make_slot
from .content import State, newest

COUNTS = (10, 1_000)


class Counting(SimulatedDevice):
    """Counts the operations that the training thread enqueues and, separately, the copies that it passes to
    another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: list[int] = []

    def copy_to_host(self, copies: Copies, num_first: int, after: StreamMark) -> SimulatedCopying:
        self.handed.append(len(copies))
        return super().copy_to_host(copies, num_first, after)


@pytest.fixture(autouse=True)
def _leaves_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the small leaves of these tests as large ones: so many leaves of 1 MiB need too much memory."""
    monkeypatch.setattr(copies, "SMALL_BYTES", 256)


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    slots = [make_slot(i, 4 << 20, 8 << 20) for i in range(3)]
    yield SlotRing(slots)
    for slot in slots:
        slot.close()


def counted(ring: SlotRing, sealer: _native.Sealer, way: str, count: int) -> tuple[int, list[int]]:
    """Return (operations of the training thread, copies of each job) of the fifth capture of a state with
    `count` leaves of this way and as many small ones in host memory between them."""
    device = Counting()
    elements = 16 if way == "small" else 128
    module = torch.nn.Module()
    leaves = {f"{i:05}.device": torch.full((elements,), float(i)) for i in range(count)}
    device.adopt(*leaves.values())
    hosts = {f"{i:05}.host": torch.full((elements,), float(i)) for i in range(count)}
    state = State(leaves | hosts)
    if way == "gate":
        for name, leaf in leaves.items():
            module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(leaf))
        device.adopt(*module.parameters())
        state = State(hosts, model=module, optimizer=Descent(list(module.parameters()), device))
    capture = Capture(state, ring, sealer, Options(), [device], optimizers=state.optimizers, schedule=Pace(1))
    for step in range(count, count + 5):
        if way == "gate":
            state.optimizers[0].step()
        device.handed.clear()
        before = device.compute.enqueued
        assert capture.boundary(step, lambda: b"{}", ordered=True).captured
        found = device.compute.enqueued - before
        device.synchronize()
        assert sealer.drain(240)
    content = newest(ring)
    assert (content.step, content.torn) == (count + 4, [])
    assert len(content.leaves) == 2 * count
    named = {row[0] for row in capture.describe()}
    assert named == {"clone" if way == "small" else way, "host"}
    capture.close()
    device.shutdown()
    return found, list(device.handed)


@pytest.mark.parametrize("way", ["small", "gate", "wait"])
def test_operations_do_not_grow_with_the_number_of_leaves(
    ring: SlotRing, sealer: _native.Sealer, way: str
) -> None:
    results = [counted(ring, sealer, way, count) for count in COUNTS]
    operations = [found for found, _ in results]
    assert operations == [operations[0]] * len(COUNTS)
    assert operations[0] <= 8
    assert [len(handed) for _, handed in results] == [1, 1]
    if way == "small":
        # The image has the cloned leaves of one alignment in a row: one copy, and one of the digests.
        assert [handed[0] for _, handed in results] == [2, 2]


def test_a_gate_waits_for_the_first_copies(
    ring: SlotRing, sealer: _native.Sealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts: list[int] = []
    copy: Callable[..., SimulatedCopying] = Counting.copy_to_host

    def seen(device: Counting, copies: Copies, num_first: int, after: StreamMark) -> SimulatedCopying:
        firsts.append(num_first)
        return copy(device, copies, num_first, after)

    monkeypatch.setattr(Counting, "copy_to_host", seen)
    counted(ring, sealer, "wait", 10)
    assert firsts == [10] * 5
