"""The digest kernel, compiled for the host from the same source as for a device."""

import ctypes
import subprocess
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flashckpt import _native

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
FLAGS = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]


def build_kernel(folder: Path) -> Path:
    made, source = folder / "kernel.o", HERE / "emulated_digest.cpp"
    subprocess.run(["g++", *FLAGS, "-c", "-fPIC", "-I", CSRC, source, "-o", made], check=True)
    return made


class EmulatedKernel:
    """Launches of the kernel, and what the last one did to memory."""

    def __init__(self, kernel_object: Path) -> None:
        made = kernel_object.with_name("kernel.so")
        subprocess.run(["g++", "-shared", kernel_object, "-o", made], check=True)
        self._launch = ctypes.CDLL(str(made)).emulate_digest
        self._launch.restype = None
        self.loaded_bytes = self.stored_bytes = 0

    def launch(self, table: bytes, num_entries: int, *, blocks: int = 2, seed: int = 0) -> list[int]:
        memory = np.frombuffer(table, np.uint8).copy()
        digests = np.full(num_entries, _native.EMPTY_DIGEST, np.uint64)
        did = np.zeros(3, np.uint64)
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in (memory, digests, did)]
        count = ctypes.c_uint64(num_entries)
        self._launch(
            pointers[0], count, pointers[1], ctypes.c_uint(blocks), ctypes.c_uint64(seed), pointers[2]
        )
        self.loaded_bytes, self.stored_bytes, _ = did.tolist()
        return digests.tolist()  # type: ignore[no-any-return]


def table_of(
    sources: Sequence[int], sizes: Sequence[int], destinations: Sequence[int] | None = None
) -> bytes:
    columns = (array("Q", sources), None if destinations is None else array("Q", destinations))
    return _native.cuda_digest_table(*columns, array("Q", sizes))
