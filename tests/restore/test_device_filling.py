"""How a resume fills leaves on a device, counted on a simulated one, whose streams the tests hold."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashckpt.capture.devices import devices_of
from flashckpt.restore import filling
from flashckpt.restore.filling import fill
from flashckpt.restore.snapshot import Snapshot
from flashckpt.state.tree import Tree
from tests.capture.simulated import SimulatedDevice
from tests.restore import snapshots
from tests.state.image import Image, none_used_up, raw_bytes
from tests.waiting import until

BUFFER = 1 << 16


class Counting(SimulatedDevice):
    """Counts what is taken and waited for. `pinned` is the memory that it was asked for, by bytes."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.pinned: list[int] = []
        self.synchronised = 0
        self._refuses = refuses

    def host_memory(self, num_bytes: int) -> Tensor:
        if self._refuses:
            raise RuntimeError("CUDA error: out of memory")
        self.pinned.append(num_bytes)
        return super().host_memory(num_bytes)

    def synchronize(self) -> None:
        self.synchronised += 1
        super().synchronize()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Counting]]:
    monkeypatch.setattr(filling, "PIECE_BYTES", BUFFER)
    made: list[Counting] = []

    def device(tree: Tree, **how: Any) -> Counting:
        found = Counting(**how)
        made.append(found)
        found.adopt(*(leaf.tensor for leaf in tree.walk(none_used_up).leaves))
        return found

    yield device
    for each in made:
        each.shutdown()


def held(sizes: list[int]) -> dict[str, Tensor]:
    return {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}


def snapshot_of(tree: Tree) -> tuple[Snapshot, dict[str, bytes]]:
    """The state as it is now, and the bytes of each leaf; then all of it is zeroed."""
    walk = tree.walk(none_used_up)
    leaves = {leaf.name: raw_bytes(leaf.tensor) for leaf in walk.leaves}
    snapshot = snapshots.snapshot_of(Image.of(walk))
    with torch.no_grad():
        for leaf in walk.leaves:
            leaf.tensor.detach().zero_()
    return snapshot, leaves


def now(tree: Tree) -> dict[str, bytes]:
    return {leaf.name: raw_bytes(leaf.tensor) for leaf in tree.walk(none_used_up).leaves}


def test_nothing_of_a_full_buffer_is_waited_for_before_its_next_turn(make: Callable[..., Counting]) -> None:
    """The device stands still: the host fills all buffers, and no more before the first was read."""
    tree = Tree({"held": held([BUFFER // 4] * 7)})  # seven buffers' worth
    snapshot, expected = snapshot_of(tree)
    device = make(tree)
    device.compute.hold()
    filling_it = threading.Thread(target=fill, args=(tree, snapshot, 1, [device]))
    filling_it.start()
    # Three copies and their three marks: the fourth copy waits for the first mark.
    until(lambda: device.compute.pending() == 6, "three full buffers")
    device.compute.step(2)
    until(lambda: device.compute.pending() == 6, "the first buffer's second turn")
    device.compute.release()
    filling_it.join()
    assert now(tree) == expected
    assert device.pinned == [BUFFER] * 3


class Own(nn.Linear):
    """Its own code takes a part of it back."""

    seen: list[float]

    def get_extra_state(self) -> Tensor:
        return torch.tensor([7.0, 8.0])

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state.tolist()


def of_every_kind(device: str) -> tuple[Tree, Own]:
    """Leaves larger than a buffer, of other strides, expanded, on odd places, without elements, gradients."""
    torch.manual_seed(3)
    data = torch.randint(0, 255, (4 * BUFFER,), dtype=torch.uint8, device=device)
    held = {
        "large": torch.randn(BUFFER, device=device),
        "last": torch.randn(8, 16, 17, 19, device=device).to(memory_format=torch.channels_last),
        "turned": torch.randn(300, 200, device=device).t(),
        "expanded": torch.randn(5, 1, device=device).expand(5, 9),
        "odd": data[3 : 2 * BUFFER + 1],
        "half": torch.randn(1003, device=device).to(torch.bfloat16),
        "wide": torch.randn(9, dtype=torch.complex128, device=device),
        "number": torch.tensor(3.5, device=device),
        "none": torch.empty(0, 5, device=device),
    }
    model = Own(40, 30, device=device)
    model(torch.randn(2, 40, device=device)).sum().backward()
    return Tree({"held": held, "model": model}), model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_leaves_of_every_kind_on_a_real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", BUFFER)
    tree, model = of_every_kind("cuda")
    snapshot, expected = snapshot_of(tree)
    devices = devices_of(leaf.tensor for leaf in tree.found().leaves)
    fill(tree, snapshot, 1, devices)
    assert now(tree) == expected
    assert model.seen == [7.0, 8.0]
    for device in devices:
        device.close()


def test_leaves_of_every_kind(make: Callable[..., Counting]) -> None:
    tree, model = of_every_kind("cpu")
    snapshot, expected = snapshot_of(tree)
    device = make(tree)
    fill(tree, snapshot, 1, [device])
    assert now(tree) == expected
    assert {"gradients.model.weight", "held.last", "held.none"} <= expected.keys()
    assert model.seen == [7.0, 8.0]
    assert device.synchronised == 1


def test_leaves_of_two_devices_and_of_the_host(make: Callable[..., Counting]) -> None:
    first, second, host = (held([BUFFER, 5, 300]) for _ in range(3))
    tree = Tree({"first": first, "second": second, "host": host})
    snapshot, expected = snapshot_of(tree)
    devices = [make(Tree({"part": part})) for part in (first, second)]
    fill(tree, snapshot, 1, devices)
    assert now(tree) == expected
    assert [device.synchronised for device in devices] == [1, 1]


def test_without_page_locked_memory_leaves_are_filled_one_by_one(make: Callable[..., Counting]) -> None:
    tree = Tree({"held": held([BUFFER, 5, 300])})
    snapshot, expected = snapshot_of(tree)
    device = make(tree, refuses=True)
    fill(tree, snapshot, 1, [device])
    assert now(tree) == expected
    assert device.compute.enqueued == 0
