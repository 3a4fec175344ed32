"""A copy to the host that the driver refuses, in a whole capture: the simulated device with CUDA's copies."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cuda import HERE, build_driver, run

pytestmark = pytest.mark.process

PROGRAM = """
import logging, sys
from array import array
sys.path.insert(0, TESTS)
import numpy as np
import torch
from capture.accelerated import Accelerated
from capture.conftest import make_slot
from flashckpt import _native
from flashckpt.capture.device.cuda import CudaCopying
from flashckpt.capture.device.simulated import SimulatedDevice
from flashckpt.memory.slots import SlotRing

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("flashckpt").addHandler(handler)
lanes = {False: _native.CudaCopies(0, 1 << 20), True: _native.CudaCopies(0, 17)}  # copies of 17 are refused
refuses = False

def copy_to_host(device, copies, num_first, after):
    device.compute.drain()
    lane, columns = lanes[refuses], (copies.sources, copies.destinations, copies.sizes)
    ticket = lane.submit(*(np.ascontiguousarray(each).data for each in columns), num_first)
    return CudaCopying(lane, ticket, lambda: array("Q"))

SimulatedDevice.copy_to_host = copy_to_host
ring = SlotRing([make_slot(i, 1 << 20, 16 << 20) for i in range(3)])
loop = Accelerated(ring, _native.Sealer(), device_memory=1 << 30)
for refuses in (False, False, True, False):
    assert loop.iterate().captured
    assert loop.result() == ("none" if refuses else "exact"), said
    assert loop.ways()["model.a"] == "clone"
assert loop.capture.report()["snapshots_lost"] == 1
[why] = said
assert "was not sealed" in why and "FAULT" in why
loop.close()
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


def test_no_leaf_is_taken_for_one_that_was_written_meanwhile(driver: Path) -> None:
    run(driver, f"TESTS = {str(HERE.parent)!r}\n" + PROGRAM, 1)
