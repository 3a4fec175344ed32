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
from pathlib import Path

import pytest

from flashckpt.store.local import LocalStore
from tests.crash.forgetful import Model, Recorder
from tests.crash.scenario import Expected, live

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.process
def test_killed_at_every_call(scratch: str) -> None:
    driver = [sys.executable, "-m", "tests.crash.kill_driver", scratch]
    result = subprocess.run(driver, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["faults"] == [], result.stderr
    assert report["calls"] > 200


def test_a_name_lasts_no_shorter_than_what_was_seen_before_it(scratch: str) -> None:
    """A part may be seen, and named by a manifest, before its own keeper has made its name durable."""
    recorder = Recorder(scratch)
    sync_folder = recorder.sync_folder

    def stopped(folder: int) -> None:
        if "part" in os.listdir(folder):
            raise OSError("this keeper stands still here")
        sync_folder(folder)

    recorder.sync_folder = stopped  # type: ignore[method-assign]
    with pytest.raises(OSError, match="stands still"):
        LocalStore(scratch, recorder).create("step/part", b"part")
    recorder.sync_folder = sync_folder  # type: ignore[method-assign]
    assert LocalStore(scratch, recorder).create("step/manifest", b"manifest")
    luck = random.Random(3)
    for moment in range(len(recorder.changes) + 1):
        for _ in range(20):
            model = Model()
            for change in recorder.changes[:moment]:
                change(model)
            with tempfile.TemporaryDirectory(dir=scratch) as left:
                model.lose_power(left, luck)
                names = os.listdir(f"{left}/step") if os.path.isdir(f"{left}/step") else []
            assert "manifest" not in names or "part" in names, f"after change {moment}"


def test_a_folder_that_another_has_just_made_is_durable_too(scratch: str) -> None:
    recorder = Recorder(scratch)
    sync_folder = recorder.sync_folder

    def stopped(folder: int) -> None:
        raise OSError("this keeper stands still here")

    recorder.sync_folder = stopped  # type: ignore[method-assign]
    with pytest.raises(OSError, match="stands still"):
        LocalStore(scratch, recorder).create("steps/1/part", b"part")
    recorder.sync_folder = sync_folder  # type: ignore[method-assign]
    assert os.listdir(scratch) == ["steps"]
    store, model = LocalStore(scratch, recorder), Model()
    assert store.create("steps/part", b"part")
    for change in recorder.changes:
        change(model)
    with tempfile.TemporaryDirectory(dir=scratch) as left:
        model.lose_power(left, None)
        assert LocalStore(left).read("steps/part", 100) == b"part"


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
