"""The digest as docs/format.md ("Digest") defines it, in NumPy over many blocks at a time."""

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
HALF = 2**32 - 1
FACTOR = 0x9E3779B97F4A7C15
EMPTY = MASK
BLOCK_BYTES = 1024


def finalize(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def split_mix_64(seed: int, count: int) -> list[int]:
    outputs = []
    for _ in range(count):
        seed = seed + FACTOR & MASK
        outputs.append(finalize(seed))
    return outputs


KEYS = split_mix_64(0, 288)
FIRST, SECOND = KEYS[:128], KEYS[128:256]
FIRST_START, SECOND_START = KEYS[256:264], KEYS[264:272]
FIRST_FOLD, SECOND_FOLD = KEYS[272:280], KEYS[280:288]

Words = NDArray[np.uint64]


def _u64(*values: int) -> Words:
    return np.array(values, np.uint64)


def _products(words: Words, keys: list[int]) -> Words:
    keyed = words ^ _u64(*keys).reshape(16, 8)
    return ((keyed & np.uint64(HALF)) * (keyed >> np.uint64(32))).sum(axis=1)


def _folds(accumulators: Words, keys: list[int]) -> Words:
    keyed = accumulators ^ _u64(*keys)
    a, b = keyed[:, ::2], keyed[:, 1::2]
    half, shift = np.uint64(HALF), np.uint64(32)
    low, high, left, right = a & half, a >> shift, b & half, b >> shift
    carry = (low * left >> shift) + (high * left & half) + low * right
    return ((a * b) ^ (high * right + (high * left >> shift) + (carry >> shift))).sum(axis=1)


def block_hashes(data: bytes, first_block: int = 0) -> Words:
    """u64[blocks]: the hashes of whole blocks, the last padded with zeros."""
    padded = data + bytes(-len(data) % BLOCK_BYTES)
    words = np.frombuffer(padded, "<u8").astype(np.uint64, copy=False).reshape(-1, 16, 8)
    lanes = np.arange(8)
    first = _u64(*FIRST_START) + _products(words, FIRST) + words.sum(axis=1)[:, lanes ^ 1]
    second = _u64(*SECOND_START) + _products(words, SECOND)
    z = np.arange(first_block + 1, first_block + 1 + len(words), dtype=np.uint64) * np.uint64(FACTOR)
    z += _folds(first, FIRST_FOLD) + _folds(second, SECOND_FOLD)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def reference_digest(data: bytes) -> int:
    """Its workspace is four times the bytes."""
    digest = len(data) * FACTOR + (int(block_hashes(data).sum()) if data else 0) & MASK
    return digest if digest != EMPTY else EMPTY - 1
