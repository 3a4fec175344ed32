"""What one checkpoint costs the loop, for whom minutes count. `python -m benchmarks.gpu.loop_cost JOB`.

One block of steps without a checkpoint and one with; the checkpoint comes first in its block, so that what
runs beside the loop falls into the block too. `measure` takes longer and says more.
Reports after each part: whoever runs out of time keeps what was measured.

`extra`: `alone`, checkpoints on an idle loop; `last`, whether a last one is left to be loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import files, peers
from benchmarks.ending import reporting
from benchmarks.measure import Measurement
from benchmarks.settings import Job

_WARM_STEPS = 3
# Steps before a block's checkpoint; all others come after it.
_BEFORE = 2


def loop_cost(job: Job) -> tuple[Any, dict[str, Any]]:
    peer = peers.create(job.peer)
    run = Measurement(job.settings, peer, Path(job.folder))
    for _ in range(_WARM_STEPS):
        run.workload.step()
    with run.phase("plain"):
        run.plain_steps(_WARM_STEPS)
    began = time.perf_counter()
    run.attach()
    result: dict[str, Any] = {
        "versions": {package: importlib.metadata.version(package) for package in peer.packages},
        "state_bytes": run.workload.num_bytes(),
        "leaves": len(run.workload.leaves()),
        "commits": peer.commits,
        "setup_s": time.perf_counter() - began,
    }
    with run.phase("checkpoints"):
        result["first"] = run.warm()
        job.report(result)
        run.block(job.settings.every - _BEFORE)
        result["blocks"] = [_blocks(run)]
        job.report(result)
        result["alone"] = []
        for _ in range(job.extra["alone"]):
            result["alone"].append(run.alone())
            job.report(result)
    result["phases"] = run.phases
    if job.extra["last"]:
        result["last"] = run.last()
    return peer, result


def _blocks(run: Measurement) -> dict[str, Any]:
    steps = run.settings.every
    run.plain_steps(_WARM_STEPS)
    plain_s = run.plain_steps(steps)
    block = run.block(steps)
    began = time.perf_counter()
    files.sync_all(run.folder)
    synced_s = time.perf_counter() - began
    return {"batch": run.settings.batch, "steps": steps, "plain_s": plain_s, "synced_s": synced_s, **block}


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        peer, result = loop_cost(job)
        job.report(result)
        if peer.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        peer.close()


if __name__ == "__main__":
    main()
