"""Compressed shards: right bytes of every range, none of a damaged file, and the memory of a few frames."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt import _native
from flashckpt.errors import DamagedError, OptionError
from flashckpt.format.layout import DTYPES, Layout, Leaf
from flashckpt.format.records import CHUNK_BYTES, Contents
from flashckpt.options import checked_compress
from flashckpt.store.base import Entry, MemoryRange, Store, Written
from flashckpt.store.compressed_file import (
    FRAME_BYTES,
    LARGEST_FRAME,
    Codec,
    is_worth,
    most_bytes,
    table_bytes,
    widths_of,
    write_compressed,
)
from flashckpt.store.local import LocalStore
from flashckpt.store.read_plan import ReadPlan, read_shard
from tests.contracts.flat_store import FlatStore

NAME = "rank-00000-5f2c0a1b.safetensors.zst"


class Image:
    """An image in memory, with its expected sums."""

    def __init__(self, leaves: list[Leaf], data: bytes, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.layout = Layout.of(leaves)
        size = self.layout.num_bytes
        body = data * (1 + size // max(1, len(data)))
        self.bytes = (self.layout.header + body)[:size]
        held = bytearray(self.bytes)
        sums = [held[start : start + chunk_bytes] for start in range(0, size, chunk_bytes)]
        address = _native.address_of(held) + self.layout.data_start
        self.contents = Contents(
            file=NAME,
            num_bytes=size,
            data_start=self.layout.data_start,
            chunk_bytes=chunk_bytes,
            checksums=b"".join(map(_native.xxh3_128, sums)),
            leaves=self.layout.leaves,
            digests=tuple(
                _native.digest(address + leaf.offset, leaf.num_bytes) for leaf in self.layout.leaves
            ),
        )

    def write(self, store: Store) -> tuple[Written, int]:
        """Write it compressed."""
        descriptor = os.memfd_create("image")
        try:
            os.write(descriptor, self.bytes)
            return write_compressed(store, NAME, self.layout, MemoryRange(descriptor, 0))
        finally:
            os.close(descriptor)


def trained(count: int, dtype: str = "float32") -> bytes:
    """Numbers like weights and an optimizer's moments."""
    random = np.random.default_rng(5)
    found = (random.standard_normal(count) * 0.02).astype("float32")
    return (found.view("uint32") >> 16).astype("uint16").tobytes() if dtype == "bfloat16" else found.tobytes()


def small() -> Image:
    """Numbers of each width, in less than a frame."""
    leaves = [
        Leaf(name=dtype, dtype=dtype, shape=(33,)) for dtype in ("int64", "float32", "bfloat16", "uint8")
    ]
    return Image(leaves, trained(300))


def stored(folder: Path) -> Path:
    [found] = [each for each in folder.rglob("*.zst")]
    return found


