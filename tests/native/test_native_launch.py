"""The launch of the digest kernel without a GPU: what a driver is asked, and what follows if it refuses."""

from pathlib import Path

import pytest
from fake_cuda import run
from reference_digest import reference_digest

pytestmark = pytest.mark.process


# What is refused when the kernel is tried, the first before there is memory.
TRIED = ("memory", "launch", "digests", "copies")
SIZES = (100, 0, 5000, 30000)
DIGESTS = """
import ctypes

def buffer(data, align=16):
    memory = ctypes.create_string_buffer(len(data) + align)
    at = -(-ctypes.addressof(memory) // align) * align
    ctypes.memmove(at, bytes(data), len(data))
    return memory, at

leaves = [buffer(bytes([i + 1]) * size) for i, size in enumerate((100, 0, 5000, 30000))]
sizes = u64(100, 0, 5000, 30000)
sources = u64(*(at for _, at in leaves))
keep, clone = buffer(bytes(5000))
table_keep, table = buffer(_native.cuda_digest_table(sources, u64(0, 0, clone, 0), sizes))
digests = u64(1, 2, 3, 4)
out = _native.address_of(digests)
"""
DIGESTS += f"expected = u64{tuple(reference_digest(bytes([i + 1]) * size) for i, size in enumerate(SIZES))}\n"
DIGESTS += f"changed = {reference_digest(bytes([9]) + bytes([4]) * (SIZES[3] - 1))}\n"


def test_digests_are_two_fills_and_a_launch(driver: Path) -> None:
    program = """
assert _native.cuda_digests_usable(1) == ""
for _ in range(2):
    _native.cuda_digest_launch(177, table, 4, out, 1)
    assert digests == expected, (digests, expected)
assert ctypes.string_at(clone, 5000) == bytes([3]) * 5000
ctypes.memset(sources[3], 9, 1)
_native.cuda_digest_launch(178, table, 4, out, 1)
assert digests[:3] == expected[:3] and digests[3] == changed
# A table of another number of leaves than was said: nothing that could be taken for a digest.
_native.cuda_digest_launch(178, table, 3, out, 1)
assert digests == u64(*[_native.EMPTY_DIGEST] * 3, digests[3])
_native.cuda_digest_launch(178, 0, 0, 0, 1)
for wrong in ((table + 8, 4, out), (table, 4, out + 4), (0, 4, out), (table, 4, 0)):
    assert "multiple of" in refused(_native.cuda_digest_launch, 178, *wrong, 1)
"""
    there = "context=1001 mode=2"
    lines = run(driver, DIGESTS + program, 2)
    assert [line.split()[0] for line in lines[:2]] == ["retain", "module"]
    assert all(line.endswith(there) for line in lines[1:])
    a_launch = [f"fill 32 177 {there}", f"fill 64 177 {there}", f"launch 6 177 {there}"]
    assert [line for line in lines if " 177 " in line] == a_launch * 2
    assert len([line for line in lines if " 178 " in line]) == 6


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        ("module", "CUDA refused to load the kernel of digests: UNSUPPORTED_PTX (no): ptxas: too new"),
        ("function", "CUDA refused to find flashckpt_digest: FAULT (no)"),
        ("memory", "CUDA refused to try the kernel of digests: FAULT (no)"),
        ("launch", "CUDA refused to launch the kernel of digests: FAULT (no)"),
        ("digests", "on this device the kernel of digests gives other digests than it should"),
        ("copies", "on this device the kernel of digests gives other copies than it should"),
    ],
)
def test_a_kernel_that_cannot_be_used(driver: Path, refuses: str, reason: str) -> None:
    program = f"""
reason = {reason!r}
assert _native.cuda_digests_usable(0) == reason, _native.cuda_digests_usable(0)
assert "find device 7" in _native.cuda_digests_usable(7)
assert refused(_native.cuda_digest_launch, 177, table, 4, out, 0) == reason
assert digests == u64(1, 2, 3, 4)
"""
    lines = run(driver, DIGESTS + program, 2, refuses)
    assert not any(" 177 " in line for line in lines)
    assert len([line for line in lines if line.startswith("stream gone")]) == 2 * (refuses in TRIED)
    assert len([line for line in lines if line.startswith("memory gone")]) == 2 * (refuses in TRIED[1:])


def test_a_refused_launch_leaves_no_digest(driver: Path) -> None:
    program = """
assert _native.cuda_digests_usable(0) == ""
os.environ["FAKE_CUDA_REFUSES"] = "launch"
why = refused(_native.cuda_digest_launch, 177, table, 4, out, 0)
assert why == "CUDA refused to launch the kernel of digests: FAULT (no)", why
assert digests == u64(*[_native.EMPTY_DIGEST] * 4)
"""
    assert [line.split()[0] for line in run(driver, DIGESTS + program, 2)][-2:] == ["fill", "launch"]
