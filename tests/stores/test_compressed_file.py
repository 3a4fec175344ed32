"""Compressed shards: every range gives the right plain bytes. A damaged file gives no wrong byte, is refused
by name, and takes no more memory than a few frames."""

from __future__ import annotations

import math
import os
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt import _native
from flashckpt.errors import DamagedError, OptionError
from flashckpt.format.layout import DTYPES, Layout, Leaf
from flashckpt.format.records import CHUNK_BYTES, Contents, ShardRecord
from flashckpt.options import checked_compress
from flashckpt.store import compressed_store
from flashckpt.store.base import Entry, LengthError, MemoryRange, Store
from flashckpt.store.compressed_store import (
    FRAME_BYTES,
    LARGEST_FRAME,
    Codec,
    CompressedStore,
    Compression,
    Widths,
    compressed_name,
    compressing,
    count_of,
    most_bytes,
    plain_name,
    read_table,
    table_bytes,
)
from flashckpt.store.local import LocalStore
from flashckpt.store.read_plan import read_shard

NAME = "rank-00000-5f2c0a1b.safetensors"


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
            shard=ShardRecord(
                file=NAME,
                num_bytes=size,
                data_start=self.layout.data_start,
                chunk_bytes=chunk_bytes,
                checksums=b"".join(map(_native.xxh3_128, sums)),
            ),
            leaves=self.layout.leaves,
            digests=tuple(
                _native.digest(address + leaf.offset, leaf.num_bytes) for leaf in self.layout.leaves
            ),
        )

    def write(self, store: Store, name: str = NAME) -> Any:
        descriptor = os.memfd_create("image")
        try:
            os.write(descriptor, self.bytes)
            return store.write_shard(name, self.layout, MemoryRange(descriptor, 0))
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


def test_most_bytes_are_split_by_the_width_of_their_elements() -> None:
    """Leaves whose size is not a multiple of 512 follow all others, with elements of any width."""

    def parts(**sizes: int) -> list[tuple[int, int]]:
        leaves = [Leaf(name=name, dtype=name.split("_")[0], shape=(size,)) for name, size in sizes.items()]
        layout = Layout.of(leaves)
        runs = Widths.of(layout).runs(layout.data_start, layout.num_bytes)
        return [(stop - start, width) for start, stop, width in runs]

    assert parts(int64=64, float32=128, bfloat16=256, uint8=512) == [(512, 8), (512, 4), (512, 2), (512, 1)]
    assert parts(float32=1 << 10, float32_odd=3, bfloat16=1 << 10) == [(4096, 4), (2060, 2)]
    assert parts(uint8=512, float32_odd=999_999) == [(512, 8), (3_999_996, 4)]
    assert parts(complex128=1, uint8=17) == [(16, 8), (17, 1)]
    assert parts() == []


@st.composite
def images(draw: st.DrawFn) -> Image:
    """Leaves of any dtype, some with no byte or one byte, some longer than a frame, with and without repeated
    bytes."""
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
    store = compressing(LocalStore(str(folder)), "zstd")
    written = image.write(store)
    size = len(image.bytes)
    assert written.stored_bytes == stored(folder).stat().st_size <= most_bytes(size)
    assert store.list("") == [Entry(NAME, False, size)]
    assert os.listdir(folder) == [f"{NAME}.{size}.zst"]
    if image.contents.shard.chunk_bytes == CHUNK_BYTES:
        assert written.checksums == image.contents.shard.checksums
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
        assert store.read_bytes(NAME, start, num_bytes) == image.bytes[start : start + num_bytes]
    with pytest.raises(LengthError):
        store.read_bytes(NAME, size, 1)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 9, 4095, 8192, 8193, 100_003])
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


def test_planes_of_other_lengths_are_refused() -> None:
    for width, source, into in ((3, 8, 8), (0, 8, 8), (4, 8, 7), (4, 7, 8)):
        with pytest.raises(ValueError, match="number|length"):
            _native.split_planes(bytes(source), width, bytearray(into))
        with pytest.raises(ValueError, match="number|length"):
            _native.join_planes(bytes(source), width, bytearray(into))
    with pytest.raises(BufferError):
        _native.split_planes(bytes(8), 4, bytes(8))


