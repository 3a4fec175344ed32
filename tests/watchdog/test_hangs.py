"""Real trainers that hang: what the keeper tells of them, saves of them, and does not do to them."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashckpt
from tests.keeper.driver import eventually
from tests.watchdog.running import HANG_AT, running

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.mark.parametrize(
    ("hang", "function"),
    [
        ("python", "spin_in_python"),
        ("gil", "hold_the_gil"),
        ("lock", "wait_for_a_lock"),
        ("loader", "__getitem__"),
    ],
)
def test_a_hang_is_told_once_with_stacks_and_saved_and_the_run_goes_on(
    tmp_path: Path, hang: str, function: str
) -> None:
    with running(tmp_path / "run", hang) as run:
        run.hangs()
        stuck = run.wait_told("stuck")
        assert stuck["source"] == "faulthandler", stuck["reason"]
        assert any(f"in {function}" in line for line in stuck["stacks"]), stuck["stacks"]
        assert any("in main" in line for line in stuck["stacks"])
        assert stuck["pid"] == run.pid
        assert stuck["seconds"] >= stuck["limit_seconds"] == 4.0
        # Nothing but the hang asked for it: the newest snapshot is committed while the trainer hangs.
        eventually(lambda: flashckpt.steps(run.folder) == [HANG_AT])
        assert run.lives()
        run.release()
        assert run.wait_told("goes-on")["seconds"] >= 4.0
        run.finishes()
        assert len(run.told("stuck")) == len(run.told("goes-on")) == 1
        assert run.told("kill") == []
