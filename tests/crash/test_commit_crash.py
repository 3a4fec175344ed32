"""Invariant 2: a kill at any call, or a power loss at any moment, leaves every committed step readable
and no half step visible; and the next attempt goes on from there."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.forgetful import Model, Recorder
from tests.crash.scenario import Expected, live

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def scratch() -> Iterator[str]:
    """A folder in memory where there is one: what lasts is modelled here, not asked of a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield folder


@pytest.mark.process
def test_killed_at_every_call(scratch: str) -> None:
    driver = [sys.executable, "-m", "tests.crash.kill_driver", scratch]
    result = subprocess.run(driver, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["faults"] == [], result.stderr
    assert report["calls"] > 200


def test_power_lost_at_every_moment(scratch: str) -> None:
    recorder, said = Recorder(scratch), []
    live(f"{scratch}/run", recorder, lambda what, step: said.append((len(recorder.changes), what, step)))
    luck, faults = random.Random(7), []
    for moment in range(len(recorder.changes) + 1):
        model, expected = Model(), Expected()
        for change in recorder.changes[:moment]:
            change(model)
        for when, what, step in said:
            if when <= moment:
                expected.say(what, step)
        for lucky in (None, luck, luck):
            left = f"{scratch}/left"
            model.lose_power(left, lucky)
            found = expected.faults(f"{left}/run", go_on=lucky is None)
            faults += [f"after change {moment}: {fault}" for fault in found]
            shutil.rmtree(left)
    assert faults == []