def test_a_frame_has_the_width_of_most_of_its_bytes() -> None:
    def widths(**sizes: int) -> list[int]:
        return widths_of(
            Layout.of([Leaf(name=name, dtype=name, shape=(size,)) for name, size in sizes.items()])
        )

    assert widths(int64=64, float32=999, bfloat16=256, uint8=512) == [4]
    assert widths(complex128=FRAME_BYTES // 16, bfloat16=FRAME_BYTES, uint8=FRAME_BYTES) == [8, 2, 2, 1, 1]
    assert widths(uint8=17, float32=0) == [1]
    assert widths() == [1], "a header alone"


@st.composite
def images(draw: st.DrawFn) -> Image:
    """Leaves of any dtype, empty, of one byte, or longer than a frame, with and without repeated bytes."""
    dtypes = draw(st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=6))
    sizes = st.sampled_from([0, 1, 2, 3, 7, 255, 4096, 70_001, FRAME_BYTES // 2 + 3])
    leaves = [Leaf(name=f"{i}", dtype=dtype, shape=(draw(sizes),)) for i, dtype in enumerate(dtypes)]
    data = draw(
        st.sampled_from([b"\0", b"\xff", os.urandom(100_003), trained(30_000), trained(9999, "bfloat16")])
    )
    chunk_bytes = draw(st.sampled_from([4096, 3 << 20, CHUNK_BYTES, 12 << 20]))
    return Image(leaves, data, chunk_bytes)


@settings(max_examples=25, deadline=None)
@given(image=images(), data=st.data())
def test_every_byte_round_trips(
    tmp_path_factory: pytest.TempPathFactory, image: Image, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run")
    store = LocalStore(str(folder))
    written, stored_bytes = image.write(store)
    size = len(image.bytes)
    assert stored_bytes <= most_bytes(size)
    assert store.list("") == [Entry(NAME, False, stored_bytes)]
    if image.contents.chunk_bytes == CHUNK_BYTES:
        assert written.checksums == image.contents.checksums
    assert tuple(written.digests) == image.contents.digests

    into = memoryview(bytearray(size))
    for room in (into, None):
        read = read_shard(store, NAME, image.contents, room)
        assert not read.bad_chunks
        assert not read.wrong_leaves(image.contents)
    assert into == image.bytes
    for _ in range(5):
        start = data.draw(st.integers(0, size))
        num_bytes = data.draw(st.integers(0, min(size - start, 3 * FRAME_BYTES)))
        plan, piece = ReadPlan(), memoryview(bytearray(num_bytes))
        plan.copy(NAME, image.contents, start, num_bytes, (), piece, 0)
        plan.run(store, 1)
        assert piece == image.bytes[start : start + num_bytes]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 9, 8193, 100_003])
def test_planes(width: int, size: int) -> None:
    """Compared with another implementation of docs/format.md."""
    plain, planes, again = os.urandom(size), bytearray(size), bytearray(size)
    _native.split_planes(plain, width, planes)
    count = size // width
    if width > 1:
        words = np.frombuffer(plain[: count * width], f"<u{width}")
        turned = (words << 1) | (words >> (8 * width - 1))
        rows = turned.astype(f">u{width}").view("uint8").reshape(count, width).T
        assert bytes(planes) == rows.tobytes() + plain[count * width :]
    else:
        assert bytes(planes) == plain
    _native.join_planes(planes, width, again)
    assert bytes(again) == plain


def test_weights_are_compressed(tmp_path: Path) -> None:
    for dtype, most in (("float32", 0.87), ("bfloat16", 0.72)):
        leaf = Leaf(name="w", dtype=dtype, shape=(3_000_000,))
        image = Image([leaf], trained(3_000_000, dtype))
        _, stored_bytes = image.write(LocalStore(str(tmp_path / dtype)))
        assert stored_bytes < most * len(image.bytes)


def look(store: Store, image: Image) -> bool:
    """Whether a file was read completely. Bytes that are read must be right, others refused by name."""
    size, is_all = len(image.bytes), True
    into = memoryview(bytearray(size))
    try:
        read = read_shard(store, NAME, image.contents, into)
        is_all = not read.bad_chunks and not read.wrong_leaves(image.contents)
        assert not is_all or into == image.bytes
    except (DamagedError, FileNotFoundError):
        is_all = False
    return is_all


def test_any_byte_flipped_and_a_file_cut_short_or_lengthened(tmp_path: Path) -> None:
    image = small()
    image.write(LocalStore(str(tmp_path)))
    path = stored(tmp_path)
    data = path.read_bytes()

    def is_read(harmed: bytes) -> bool:
        path.write_bytes(harmed)
        return look(LocalStore(str(tmp_path)), image)

    flips = [data[place] ^ (1, 0x80, 0xFF)[place % 3] for place in range(len(data))]
    kept = sum(is_read(data[:at] + bytes([flip]) + data[at + 1 :]) for at, flip in enumerate(flips))
    assert kept <= 8, "a header's spare bits at most"
    assert not any(is_read(data[:size]) for size in (*range(0, len(data), 7), len(data) - 1))
    assert not any(is_read(data + more) for more in (b"\0", data, data[-100:], bytes(100_000)))
    assert is_read(data)


def assembled(frames: list[bytes], num_bytes: int, sizes: list[int] | None = None) -> bytes:
    """A forged file with a valid checksum."""
    rows = sizes or [*map(len, frames)]
    return b"".join(frames) + table_bytes(num_bytes, [1] * len(rows), rows)


def lies(image: Image) -> dict[str, bytes]:
    size = len(image.bytes)
    frame = Codec().pack(1, memoryview(bytearray(image.bytes)))
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    claims = bytearray(bomb)
    about = zstandard.get_frame_parameters(bomb)
    assert about.content_size == 64 << 20
    where = bytes(claims).index((64 << 20).to_bytes(4, "little"))
    claims[where : where + 4] = size.to_bytes(4, "little")
    skipped = b"\x50\x2a\x4d\x18" + size.to_bytes(4, "little")
    return {
        "a bomb": assembled([bomb], size),
        "a bomb that does not say how large it is": assembled([unsized], size),
        "a bomb that says it is small": assembled([bytes(claims)], size),
        "a frame too many": assembled([frame, frame], size),
        "a frame and more": assembled([frame + frame], size),
        "a skipped frame": assembled([skipped + bytes(size)], size),
        "no frame": assembled([b""], size, [0]),
        "a frame that ends behind the file": assembled([frame], size, [len(frame) + 1000]),
        "a frame longer than can be": assembled([frame + bytes(LARGEST_FRAME)], size),
        "another length": assembled([frame], size + 1),
    }


@pytest.mark.parametrize("lie", sorted(lies(small())))
def test_a_file_with_a_wrong_length_in_its_table(tmp_path: Path, lie: str) -> None:
    image = small()
    data = lies(image)[lie]
    (tmp_path / NAME).write_bytes(data)
    store = LocalStore(str(tmp_path))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            read_shard(store, NAME, image.contents, None)
        assert tracemalloc.get_traced_memory()[1] < 10 * FRAME_BYTES
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_threads_and_not_by_the_file(tmp_path: Path) -> None:
    image = Image([Leaf(name="w", dtype="float32", shape=(16 * FRAME_BYTES // 4,))], trained(300_000))
    store, threads = LocalStore(str(tmp_path)), 2
    tracemalloc.start()
    try:
        image.write(store)
        assert tracemalloc.get_traced_memory()[1] < 5 * (threads + 1) * FRAME_BYTES, "of a file of 16 frames"
        tracemalloc.reset_peak()
        assert not read_shard(store, NAME, image.contents, None, threads=threads).bad_chunks
        assert tracemalloc.get_traced_memory()[1] < 8 * threads * FRAME_BYTES
    finally:
        tracemalloc.stop()


def test_zstandard_reads_the_whole_file(tmp_path: Path) -> None:
    image = Image([Leaf(name="w", dtype="uint8", shape=(FRAME_BYTES,))], b"abc")
    image.write(LocalStore(str(tmp_path)))
    data = stored(tmp_path).read_bytes()
    found = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    assert found == image.bytes, "of bytes, which have no planes"


def test_auto_compresses_what_shrinks_on_its_way_to_a_server(tmp_path: Path) -> None:
    weights = Image([Leaf(name="w", dtype="bfloat16", shape=(6_000_000,))], trained(6_000_000, "bfloat16"))
    noise = Image([Leaf(name="w", dtype="uint8", shape=(12_000_000,))], os.urandom(12_000_100))
    local, remote = LocalStore(str(tmp_path)), FlatStore(f"flat://{tmp_path}")
    for image, how, store, expected in (
        (weights, "auto", remote, True),
        (noise, "auto", remote, False),
        (small(), "auto", remote, False),
        (weights, "auto", local, False),
        (noise, "zstd", local, True),
        (weights, "none", remote, False),
    ):
        descriptor = os.memfd_create("image")
        os.write(descriptor, image.bytes)
        assert is_worth(how, store, image.layout, MemoryRange(descriptor, 0)) is expected
        os.close(descriptor)


def test_other_compressions_are_refused() -> None:
    for value in ("gzip", None, True, 3):
        with pytest.raises(OptionError, match="auto"):
            checked_compress(value)
