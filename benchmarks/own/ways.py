"""What a snapshot costs the loop by each way of copying what is on a device: clone, gate, wait.

clone: with device memory for all leaves. gate: with none. wait: with none, and an optimizer whose hooks do
not fire (as when its step is compiled), so that nothing says when the state will be changed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import flashckpt
from benchmarks.ending import reporting
from benchmarks.own.snapshot import copier, measure_on_gpu, warm
from benchmarks.settings import Job
from benchmarks.workload import Workload

_WAYS = {"clone": 1 << 50, "gate": 0, "wait": 0}


def ways(job: Job) -> dict[str, Any]:
    workload = Workload(job.settings)
    workload.step()
    copy = copier(workload)
    result: dict[str, Any] = {"leaves": len(workload.leaves()), "num_bytes": workload.num_bytes()}
    for name, device_memory in _WAYS.items():
        if name == "wait":
            step: Any = type(workload.optimizer).step
            workload.optimizer.step = functools.partial(  # type: ignore[method-assign]
                step.__wrapped__, workload.optimizer
            )
        try:
            result[name] = _cost(job, workload, copy, name, device_memory)
        except Exception as error:  # the next way does not depend on this one
            result[name] = {"failed": f"{type(error).__name__}: {error}"}
        job.report(result)
    return result


def _cost(
    job: Job, workload: Workload, copy: Callable[[], float], name: str, device_memory: int
) -> dict[str, Any]:
    checkpointer = flashckpt.attach(
        Path(job.folder, name),
        every=3,
        persist_every=None,
        options=flashckpt.Options(device_memory=device_memory),
        model=workload.model,
        optimizer=workload.optimizer,
    )
    with checkpointer:
        warm(workload, checkpointer)
        before = checkpointer.report()["snapshots"]
        measured = measure_on_gpu(job, workload, checkpointer, copy)
        taken = checkpointer.report()["snapshots"] - before
        copied_by = [list(row[:3]) for row in checkpointer._capture.describe()]
    # (way, leaves, bytes): what was asked for is not always what a state allows.
    return {**measured, "snapshots": taken, "middle_s": median(measured["cost_s"]), "ways": copied_by}


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        job.report(ways(job))


if __name__ == "__main__":
    main()
