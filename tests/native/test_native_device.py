"""`CudaDevice` without a GPU: torch's answers are given by the test, the driver is the one built here."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cuda import build_driver, check_program

pytestmark = pytest.mark.process

DEVICE = """
import torch
from flashckpt.capture.devices import CudaDevice

GIB = 1 << 30
MARGIN = GIB // 4
free, total, reserved, peak, allocated, fraction = 60 * GIB, 80 * GIB, 10 * GIB, 10 * GIB, 10 * GIB, 1.0
torch.cuda.mem_get_info = lambda device: (free, total)
torch.cuda.memory_reserved = lambda device: reserved
torch.cuda.max_memory_reserved = lambda device: peak
torch.cuda.memory_allocated = lambda device: allocated
torch.cuda.get_per_process_memory_fraction = lambda device: fraction
device = CudaDevice(0)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.mark.long
def test_room_is_within_the_fraction_that_the_process_may_take(driver: Path) -> None:
    program = """
assert device.room_bytes() == 60 * GIB - MARGIN
fraction = 0.25
assert device.room_bytes() == 20 * GIB - 10 * GIB - MARGIN
peak = 13 * GIB  # the loop will want these three again
assert device.room_bytes() == 20 * GIB - 13 * GIB - MARGIN
fraction = 0.1
assert device.room_bytes() < 0, "arenas give way"
device.close()
"""
    check_program(driver, DEVICE + program, 1)


@pytest.mark.parametrize("silent", ["memory_reserved", "get_per_process_memory_fraction"])
def test_an_allocator_without_statistics_has_no_room(driver: Path, silent: str) -> None:
    """As torch's pluggable allocators: neither their statistics nor their limit can be asked for."""
    program = f"""
def refuse(device):
    raise RuntimeError("CUDAPluggableAllocator does not yet support this")

torch.cuda.{silent} = refuse
assert device.room_bytes() == 0
device.close()
"""
    check_program(driver, DEVICE + program, 1)
