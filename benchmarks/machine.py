"""What this machine can do at best, and what it is. `python -m benchmarks.machine JOB` measures, in a process
of its own: torch's copy of the state, device to host, device clone, O_DIRECT write and read, a step.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import direct_io
from benchmarks.ending import reporting
from benchmarks.settings import MIB, Job, Settings
from benchmarks.workload import Workload

_BLOCK = 16 * MIB
_STEPS = 5


def describe(folder: Path) -> dict[str, Any]:
    """The machine, as far as it decides the figures."""
    cuda = torch.cuda.is_available()
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")},
        "load_average": os.getloadavg(),
    }


def _first(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _file_system(folder: Path) -> str:
    """Type and device of what holds the folder: of all mounts above it, the deepest."""
    best, found = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        device, place, kind = line.split()[:3]
        above = folder.resolve().is_relative_to(place)
        if above and len(place) >= len(best):
            best, found = place, f"{kind} on {device}"
    return found


def limits(settings: Settings, folder: Path) -> dict[str, Any]:
    """Seconds of each repetition, by name; `num_bytes` is what each of them moved."""
    workload = Workload(settings)
    workload.step()
    leaves = list(workload.leaves().values())
    found: dict[str, Any] = {"num_bytes": workload.num_bytes()}
    repeat = settings.repetitions
    if workload.device.type == "cuda":
        found["clone_s"] = _repeat(repeat, _copy_into([torch.empty_like(leaf) for leaf in leaves], leaves))
        pinned = [torch.empty_like(leaf, device="cpu", pin_memory=True) for leaf in leaves]
        found["to_host_s"] = _repeat(repeat, _copy_into(pinned, leaves))
        del pinned
    host = [torch.zeros_like(leaf, device="cpu") for leaf in leaves]
    found["copy_s"] = _repeat(repeat, _copy_into([torch.zeros_like(leaf) for leaf in host], host))
    found |= _disk(folder, workload.num_bytes(), repeat)
    found["step_s"] = _repeat(_STEPS, workload.step)
    return found


def _copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
    """What torch itself does at best: memory that is there already, one call a tensor."""

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    copy()
    return copy


def _repeat(count: int, run: Callable[[], None]) -> list[float]:
    seconds = []
    for _ in range(count):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def _disk(folder: Path, num_bytes: int, repeat: int) -> dict[str, Any]:
    """Of the shapes of requests, the one that was faster over all repetitions; in seconds for `num_bytes`."""
    rounded = -(-num_bytes // _BLOCK) * _BLOCK
    share = num_bytes / rounded
    measured: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    path = folder / "direct"
    try:
        for shape in direct_io.SHAPES * repeat:
            writes, reads = measured.setdefault(shape, ([], []))
            writes.append(direct_io.write_s(path, rounded, shape) * share)
            reads.append(direct_io.read_s(path, rounded, shape) * share)
            path.unlink()
    except direct_io.DirectRefused as refused:
        return {"direct_refused": str(refused)}
    finally:
        path.unlink(missing_ok=True)
    return {
        "write_s": min((writes for writes, _ in measured.values()), key=sum),
        "read_s": min((reads for _, reads in measured.values()), key=sum),
    }


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        job.report(limits(job.settings, Path(job.folder)))


if __name__ == "__main__":
    main()
