"""Headers made to harm: each is a DamagedError, at once, and takes no memory for what it claims."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import DamagedError
from flashckpt.format.image import parse_header, read_header
from flashckpt.format.layout import DTYPES, PAGE, Layout, Leaf


def image(table: object, data_bytes: int) -> tuple[bytes, int]:
    """A padded header that holds `table`, and the length of its file."""
    text = (table if isinstance(table, str) else json.dumps(table)).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length, b" "), 8 + length + data_bytes


def leaf(
    dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8), **other: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **other}


GOOD = {"a": leaf(), "b": leaf("I16", (3,), (8, 14))}

BAD = {
    "overlap": ({"a": leaf(), "b": leaf("F32", (2,), (4, 12))}, 12),
    "overlap, lengths add up": ({"a": leaf(), "b": leaf("F32", (2,), (4, 12))}, 16),
    "hole, lengths add up": ({"a": leaf(), "b": leaf("F32", (2,), (12, 20))}, 16),
    "hole": ({"a": leaf(), "b": leaf("F32", (2,), (12, 20))}, 20),
    "hole at the start": ({"a": leaf("F32", (2,), (8, 16))}, 16),
    "hole at the end": ({"a": leaf()}, 16),
    "past the end": ({"a": leaf("F32", (4,), (0, 16))}, 8),
    "listed out of order": ({"b": leaf("F32", (2,), (8, 16)), "a": leaf()}, 16),
    "small before large": ({"a": leaf("I8", (8,), (0, 8)), "b": leaf("F64", (1,), (8, 16))}, 16),
    "backwards": ({"a": leaf("F32", (2,), (8, 0))}, 8),
    "negative": ({"a": leaf("F32", (2,), (-8, 0))}, 8),
    "negative size": ({"a": leaf("F32", (-1, -2), (0, 8))}, 8),
    "product overflows": ({"a": leaf("F32", (2**32, 2**32, 2), (0, 8))}, 8),
    "huge size": ({"a": leaf("F32", (2**62,), (0, 8))}, 8),
    "huge times zero": ({"a": leaf("F32", (2**62, 0), (0, 0))}, 0),
    "many dimensions": ({"a": leaf("F32", (1,) * 65 + (2,), (0, 8))}, 8),
    "huge offset": ({"a": leaf("F32", (2,), (2**64, 2**64 + 8))}, 8),
    "floats": ({"a": leaf("F32", (2.0,), (0, 8))}, 8),
    "booleans": ({"a": leaf("F32", (True, 2), (0, 8))}, 8),
    "text": ({"a": leaf("F32", "2", (0, 8))}, 8),
    "three offsets": ({"a": leaf("F32", (2,), (0, 8, 8))}, 8),
    "one offset": ({"a": leaf("F32", (2,), (0,))}, 8),
    "unknown dtype": ({"a": leaf("Q4", (2,), (0, 8))}, 8),
    "dtype is a list": ({"a": leaf(["F32"], (2,), (0, 8))}, 8),  # type: ignore[arg-type]
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8),
    "one key more": ({"a": leaf(extra=1)}, 8),
    "metadata": ({"__metadata__": {"a": "b"}, "a": leaf()}, 8),
    "leaf called metadata": ({"__metadata__": leaf()}, 8),
    "empty name": ({"": leaf()}, 8),
    "long name": ({"x" * 5000: leaf()}, 8),
    "not an object": ([leaf()], 8),
    "leaf is null": ({"a": None}, 0),
    "repeated name": (
        '{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        0,
    ),
    "repeated key": ('{"a":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}', 0),
    "nan": ('{"a":NaN}', 0),
    "endless integer": ('{"a":' + "9" * 100_000 + "}", 0),
    "deep": ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", 0),
    "cut": ('{"a":', 0),
    "nothing": ("", 0),
    "rubbish after": ('{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}} x', 0),
}


def test_the_good_one_is_good() -> None:
    header, file_bytes = image(GOOD, 14)
    assert [found.name for found in parse_header(header, file_bytes, "file")] == ["a", "b"]


@pytest.mark.parametrize("name", BAD)
def test_bad_tables(name: str) -> None:
    header, file_bytes = image(*BAD[name])
    with pytest.raises(DamagedError):
        parse_header(header, file_bytes, "file")


@pytest.mark.parametrize("claimed", [0, 1, 4087, 4089, 5000, 2**31, 100_000_001, 2**63 - 1, 2**64 - 1])
def test_lengths_that_lie_take_no_memory(tmp_path: Path, claimed: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(claimed.to_bytes(8, "little") + b" " * 4088)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            read_header(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_larger_than_can_be_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.write((4096 * 30_000 - 8).to_bytes(8, "little"))
        file.truncate(4096 * 40_000)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="claims"):
            read_header(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_padding() -> None:
    header, file_bytes = image(GOOD, 14)
    text = header[8:].rstrip(b" ")
    for padded in (
        text.ljust(4088, b"\0"),
        text.ljust(4088, b"\n"),
        text.ljust(8184, b" "),
        b" " + text.ljust(4087),
    ):
        changed = len(padded).to_bytes(8, "little") + padded
        if padded.startswith(b" "):
            continue
        with pytest.raises(DamagedError):
            parse_header(changed, file_bytes + len(changed) - len(header), "file")
    with pytest.raises(DamagedError):
        parse_header(header[:-1], file_bytes, "file")


LEAVES = st.lists(
    st.builds(
        Leaf,
        name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
            lambda n: n != "__metadata__"
        ),
        dtype=st.sampled_from(sorted(DTYPES)),
        shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ),
    max_size=8,
    unique_by=lambda each: each.name,
)


@given(LEAVES)
def test_every_layout_is_read_back(leaves: list[Leaf]) -> None:
    layout = Layout.of(leaves)
    found = parse_header(layout.header, layout.num_bytes, "file")
    assert [(each.name, each.offset) for each in found] == [
        (each.name, each.offset) for each in layout.leaves
    ]


@given(LEAVES, st.data())
def test_changed_bytes_never_do_worse_than_damage(leaves: list[Leaf], data: st.DataObject) -> None:
    layout = Layout.of(leaves)
    header = bytearray(layout.header)
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(layout.header.rstrip(b" ")) + 1))] = data.draw(
            st.integers(0, 255)
        )
    file_bytes = data.draw(st.sampled_from([layout.num_bytes, layout.data_start, 8, 0, 2**40]))
    try:
        found = parse_header(bytes(header), file_bytes, "file")
    except DamagedError:
        return
    assert sum(each.num_bytes for each in found) == file_bytes - layout.data_start


@given(st.binary(max_size=200), st.integers(0, 2**64))
def test_any_bytes(data: bytes, file_bytes: int) -> None:
    with pytest.raises(DamagedError):
        parse_header(data, file_bytes, "file")
