"""A run without steps, and the shell as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import Ended, MadeRun

from flashckpt.store import open_store
from tests import run_view


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    store = open_store(tmp_path / "run")
    run_view.make(store)
    return MadeRun(tmp_path / "run", store)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """Runs `flashckpt` with these arguments in a process of its own."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FLASHCKPT_RUNTIME", str(tmp_path))

    def call(*arguments: object) -> Ended:
        command = [sys.executable, "-c", "from flashckpt.cli.main import main; main()", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        return Ended(done.returncode, done.stdout, done.stderr)

    return call
