"""A recovery that is killed anywhere, and run again, ends where one that was never killed does."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.keeper.driver import committed, eventually
from tests.recovery.scene import Crash, recovered, regions_of, rows

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("mess", "least_calls", "steps"),
    [
        ("asked_for", 30, [5, 6]),
        pytest.param("everything", 60, [1, 2, 3, 4], marks=pytest.mark.long),
        pytest.param("overtaken_branch", 30, [1, 3], marks=pytest.mark.long),
    ],
)
def test_killed_at_every_call(
    scratch: str, runtime: Path, mess: str, least_calls: int, steps: list[int]
) -> None:
    command = [sys.executable, "-m", "tests.recovery.kill_driver", scratch, str(runtime), mess]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["faults"] == [], result.stderr
    assert report["calls"] >= least_calls
    assert report["committed"] == steps


def test_an_interrupt_ends_it_though_storage_hangs(tmp_path: Path, runtime: Path) -> None:
    """What it was writing is never used, and what it had pinned is free for the next one."""
    run, faults = tmp_path / "run", tmp_path / "faults"
    crash = Crash(run, runtime).slots(2)
    crash.seal(1)
    crash.both_killed()
    faults.mkdir()
    (faults / "write.pause").touch()
    program = """
import signal, sys
from pathlib import Path
from flashckpt.recovery.recover import recover
from flashckpt.store import open_store
from tests.keeper.faulty import harm
harm(Path(sys.argv[2]))
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
recover(open_store(sys.argv[1]))
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(run), str(faults)], cwd=ROOT)
    eventually((faults / "write.paused").exists)
    child.send_signal(signal.SIGINT)
    assert child.wait(240) == -signal.SIGINT
    assert committed(run) == []
    report = recovered(run)
    assert ("snapshot", "committed", 1) in rows(report)
    assert committed(run) == [1]
    assert regions_of(crash.folder) == []
