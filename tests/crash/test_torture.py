"""Kills at random moments: the bounded form of `make torture`, of a model and of ranks on two nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.job import none
from tests.crash.torture import Torture, main
from tests.zygote import Zygote

ROOT = Path(__file__).resolve().parents[2]
# Of a seed that is written down the draws are always the same; what the processes do at them is not.
SEEDS = {16: 21, 100: 20}
STEPS = {6: 150, 16: 150, 100: 500}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [16, pytest.param(100, marks=pytest.mark.long)])
def test_killed_at_random_moments(tmp_path: Path, zygote: Zygote, kills: int) -> None:
    tally = Torture(zygote, tmp_path, SEEDS[kills], steps=STEPS[kills]).kill(kills)
    none(tally.faults)
    assert tally.killed >= kills
    assert max(tally.steps_lost) <= 2
    if kills >= 100:  # chance decides what few kills hit
        assert set(tally.kills) == {"trainer", "keeper", "both", "node"}
        assert tally.resumed["memory"] > tally.resumed["local"] > 0
        assert tally.branches > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.long)])
def test_killed_at_random_moments_with_a_cache(tmp_path: Path, zygote: Zygote, kills: int) -> None:
    """What was cached outlives the memory of a node."""
    tally = Torture(zygote, tmp_path, 22, steps=STEPS[kills], has_cache=True).kill(kills)
    none(tally.faults)
    assert tally.killed >= kills
    if kills >= 100:  # of few kills, chance decides whether a node is lost with something in its cache
        assert tally.resumed["cache"] > 0


@pytest.mark.long
@pytest.mark.process
def test_its_program_writes_what_happened(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["--kills", "5", "--seed", "3", "--steps", "60", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["killed"] >= 5
    assert found["seed"] == 3
    assert found["faults"] == []


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
