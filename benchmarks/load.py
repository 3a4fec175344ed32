"""Loading, in a new process: `python -m benchmarks.load JOB`. Owns the timing of a load and the comparison
of what was loaded with what was saved.

The live model and optimizer exist already and have done a step, as for every peer; the files are not in the
page cache.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import files, peers
from benchmarks.ending import reporting
from benchmarks.settings import Job
from benchmarks.workload import Workload


def load(job: Job) -> dict[str, Any]:
    folder = Path(job.folder)
    peer = peers.create(job.peer)
    workload = Workload(job.settings)
    workload.step()
    workload.sync()
    files.forget(folder)
    began = time.perf_counter()
    reported = peer.load(workload, folder, job.extra["step"])
    seconds = time.perf_counter() - began
    saved, loaded = job.extra["fingerprint"], workload.fingerprint()
    return {
        "seconds": seconds,
        "reported": reported,
        "tier": peer.tier,
        "exact": loaded == saved,
        "differ": sum(loaded.get(name) != value for name, value in saved.items()),
    }


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        job.report(load(job))


if __name__ == "__main__":
    main()
