"""A few of the kills of `make torture ARGS="--nodes 2 --ranks 2"`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_nothing_is_lost_on_two_nodes(tmp_path: Path) -> None:
    """A process of its own, which forks ranks: this one may have threads."""
    out = tmp_path / "out.json"
    program = [sys.executable, "-m", "tests.crash.ranks_torture", "12", "20261122", str(out)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["killed"] >= 12
    assert found["tiers"]["memory"] > 0
