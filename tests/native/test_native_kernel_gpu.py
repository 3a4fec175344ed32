"""The digest kernel on a real device: the same numbers and bytes as on the processor."""

from array import array

import numpy as np
import pytest
import torch

from flashckpt import _native

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class Launch:
    """Leaves of random bytes in one buffer on the device, and their clones between guard bytes."""

    def __init__(self, sizes: list[int], shifts: list[int], seed: int) -> None:
        starts, end = [], 0
        for size, shift in zip(sizes, shifts, strict=True):
            starts.append(end + shift)
            end += -(-(shift + size + 1) // 16) * 16
        self.sizes, self.starts = sizes, starts
        self.host = np.random.default_rng(seed).integers(0, 256, end, dtype=np.uint8)
        self.memory = torch.from_numpy(self.host).cuda()
        self.clones = torch.full((end + 16,), 0xEE, dtype=torch.uint8, device="cuda")
        sources = [self.memory.data_ptr() + start for start in starts]
        places = [self.clones.data_ptr() + start for start in starts]
        table = _native.cuda_digest_table(array("Q", sources), array("Q", places), array("Q", sizes))
        self.table = torch.frombuffer(bytearray(table), dtype=torch.uint8).cuda()
        self.out = torch.zeros(len(sizes), dtype=torch.int64, device="cuda")

    def run(self) -> list[int]:
        stream = torch.cuda.current_stream()
        addresses = (self.table.data_ptr(), len(self.sizes), self.out.data_ptr())
        _native.cuda_digest_launch(stream.cuda_stream, *addresses, torch.cuda.current_device())
        return [digest & (2**64 - 1) for digest in self.out.tolist()]

    def check(self) -> None:
        found, clones = self.run(), self.clones.cpu().numpy()
        is_clone = np.zeros(len(clones), bool)
        for size, start, digest in zip(self.sizes, self.starts, found, strict=True):
            assert digest == _native.digest(self.host[start:].ctypes.data, size), (size, start)
            assert (clones[start : start + size] == self.host[start : start + size]).all(), (size, start)
            is_clone[start : start + size] = True
        assert (clones[~is_clone] == 0xEE).all()


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_every_tail_at_every_alignment(shift: int) -> None:
    sizes = [*range(1024), *(8192 + tail for tail in range(4097))]
    Launch(sizes, [shift] * len(sizes), shift).check()


def test_ten_thousand_leaves_twice() -> None:
    random = np.random.default_rng(5)
    sizes = [int(2 ** random.uniform(0, 17)) * (i % 100 != 0) for i in range(10_000)]
    launch = Launch(sizes, random.integers(0, 17, len(sizes)).tolist(), 6)
    launch.check()
    launch.check()


def test_long_leaves_and_what_was_there_before() -> None:
    launch = Launch([(1 << 30) + 5, 3, 64 << 20], [0, 2, 8], 7)
    launch.check()
    launch.memory[launch.starts[0] + (1 << 29)] ^= 1
    first, *others = launch.run()
    changed = launch.memory.cpu()
    assert first == _native.digest(changed.data_ptr(), launch.sizes[0])
    assert others == [
        _native.digest(launch.host[start:].ctypes.data, size)
        for size, start in zip(launch.sizes[1:], launch.starts[1:], strict=True)
    ]


def test_on_a_side_stream_while_another_computes() -> None:
    launch = Launch([20 << 20, 77], [0, 1], 8)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 2048
    with torch.cuda.stream(side):
        launch.check()
    torch.cuda.synchronize()
