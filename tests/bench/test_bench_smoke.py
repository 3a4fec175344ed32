"""The benchmark still runs: flashckpt and one peer, 64 MiB, in the environment that runs the tests."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

_ROOT = Path(__file__).resolve().parents[2]
# Several threads wait for one another at each operation, long on a machine that has other work.
_ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
Results = dict[str, Any]


@pytest.mark.long
def test_it_runs(tmp_path: Path) -> None:
    """One run of flashckpt, torch.save and a peer that is not installed here. One test looks at all of it:
    several would be dealt to several processes, and each of these would have a run of its own."""
    results, printed = measured(tmp_path)
    both_are_measured_and_load_exactly_what_was_saved(results)
    a_peer_that_cannot_run_is_reported_with_its_reason(results, printed)
    the_limits_of_the_machine_stand_beside(results)
    left = {path.suffix for path in tmp_path.iterdir()}
    assert left <= {".json", ".png"}, "only the report is left"


def measured(output: Path) -> tuple[Results, str]:
    options = ["--quick", "--here", "--no-figures", "--peers", "flashckpt,torch_save,nvrx"]
    command = [sys.executable, "-m", "benchmarks", *options, "--output", str(output)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=280, env=_ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    [numbers] = output.glob("*.json")
    return json.loads(numbers.read_text()), done.stdout


def both_are_measured_and_load_exactly_what_was_saved(results: Results) -> None:
    found = {peer["name"]: peer for peer in results["peers"]}
    for name in ("flashckpt", "torch_save"):
        peer = found[name]
        assert "failed" not in peer, peer
        assert peer["load"].get("exact") is True, peer["load"]
        assert peer["state_bytes"] >= 64 << 20
        assert all(block["taken"] for block in peer["rounds"])
        assert all(each["durable_s"] > 0 for each in peer["alone"])


def a_peer_that_cannot_run_is_reported_with_its_reason(results: Results, printed: str) -> None:
    [nvrx] = [peer for peer in results["peers"] if peer["name"] == "nvrx"]
    assert "nvidia_resiliency_ext" in nvrx["failed"]
    assert "cannot run here" in printed
    assert "nvidia_resiliency_ext" in printed


def the_limits_of_the_machine_stand_beside(results: Results) -> None:
    limits = results["limits"][0]
    assert limits["num_bytes"] >= 64 << 20
    assert limits["copy_s"]
    assert limits.get("write_s") or limits["direct_refused"]


_STOPPED = """
import os, signal, sys
from pathlib import Path
import benchmarks.run as run

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "matplotlib.rcsetup":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

def measured(self, name):
    if name == "flashckpt":  # the second one: the process that measures it is waited for
        program = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
        session = self._session(name)
        try:
            session.call([sys.executable, "-c", program], log=session.folder / "log", timeout_s=240)
        finally:
            print("left:", session.processes())
    return {"name": name, "title": name, "failed": "not measured here"}

def limits(self):
    return {"num_bytes": 1 << 26, "copy_s": [0.1], "step_s": [0.1], "write_s": [0.1], "read_s": [0.1]}

run.Run._peer, run.Run._limits = measured, limits
if sys.argv.pop(1) == "import":
    sys.meta_path.insert(0, Stop())
run.app()
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["import", "process"])
def test_a_run_that_is_stopped_anywhere_keeps_what_it_has_measured(tmp_path: Path, where: str) -> None:
    """In the import of matplotlib: half of it was imported, and the report at the end could not be drawn."""
    pytest.importorskip("matplotlib")
    options = ["--quick", "--here", "--no-figures", "--peers", "torch_save,flashckpt", "--output"]
    command = [sys.executable, "-c", _STOPPED, where, *options, str(tmp_path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    [report] = tmp_path.glob("*.json")
    assert [peer["name"] for peer in json.loads(report.read_text())["peers"]] == ["torch_save"]
    assert str(tmp_path) not in report.read_text(), "a path of the machine"
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".png"}, "only the report is left"
    assert where == "import" or "left: []" in done.stdout
