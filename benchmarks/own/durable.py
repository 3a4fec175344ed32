"""How fast a snapshot gets to disk with the loop held still: `save(); wait()`, and the disk at its best right
before each, with as many bytes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import flashckpt
from benchmarks import direct_io
from benchmarks.ending import reporting
from benchmarks.settings import MIB, Job
from benchmarks.workload import Workload

_BLOCK = 16 * MIB


def durable(job: Job) -> dict[str, Any]:
    workload = Workload(job.settings)
    workload.step()
    num_bytes = workload.num_bytes()
    saves, calls, disk = [], [], []
    with flashckpt.attach(
        Path(job.folder, "run"), every=None, model=workload.model, optimizer=workload.optimizer
    ) as checkpointer:
        for index in range(job.settings.repetitions + 1):
            workload.step()
            workload.sync()
            disk_s = best_write_s(Path(job.folder, "direct"), num_bytes)
            began = time.perf_counter()
            checkpointer.save()
            called = time.perf_counter()
            checkpointer.wait()
            ended = time.perf_counter()
            if index:  # the first makes the slots
                calls.append(called - began)
                saves.append(ended - began)
                disk.append(disk_s)
    return {"num_bytes": num_bytes, "save_s": saves, "call_s": calls, "write_s": disk}


def best_write_s(path: Path, num_bytes: int) -> float | None:
    """The faster of both shapes of requests, in seconds for `num_bytes`; None without O_DIRECT."""
    rounded = -(-num_bytes // _BLOCK) * _BLOCK
    seconds = []
    for shape in direct_io.SHAPES:
        try:
            seconds.append(direct_io.write_s(path, rounded, shape) * num_bytes / rounded)
        except direct_io.DirectRefused:
            return None
        finally:
            path.unlink(missing_ok=True)
    return min(seconds)


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        job.report(durable(job))


if __name__ == "__main__":
    main()
