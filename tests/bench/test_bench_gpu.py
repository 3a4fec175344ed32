"""`make gpu` itself, on machines that have no GPU: what it says there, and its whole course on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.stages import Budget, OutOfTime
from tests.waiting import until

pytestmark = pytest.mark.process

_ROOT = Path(__file__).resolve().parents[2]
_TRIAL = ["--device", "cpu", "--small", "--here"]

_TESTS = """
import ctypes, os, sys, time
import pytest

pytestmark = pytest.mark.gpu

def test_passes():
    pass

def test_fails():
    assert 1 == 2, "one is not two"

def test_ends_the_process():
    os._exit(7)

def test_loses_the_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.skipif(True, reason="wants two devices")
def test_skips():
    pass

def test_crashes():
    ctypes.string_at(0)

def test_comes_last():
    pass
"""

_HANGS = """
import time
import pytest

@pytest.mark.gpu
def test_passes():
    pass

@pytest.mark.gpu
def test_hangs():
    time.sleep(600)
"""


def start(
    out: Path, *arguments: str, environment: Mapping[str, str] | None = None, **how: Any
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **(environment or {})}, **pipes, **how)


def found_in(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    return found


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    return {entry["test"].rpartition("::")[2]: entry["outcome"] for entry in found["tests"]["not_passed"]}


def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    process = start(tmp_path / "out", "--here", environment=hidden)
    told, _ = process.communicate()
    assert process.returncode == 3
    assert "no GPU that torch can use" in told
    assert "sees no CUDA device" in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_a_stage_that_is_not_known_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path / "out", *_TRIAL, "--stages", "own,nonsense")
    told, _ = process.communicate()
    assert process.returncode == 2
    assert "nonsense: unknown" in told


def test_the_whole_course_on_a_cpu(tmp_path: Path) -> None:
    """Our own figures and two peers, one of which is not installed here: one run, since each takes long."""
    out = tmp_path / "out"
    process = start(out, *_TRIAL, "--stages", "own,peers", "--peers", "torch_save,nvrx")
    told, _ = process.communicate()
    assert process.returncode == 0, told
    found = found_in(out)
    assert found["ended"] == "done"
    own = found["own"]
    for name in ("flashckpt", "flashckpt_memory"):
        assert own[name]["load"]["exact"] is True
        assert all(block["taken"] == 1 for block in own[name]["blocks"])
    assert own["flashckpt"]["alone"][0]["durable_s"] > 0
    assert own["rates"]["digest of the state"]["seconds"]
    assert own["small"]["leaves"] == 10_000
    assert found["peers"]["torch_save"]["blocks"][0]["taken"] == 1
    assert "nvidia_resiliency_ext" in found["peers"]["nvrx"]["failed"]
    assert any("NVRx" in lacking for lacking in found["lacks"])
    assert "NVRx" in told, "what is missing is said, and is no error"
    assert "flashckpt, to memory" in (out / "summary.txt").read_text()
    left = {path.name for path in out.iterdir()}
    assert left == {"gpu.json", "summary.txt", "log.txt"}, "and no checkpoint of gigabytes"


def test_a_test_that_ends_the_process_costs_only_itself(tmp_path: Path) -> None:
    tests, out = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_on_a_device.py").write_text(_TESTS)
    (tests / "test_cannot_be_read.py").write_text("import pytest\npytestmark = pytest.mark.gpu\n1 / 0\n")
    (tests / "test_wants_more.py").write_text("import a_package_that_nobody_has\n")
    process = start(out, *_TRIAL, "--stages", "tests", "--tests", str(tests))
    told, _ = process.communicate()
    assert process.returncode == 1, told
    found = found_in(out)
    assert found["tests"]["counts"] == {
        "passed": 2,
        "failed": 2,
        "did not end": 2,
        "skipped": 1,
        "not collected": 1,
    }
    assert outcomes(found) == {
        "test_fails": "failed",
        "test_ends_the_process": "did not end",
        "test_loses_the_device": "failed",
        "test_crashes": "did not end",
        "test_cannot_be_read.py": "not collected",
    } | {name: "not collected" for name in outcomes(found) if name.endswith("test_cannot_be_read.py")}
    assert "one is not two" in told, "why a test failed is in the summary"
    assert "wants two devices" in told
    assert any("a_package_that_nobody_has" in lacking for lacking in found["lacks"])


def test_a_test_that_hangs_is_killed_and_said(tmp_path: Path) -> None:
    """The whole budget is over before a hang of ten minutes is: what passed before it stands."""
    tests, out = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_on_a_device.py").write_text(_HANGS)
    process = start(out, *_TRIAL, "--stages", "tests,peers", "--seconds", "45", "--tests", str(tests))
    told, _ = process.communicate()
    assert process.returncode == 1, told
    found = found_in(out)
    assert outcomes(found) == {"test_hangs": "did not end"}
    assert found["tests"]["counts"]["passed"] == 1
    [stage] = [each for each in found["stages"] if each["name"] == "tests"]
    assert "killed at its limit" in stage["outcome"]
    assert any("no time left" in lacking for lacking in found["lacks"]), "what was left out for it is said"
    assert "killed at its limit" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_leaves_what_was_found_so_far(tmp_path: Path, number: signal.Signals) -> None:
    tests, out = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_on_a_device.py").write_text(_TESTS)
    process = start(out, *_TRIAL, "--tests", str(tests), "--stages", "tests,own", start_new_session=True)
    try:
        until(lambda: (out / "gpu.json").exists() and found_in(out)["tests"] != {}, "the tests", 200)
        process.send_signal(number)
        told, _ = process.communicate()
    finally:
        process.kill()
    found = found_in(out)
    assert found["tests"]["counts"]["passed"] == 2
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert found["ended"] == "interrupted"
        assert "one is not two" in told, "the summary is written all the same"
        assert not list(out.glob("work-*"))


def test_a_budget_that_is_spent_is_no_limit_of_nothing() -> None:
    budget = Budget(whole_s=0.0)
    with pytest.raises(OutOfTime, match="no time left"):
        budget.limit(60.0)
    assert Budget(whole_s=1000.0).limit(60.0) == 60.0
