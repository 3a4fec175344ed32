"""Digests with torch's operations equal the native ones, for all sizes, in a bounded workspace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.devices import (
    WORKSPACE_BYTES,
    TorchDigests,
    Workspace,
    bytes_of,
    workspace_bytes,
)

BLOCK = _native.BLOCK_BYTES


class Memory:
    """An allocator that records the requested bytes and returns non-zero memory."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, num_bytes: int) -> Tensor:
        self.num_bytes += num_bytes
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)


def native(data: np.ndarray) -> int:
    data = np.ascontiguousarray(data)
    return _native.digest(_native.address_of(data), data.nbytes)


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def digests_of(leaves: list[np.ndarray], most_blocks: int | None = None) -> list[int]:
    sizes = [leaf.nbytes for leaf in leaves]
    most = WORKSPACE_BYTES if most_blocks is None else 3 * BLOCK * most_blocks
    workspace = Workspace(Memory(), workspace_bytes(sizes, most))
    out = torch.full((len(leaves),), 7, dtype=torch.int64)
    digests = TorchDigests(workspace, sizes)
    for _ in range(2):  # remains of one pass in the workspace must not affect the next
        digests.into([torch.from_numpy(leaf) for leaf in leaves], out)
    return [value % 2**64 for value in out.tolist()]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 1023, 1025, 4096 * 900 + 13])
def test_a_leaf_on_its_own(count: int) -> None:
    data = random_bytes(count)
    assert digests_of([data]) == [native(data)]


@pytest.mark.parametrize(
    "leaf", [torch.arange(2)[::2], torch.randn(4, 3)[:1, :1], torch.tensor(1.5), torch.empty(0, 2)]
)
def test_strides_of_dimensions_of_one_element_may_be_anything(leaf: Tensor) -> None:
    assert leaf.is_contiguous()
    assert bytes_of(leaf).numpy().tobytes() == leaf.numpy().tobytes()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12_000), min_size=1, max_size=20), st.none() | st.integers(1, 9))
def test_many_leaves_in_any_batches(sizes: list[int], most_blocks: int | None) -> None:
    leaves = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    assert digests_of(leaves, most_blocks) == [native(leaf) for leaf in leaves]


def test_the_workspace_is_bounded_however_large_the_leaves() -> None:
    memory = Memory()
    Workspace(memory, workspace_bytes([1 << 40, 5]))
    assert memory.num_bytes <= WORKSPACE_BYTES
    assert workspace_bytes([5, 2000]) == 3 * 3 * BLOCK
    assert workspace_bytes([]) == workspace_bytes([0]) == 3 * BLOCK


@pytest.mark.parametrize("value", [0x00, 0x7F, 0x80, 0xFF])
def test_halves_at_their_limits_are_unsigned(value: int) -> None:
    data = np.full(BLOCK * 5 + 4, value, dtype=np.uint8)
    assert digests_of([data]) == [native(data)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_bytes_of_any_dtype_at_any_place(dtype: torch.dtype) -> None:
    whole = torch.from_numpy(random_bytes(3001) % 2).to(dtype)
    for tensor in (whole, whole[1:], whole[3:].reshape(2, -1), whole[5], whole[:0]):
        data = bytes_of(tensor)
        assert data.data_ptr() == tensor.data_ptr()
        assert data.numel() == tensor.numel() * tensor.element_size()
        out = torch.zeros(1, dtype=torch.int64)
        TorchDigests(Workspace(Memory(), workspace_bytes([data.numel()])), [data.numel()]).into([data], out)
        assert out.item() % 2**64 == native(data.numpy())
