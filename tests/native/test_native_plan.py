"""Plans of one file: what is needed is read, compared with its checksum, digested and copied. No more."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_digest import reference_digest

from flashckpt import _native
from flashckpt.format.layout import Leaf
from flashckpt.restore.step_tensors import TensorSlice
from flashckpt.restore.whole_tensors import copy_of

CHUNK = 4096


class File:
    """Random bytes with the checksums of their chunks."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
        self.checksums = b"".join(map(_native.xxh3_128, chunks))

    @classmethod
    def of(cls, num_bytes: int) -> "File":
        return cls(np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8).tobytes())

    def plan(
        self,
        *,
        copies: Sequence[int] = (),
        parts: Sequence[int] = (),
        ranges: Sequence[int] = (),
        digests: _native.LeafDigests | None = None,
        direct: bool = True,
    ) -> _native.FilePlan:
        return _native.FilePlan(
            num_bytes=len(self.data), chunk_bytes=CHUNK, checksums=self.checksums,
            copies=array("Q", copies), parts=array("Q", parts), ranges=array("Q", ranges),
            digests=digests or _native.LeafDigests(array("Q")), direct=direct,
        )  # fmt: skip


def chunks_of(plan: _native.FilePlan) -> list[int]:
    return [chunk for first, last in plan.left() for chunk in range(first, last)]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_box_is_copied_out_of_any_other_and_no_other_chunk_is_needed(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["uint8", "int16", "float32", "int64", "complex128"])))
    most = [1, 3, 12, 60, 3000]
    shape = data.draw(
        st.lists(st.sampled_from(most), max_size=4).filter(lambda s: np.prod(s) < 30_000).map(tuple)
    )

    def box() -> TensorSlice:
        ends = [sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in shape]
        return TensorSlice(tuple(a for a, _ in ends), tuple(b - a + 1 for a, b in ends))

    held, wanted = box(), box()
    common = held.common(wanted)
    if common is None:
        return
    whole = np.random.default_rng(1).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    whole = whole.view(dtype).reshape(shape)
    begin = 8 * data.draw(st.integers(0, 1000))
    file = File(bytes(begin) + of_box(whole, held).tobytes())
    into = bytearray(b"\xee" * (8 + dtype.itemsize * wanted.num_elements))
    leaf = Leaf(name="w", dtype=dtype.name, shape=held.shape)
    source, target, run, steps = copy_of(leaf, begin, held, wanted, 8, common)
    row = [source, _native.address_of(into) + target, run, len(steps), *(n for step in steps for n in step)]
    plan = file.plan(copies=row)

    is_taken = np.zeros(held.shape, bool)
    is_taken[place_in(held, common)] = True
    places = np.flatnonzero(is_taken.ravel()) * dtype.itemsize + begin
    needed = sorted({int(at) // CHUNK for at in (*places, *(places + dtype.itemsize - 1))})
    assert chunks_of(plan) == needed
    for chunk in data.draw(st.permutations(needed)):
        plan.add(chunk * CHUNK, file.data[chunk * CHUNK : (chunk + 1) * CHUNK])
    assert (plan.left(), plan.bad_chunks()) == ([], [])

    empty = np.frombuffer(b"\xee" * dtype.itemsize * wanted.num_elements, dtype)
    expected = empty.reshape(wanted.shape).copy()
    expected[place_in(wanted, common)] = of_box(whole, common)
    assert bytes(into[:8]) == b"\xee" * 8
    assert bytes(into[8:]) == expected.tobytes()


def place_in(region: TensorSlice, common: TensorSlice) -> tuple[slice, ...]:
    rows = zip(common.start, region.start, common.shape, strict=True)
    return tuple(slice(at - start, at - start + n) for at, start, n in rows)


def of_box(whole: np.ndarray, region: TensorSlice) -> np.ndarray:
    index = tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))
    return np.array(whole[index])


