"""`scripts/run-tests` forgives a test that fails once, and names it; it forgives three tests at most."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Fails until the file that is named after the test exists, and makes it.
FAILS_ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({number}))
def test_fails_once(number):
    file = Path(__file__).with_name(f"seen-{{number}}")
    seen = file.exists()
    file.touch()
    assert seen

def test_passes():
    pass
"""

pytestmark = pytest.mark.process


def run_tests(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_written.py").write_text(text)
    command = [sys.executable, str(ROOT / "scripts/run-tests"), "-n", "2"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_test_that_passes_alone_is_named_as_flaky(tmp_path: Path) -> None:
    done = run_tests(tmp_path, FAILS_ONCE.format(number=3))
    assert done.returncode == 0, done.stdout + done.stderr
    flaky = [line for line in done.stdout.splitlines()[-5:] if line.startswith("flaky: ")]
    assert len(flaky) == 3
    assert "test_passes" not in "".join(flaky)


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "def test_fails():\n    assert False\n")
    assert done.returncode == 1
    assert "flaky" not in done.stdout


def test_four_failures_are_not_run_again(tmp_path: Path) -> None:
    done = run_tests(tmp_path, FAILS_ONCE.format(number=4))
    assert done.returncode == 1
    assert "4 failed, 1 passed" in done.stdout
    assert "once more" not in done.stdout
