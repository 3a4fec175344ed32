"""What the default, `every="auto"`, costs a loop: a few steps with it and a few without take turns, so
that a machine which is slower for a minute is slower for both. What a snapshot leaves to be done beside the
loop is waited for between turns, in neither's time, but for the steps that it really went beside.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import flashckpt
from benchmarks.ending import reporting
from benchmarks.settings import Job
from benchmarks.workload import Workload

_TURN_STEPS = 8
_LIMIT = 300


def auto(job: Job) -> dict[str, Any]:
    workload = Workload(job.settings)
    workload.step()
    with flashckpt.attach(
        Path(job.folder, "run"), model=workload.model, optimizer=workload.optimizer
    ) as checkpointer:
        _warm(workload, checkpointer)
        step_s = min(_plain(workload, 1) for _ in range(3))
        pairs = max(4, math.ceil(job.settings.auto_seconds / (2 * _TURN_STEPS * step_s)))
        before = checkpointer.report()
        blocks = [_pair(workload, checkpointer, _TURN_STEPS, index) for index in range(pairs)]
        after = checkpointer.report()
    return {
        "blocks": blocks,
        "steps": _TURN_STEPS,
        "snapshots": after["snapshots"] - before["snapshots"],
        "call_s": after["capture_call_seconds"] - before["capture_call_seconds"],
        "overhead": flashckpt.Options().overhead,
    }


def _warm(workload: Workload, checkpointer: flashckpt.Checkpointer) -> None:
    """Until the budget knows what a snapshot costs: it took one, and then a second."""
    for _ in range(_LIMIT):
        workload.step()
        checkpointer.step()
        if checkpointer.report()["snapshots"] >= 2:
            return
    raise RuntimeError(f"fewer than two snapshots in {_LIMIT} steps: {checkpointer.report()}")


def _pair(
    workload: Workload, checkpointer: flashckpt.Checkpointer, steps: int, index: int
) -> dict[str, float]:
    first = _plain(workload, steps) if index % 2 == 0 else None
    # Ends what is in flight, so that the iterations without boundaries are not taken for one long one.
    checkpointer.wait()
    with_s = _with(workload, checkpointer, steps)
    checkpointer.wait()
    return {"plain_s": _plain(workload, steps) if first is None else first, "with_s": with_s}


def _plain(workload: Workload, steps: int) -> float:
    workload.sync()
    began = time.perf_counter()
    for _ in range(steps):
        workload.step()
    workload.sync()
    return time.perf_counter() - began


def _with(workload: Workload, checkpointer: flashckpt.Checkpointer, steps: int) -> float:
    workload.sync()
    began = time.perf_counter()
    for _ in range(steps):
        workload.step()
        checkpointer.step()
    workload.sync()
    return time.perf_counter() - began


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        job.report(auto(job))


if __name__ == "__main__":
    main()