@pytest.mark.parametrize("way", ["added", "read", "read through the cache"])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_a_flipped_byte_is_found_before_its_chunk_is_copied(
    tmp_path: Path, way: str, is_aligned: bool
) -> None:
    file = File.of(5 * CHUNK + 77)
    size, cut = len(file.data), 2 * CHUNK
    for at in (0, CHUNK - 1, 2 * CHUNK + 5, 5 * CHUNK + 76):
        into, harmed = bytearray(size + CHUNK), bytearray(file.data)
        harmed[at] ^= 8
        start = -_native.address_of(into) % CHUNK if is_aligned else 3
        digests = _native.LeafDigests(array("Q", [cut, size - cut]))
        plan = file.plan(
            copies=[0, _native.address_of(into) + start, size, 0],
            parts=[0, cut, 0, 0, cut, size, 1, 0],
            digests=digests,
            direct=way == "read",
        )
        if way == "added":
            plan.add(0, harmed)
        else:
            (tmp_path / "file").write_bytes(harmed)
            plan.read(tmp_path / "file")
        assert plan.bad_chunks() == [at // CHUNK]
        first = at // CHUNK * CHUNK
        last = min(first + CHUNK, size)
        found = bytes(into[start : start + size])
        assert found == file.data[:first] + bytes(last - first) + file.data[last:]
        expected = [reference_digest(harmed[:cut]), reference_digest(harmed[cut:])]
        assert array("Q", digests.digests()).tolist() == expected, "of the harmed bytes"


def test_slices_of_a_leaf_in_several_plans_have_its_digest() -> None:
    file, size = File.of(6 * CHUNK + 9), 5 * CHUNK + 9
    digests = _native.LeafDigests(array("Q", [size]))
    cuts = [0, 1, 4099, 2 * CHUNK, size]
    for low, high in reversed(list(zip(cuts, cuts[1:], strict=False))):
        assert array("Q", digests.digests()).tolist() == [_native.EMPTY_DIGEST]
        plan = file.plan(parts=[CHUNK + low, CHUNK + high, 0, low], digests=digests)
        for chunk in chunks_of(plan):
            plan.add(chunk * CHUNK, file.data[chunk * CHUNK : (chunk + 1) * CHUNK])
    assert array("Q", digests.digests()).tolist() == [reference_digest(file.data[CHUNK : CHUNK + size])]


def test_thousands_of_small_leaves_are_copied(tmp_path: Path) -> None:
    file = File.of(40 * CHUNK)
    rng, at, leaves = np.random.default_rng(3), 11, list[tuple[int, int]]()
    while at + 60 < len(file.data):
        size = int(rng.integers(1, 50))
        leaves.append((at, size))
        at += size + int(rng.integers(0, 9))
    assert len(leaves) > 5000
    places = [bytearray(size) for _, size in leaves]
    copies = [
        n
        for (at, size), into in zip(leaves, places, strict=True)
        for n in (at, _native.address_of(into), size, 0)
    ]
    digests = _native.LeafDigests(array("Q", [size for _, size in leaves]))
    parts = [n for i, (at, size) in enumerate(leaves) for n in (at, at + size, i, 0)]
    (tmp_path / "file").write_bytes(file.data)
    file.plan(copies=copies, parts=parts, digests=digests).read(tmp_path / "file", threads=3)
    data = [file.data[at : at + size] for at, size in leaves]
    assert [bytes(each) for each in places] == data
    assert array("Q", digests.digests()).tolist() == list(map(reference_digest, data))


@pytest.mark.parametrize("direct", [True, False])
def test_one_byte_is_copied_to_several_places(tmp_path: Path, direct: bool) -> None:
    file, into = File.of(3 * CHUNK), [bytearray(3 * CHUNK) for _ in range(2)]
    (tmp_path / "file").write_bytes(file.data)
    copies = [n for each in into for n in (0, _native.address_of(each), 3 * CHUNK, 0)]
    file.plan(copies=copies, direct=direct).read(tmp_path / "file")
    assert [bytes(each) for each in into] == [file.data] * 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"copies": [0, 0, 2 * CHUNK + 1, 0]}, "not inside"),
        ({"copies": [2 * CHUNK - 1, 0, 2, 0]}, "not inside"),
        ({"copies": [2**64 - 1, 0, 2, 0]}, "not inside"),
        ({"copies": [0, 0, 0, 0]}, "not inside"),
        ({"copies": [0, 0, 8, 1, 3, 4, 8]}, "not inside"),
        ({"copies": [0, 0, 8, 1, 2**60, 16, 8]}, "not inside"),
        ({"copies": [0, 0, 8, 2, 4, 64, 8, 9, 16, 8]}, "not inside"),
        ({"copies": [0, 0, 8, 1, 2, 16]}, "middle of one"),
        ({"copies": [0, 0, 8, 2**62]}, "middle of one"),
        ({"parts": [0, 5, 0, 0, 4, 9, 1, 0]}, "overlap"),
        ({"parts": [0, 11, 0, 0]}, "beyond the last byte of its leaf"),
        ({"parts": [0, 5, 2, 0]}, "beyond the last byte of its leaf"),
        ({"parts": [5, 5, 0, 0]}, "empty"),
        ({"parts": [5, 4, 0, 0]}, "beyond the last byte"),
        ({"ranges": [0, 2 * CHUNK + 1]}, "beyond the last byte"),
        ({"ranges": [0]}, "middle of one"),
    ],
)
def test_an_invalid_plan_is_refused(what: dict[str, list[int]], message: str) -> None:
    digests = _native.LeafDigests(array("Q", [10, 10]))
    with pytest.raises(ValueError, match=message):
        File.of(2 * CHUNK).plan(digests=digests, **what)  # type: ignore[arg-type]


def test_chunks_are_added_once_and_complete() -> None:
    file, into = File.of(3 * CHUNK + 1), bytearray(CHUNK)
    plan = file.plan(copies=[CHUNK, _native.address_of(into), CHUNK, 0])
    for offset, size in ((1, CHUNK), (0, CHUNK - 1), (0, 4 * CHUNK), (2**63, 1)):
        with pytest.raises(ValueError, match="whole chunks|beyond the last"):
            plan.add(offset, file.data[:size] if size <= len(file.data) else bytes(size))
    plan.add(0, file.data)
    assert (plan.left(), bytes(into)) == ([], file.data[CHUNK : 2 * CHUNK])
    plan.add(0, bytes(len(file.data)))
    assert (plan.bad_chunks(), bytes(into)) == ([], file.data[CHUNK : 2 * CHUNK])
