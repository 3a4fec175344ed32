"""Ends of a run that fail: what is sealed and newest comes to storage all the same, and the error is told."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt import StateError
from tests.checkpointer.test_loop import Job
from tests.processes import keepers_of
from tests.waiting import newest_sealed, until

SEALED = 3


class Spoilt:
    """State that cannot be read once `error` is set."""

    error: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"kept": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def sealed_once(run: Path, spoilt: Spoilt) -> flashckpt.Checkpointer:
    """A run of a step more than its one snapshot, which nobody has asked to be persisted."""
    job = Job()
    named = {"spoilt": spoilt, **job.named}
    checkpointer = flashckpt.attach(run, every=SEALED, persist_every=None, **named)
    while checkpointer.completed <= SEALED:
        job.train(torch.ones(1, 4))
        checkpointer.step()
        if checkpointer.completed == 1:
            until(lambda: checkpointer._keeper_link.slots.ready, "slots")
    until(lambda: newest_sealed(checkpointer) == SEALED, "the snapshot")
    assert flashckpt.steps(run) == []
    return checkpointer


def saved_behind(run: Path, runtime: Path) -> list[int]:
    """The steps on disk once there are some, or nobody is left who could save one."""
    until(lambda: flashckpt.steps(run) or not keepers_of(runtime), "a step, or the keeper's end")
    return flashckpt.steps(run)


@pytest.mark.parametrize("error", [StateError("spoilt"), KeyboardInterrupt("spoilt")])
def test_the_newest_snapshot_is_saved_where_the_last_boundary_cannot_be_captured(
    error: BaseException, tmp_path: Path, runtime: Path
) -> None:
    run, spoilt = tmp_path / "run", Spoilt()
    checkpointer = sealed_once(run, spoilt)
    spoilt.error = error
    with pytest.raises(type(error), match="spoilt"):
        checkpointer.close()
    if isinstance(error, Exception):
        assert flashckpt.steps(run) == [SEALED], "it was not waited for"
    assert saved_behind(run, runtime) == [SEALED]
    with flashckpt.attach(run, spoilt=Spoilt(), **Job().named) as again:  # the run was let go
        assert again.completed == SEALED


PROGRAM = """
import sys, torch, flashckpt

model = torch.nn.Linear(3, 3)
checkpointer = flashckpt.attach(sys.argv[1], model=model)
epochs = checkpointer.epochs(2)
if sys.argv[2] == "closed":
    checkpointer.close()
if sys.argv[2] == "in a batch":
    next(epochs)
    batches = checkpointer.batches([1, 2])
    next(batches)
"""


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("how", ["closed", "left", "in a batch"])
def test_a_program_that_holds_its_checkpointer_ends_without_an_error(
    tmp_path: Path, runtime: Path, how: str
) -> None:
    """Python clears the names of modules before it deletes what a program still holds."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), how]
    environment = {**os.environ, "FLASHCKPT_RUNTIME": str(runtime)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
