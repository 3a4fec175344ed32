"""A copy to the host that the driver refuses, in a whole capture: the simulated device with CUDA's copies."""

from pathlib import Path

import pytest
from fake_cuda import HERE, check_program, run

pytestmark = pytest.mark.process

PROGRAM = """
import logging, sys
sys.path.insert(0, TESTS)
import numpy as np
import torch
from capture.accelerated import Accelerated
from capture.conftest import make_slot
from flashckpt.capture.devices import CudaCopying
from tests.capture.simulated import SimulatedDevice
from flashckpt.memory.slot import SlotRing

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("flashckpt").addHandler(handler)
lane = _native.CudaCopies(0, 1 << 20)

def copy_to_host(device, copies, num_first, after):
    device.compute.drain()
    columns = copies.T
    ticket = lane.submit(*(np.ascontiguousarray(each).data for each in columns), num_first)
    return CudaCopying(lane, ticket, lambda: array("Q"))

SimulatedDevice.copy_to_host = copy_to_host
ring = SlotRing([make_slot(i, 1 << 20, 16 << 20) for i in range(3)])
loop = Accelerated(ring, _native.Sealer(), device_memory=1 << 30)
for refuses in (False, False, True, False):
    os.environ["FAKE_CUDA_REFUSES"] = "copy" if refuses else ""
    assert loop.iterate().captured
    assert loop.result() == ("none" if refuses else "exact"), said
    assert loop.ways()["model.a"] == "clone"
assert loop.capture.report()["snapshots_lost"] == 1
[why] = said
assert "was not sealed" in why and "FAULT" in why
loop.close()
"""


FORGOTTEN = """
import mmap
import numpy as np

lane = _native.CudaCopies(0, 1 << 20)  # copies of 17 are refused
data = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)  # one page: nothing is cut

def submit(num_bytes):
    columns = [[data.ctypes.data], [data.ctypes.data + 32], [num_bytes]]
    return lane.submit(*(np.array(each, np.uint64).data for each in columns), 1)

good = submit(16)
lane.wait(good)
bad = [submit(17) for _ in range(1000)]
lane.wait(submit(16))
assert all("FAULT" in refused(lane.wait, ticket) for ticket in bad[-64:])
assert all("not known" in refused(lane.wait, ticket) for ticket in bad[:-64]), "never taken for done"
assert "not known" in refused(lane.wait, good)
lane.close()
"""


def test_an_old_leaf_is_not_taken_for_a_new_one(driver: Path) -> None:
    check_program(driver, f"TESTS = {str(HERE.parent)!r}\n" + PROGRAM, 1)


def test_failures_are_not_kept_for_ever(driver: Path) -> None:
    lines = run(driver, FORGOTTEN, 1)
    assert len([line for line in lines if line.startswith("copy 17 ")]) == 1000
