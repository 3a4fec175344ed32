"""`CudaDevice` without a GPU: torch's answers are given by the test, the driver is the one built here."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cuda import check_program

pytestmark = pytest.mark.process

DEVICE = """
import logging
import torch
from flashckpt import _native
from flashckpt.capture import devices

GIB = 1 << 30
MARGIN = GIB // 4
free, total, reserved, peak, allocated, fraction = 60 * GIB, 80 * GIB, 10 * GIB, 10 * GIB, 10 * GIB, 1.0
torch.cuda.mem_get_info = lambda device: (free, total)
torch.cuda.memory_reserved = lambda device: reserved
torch.cuda.max_memory_reserved = lambda device: peak
torch.cuda.memory_allocated = lambda device: allocated
torch.cuda.get_per_process_memory_fraction = lambda device: fraction
device = devices.CudaDevice(0)
"""

ROOM = """
# Within the fraction that the process may take.
assert device.room_bytes() == 60 * GIB - MARGIN
fraction = 0.25
assert device.room_bytes() == 20 * GIB - 10 * GIB - MARGIN
peak = 13 * GIB  # the loop will want these three again
assert device.room_bytes() == 20 * GIB - 13 * GIB - MARGIN
fraction = 0.1
assert device.room_bytes() < 0, "arenas give way"
peak, fraction = 10 * GIB, 1.0
"""

NO_STATISTICS = """
# Of torch's pluggable allocators neither their statistics nor their limit can be asked for.
def refuse(device):
    raise RuntimeError("CUDAPluggableAllocator does not yet support this")

for silent in ("memory_reserved", "get_per_process_memory_fraction"):
    asked = getattr(torch.cuda, silent)
    setattr(torch.cuda, silent, refuse)
    assert device.room_bytes() == 0
    setattr(torch.cuda, silent, asked)
assert device.room_bytes() > 0
"""

REFUSED_REGISTRATION = """
# It is reported once, with the driver's reason.
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("flashckpt").addHandler(handler)
for _ in range(2):
    memory = _native.Mapping(13)  # refused
    for _ in range(2):
        device.register(memory)
    memory.close()
[text] = [each for each in said if "pageable" in each]
assert "page-lock 13 of 13 bytes of host memory: ALREADY (registered already)" in text, text
"""

PCI_ADDRESS = """
assert _native.cuda_pci_address(0) == (0, 0x1A, 3)
places = []
devices.node_of_pci = lambda *address: places.append(address) or 1
assert devices.CudaDevice(1).numa_node == 1
assert places == [(0, 0x1B, 3)]
"""


def test_a_device_says_its_room_its_node_and_once_why_memory_is_pageable(driver: Path) -> None:
    """In one process, since each would import torch."""
    program = DEVICE + ROOM + NO_STATISTICS + REFUSED_REGISTRATION + PCI_ADDRESS + "device.close()\n"
    check_program(driver, program, 2)
