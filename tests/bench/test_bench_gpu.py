"""`make gpu` itself, on machines that have no GPU: what it says there, and its whole course on a CPU."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.course import PARTS
from benchmarks.gpu.machine import settings_for
from benchmarks.gpu.stages import measure
from benchmarks.session import Session
from benchmarks.settings import GIB, MIB, Settings
from tests.waiting import until

pytestmark = pytest.mark.process

_ROOT = Path(__file__).resolve().parents[2]
_TRIAL = ["--device", "cpu", "--small", "--here"]

_TESTS = """
import ctypes, os, sys, time
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.process
def test_starts_processes():
    pass

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


def start(
    out: Path, *arguments: str, environment: Mapping[str, str] | None = None, **how: Any
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # Several threads wait for one another at each operation, long on a machine that has other work.
    told = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.Popen(command, cwd=_ROOT, env=told, **pipes, **how)


def found_in(out: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / part / "gpu.json").read_text())
    return found


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    return {entry["test"].rpartition("::")[2]: entry["outcome"] for entry in found["tests"]["not_passed"]}


@pytest.mark.long
def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    process = start(tmp_path / "out", "--here", environment=hidden)
    told, _ = process.communicate()
    assert process.returncode == 3
    assert "no GPU that torch can use" in told
    assert "sees no CUDA device" in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_whole_course_on_a_cpu(tmp_path: Path) -> None:
    """Our own figures and two peers, one of which is not installed here: one run, since each takes long."""
    out = tmp_path / "out"
    process = start(out, *_TRIAL, "--stages", "own,peers", "--peers", "torch_save,nvrx")
    told, _ = process.communicate()
    assert process.returncode == 0, told
    found = found_in(out, "bench")
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
    assert "flashckpt, to memory" in (out / "bench" / "summary.txt").read_text()
    assert [path.name for path in out.iterdir()] == ["bench"], "of the other part nothing was asked for"
    left = {path.name for path in (out / "bench").iterdir()}
    assert left == {"gpu.json", "summary.txt", "log.txt"}, "and no checkpoint of gigabytes"


@pytest.mark.long
def test_a_test_that_ends_the_process_costs_only_itself(tmp_path: Path) -> None:
    tests, out = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_on_a_device.py").write_text(_TESTS)
    (tests / "test_cannot_be_read.py").write_text("import pytest\npytestmark = pytest.mark.gpu\n1 / 0\n")
    (tests / "test_wants_more.py").write_text("import a_package_that_nobody_has\n")
    process = start(out, *_TRIAL, "--stages", "tests", "--tests", str(tests))
    told, _ = process.communicate()
    assert process.returncode == 1, told
    found = found_in(out, "tests")
    counts = {"passed": 3, "failed": 2, "did not end": 2, "skipped": 1, "not collected": 1}
    assert found["tests"]["counts"] == counts
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
    last = json.loads((out / "tests" / "tests.jsonl").read_text().splitlines()[-1])
    assert last["test"].endswith("::test_starts_processes"), "though it comes first in its file"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_leaves_what_was_found_so_far(tmp_path: Path, number: signal.Signals) -> None:
    tests, out = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_on_a_device.py").write_text(_TESTS)
    process = start(out, *_TRIAL, "--tests", str(tests), "--stages", "tests,ranks", start_new_session=True)
    try:
        written = out / "tests" / "gpu.json"
        until(lambda: written.exists() and found_in(out, "tests")["tests"] != {}, "the tests", 200)
        process.send_signal(number)
        told, _ = process.communicate()
    finally:
        process.kill()
    found = found_in(out, "tests")
    assert found["tests"]["counts"]["passed"] == 3
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert found["ended"] == "interrupted"
        assert "one is not two" in told, "the summary is written all the same"
        assert not list((out / "tests").glob("work-*"))


@pytest.mark.long
def test_what_there_is_no_time_for_is_no_failure(tmp_path: Path) -> None:
    """Of both parts, in one run: their time is over before they begin."""
    out = tmp_path / "out"
    process = start(out, *_TRIAL, "--seconds", "12")
    told, _ = process.communicate()
    assert process.returncode == 0, told
    for part, stages in PARTS.items():
        found = found_in(out, part)
        assert found["ended"] == "done"
        assert {each["name"].partition(":")[0] for each in found["stages"]} == {
            "peer" if stage == "peers" else stage for stage in stages if stage != "build"
        }
        assert all(each["outcome"].startswith("not run: no time left") for each in found["stages"])
        assert sum("not run: no time left" in each for each in found["lacks"]) == len(found["stages"])
    own = found_in(out, "bench")["own"]
    assert own.keys() == {"rates", "flashckpt_memory", "flashckpt", "small"}
    assert all(each["no_time"].startswith("not run: no time left") for each in own.values())


@pytest.mark.parametrize(("most_s", "key"), [(40.0, "no_time"), (0.1, "failed")])
def test_a_measurement_cut_short_is_told_from_one_that_is_too_slow(
    tmp_path: Path, most_s: float, key: str
) -> None:
    session = Session(sys.executable, tmp_path)
    settings = Settings(folder=str(tmp_path), state_bytes=MIB)
    try:
        found = measure(session, "benchmarks.own.small", settings, limit_s=0.1, most_s=most_s)
    finally:
        session.clean()
    assert found.keys() == {key}


def test_a_small_dev_shm_makes_no_state_smaller(tmp_path: Path) -> None:
    """Slots are memfds there, as in a container with its 64 MB."""
    described = {
        "threads": 8,
        "shared_memory_free_bytes": 64 * MIB,
        "memory_available_bytes": 128 * GIB,
        "disk_free_bytes": 64 * GIB,
        "devices": [{"free_bytes": 78 * GIB}],
    }
    settings, smaller = settings_for(described, tmp_path, device="cuda", small=False)
    assert (settings.state_bytes, smaller) == (int(8.25 * GIB), "")
    described["memory_available_bytes"] = 12 * GIB
    settings, smaller = settings_for(described, tmp_path, device="cuda", small=False)
    assert settings.state_bytes == 2 * GIB
    assert "host memory" in smaller
