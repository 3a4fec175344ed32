"""Files written, read and checked: what is right comes back, what is wrong is found or refused."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
import subprocess
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_digest import reference_digest

from flashckpt import _native
from tests.descriptors import closed_after

PAGE = 4096


class Region:
    """A memfd with random bytes, whole pages long."""

    def __init__(self, num_bytes: int, offset: int = 0, seed: int = 0) -> None:
        self.fd = os.memfd_create("region")
        closed_after(self)
        self.offset = offset
        capacity = offset + max(PAGE, -(-num_bytes // PAGE) * PAGE)
        os.ftruncate(self.fd, capacity)
        self.map = mmap.mmap(self.fd, capacity)
        self.map[:] = np.random.default_rng(seed).integers(0, 256, capacity, dtype=np.uint8).tobytes()
        self.num_bytes = num_bytes

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)

    @property
    def data(self) -> bytes:
        return self.map[self.offset : self.offset + self.num_bytes]


def leaves_of(num_bytes: int) -> dict[str, array[int]]:
    """Ranges of odd sizes at odd places, in no order, one of them empty."""
    cuts = sorted({0, num_bytes, *(min(num_bytes, cut) for cut in (1, 6, 4099, 8191, 8200, 50_001))})
    pairs = [(a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)][::-1] + [(num_bytes, 0)]
    return {
        "leaf_offsets": array("Q", [a for a, _ in pairs]),
        "leaf_sizes": array("Q", [size for _, size in pairs]),
    }


def expected_digests(data: bytes, leaves: dict[str, array[int]]) -> list[int]:
    pairs = zip(leaves["leaf_offsets"], leaves["leaf_sizes"], strict=True)
    return [reference_digest(data[a : a + size]) for a, size in pairs]


def write(path: Path, region: Region, **options: object) -> tuple[bytes, bytes, bool]:
    leaves = leaves_of(region.num_bytes)
    return _native.write_file(path, region.fd, region.offset, region.num_bytes, **leaves, **options)  # type: ignore[arg-type]


def read_file(
    path: Path, into: object, *, leaf_offsets: array[int], leaf_sizes: array[int], num_bytes: int,
    chunk_bytes: int = 4 << 20, checksums: bytes, direct: bool = True, threads: int = 2,
) -> tuple[bytes, list[int]]:  # fmt: skip
    """All of a file, into memory if there is some: the digests of its leaves, and the bad chunks."""
    digests = _native.LeafDigests(leaf_sizes)
    rows = enumerate(zip(leaf_offsets, leaf_sizes, strict=True))
    parts = [number for i, (start, size) in rows if size for number in (start, start + size, i, 0)]
    address = None if into is None else _native.address_of(into)  # type: ignore[arg-type]
    plan = _native.FilePlan(
        num_bytes=num_bytes, chunk_bytes=chunk_bytes, checksums=checksums,
        copies=array("Q", [] if address is None or not num_bytes else [0, address, num_bytes, 0]),
        parts=array("Q", parts), ranges=array("Q", [0, num_bytes]), digests=digests, direct=direct,
    )  # fmt: skip
    plan.read(path, threads=threads)
    return digests.digests(), plan.bad_chunks()


def check_file(path: Path, **how: Any) -> tuple[bytes, list[int]]:
    return read_file(path, None, **how)


@pytest.fixture
def no_direct(tmp_path: Path) -> Iterator[Path]:
    """A folder of a file system that has neither O_DIRECT nor fallocate."""
    folder = tmp_path / "ramfs"
    folder.mkdir()
    command = ["mount", "-t", "ramfs", "-o", "mode=0700", "ramfs", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting is refused here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
# A chunk of 16 pages is taken in several turns of what the caches hold.
@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes"),
    [*((size, 2 * PAGE) for size in (0, 1, 4096, 4097, 100_003)), (200_003, 16 * PAGE)],
)
def test_round_trip(tmp_path: Path, num_bytes: int, chunk_bytes: int, threads: int, direct: bool) -> None:
    region = Region(num_bytes, offset=2 * PAGE)
    leaves, progress = leaves_of(num_bytes), array("Q", [0])
    options = {"chunk_bytes": chunk_bytes, "threads": threads, "direct": direct}
    counter = _native.address_of(progress)
    digests, checksums, _ = write(tmp_path / "shard", region, progress=counter, **options)
    assert (tmp_path / "shard").read_bytes() == region.data
    assert stat.S_IMODE((tmp_path / "shard").stat().st_mode) & ~0o644 == 0
    assert progress[0] == num_bytes
    assert array("Q", digests).tolist() == expected_digests(region.data, leaves)
    chunks = [region.data[i : i + chunk_bytes] for i in range(0, num_bytes, chunk_bytes)]
    assert checksums == b"".join(_native.xxh3_128(chunk) for chunk in chunks)

    same = {"num_bytes": num_bytes, "checksums": checksums, **leaves, **options}
    for first, behind in ((PAGE, PAGE), (PAGE + 1, PAGE), (PAGE, 0)):
        # On whole pages and to their end, as direct requests need it; elsewhere; and with no byte to spare.
        target = Region(first + num_bytes + behind, seed=1)
        before = target.map[:]
        capacity = -(-num_bytes // PAGE) * PAGE if behind else num_bytes
        into = memoryview(target.map)[first : first + capacity]
        read = read_file(tmp_path / "shard", into, **same)
        assert read == (digests, [])
        assert into[:num_bytes] == region.data
        assert target.map[:first] == before[:first]
        assert target.map[first + capacity :] == before[first + capacity :]
    assert check_file(tmp_path / "shard", **same) == (digests, [])


@pytest.mark.parametrize("length", [0, 100_002, 100_004, 98_304])
def test_a_file_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    path, region = tmp_path / "shard", Region(100_003)
    _, checksums, _ = write(path, region)
    os.truncate(path, length)
    target = Region(100_003, seed=1)
    before = target.data
    with pytest.raises(ValueError, match=f"has {length} bytes"):
        read_file(path, target.map, num_bytes=100_003, checksums=checksums, **leaves_of(100_003))
    with pytest.raises(ValueError, match=f"has {length} bytes"):
        check_file(path, num_bytes=100_003, checksums=checksums, **leaves_of(100_003))
    assert target.data == before


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    region = Region(10)
    _, checksums, _ = write(tmp_path / "shard", region)
    (tmp_path / "link").symlink_to("shard")
    os.mkfifo(tmp_path / "pipe")
    for name, code in (
        ("link", errno.ELOOP),
        ("pipe", errno.EINVAL),
        (".", errno.EINVAL),
        ("none", errno.ENOENT),
    ):
        with pytest.raises(OSError, match=r"\S") as refused:
            check_file(tmp_path / name, num_bytes=10, checksums=checksums, **leaves_of(10))
        assert (refused.value.errno, refused.value.filename) == (code, str(tmp_path / name))


def test_an_existing_file_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("shard", "link"):
        with pytest.raises(FileExistsError) as refused:
            write(tmp_path / name, Region(10_000))
        assert refused.value.filename == str(tmp_path / name)
    assert (tmp_path / "shard").read_bytes() == b"mine"
    assert not (tmp_path / "elsewhere").exists()


def test_a_truncated_region_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    region = Region(100_003)
    os.ftruncate(region.fd, 8192)
    with pytest.raises(OSError, match="region ends") as refused:
        _native.write_file(tmp_path / "shard", region.fd, 0, 100_003, **leaves_of(100_003))
    assert refused.value.errno == errno.EIO
    assert not (tmp_path / "shard").exists()


def test_a_limit_of_file_size_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    region, before = Region(1 << 20), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as refused:
            write(tmp_path / "shard", region)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / "shard"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_file_system_without_direct_io(no_direct: Path) -> None:
    region = Region(100_003)
    digests, checksums, direct = write(no_direct / "shard", region, chunk_bytes=2 * PAGE)
    assert not direct
    assert (no_direct / "shard").read_bytes() == region.data
    same = {"num_bytes": 100_003, "chunk_bytes": 2 * PAGE, "checksums": checksums, **leaves_of(100_003)}
    assert check_file(no_direct / "shard", **same) == (digests, [])


def test_leaves_without_bytes_may_share_offsets_of_others(tmp_path: Path) -> None:
    region = Region(100)
    leaves = {"leaf_offsets": array("Q", [0, 0, 5, 5, 100]), "leaf_sizes": array("Q", [5, 0, 95, 0, 0])}
    digests, _, _ = _native.write_file(tmp_path / "shard", region.fd, 0, 100, **leaves)
    assert array("Q", digests).tolist() == expected_digests(region.data, leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_bytes": 1000}, "chunk_bytes"),
        ({"chunk_bytes": 2 << 30}, "chunk_bytes"),
        ({"threads": 0}, "threads"),
        ({"leaf_offsets": array("Q", [5, 9])}, "differ in length"),
        ({"leaf_offsets": array("Q", [5]), "leaf_sizes": array("Q", [96])}, "beyond the last"),
        ({"leaf_offsets": array("Q", [2**64 - 1]), "leaf_sizes": array("Q", [2])}, "beyond the last"),
        ({"leaf_offsets": array("Q", [5, 8]), "leaf_sizes": array("Q", [4, 4])}, "overlaps"),
        ({"progress": 3}, "multiple of 8"),
    ],
)
def test_invalid_arguments(tmp_path: Path, change: dict[str, object], message: str) -> None:
    region = Region(100)
    options = {"leaf_offsets": array("Q"), "leaf_sizes": array("Q"), **change}
    with pytest.raises(ValueError, match=message):
        _native.write_file(tmp_path / "shard", region.fd, 0, 100, **options)  # type: ignore[arg-type]
    nothing: dict[str, Any] = {"leaf_offsets": array("Q"), "leaf_sizes": array("Q")}
    with pytest.raises(ValueError, match="source_offset"):
        _native.write_file(tmp_path / "shard", region.fd, 8, 80, **nothing)
    with pytest.raises(ValueError, match="one checksum"):
        check_file(tmp_path / "shard", num_bytes=100, checksums=bytes(32), **nothing)
    with pytest.raises(ValueError, match="is no size"):
        check_file(tmp_path / "shard", num_bytes=(1 << 62) + 1, checksums=b"", **nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_read_in_progress_ends_when_its_plan_is_closed(tmp_path: Path) -> None:
    """What was begun before it is read, and goes nowhere."""
    source = Region(64 << 20)
    _, checksums, _ = write(tmp_path / "shard", source)
    target, progress = bytearray(source.num_bytes), array("Q", [0])
    plan = _native.FilePlan(
        num_bytes=source.num_bytes, chunk_bytes=4 << 20, checksums=checksums,
        copies=array("Q", [0, _native.address_of(target), source.num_bytes, 0]), parts=array("Q"),
        ranges=array("Q"), digests=_native.LeafDigests(array("Q")), progress=_native.address_of(progress),
    )  # fmt: skip
    found: list[object] = []

    def read() -> None:
        try:
            plan.read(tmp_path / "shard", threads=1)
        except OSError as error:
            found.append(error.errno)

    thread = threading.Thread(target=read)
    thread.start()
    while not progress[0]:
        pass
    _native.FilePlan.close([plan])
    done, copied = progress[0], bytes(target)
    thread.join()
    assert found == [errno.ECANCELED] or done == source.num_bytes
    assert (progress[0], bytes(target)) == (done, copied)


@pytest.mark.parametrize("num_bytes", [1, 4097, 3 * 65536, 3 * 65536 + 5, 9 * 65536 + 4096])
def test_chunks_from_other_sources_have_the_same_sums(num_bytes: int) -> None:
    """In any order, many at once or one by one."""
    region, leaves, chunk = Region(num_bytes, offset=2 * PAGE), leaves_of(num_bytes), 65536
    shape = {"num_bytes": num_bytes, "chunk_bytes": chunk, **leaves}
    window = memoryview(_native.Mapping(region.fd, 2 * PAGE, num_bytes))
    assert window.readonly
    assert window == region.data
    starts = [*range(0, num_bytes, 2 * chunk)][::-1]
    audit = _native.Audit(**shape)
    assert set(array("Q", audit.digests())) <= {_native.EMPTY_DIGEST, _native.finish_digest(0, 0)}
    sums = {}
    for start in starts:
        stop = min(start + 2 * chunk, num_bytes)
        sums[start] = audit.add(start, window[start:stop])
    found = b"".join(sums[start] for start in sorted(sums))
    chunks = [region.data[start : start + chunk] for start in range(0, num_bytes, chunk)]
    assert found == b"".join(map(_native.xxh3_128, chunks))
    assert [*array("Q", audit.digests())] == expected_digests(region.data, leaves)


def test_partial_chunks_are_refused() -> None:
    audit = _native.Audit(num_bytes=10_000, chunk_bytes=4096, leaf_offsets=array("Q"), leaf_sizes=array("Q"))
    data = bytes(10_000)
    for offset, size in ((1, 4096), (0, 4095), (8192, 1809), (4096, 10_000), (1 << 63, 4096), (12_288, 0)):
        with pytest.raises(ValueError, match="whole chunks|beyond the last"):
            audit.add(offset, data[:size])
