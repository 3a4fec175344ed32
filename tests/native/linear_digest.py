"""The digest as its definition says it, in plain Python, to compare the native one with."""

from __future__ import annotations

SEED = 0x9E3779B97F4A7C15


def reference_digest(data: bytes) -> int:
    padded = data + bytes(-len(data) % 4)
    total = len(data) * SEED
    for j in range(len(padded) // 4):
        total += (2 * j + 1) * int.from_bytes(padded[4 * j : 4 * j + 4], "little", signed=True)
    return total % 2**64
