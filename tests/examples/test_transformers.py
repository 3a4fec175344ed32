"""examples/transformers/train.py, killed and resumed, ends like an uninterrupted training."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

PROGRAM = Path(__file__).parents[2] / "examples" / "transformers" / "train.py"


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(out), "--steps", "20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.long
@pytest.mark.process
def test_a_killed_training_resumes(tmp_path: Path, runtime: Path) -> None:
    whole, _ = start(tmp_path / "whole").communicate(timeout=250)
    killed = start(tmp_path / "killed")
    until(lambda: any((tmp_path / "killed" / "trainer").glob("checkpoint-*")), "the first best weights", 200)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    again, _ = start(tmp_path / "killed").communicate(timeout=250)
    assert again.splitlines()[-1] == whole.splitlines()[-1]
    assert "step 20, best loss" in again
    kept = [sorted(each.name for each in (tmp_path / n / "trainer").iterdir()) for n in ("whole", "killed")]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 1
