"""Where no slot can be made, for whatever reason, the run ends in its first steps and says why."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import zygote
from tests.memory.mounts import small_tmpfs

# Hours of training, so to say.
_STEPS = 100_000


def ended(run: Path, runtime: Path, how: str) -> tuple[int, str, str]:
    """Steps that were completed, the kind of the error and its words."""
    environment = {**os.environ, "FLASHCKPT_RUNTIME": str(runtime)}
    command = ["tests.checkpointer.slotless", str(run), how, str(_STEPS)]
    done = zygote.shared().run(command, env=environment)
    assert done.returncode == 0, done.stderr
    steps, kind, words = done.stdout.strip().split(" ", 2)
    return int(steps), kind, words


@pytest.mark.parametrize(("how", "reason"), [("small files", "File too large"), ("no descriptors", "files")])
def test_a_keeper_that_can_make_no_slot(how: str, reason: str, tmp_path: Path, runtime: Path) -> None:
    steps, kind, words = ended(tmp_path / "run", runtime, how)
    assert steps < _STEPS
    assert kind == "KeeperError"
    assert reason in words


@pytest.mark.process
def test_a_runtime_folder_that_is_read_only(tmp_path: Path) -> None:
    """Here it is known at once."""
    with small_tmpfs(64 << 20) as runtime:
        subprocess.run(["mount", "-o", "remount,ro", str(runtime)], check=True)
        steps, kind, words = ended(tmp_path / "run", runtime, "nothing")
    assert (steps, kind) == (0, "KeeperError")
    assert "Read-only file system" in words
