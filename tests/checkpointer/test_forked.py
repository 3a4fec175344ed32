"""A child that the user's code forks in an iteration: it has no part in the run, however it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

import flashckpt
from tests import zygote
from tests.checkpointer.forking import REFUSED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("way", "status"),
    [("raise", 6), ("break", 4), ("wait", REFUSED), ("report", REFUSED)],
)
def test_a_forked_child_ends_by_itself(tmp_path: Path, runtime: Path, way: str, status: int) -> None:
    """Slots are not mapped in it: whoever looks into one there dies of it."""
    run = tmp_path / "run"
    module = ["tests.checkpointer.forking", str(run), way]
    if way == "break":
        command = [sys.executable, "-m", *module]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    else:
        done = zygote.shared().run(module, timeout=240)
    assert done.stdout.splitlines() == [f"child {status}", "after 6"], done.stderr
    assert done.returncode == 0
    assert flashckpt.steps(run) == [6]
