"""The CUDA kernel of digests without a GPU: its source compiled for the host against the definition and the
native digest, and the PTX that ships against its source. The driver's part is in test_native_cuda.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulated_kernel import CSRC, EmulatedKernel, table_of
from reference_digest import reference_digest

from flashckpt import _native

pytestmark = pytest.mark.process

ROOT = CSRC.parent
EMPTY = _native.EMPTY_DIGEST


def random_bytes(seed: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def expected(leaf: np.ndarray) -> int:
    digest = reference_digest(leaf.tobytes())
    assert digest == _native.digest(leaf.ctypes.data, leaf.nbytes)
    return digest


def views(memory: np.ndarray, sizes: list[int], shift: int) -> list[np.ndarray]:
    """Leaves at addresses that are `shift` past a multiple of 16."""
    leaves, at = [], -memory.ctypes.data % 16
    for size in sizes:
        leaves.append(memory[at + shift : at + shift + size])
        at += -(-(shift + size) // 16) * 16
    return leaves


@pytest.mark.parametrize("shift", [1, 0, 8])
def test_every_tail_at_every_alignment(kernel: EmulatedKernel, shift: int) -> None:
    sizes = [*range(1024), *(4096 * 2 + tail for tail in range(0, 4096, 331)), 1024, 2048, 4096]
    leaves = views(random_bytes(shift, sum(sizes) + 32 * len(sizes)), sizes, shift)
    table = table_of([leaf.ctypes.data for leaf in leaves], sizes)
    assert kernel.launch(table, len(sizes), seed=shift) == [expected(leaf) for leaf in leaves]
    assert (kernel.loaded_bytes, kernel.stored_bytes) == (sum(sizes), 0)


@pytest.mark.parametrize("blocks", [3, 16])
def test_many_leaves_and_clones_in_one_launch(kernel: EmulatedKernel, blocks: int) -> None:
    random = np.random.default_rng(blocks)
    sizes = [0 if i % 50 == 0 else int(2 ** random.uniform(0, 16)) for i in range(400)]
    sizes.append((2 << 20) + 5)  # it is added by runs
    leaves, places = [], []
    for size in sizes:
        shift, place = random.integers(0, 17, 2).tolist()
        leaves.append(random.integers(0, 256, size + shift, dtype=np.uint8)[shift:])
        places.append(np.full(size + place + 1, 0xEE, np.uint8)[place:])
    cloned = [size > 0 and i % 3 != 0 for i, size in enumerate(sizes)]
    table = table_of(
        [leaf.ctypes.data for leaf in leaves],
        sizes,
        [place.ctypes.data if yes else 0 for place, yes in zip(places, cloned, strict=True)],
    )
    assert kernel.launch(table, len(sizes), blocks=blocks, seed=blocks) == [expected(leaf) for leaf in leaves]
    for leaf, place, yes in zip(leaves, places, cloned, strict=True):
        assert (place[:-1] == leaf).all() if yes else (place == 0xEE).all()
        assert place[-1] == 0xEE
    assert kernel.loaded_bytes == sum(sizes)
    assert kernel.stored_bytes == sum(size for size, yes in zip(sizes, cloned, strict=True) if yes)


def test_leaves_may_share_memory(kernel: EmulatedKernel) -> None:
    leaf = random_bytes(3, 9000)
    at = leaf.ctypes.data
    table = table_of([at, at, at + 100], [9000, 9000, 200])
    assert kernel.launch(table, 3) == [expected(leaf), expected(leaf), expected(leaf[100:300])]


def test_an_unfinished_leaf_has_no_digest(kernel: EmulatedKernel) -> None:
    leaves = [random_bytes(i, size) for i, size in enumerate((500, 50000, 20000))]
    sizes = [leaf.nbytes for leaf in leaves]
    table = table_of([leaf.ctypes.data for leaf in leaves], sizes)
    digests = [expected(leaf) for leaf in leaves]
    words = np.frombuffer(table, np.uint64).copy()
    words[2] -= 1  # groups of the launch: the last one of the last leaf is never taken
    assert kernel.launch(words.tobytes(), 3) == [*digests[:2], EMPTY]
    assert kernel.launch(table, 2) == [EMPTY] * 2  # another number of leaves than the table's
    words[0] ^= 1
    assert kernel.launch(words.tobytes(), 3) == [EMPTY] * 3


@pytest.mark.parametrize(
    ("sources", "sizes", "destinations", "message"),
    [
        ([4096], [8, 8], None, "differ in length"),
        ([4096, 0], [8, 8], None, "source of leaf 1 has no address"),
        ([4096, 2**64 - 4], [8, 8], None, "source of leaf 1 goes past the end"),
        ([4096], [8], [2**64 - 4], "destination of leaf 0 goes past the end"),
        ([4096, 4200], [64, 64], [8192, 8255], "destination of leaf 1 overlaps the destination of leaf 0"),
        ([4096, 4200], [64, 64], [4263, 0], "destination of leaf 0 overlaps the source of leaf 1"),
        ([8200, 4200], [4, 4], [9000, 8190], None),
        ([0, 4200], [0, 4], [7, 4204], None),
    ],
)
def test_tables_are_checked(
    sources: list[int], sizes: list[int], destinations: list[int] | None, message: str | None
) -> None:
    if message is None:
        table_of(sources, sizes, destinations)
        return
    with pytest.raises(ValueError, match=message):
        table_of(sources, sizes, destinations)


def make_ptx(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/make-ptx"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_ptx_is_made_from_these_sources() -> None:
    done = make_ptx(ROOT, "--check")
    assert done.returncode in (0, 3), done.stderr


@pytest.mark.parametrize("name", ["csrc/device/digest.cu", "csrc/digest/definition.h"])
def test_a_stale_ptx_is_found(tmp_path: Path, name: str) -> None:
    for folder in ("csrc", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    with (tmp_path / name).open("a") as source:
        source.write("// changed\n")
    done = make_ptx(tmp_path, "--check")
    assert done.returncode == 1
    assert "run scripts/make-ptx" in done.stderr


def test_the_library_holds_the_ptx() -> None:
    assert _native.__file__ is not None
    ptx = (CSRC / "device/digest.ptx").read_bytes()
    assert ptx + b"\0" in Path(_native.__file__).read_bytes()


def test_the_kernel_compiles_for_real_devices() -> None:
    # In another process, since NVRTC sets the caller's locale to "C".
    done = make_ptx(ROOT, "--compile", "sm_50", "sm_70", "sm_80", "sm_90")
    if done.returncode == 3:
        pytest.skip("there is no NVRTC here: pip install nvidia-cuda-nvrtc-cu11==11.8.89")
    assert done.returncode == 0, done.stderr
