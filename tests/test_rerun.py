"""`scripts/run-tests` forgives a test that fails once, and names it; it forgives three tests at most."""

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


@pytest.mark.every_set
@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "status", "forgiven"),
    [
        (FAILS_ONCE.format(number=3), 0, 3),
        (FAILS_ONCE.format(number=4), 1, 0),
        ("def test_fails():\n    assert False\n", 1, 0),
    ],
    ids=["three that pass alone", "four that would pass alone", "one that fails twice"],
)
def test_what_passes_alone_is_named_as_flaky(tmp_path: Path, text: str, status: int, forgiven: int) -> None:
    (tmp_path / "test_written.py").write_text(text)
    command = [sys.executable, str(ROOT / "scripts/run-tests"), "-n", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    flaky = [line for line in done.stdout.splitlines()[-5:] if line.startswith("flaky: ")]
    assert len([line for line in flaky if "test_fails_once" in line]) == len(flaky) == forgiven
