"""SIGKILL in each phase of a save: the newest complete checkpoint stays loadable, a half one is invisible."""

import json
import os
import signal
from pathlib import Path

import pytest

import flashckpt.dcp as dcp
from flashckpt.errors import NoSuchStepError
from tests.dcp.mortal import PHASES
from tests.dcp.states import equal, state
from tests.ranks.launch import Launcher
from tests.zygote import Zygote

pytestmark = pytest.mark.process


def test_a_process_that_is_killed_in_each_phase(zygote: Zygote, tmp_path: Path) -> None:
    done = zygote.run(["tests.dcp.mortal", str(tmp_path / "it")])
    assert done.returncode == 0, done.stderr
    expected = [f"{phase} {which}" for phase, (_, which) in PHASES.items()]
    assert done.stdout.splitlines() == [*expected, "files 2"]


@pytest.mark.parametrize("point", ["attempt.reserved", "capture.copied:2", "version.created"])
def test_a_run_whose_processes_are_killed(zygote: Zygote, runtime: Path, tmp_path: Path, point: str) -> None:
    """The keeper at the last point, the trainer at the others."""
    run = str(tmp_path / "run")
    environment = {**os.environ, "FLASHCKPT_CRASH_AT": point}
    done = zygote.run(["tests.dcp.mortal", "functions", run], env=environment)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    saved = [int(line.split()[1]) for line in done.stdout.splitlines()]
    if done.returncode == 0:
        assert saved == [1, 2]
    loaded = state(99)
    try:
        dcp.load(loaded, checkpoint_id=run)
        seed = int(loaded["model"]["count"])
        assert equal(loaded, state(seed))
        assert seed >= max(saved, default=0), "the keeper may have saved what was not reported yet"
    except NoSuchStepError:
        assert not saved
        assert equal(loaded, state(99))
    assert dcp.save(state(7), checkpoint_id=run) > len(saved)
    dcp.load(loaded, checkpoint_id=run)
    dcp.close()
    assert equal(loaded, state(7))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("phase", "who", "which"),
    [("writing", 1, "first"), ("before the commit", 0, "first"), ("after the commit", 0, "second")],
)
def test_ranks_that_are_killed(launcher: Launcher, tmp_path: Path, phase: str, who: int, which: str) -> None:
    path, program = str(tmp_path / "it"), "tests.dcp.sharded"
    job = launcher.fork(program, json.dumps({"dies": [path, phase, who]}))
    job.until_died(who)
    expected = dict(line.split() for line in job.said(1 - who))
    job.kill()
    ended = launcher.fork(program, json.dumps({"loads": [["bare", path]], "saves": [["writer", path]]}))
    assert ended.finished()[0].out[0] == f"loaded bare {expected[which]}"
