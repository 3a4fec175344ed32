"""What the digest must see: the page's numbers, structured changes, single bits."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reference_digest import KEYS, block_hashes, reference_digest

from flashckpt import _native

ROOT = Path(__file__).resolve().parents[2]
BLOCK = _native.BLOCK_BYTES
Leaf = np.ndarray


def digest_of(leaf: Leaf) -> int:
    leaf = np.ascontiguousarray(leaf)
    return _native.digest(leaf.ctypes.data, leaf.nbytes)


def test_the_numbers_of_the_format_page() -> None:
    page = (ROOT / "docs" / "format.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| `([0-9a-f]{16})` \|$", page, re.MULTILINE))

    def counted(num_bytes: int) -> bytes:
        return bytes(i % 251 for i in range(num_bytes))

    expected = {
        "none": b"",
        "`00`": b"\x00",
        "`01`": b"\x01",
        "8 of `00`": bytes(8),
        "1,024 of `00`": bytes(1024),
        "1,025 of `00`": bytes(1025),
        "2,048 of `ff`": b"\xff" * 2048,
        **{f"{n:,}, byte i = i mod 251": counted(n) for n in (1000, 1024, 1031, 100_000)},
    }
    assert rows.keys() == expected.keys()
    for name, data in expected.items():
        assert int(rows[name], 16) == reference_digest(data), name
        assert int(rows[name], 16) == digest_of(np.frombuffer(data, np.uint8)), name
    keys = re.findall(r"^\| (\d+) … (\d+) \|[^|]*\|[^|]*\| `(\w{16})` \| `(\w{16})` \|$", page, re.MULTILINE)
    assert len(keys) == 6
    for first, last, *values in keys:
        assert [KEYS[int(first)], KEYS[int(last)]] == [int(value, 16) for value in values]


# From one word on, with odd tails.
SIZES = (4, 60, 68, 1024, 4100, (1 << 16) + 4, 1 << 20)


def values_of(num_bytes: int) -> dict[str, Leaf]:
    count = num_bytes // 4
    draw = np.random.default_rng(num_bytes)
    weights = draw.standard_normal(count).astype(np.float32)
    return {
        "weights": weights,
        "counters": np.arange(count, dtype=np.int32),
        "bf16 pairs": (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    }


def constants(num_bytes: int) -> dict[str, Leaf]:
    count = num_bytes // 4
    found = {
        f"float32 {value}": np.full(count, value, np.float32)
        for value in (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 4.0, 16.0, np.inf, -np.inf, np.nan, 1e-3)
    }
    found |= {f"int32 {value}": np.full(count, value, np.int32) for value in (1, -1, 2, 3, 255, 256, 1 << 30)}
    if num_bytes % 8 == 0:
        for value in (1, 2, -2, 1 << 32, 1 << 63):
            found[f"int64 {value}"] = np.full(count // 2, value % 2**64, np.uint64)
    return found


def swapped(leaf: Leaf, unit: int) -> Leaf:
    """The first two units of so many bytes in each other's place."""
    data = leaf.view(np.uint8).copy()
    if len(data) < 2 * unit:
        return data
    data[:unit], data[unit : 2 * unit] = data[unit : 2 * unit].copy(), data[:unit].copy()
    return data


