"""Direct requests that are refused where O_DIRECT was taken: files are written and read all the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

# Many threads on each file: those that are refused while one gives up O_DIRECT must not fail.
_SCRIPT = """
import ctypes, os, sys
from array import array
from flashckpt import _native

size, chunk_bytes, shim = 64 * 4096, int(sys.argv[2]), ctypes.CDLL(sys.argv[3])
taken, refusals = (ctypes.c_int.in_dll(shim, name) for name in ("taken", "refusals"))
region = os.memfd_create("source")
os.write(region, os.urandom(size))
leaves = {"leaf_offsets": array("Q", [0]), "leaf_sizes": array("Q", [size])}
target = _native.Mapping(size)
for number in range(40):
    path = os.path.join(sys.argv[1], str(number))
    digests, sums, direct = _native.write_file(
        path, region, 0, size, chunk_bytes=chunk_bytes, threads=8, **leaves
    )
    assert not direct
    for copies in ([], [0, _native.address_of(target), size, 0]):
        found = _native.LeafDigests(array("Q", [size]))
        plan = _native.FilePlan(
            num_bytes=size, chunk_bytes=chunk_bytes, checksums=sums, copies=array("Q", copies),
            parts=array("Q", [0, size, 0, 0]), ranges=array("Q"), digests=found,
        )
        taken.value = refusals.value = 0
        plan.read(path, threads=8)
        assert refusals.value > 0
        assert (taken.value > 0) == (os.environ["REFUSED_FROM"] != "0")
        assert (found.digests(), plan.left(), plan.bad_chunks()) == (digests, [], [])
assert bytes(target) == os.pread(region, size, 0)
print("all")
"""


@pytest.mark.every_set
@pytest.mark.parametrize(("chunk_pages", "from_page"), [(1, 0), (1, 24), (64, 24)])
def test_refused_direct_requests_go_through_the_cache(
    tmp_path: Path, chunk_pages: int, from_page: int
) -> None:
    """From the first on, from one of many on, and in the middle of what one request asks for."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: nothing refuses requests")
    shim = tmp_path / "refusing.so"
    source = Path(__file__).with_name("refusing.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
    files = tmp_path / "files"
    files.mkdir()
    preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(shim)]))
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(files), str(chunk_pages * 4096), str(shim)],
        env={**os.environ, "LD_PRELOAD": preload, "REFUSED_FROM": str(from_page * 4096)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "all\n", "")
