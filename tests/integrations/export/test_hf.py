"""`from_pretrained` on an exported folder gives the weights of the run, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = ["tied", "sharded", "experts", "lora", "ranks", "wrapped", "refusals", "untied"]


@pytest.mark.process
def test_from_pretrained_gives_the_weights_of_the_run(runtime: Path, tmp_path: Path) -> None:
    """All cases in one test: the process that runs them imports transformers and peft once."""
    pytest.importorskip("peft")
    command = [sys.executable, "-m", "tests.integrations.export.cases", str(tmp_path), *CASES]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert found == dict.fromkeys(CASES, 0), done.stderr