def test_weights_are_compressed(tmp_path: Path) -> None:
    for dtype, most in (("float32", 0.87), ("bfloat16", 0.72)):
        leaf = Leaf(name="w", dtype=dtype, shape=(3_000_000,))
        image = Image([leaf], trained(3_000_000, dtype))
        written = image.write(compressing(LocalStore(str(tmp_path / dtype)), "zstd"))
        assert written.stored_bytes < most * len(image.bytes)


def look(store: Store, image: Image) -> bool:
    """Whether a file was read completely. Bytes that are read must be right; others must be refused by
    name."""
    size, is_all = len(image.bytes), True
    into = memoryview(bytearray(size))
    try:
        read = read_shard(store, NAME, image.contents, into)
        is_all = not read.bad_chunks and not read.wrong_leaves(image.contents)
        assert not is_all or into == image.bytes
    except (DamagedError, FileNotFoundError):
        is_all = False
    return is_all


def test_any_byte_flipped(tmp_path: Path) -> None:
    image = small()
    image.write(compressing(LocalStore(str(tmp_path)), "zstd"))
    path, store = stored(tmp_path), CompressedStore(LocalStore(str(tmp_path)))
    data = path.read_bytes()
    kept = set()
    for place in range(len(data)):
        flipped = data[place] ^ (1, 0x80, 0xFF)[place % 3]
        path.write_bytes(data[:place] + bytes([flipped]) + data[place + 1 :])
        if look(CompressedStore(LocalStore(str(tmp_path))), image):
            kept.add(place)
    assert len(kept) <= 8, "a header's spare bits at most"
    path.write_bytes(data)
    assert look(store, image)


def test_cut_short_and_lengthened(tmp_path: Path) -> None:
    image = small()
    image.write(compressing(LocalStore(str(tmp_path)), "zstd"))
    path = stored(tmp_path)
    data = path.read_bytes()
    for size in (*range(0, len(data), 7), len(data) - 1):
        path.write_bytes(data[:size])
        assert not look(CompressedStore(LocalStore(str(tmp_path))), image)
    for more in (b"\0", data, data[-100:], bytes(100_000)):
        path.write_bytes(data + more)
        assert not look(CompressedStore(LocalStore(str(tmp_path))), image)


def assembled(frames: list[bytes], num_bytes: int, widths: Widths, sizes: list[int] | None = None) -> bytes:
    """A forged file with a valid checksum."""
    return b"".join(frames) + table_bytes(num_bytes, widths, array("I", sizes or map(len, frames)))


def lies(image: Image) -> dict[str, bytes]:
    size, widths = len(image.bytes), Widths.of(image.layout)
    frame = Codec().pack(widths, 0, memoryview(bytearray(image.bytes)))
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    claims = bytearray(bomb)
    about = zstandard.get_frame_parameters(bomb)
    assert about.content_size == 64 << 20
    where = bytes(claims).index((64 << 20).to_bytes(4, "little"))
    claims[where : where + 4] = size.to_bytes(4, "little")
    skipped = b"\x50\x2a\x4d\x18" + size.to_bytes(4, "little")
    return {
        "a bomb": assembled([bomb], size, widths),
        "a bomb that does not say how large it is": assembled([unsized], size, widths),
        "a bomb that says it is small": assembled([bytes(claims)], size, widths),
        "a frame too many": assembled([frame, frame], size, widths),
        "a frame and more": assembled([frame + frame], size, widths),
        "a skipped frame": assembled([skipped + bytes(size)], size, widths),
        "no frame": assembled([b""], size, widths, [0]),
        "a frame that ends behind the file": assembled([frame], size, widths, [len(frame) + 1000]),
        "a frame longer than can be": assembled([frame + bytes(LARGEST_FRAME)], size, widths),
        "another length": assembled([frame], size + 1, widths),
        "widths that go back": assembled([frame], size, Widths((size, size - 1, 0, 0, size))),
        "widths past the end": assembled([frame], size, Widths((0, 0, 0, size + 4096, size))),
    }


@pytest.mark.parametrize("lie", sorted(lies(small())))
def test_a_file_with_a_wrong_length_in_its_table(tmp_path: Path, lie: str) -> None:
    image = small()
    data = lies(image)[lie]
    (tmp_path / compressed_name(NAME, len(image.bytes))).write_bytes(data)
    store = CompressedStore(LocalStore(str(tmp_path)))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            read_shard(store, NAME, image.contents, None)
        assert tracemalloc.get_traced_memory()[1] < 10 * FRAME_BYTES
    finally:
        tracemalloc.stop()


