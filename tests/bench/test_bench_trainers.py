"""The benchmark of trainers still runs, on a model that says nothing of a machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.trainers import FRAMEWORKS, table

pytestmark = [pytest.mark.process, pytest.mark.long]

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.timeout(900)
def test_it_runs(framework: str, tmp_path: Path) -> None:
    """Turns of two variants, a kill of each, and the table."""
    options = ["--mib=2", "--layers=2", "--batch=4", "--save-every=3", "--turns=1", "--kills=1"]
    command = [sys.executable, "-m", "benchmarks.trainers", "--frameworks", framework, *options]
    command += ["--variants", "plain", "own", "--json", str(tmp_path / "out.json"), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    found = results["frameworks"][framework]
    assert found["failed"] == {}
    assert [sorted(turn) for turn in found["turns"]] == [["own", "plain"]]
    [plain], [own] = found["kills"]["plain"], found["kills"]["own"]
    assert plain["first_step"] == 0
    assert own["first_step"] == own["done"] // 3 * 3
    assert own["lost"] == own["done"] % 3
    assert list(table.lines(results)) == done.stdout.splitlines()
    assert not list(tmp_path.glob("trainers-*")), "only the report is left"