def all_swapped(leaf: Leaf, unit: int) -> Leaf:
    """Each unit in the place of its neighbour."""
    data = leaf.view(np.uint8).copy()
    whole = data[: len(data) // (2 * unit) * 2 * unit].reshape(-1, 2, unit)
    whole[:] = whole[:, ::-1].copy()
    return data


CHANGES: dict[str, Callable[[Leaf], Leaf]] = {
    **{f"times {f}": lambda leaf, f=f: leaf * leaf.dtype.type(f) for f in (2, 4, 16, 1024)},  # type: ignore[misc]
    "halved": lambda leaf: (leaf / 2).astype(leaf.dtype),
    "negated": lambda leaf: -leaf,
    "signs flipped": lambda leaf: leaf.view(np.uint32) ^ np.uint32(1 << 31),
    "inverted": lambda leaf: ~leaf.view(np.uint32),
    "one more": lambda leaf: leaf.view(np.uint32) + np.uint32(1),
    "high halves one more": lambda leaf: leaf.view(np.uint32) + np.uint32(1 << 16),
    "bytes reversed": lambda leaf: leaf.byteswap(),
    "reversed": lambda leaf: leaf[::-1],
    "rolled by a word": lambda leaf: np.roll(leaf, 1),
    "rolled by two": lambda leaf: np.roll(leaf, 2),
    "rolled by a stripe": lambda leaf: np.roll(leaf, 16),
    "rolled by a block": lambda leaf: np.roll(leaf, 256),
    "rolled by a row": lambda leaf: np.roll(leaf, 1000),
    "halves exchanged": lambda leaf: np.roll(leaf, len(leaf) // 2),
    **{f"swapped by {n}": lambda leaf, n=n: swapped(leaf, n) for n in (2, 4, 8, 64, 1024)},  # type: ignore[misc]
    **{f"each by {n}": lambda leaf, n=n: all_swapped(leaf, n) for n in (1, 2, 4, 8, 64, 1024)},  # type: ignore[misc]
    "a word less": lambda leaf: leaf[:-1],
    "a zero more": lambda leaf: np.append(leaf, leaf.dtype.type(0)),
    "zeroed": lambda leaf: np.zeros_like(leaf),
}


def collisions(num_bytes: int) -> list[tuple[str, str]]:
    """Pairs with the same digest and other bytes."""
    leaves = constants(num_bytes)
    for name, leaf in values_of(num_bytes).items():
        leaves[name] = leaf
        with np.errstate(all="ignore"):
            leaves |= {f"{name}, {what}": change(leaf) for what, change in CHANGES.items()}
    seen: dict[int, str] = {}
    found = []
    for name, leaf in leaves.items():
        before = seen.setdefault(digest_of(leaf), name)
        if leaves[before].tobytes() != leaf.tobytes():
            found.append((before, name))
    return found


@pytest.mark.parametrize("num_bytes", SIZES)
def test_no_structured_change_collides(num_bytes: int) -> None:
    assert collisions(num_bytes) == []


def test_every_bit_of_a_block_counts() -> None:
    data = np.random.default_rng(2).integers(0, 256, 3 * BLOCK + 5, np.uint8)
    found = {digest_of(data)}
    bits = [*range(8 * BLOCK, 16 * BLOCK), *range(24 * BLOCK, 24 * BLOCK + 40)]
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        found.add(digest_of(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == len(bits) + 1


@pytest.mark.parametrize("size", [0, 1023, 1025, (3 << 20) + 77])
def test_pieces_of_whole_blocks_add_up(size: int) -> None:
    draw = np.random.default_rng(size)
    data = draw.integers(0, 256, size, np.uint8)
    cuts = sorted({0, size, *(int(cut) * BLOCK for cut in draw.integers(0, size // BLOCK + 1, 5))})
    total = sum(
        _native.hash_blocks(data.ctypes.data + begin, end - begin, begin // BLOCK)
        for begin, end in zip(cuts, cuts[1:], strict=False)
    )
    assert _native.finish_digest(size, total % 2**64) == digest_of(data) == reference_digest(data.tobytes())
    assert total % 2**64 == (int(block_hashes(data.tobytes()).sum()) if size else 0)


def test_a_sum_equal_to_the_empty_mark_is_changed() -> None:
    assert _native.finish_digest(0, _native.EMPTY_DIGEST) == _native.EMPTY_DIGEST - 1
    assert _native.finish_digest(0, _native.EMPTY_DIGEST - 1) == _native.EMPTY_DIGEST - 1


@pytest.mark.process
def test_the_portable_loop_gives_the_same_digest(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    source = tmp_path / "portable.cpp"
    source.write_text(
        '#define FLASHCKPT_PORTABLE_DIGEST\n#include "digest/block_hash.cpp"\nusing namespace flashckpt;\n'
        'extern "C" Word hash_portable(const std::uint8_t* s, std::size_t n, Word b) '
        "{ return hash_blocks(s, n, b); }\n"
        'extern "C" Word copy_portable(std::uint8_t* d, const std::uint8_t* s, std::size_t n, Word b) '
        "{ return copy_blocks(d, s, n, b, true); }\n"
    )
    library = tmp_path / "portable.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", str(source), "-o"]
    subprocess.run([*command, str(library)], check=True)
    portable = ctypes.CDLL(str(library))
    portable.hash_portable.restype = portable.copy_portable.restype = ctypes.c_uint64
    u64 = ctypes.c_uint64
    for size in (1, 8, 63, 64, 65, 1000, 1023, 1024, 1025, 5000, 100_003):
        data = np.random.default_rng(size).integers(0, 256, size + 3, np.uint8)[3:]
        copy = np.full(size + 2, 0xEE, np.uint8)
        expected = int(block_hashes(data.tobytes(), 7).sum())
        assert portable.hash_portable(u64(data.ctypes.data), u64(size), u64(7)) == expected
        assert _native.hash_blocks(data.ctypes.data, size, 7) == expected
        to = u64(copy.ctypes.data + 1)
        assert portable.copy_portable(to, u64(data.ctypes.data), u64(size), u64(7)) == expected
        assert (copy[1:-1] == data).all()
        assert copy[0] == copy[-1] == 0xEE