def test_a_file_with_a_wrong_length_in_its_name(tmp_path: Path) -> None:
    """Whatever length the file claims, no more bytes are read or allocated than it has."""
    image = small()
    image.write(compressing(LocalStore(str(tmp_path)), "zstd"))
    stored(tmp_path).rename(tmp_path / compressed_name(NAME, 10**15))
    store = CompressedStore(LocalStore(str(tmp_path)))
    with pytest.raises(LengthError):
        read_shard(store, NAME, image.contents, None)
    with pytest.raises(DamagedError, match="table"):
        store.read_bytes(NAME, 0, 8)


def test_names() -> None:
    assert plain_name(compressed_name(NAME, 4097)) == (NAME, 4097)
    temporary = f".{NAME}.0123456789abcdef.tmp"
    assert plain_name(compressed_name(temporary, 1)) == (temporary, 1)
    numbers = ("", "0", "01", "-1", "+1", str(10**16), "1 ", "\u0663")
    names = [NAME, "node-0.json.5.zst", ".safetensors.5.zst", *(f"{NAME}.{each}.zst" for each in numbers)]
    for name in names:
        assert plain_name(name) is None, name


def test_no_file_exceeds_the_longest_length(tmp_path: Path) -> None:
    """For incompressible bytes, the bound that determines the parts of an upload holds."""
    image = Image([Leaf(name="noise", dtype="uint8", shape=(2 * FRAME_BYTES + 5,))], os.urandom(8_500_000))
    written = image.write(compressing(LocalStore(str(tmp_path)), "zstd"))
    assert 2 * FRAME_BYTES + 5 < written.stored_bytes <= most_bytes(len(image.bytes))
    assert look(CompressedStore(LocalStore(str(tmp_path))), image)


