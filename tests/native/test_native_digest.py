"""Digests and copies against the definition."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_digest import reference_digest

from flashckpt import _native


def u64(*values: int) -> array[int]:
    return array("Q", values)


def random_bytes(seed: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def digest_of(data: np.ndarray) -> int:
    data = np.ascontiguousarray(data)
    return _native.digest(data.ctypes.data, data.nbytes)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 6000), st.integers(0, 70), st.integers(0, 70), st.integers(0, 2**32), st.integers(1, 3))
def test_any_size_at_any_alignment(size: int, shift: int, place: int, seed: int, threads: int) -> None:
    source = random_bytes(seed, size + 70)
    image = np.full(size + 142, 0xEE, np.uint8)
    expected = reference_digest(source[shift : shift + size].tobytes())
    out = u64(_native.EMPTY_DIGEST, 7)
    assert _native.digest(source.ctypes.data + shift, size) == expected
    _native.copy_digest(
        u64(source.ctypes.data + shift),
        u64(image.ctypes.data + place),
        u64(size),
        _native.address_of(out),
        threads,
    )
    assert out.tolist() == [expected, 7]
    assert (image[place : place + size] == source[shift : shift + size]).all()
    assert (image[:place] == 0xEE).all()
    assert (image[place + size :] == 0xEE).all()


@pytest.mark.parametrize("threads", [1, 5])
def test_leaves_cut_and_batched_over_threads(threads: int) -> None:
    sizes = [0, 5 << 20, 1, 64, (3 << 20) + 1, 17, 0, 2 << 20, *range(0, 900, 3), (2 << 20) + 4099]
    leaves = [random_bytes(i, size) for i, size in enumerate(sizes)]
    image = np.zeros(sum(sizes) + 1, np.uint8)
    places = 1 + np.cumsum([0, *sizes[:-1]]).astype(np.uint64)  # odd, so that streaming stores cannot be used
    sources = np.array([leaf.ctypes.data for leaf in leaves], np.uint64)
    numbers = np.array(sizes, np.uint64)
    single = np.array([digest_of(leaf) for leaf in leaves], np.uint64)
    for start in (0, 1):
        digests = np.full(len(sizes), _native.EMPTY_DIGEST, np.uint64)
        to = places - np.uint64(start) + np.uint64(image.ctypes.data)
        _native.copy_digest(sources, to, numbers, digests.ctypes.data, threads)
        assert (digests == single).all()
        assert image[1 - start : len(image) - start].tobytes() == b"".join(leaf.tobytes() for leaf in leaves)
        digests[:] = 0
        _native.digest_many(to, numbers, digests.ctypes.data, threads)
        assert (digests == single).all()
    big = leaves[1][: 1 << 16]
    assert digest_of(big) == reference_digest(big.tobytes())


def test_checksums_are_xxh3() -> None:
    assert _native.xxh3_64(b"") == 0x2D06800538D394C2
    assert _native.xxh3_128(b"").hex() == "99aa06d3014798d86001c324468d497f"
    for size in (1, 16, 17, 128, 129, 240, 241, 1023, 1024, 4097, 100_003):
        data = random_bytes(size, size).tobytes()
        assert _native.xxh3_64(data) == xxhash.xxh3_64_intdigest(data)
        assert _native.xxh3_128(data) == xxhash.xxh3_128_digest(data)
        assert _native.xxh3_128_at(_native.address_of(data), size) == xxhash.xxh3_128_digest(data)


def test_invalid_arguments() -> None:
    out = u64(0)
    address = _native.address_of(out)
    with pytest.raises(ValueError, match="differ in length"):
        _native.copy_digest(u64(1), u64(1, 2), u64(1), address, 1)
    with pytest.raises(TypeError, match="8-byte integers"):
        _native.digest_many(array("I", [1]), u64(1), address, 1)
    with pytest.raises(TypeError, match="8-byte integers"):
        _native.digest_many(array("d", [1]), u64(1), address, 1)
    with pytest.raises(ValueError, match="threads"):
        _native.digest_many(u64(address), u64(8), address, 0)
    with pytest.raises(ValueError, match="multiple of 8"):
        _native.load(address + 1)
    with pytest.raises(BufferError):
        _native.address_of(memoryview(bytes(8))[::2])


def test_bytes_without_an_address_are_refused_unless_there_are_none() -> None:
    """A tensor whose storage was resized to nothing gives 0 for its pointer."""
    here, out = bytearray(64), u64(*[_native.EMPTY_DIGEST] * 2)
    at, table, sizes = _native.address_of(here), _native.address_of(out), u64(8, 8)
    some, all_ = u64(at, 0), u64(at, at + 32)
    for call in (
        lambda: _native.digest_many(some, sizes, table, 2),
        lambda: _native.copy_digest(some, all_, sizes, table, 2),
        lambda: _native.copy_digest(all_, some, sizes, table, 2),
        lambda: _native.digest(0, 8),
        lambda: _native.hash_blocks(0, 8, 0),
        lambda: _native.xxh3_128_at(0, 8),
    ):
        with pytest.raises(ValueError, match="no address"):
            call()
    assert list(out) == [_native.EMPTY_DIGEST] * 2
    assert here == bytes(64)
    _native.digest_many(u64(0), u64(0), table, 1)
    _native.copy_digest(u64(0), u64(0), u64(0), table + 8, 1)
    assert list(out) == [_native.digest(0, 0)] * 2
    assert _native.xxh3_128_at(0, 0) == _native.xxh3_128(b"")
