"""Digests on a device equal the native ones, bit for bit, for every size and whatever is beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashckpt import _native
from flashckpt.capture import digests
from flashckpt.capture.digests import LeafDigests, PackedDigests, RowDigests


class Memory:
    """An allocator that remembers how much was asked for; fresh bytes are never zero by luck."""

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


def unsigned(values: Tensor) -> list[int]:
    return [value % 2**64 for value in values.flatten().tolist()]


@pytest.mark.parametrize("count", [4, 8, 4092, 4096, 4100, 40_960, 4096 * 4096 + 12, 4096 * 9000 + 8])
def test_a_leaf_on_its_own(count: int) -> None:
    data, memory = random_bytes(count), Memory()
    out = torch.zeros((), dtype=torch.int64)
    LeafDigests(memory, count).into(torch.from_numpy(data).view(torch.int32), out)
    assert unsigned(out) == [native(data)]
    assert memory.num_bytes <= max(8 * 1024, 2 * count + 8192, 0)
    assert memory.num_bytes <= 8 * 4096 * 1024  # bounded, however large the leaf


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=12))
def test_rows(sizes: list[int]) -> None:
    firsts, rows = [], 0
    for size in sizes:
        firsts.append(rows)
        rows += -(-size // digests.ROW_BYTES)
    buffer = np.zeros(rows * digests.ROW_BYTES, dtype=np.uint8)
    for seed, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
        buffer[first * 4096 : first * 4096 + size] = random_bytes(size, seed)
    out = torch.zeros(len(sizes), dtype=torch.int64)
    RowDigests(Memory(), firsts, sizes).into(torch.from_numpy(buffer).view(torch.int32), out)
    pieces = [buffer[f * 4096 : f * 4096 + size] for f, size in zip(firsts, sizes, strict=True)]
    assert unsigned(out) == [native(piece) for piece in pieces]


def test_rows_of_more_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_LEAST_BLOCK_ROWS", 3)
    sizes = [4096 * 100 + 4, 4096 * 7, 4096 * 60 + 4092]
    test_rows.hypothesis.inner_test(sizes)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=40), st.integers(64, 4096))
def test_packed(sizes: list[int], block_words: int) -> None:
    before = digests.PACKED_BLOCK_WORDS
    digests.PACKED_BLOCK_WORDS = block_words
    try:
        starts, words = [], 0
        for size in sizes:
            starts.append(words)
            words += -(-size // 4)
        buffer = np.zeros(words * 4, dtype=np.uint8)
        for seed, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            buffer[start * 4 : start * 4 + size] = random_bytes(size, seed)
        out = torch.zeros(len(sizes), dtype=torch.int64)
        PackedDigests(Memory(), starts, sizes).into(torch.from_numpy(buffer).view(torch.int32), out)
    finally:
        digests.PACKED_BLOCK_WORDS = before
    pieces = [buffer[s * 4 : s * 4 + size] for s, size in zip(starts, sizes, strict=True)]
    assert unsigned(out) == [native(piece) for piece in pieces]


def test_extreme_words_wrap_as_native_ones_do() -> None:
    data = np.full(4096 * 5 + 4, 0x80, dtype=np.uint8)
    out = torch.zeros((), dtype=torch.int64)
    LeafDigests(Memory(), data.nbytes).into(torch.from_numpy(data).view(torch.int32), out)
    assert unsigned(out) == [native(data)]