def test_memory_is_bounded_by_threads_and_not_by_the_file(tmp_path: Path) -> None:
    image = Image([Leaf(name="w", dtype="float32", shape=(16 * FRAME_BYTES // 4,))], trained(300_000))
    store, threads = compressing(LocalStore(str(tmp_path)), "zstd"), 2
    tracemalloc.start()
    try:
        image.write(store)
        assert tracemalloc.get_traced_memory()[1] < 5 * (threads + 1) * FRAME_BYTES, "of a file of 16 frames"
        tracemalloc.reset_peak()
        assert not read_shard(store, NAME, image.contents, None, threads=threads).bad_chunks
        assert tracemalloc.get_traced_memory()[1] < 8 * threads * FRAME_BYTES
    finally:
        tracemalloc.stop()


def test_a_table_is_read_alone(tmp_path: Path) -> None:
    """For a long file, only the table and the requested frames are read."""
    image = Image([Leaf(name="w", dtype="float32", shape=(5_000_000,))], trained(200_000))
    image.write(compressing(LocalStore(str(tmp_path)), "zstd"))

    class Counted(LocalStore):
        num_bytes = 0

        def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
            found = super().read_bytes(path, offset, num_bytes)
            self.num_bytes += len(found)
            return found

    below = Counted(str(tmp_path))
    store = CompressedStore(below)
    assert store.read_bytes(NAME, FRAME_BYTES + 5, 100) == image.bytes[FRAME_BYTES + 5 : FRAME_BYTES + 105]
    assert below.num_bytes <= LARGEST_FRAME + 4 * count_of(len(image.bytes)) + 80
    before = below.num_bytes
    store.read_bytes(NAME, 3 * FRAME_BYTES, 10)
    assert below.num_bytes - before <= LARGEST_FRAME, "the table is known"


def test_a_file_written_again_with_other_frames(tmp_path: Path) -> None:
    """Removed and compressed again by another version: cached entries of the old file are not used."""
    image = Image([Leaf(name="w", dtype="float32", shape=(2_000_000,))], trained(200_000))
    writer = compressing(LocalStore(str(tmp_path)), "zstd")
    image.write(writer)
    reader = CompressedStore(LocalStore(str(tmp_path)))
    assert look(reader, image)
    path = stored(tmp_path)
    path.unlink()
    frames = [
        zstandard.ZstdCompressor(level=9).compress(image.bytes[start : start + FRAME_BYTES])
        for start in range(0, len(image.bytes), FRAME_BYTES)
    ]
    size = len(image.bytes)
    path.write_bytes(assembled(frames, size, Widths((size, size, size, size, size))))
    assert look(reader, image)


def test_zstandard_reads_the_whole_file(tmp_path: Path) -> None:
    image = Image([Leaf(name="w", dtype="uint8", shape=(FRAME_BYTES,))], b"abc")
    image.write(compressing(LocalStore(str(tmp_path)), "zstd"))
    data = stored(tmp_path).read_bytes()
    found = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    assert found == image.bytes, "of bytes, which have no planes"


def test_a_plain_and_compressed_file_is_listed_once(tmp_path: Path) -> None:
    image, plain = small(), LocalStore(str(tmp_path))
    image.write(compressing(plain, "zstd"))
    image.write(plain)
    store = CompressedStore(plain)
    assert store.list("") == [Entry(NAME, False, len(image.bytes))]
    assert not store.list("")[0].is_compressed
    assert look(store, image)
    store.remove(NAME)
    assert os.listdir(tmp_path) == []
    assert not store.exists(NAME)


def test_the_plain_file_is_preferred_to_the_compressed_one(tmp_path: Path) -> None:
    """Whatever happened to the other file, and whether the folder was listed before or not."""
    image, plain = small(), LocalStore(str(tmp_path))
    image.write(compressing(plain, "zstd"))
    reader = CompressedStore(plain)
    assert look(reader, image)
    image.write(plain)
    other = small()
    other.bytes = other.bytes[:-4] + b"rot!"
    stored(tmp_path).unlink()
    other.write(compressing(CompressedStore(LocalStore(str(tmp_path / "other"))), "zstd"))
    stored(tmp_path / "other").rename(tmp_path / compressed_name(NAME, len(image.bytes)))
    for store in (reader, CompressedStore(plain)):
        assert [each.is_compressed for each in store.list("") if not each.is_folder] == [False]
        assert look(store, image)
        assert store.read_bytes(NAME, 0, len(image.bytes)) == image.bytes


def test_auto_chooses_what_arrives_earlier(tmp_path: Path) -> None:
    image = Image([Leaf(name="w", dtype="bfloat16", shape=(6_000_000,))], trained(6_000_000, "bfloat16"))
    noise = Image([Leaf(name="w", dtype="uint8", shape=(12_000_000,))], os.urandom(12_000_100))
    descriptors = []
    for each in (image, noise):
        descriptors.append(os.memfd_create("image"))
        os.write(descriptors[-1], each.bytes)

    def is_worth(how: Compression, which: int, *, is_remote: bool) -> bool:
        each = (image, noise)[which]
        return how.is_worth(each.layout, MemoryRange(descriptors[which], 0), 1, is_remote=is_remote)

    for rate, expected in ((None, True), (1e6, True), (1e13, False)):
        how = Compression("auto")
        if rate is not None:
            how.sent(1 << 30, (1 << 30) / rate)
        assert is_worth(how, 0, is_remote=True) is expected
        assert not is_worth(how, 1, is_remote=True), "nothing is gained"
    assert not is_worth(Compression("auto"), 0, is_remote=False), "a disk is faster until it is known"
    assert is_worth(Compression("zstd"), 1, is_remote=False)
    for each in descriptors:
        os.close(each)


def test_other_compressions_are_refused() -> None:
    for value in ("gzip", None, True, 3):
        with pytest.raises(OptionError, match="auto"):
            checked_compress(value)


def test_bounds_hold_for_the_library() -> None:
    """The longest frame, by zstandard's own bound."""
    noise = os.urandom(FRAME_BYTES)
    assert len(Codec().pack(Widths((FRAME_BYTES,) * 5), 0, memoryview(bytearray(noise)))) <= LARGEST_FRAME
    assert math.ceil(FRAME_BYTES / 256) + FRAME_BYTES <= LARGEST_FRAME
    with pytest.raises(DamagedError):
        read_table(lambda offset, size: bytes(size), NAME, 10**6, FRAME_BYTES)
    assert compressed_store.count_of(0) == 0
