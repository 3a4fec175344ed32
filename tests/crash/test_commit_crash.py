"""Invariant 2: a kill at any call, or a power loss at any moment, leaves every committed step readable
and no half step visible; and the next attempt goes on from there."""

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from unittest import mock

import pytest

from flashckpt.store.local import LocalStore
from tests.crash.forgetful import Model, Recorder, write
from tests.crash.scenario import Expected, live


def creation_that_stops(path: str, recorder: Recorder, before: Callable[[int], bool]) -> None:
    """A keeper creates a file, and stands still before it makes the names of such a folder durable."""

    def sync_folder(folder: int) -> None:
        if before(folder):
            raise OSError("this keeper stands still here")
        Recorder.sync_folder(recorder, folder)

    with (
        mock.patch.object(recorder, "sync_folder", sync_folder),
        pytest.raises(OSError, match="stands still"),
    ):
        LocalStore(recorder.root, recorder).create(path, b"part")


def test_a_name_lasts_no_shorter_than_what_was_seen_before_it(scratch: str) -> None:
    """A part may be seen, and named by a manifest, before its own keeper has made its name durable."""
    recorder, model, luck = Recorder(scratch), Model(), random.Random(3)
    creation_that_stops("step/part", recorder, lambda folder: "part" in os.listdir(folder))
    assert LocalStore(scratch, recorder).create("step/manifest", b"manifest")
    for change in recorder.changes:
        change(model)
        for _ in range(20):
            with tempfile.TemporaryDirectory(dir=scratch) as left:
                write(model.left(luck), left)
                names = os.listdir(f"{left}/step") if os.path.isdir(f"{left}/step") else []
            assert "manifest" not in names or "part" in names


def test_a_folder_that_another_has_just_made_is_durable_too(scratch: str) -> None:
    recorder, model = Recorder(scratch), Model()
    creation_that_stops("steps/1/part", recorder, lambda folder: True)
    assert os.listdir(scratch) == ["steps"]
    assert LocalStore(scratch, recorder).create("steps/part", b"part")
    for change in recorder.changes:
        change(model)
    with tempfile.TemporaryDirectory(dir=scratch) as left:
        write(model.left(None), left)
        assert LocalStore(left).read("steps/part", 100) == b"part"


class NothingIsLost(random.Random):
    """What a kill leaves, of everything that was written."""

    def random(self) -> float:
        return 0.0


def test_killed_or_power_lost_at_every_moment(scratch: str) -> None:
    """In the middle of each write, too."""
    recorder, said = Recorder(scratch), []
    live(f"{scratch}/run", recorder, lambda what, step: said.append((len(recorder.changes), what, step)))
    luck, model, faults, seen = random.Random(7), Model(), list[str](), set[object]()
    assert len(recorder.changes) > 200
    for moment, change in enumerate(recorder.changes, 1):
        change(model)
        expected = Expected()
        for when, what, step in said:
            if when <= moment:
                expected.say(what, step)
        for lucky in (NothingIsLost(), None, luck, luck):
            left = model.left(lucky)
            known = frozenset(left.items()), frozenset(expected.must), frozenset(expected.may)
            if known in seen:
                continue
            seen.add(known)
            write(left, f"{scratch}/left")
            found = expected.faults(f"{scratch}/left/run", go_on=lucky is not luck)
            faults += [f"after change {moment}: {fault}" for fault in found]
            shutil.rmtree(f"{scratch}/left")
    assert faults == []
