"""Addresses of memory that is not there."""

from __future__ import annotations

from array import array

import pytest

from flashckpt import _native


def test_bytes_without_an_address_are_refused() -> None:
    """A tensor whose storage was resized to nothing gives 0 for its pointer."""
    here = bytearray(64)
    at = _native.address_of(here)
    out = array("Q", [_native.EMPTY_DIGEST] * 2)
    table, sizes = _native.address_of(out), array("Q", [8, 8])
    some, all_ = array("Q", [at, 0]), array("Q", [at, at + 32])
    refused = pytest.raises(ValueError, match="no address")
    with refused:
        _native.digest_many(some, sizes, table, 2)
    with refused:
        _native.copy_digest(some, all_, sizes, table, 2)
    with refused:
        _native.copy_digest(all_, some, sizes, table, 2)
    with refused:
        _native.digest(0, 8)
    with refused:
        _native.hash_blocks(0, 8, 0)
    with refused:
        _native.xxh3_128_at(0, 8)
    assert list(out) == [_native.EMPTY_DIGEST] * 2
    assert here == bytes(64)


def test_empty_ranges_need_no_address() -> None:
    out = array("Q", [_native.EMPTY_DIGEST])
    table, nothing = _native.address_of(out), array("Q", [0])
    _native.digest_many(nothing, nothing, table, 1)
    empty = _native.digest(0, 0)
    assert list(out) == [empty]
    _native.copy_digest(nothing, nothing, nothing, table, 1)
    assert list(out) == [empty]
    assert _native.xxh3_128_at(0, 0) == _native.xxh3_128(b"")
