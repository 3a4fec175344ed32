"""A test that starts a process without the mark `process` fails, whatever becomes of what is raised there."""

import subprocess
import sys
from pathlib import Path

import pytest

STARTS = """
import multiprocessing, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import pytest

NOTHING = [sys.executable, "-c", ""]

def nothing(): pass

def fork(): os.fork() or os._exit(0)

def spawn(): os.posix_spawn(sys.executable, NOTHING, os.environ)

def run(): subprocess.run(NOTHING, check=True)

def system(): os.system("true")

def multiprocess(): multiprocessing.get_context("spawn").Process(target=nothing).start()

def in_a_thread():
    with ThreadPoolExecutor() as pool:
        pool.submit(run)

STARTS = [fork, spawn, run, system, multiprocess, in_a_thread]

@pytest.mark.parametrize("start", STARTS)
def test_not_marked(start): start()

@pytest.fixture(scope="module")
def made(): run()

def test_by_a_fixture(made): pass

def test_nothing(): nothing()

@pytest.mark.process
@pytest.mark.parametrize("start", STARTS)
def test_marked(start): start()

@pytest.fixture
def runtime(): run()

def test_marked_by_a_fixture(runtime): run()
"""


@pytest.mark.process
def test_only_those_that_are_marked_start_processes(tmp_path: Path) -> None:
    (tmp_path / "test_starts.py").write_text(STARTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    fast\n    process\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.process_guard", "-rA", "-q", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    words = ("PASSED", "FAILED", "ERROR")
    told = [line.split() for line in ended.stdout.splitlines() if line.startswith(words)]
    outcomes = {name.rpartition("::")[2]: outcome for outcome, name, *_ in told}
    starts = ("fork", "spawn", "run", "system", "multiprocess", "in_a_thread")
    assert outcomes == {
        **{f"test_not_marked[{start}]": "FAILED" for start in starts},
        **{f"test_marked[{start}]": "PASSED" for start in starts},
        "test_by_a_fixture": "ERROR",
        "test_nothing": "PASSED",
        "test_marked_by_a_fixture": "PASSED",
    }, ended.stdout + ended.stderr
