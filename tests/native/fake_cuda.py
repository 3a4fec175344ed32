"""A stand-in for the CUDA driver, built where a test runs, and programs that are run with it."""

import os
import subprocess
import sys
from pathlib import Path

from emulated_kernel import HERE

PRELUDE = """
import os
from array import array
from flashckpt import _native

def u64(*values):
    return array("Q", values)

def refused(call, *args, **named):
    try:
        call(*args, **named)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("not refused")
"""


def build_driver(folder: Path, kernel_object: Path) -> Path:
    made = folder / "fake_driver.o"
    subprocess.run(["gcc", "-c", "-fPIC", "-o", made, HERE / "fake_driver.c"], check=True)
    subprocess.run(["g++", "-shared", made, kernel_object, "-o", folder / "libcuda.so.1"], check=True)
    return folder


def run(driver: Path, program: str, devices: int, refuses: str = "") -> list[str]:
    """The driver's log, a line a call, of a program behind the prelude. `refuses`: see fake_driver.c."""
    log = driver / "log"
    log.write_text("")
    changed = {"LD_LIBRARY_PATH": str(driver), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_DEVICES": str(devices)}
    changed["FAKE_CUDA_REFUSES"] = refuses
    command = [sys.executable, "-c", PRELUDE + program]
    done = subprocess.run(command, env={**os.environ, **changed}, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return log.read_text().splitlines()


def check_program(driver: Path, program: str, devices: int) -> None:
    """Run a program that asserts by itself, and check that it has reached its end."""
    end = '\nprint("reached its end", file=open(os.environ["FAKE_CUDA_LOG"], "a"))\n'
    assert "reached its end" in run(driver, program + end, devices)
