"""A device that fails in the middle of a run, as after an assert: each further call of the driver is refused.

A whole run on the simulated device, with CUDA's copies and the stand-in for the driver. The loop's own call
of torch must be what raises, and nothing of the state after the failure may be saved.
"""

from pathlib import Path

import numpy as np
import pytest
from fake_cuda import run

import flashckpt
from tests.keeper.driver import told
from tests.waiting import until

pytestmark = pytest.mark.process

PROGRAM = """
import sys

import numpy as np
import torch

import flashckpt
from flashckpt.capture.devices import CudaCopying, CudaDevice
from flashckpt.checkpointer import resume
from tests.capture.simulated import SimulatedDevice
from tests.waiting import newest_sealed, until, until_room, until_slots

FOLDER, STRIKE, EVERY = ARGUMENTS
LAST = 5
sys.unraisablehook = lambda found: os._exit(90)  # what a destructor of ours raises

class OwnCall(torch.AcceleratorError):
    pass

def fail():
    os.environ["FAKE_CUDA_REFUSES"] = "assert"

def call_torch(kind=torch.AcceleratorError):
    if os.environ["FAKE_CUDA_REFUSES"] == "assert":
        raise kind("CUDA error: device-side assert triggered")

class Device(SimulatedDevice):
    index, strike = 0, ""
    capturing = CudaDevice.capturing

    def _writer_handles(self):
        return array("Q", [8])

    def _refuse_in_graph(self):
        call_torch()

    def join_writers(self):
        call_torch()

    def hold_writers(self, mark):
        if self.strike == "reading":
            fail()
        super().hold_writers(mark)

    def mark(self, mark):
        super().mark(mark)
        if self.strike == "marking":
            fail()

    def copy_to_host(self, copies, num_first, after):
        self.compute.drain()
        if self.strike == "copying":
            fail()
        self.ticket = lane.submit(*(np.ascontiguousarray(each).data for each in copies.T), num_first)
        return CudaCopying(lane, self.ticket, self._writer_handles)

lane = _native.CudaCopies(0, 1 << 20)
device = Device()
resume.devices_of = lambda tensors, streams=(): list(tensors) and [device]
torch.manual_seed(1)
model = torch.nn.Linear(700, 700)
device.adopt(*model.parameters())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = flashckpt.attach(
    FOLDER, every=EVERY, persist_every=None, model=model, optimizer=optimizer,
    options=flashckpt.Options(read_ahead_check=False))
try:
    for batch in checkpointer.batches(range(20)):
        call_torch(OwnCall)
        step = checkpointer.completed
        if EVERY is not None and 0 < step < LAST:
            # No boundary before the failure is skipped.
            until_slots(checkpointer)
            until_room(checkpointer)
        if step == LAST:
            np.save(os.path.dirname(FOLDER) + "/reference.npy", model.weight.detach().numpy())
            if EVERY is not None:
                # The snapshot before the failure is whole.
                until(lambda: newest_sealed(checkpointer) == LAST, "its seal")
            device.strike = STRIKE
            if STRIKE == "hook":
                fail()
            if STRIKE == "save":
                checkpointer.save()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            device.adopt(parameter.grad)
        optimizer.step()
        if step == LAST and STRIKE in ("loop", "save"):
            fail()
except torch.AcceleratorError as error:
    assert type(error) is OwnCall, "it is the loop's own call that raises"
else:
    raise AssertionError("nothing was raised")
assert checkpointer.completed == LAST + 1
for call in (checkpointer.wait, checkpointer.close):
    try:
        call()
    except flashckpt.PersistError as error:
        assert "ASSERT" in str(error), error
    else:
        raise AssertionError("a waiter must get the error")
"""


@pytest.mark.parametrize("strike", ["hook", "loop", "reading", "marking", "copying", "save"])
def test_the_loops_own_call_raises_and_nothing_after_the_failure_is_saved(
    driver: Path, tmp_path: Path, runtime: Path, strike: str
) -> None:
    folder = tmp_path / "run"
    # Without a schedule nothing is captured but what save() orders, at the boundary after the failure.
    every = None if strike == "save" else 1
    run(driver, f"ARGUMENTS = {str(folder)!r}, {strike!r}, {every}\n" + PROGRAM, 1)
    told(folder, "close", 1)
    if strike != "copying":  # there the boundary was over
        [line] = told(folder, "error", 1)
        assert (line["what"], line["step"]) == ("capture", 6)
        assert "has failed" in line["message"]
        assert "ASSERT" in line["message"]
    if every is None:
        assert flashckpt.steps(folder) == []
        return
    # The keeper saves the newest snapshot of a trainer that has gone: it is the one before the failure.
    until(lambda: flashckpt.steps(folder), "a committed step")
    assert flashckpt.steps(folder) == [5]
    found = flashckpt.load(folder)["model.weight"].numpy()
    np.testing.assert_array_equal(found, np.load(tmp_path / "reference.npy"))
