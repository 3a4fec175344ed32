"""`CudaDevice` without a GPU: the driver is the one built here."""

from pathlib import Path

import pytest
from fake_cuda import check_program

pytestmark = pytest.mark.process

PROGRAM = """
import logging
from flashckpt.capture import devices

device = devices.CudaDevice(0)
# A refusal is reported once, with the driver's reason.
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

assert _native.cuda_pci_address(0) == (0, 0x1A, 3)
places = []
devices.node_of_pci = lambda *address: places.append(address) or 1
assert devices.CudaDevice(1).numa_node == 1
assert places == [(0, 0x1B, 3)]
device.close()
"""


def test_a_device_says_its_node_and_once_why_memory_is_pageable(driver: Path) -> None:
    """In one process, since each would import torch."""
    check_program(driver, PROGRAM, 2)
