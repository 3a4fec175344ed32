"""The example of docs/lightning.md: weights by Lightning, the resume by flashckpt."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_best.py"


def run(folder: Path, runtime: Path, epochs: int) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--folder", str(folder), "--epochs", str(epochs)],
        env={**os.environ, "FLASHCKPT_RUNTIME": str(runtime)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"best \S*/", "best ", done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.process
def test_a_run_in_two_parts_ends_like_one(tmp_path: Path, runtime: Path) -> None:
    run(tmp_path / "parts", runtime, 2)
    assert run(tmp_path / "parts", runtime, 4) == run(tmp_path / "one", runtime, 4)
    [best] = (tmp_path / "parts" / "best").glob("*.ckpt")
    assert best.name == next(iter((tmp_path / "one" / "best").glob("*.ckpt"))).name
