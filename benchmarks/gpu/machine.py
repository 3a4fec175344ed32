"""Which interpreter has a torch that sees the GPU, what the machine is, and how large a state it can bear.
Imports no torch: asks the interpreters that may have one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.settings import GIB, MIB, Settings

_ROOT = Path(__file__).resolve().parent.parent.parent
_ASK_S = 90.0
_WHOLE_STATE = int(8.25 * GIB)
# Sequences of 1,024 tokens a step: about 84 ms on an H200.
_BATCH = 8
_STEPS = 24

_PROBE = """
import json, platform, sys
import importlib.metadata as metadata
import torch
found = {"python": platform.python_version(), "torch": torch.__version__, "torch_cuda": torch.version.cuda,
         "torch_hip": torch.version.hip, "threads": torch.get_num_threads(), "devices": [], "versions": {}}
for name in ("torch", "numpy", "safetensors", "pytest", "pytest-timeout", "flashckpt"):
    try:
        found["versions"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
try:
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found["devices"].append({"name": facts.name, "capability": [facts.major, facts.minor],
                                 "multiprocessors": facts.multi_processor_count,
                                 "memory_bytes": total, "free_bytes": free})
except Exception as error:
    found["devices"], found["refused"] = [], f"{type(error).__name__}: {error}"
print("PROBED " + json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """python: what runs everything, once `environment` (if any) was handed to scripts/environment.
    facts: what its torch says of itself and of the devices."""

    python: str
    environment: dict[str, str] | None
    facts: dict[str, Any]


def choose(device: str, *, here: bool) -> Interpreter | str:
    """The environment of `make test` if its torch sees the device; else one that stands on the torch of this
    interpreter. Why there is none, if so."""
    venv = os.environ.get("VENV") or ".venv"
    offline = bool(os.environ.get("WHEELS")) or os.environ.get("TORCH") == "system"
    candidates: list[tuple[str, str, dict[str, str] | None]] = []
    made = _ROOT / venv / "bin" / "python"
    if here:
        candidates.append((sys.executable, sys.executable, None))
    else:
        if made.exists() and not offline:
            candidates.append((str(made), str(made), {"VENV": venv}))
        own = venv if offline and venv != ".venv" else ".venv-gpu"
        standing = {"VENV": own, "TORCH": "system", "PYTHON": sys.executable}
        candidates.append((sys.executable, str(_ROOT / own / "bin" / "python"), standing))
    reasons = []
    for asked, python, environment in candidates:
        facts = probe(asked)
        if isinstance(facts, dict) and (facts["devices"] or device == "cpu"):
            return Interpreter(python, environment, facts)
        reasons.append(f"{asked}: {facts if isinstance(facts, str) else _sees_none(facts)}")
    driver = "there is an NVIDIA driver" if os.path.exists("/dev/nvidiactl") else "there is no NVIDIA driver"
    return (
        f"no GPU that torch can use ({driver}). Nothing was built or measured.\n  "
        + "\n  ".join(reasons)
        + "\nOn a machine with a GPU: install torch with CUDA, or run `make test` once, which does; or name "
        "an interpreter that has it: make gpu PYTHON=…\nTo try the command itself: --device cpu --small."
    )


def _sees_none(facts: dict[str, Any]) -> str:
    if "refused" in facts:
        return f"torch {facts['torch']}: {facts['refused']}"
    return f"torch {facts['torch']} sees no CUDA device"


def probe(python: str) -> dict[str, Any] | str:
    """What the interpreter's torch says; the reason if it says nothing."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_ASK_S, cwd="/", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    for line in done.stdout.splitlines():
        if line.startswith("PROBED "):
            found: dict[str, Any] = json.loads(line.removeprefix("PROBED "))
            return found
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def reaches_an_index() -> bool:
    """Whether pip finds packages anywhere, by whatever it is configured with. Asked with one small package,
    which is not installed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run"]
    command += ["--no-cache-dir", "--ignore-installed", "--no-deps", "--retries", "0", "--timeout", "10"]
    command.append("ninja")
    try:
        done = subprocess.run(command, capture_output=True, timeout=40)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def describe(interpreter: Interpreter, folder: Path) -> dict[str, Any]:
    """The machine, as far as it decides the figures."""
    return {
        **interpreter.facts,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "driver": _driver(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": _available(),
        "shared_memory_free_bytes": shutil.disk_usage("/dev/shm").free,
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "load_average": os.getloadavg(),
        "commit": _commit(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=_ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def settings_for(
    described: dict[str, Any], folder: Path, *, device: str, small: bool
) -> tuple[Settings, str]:
    """What is measured with, and what made it smaller than 8.25 GiB of state, if anything did."""
    settings = Settings(
        folder=str(folder), device=device, layers=12, batch=_BATCH, length=1024, every=_STEPS,
        checkpoints=1, rounds=1, repetitions=2, pairs=8, threads=described["threads"],
        state_bytes=_WHOLE_STATE,
    )  # fmt: skip
    if small:
        small_state = replace(settings, state_bytes=16 * MIB, layers=2, batch=1, length=16, every=6)
        return replace(small_state, repetitions=1, pairs=2, threads=1), ""
    # Three slots and a spare, which are memfds where /dev/shm is too small for them; a peer's own copies; two
    # checkpoints of a peer that keeps the last one.
    bounds = {
        "host memory": described["memory_available_bytes"] / 6,
        "the disk": described["disk_free_bytes"] / 4,
    }
    if described["devices"]:
        bounds["device memory"] = described["devices"][0]["free_bytes"] / 5
    name = min(bounds, key=lambda one: bounds[one])
    if bounds[name] >= _WHOLE_STATE:
        return settings, ""
    state = max(64 * MIB, int(bounds[name]))
    return replace(settings, state_bytes=state), (
        f"room in {name}: the state is {state / GIB:.2f} GiB, not {_WHOLE_STATE / GIB:.2f}"
    )
