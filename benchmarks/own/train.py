"""A training script that uses `flashckpt.loop`: what is killed, and what is started again after it.

It reports the monotonic time of each stage up to its first batch once it has taken `extra["snapshots"]`, and
kills itself in the step after that.
"""

from __future__ import annotations

import time

_STARTED_S = time.monotonic()

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import flashckpt  # noqa: E402
from benchmarks.ending import reporting  # noqa: E402
from benchmarks.settings import Job  # noqa: E402
from benchmarks.workload import Workload  # noqa: E402

_IMPORTED_S = time.monotonic()
# More than any run needs: it must not come to its end before it is killed.
_ENDLESS = 10_000_000


def train(job: Job) -> None:
    """Never returns: ends by SIGKILL in the middle of a step, after the backward pass."""
    workload = Workload(job.settings)
    built_s = time.monotonic()
    loop = flashckpt.loop(
        range(_ENDLESS),
        Path(job.folder, "run"),
        every=1,
        persist_every=None,
        model=workload.model,
        optimizer=workload.optimizer,
    )
    first_s = 0.0
    for _ in loop:
        if not first_s:
            first_s = time.monotonic()
            resumed = loop.checkpointer.resumed
        if loop.checkpointer.report()["snapshots"] < job.extra["snapshots"]:
            workload.step()
            continue
        job.report(
            {
                "started_s": _STARTED_S,
                "imported_s": _IMPORTED_S,
                "built_s": built_s,
                "first_batch_s": first_s,
                "resumed": None if resumed is None else vars(resumed),
                "num_bytes": 12 * sum(parameter.numel() for parameter in workload.model.parameters()),
            }
        )
        workload.step(gate=lambda: os.kill(os.getpid(), signal.SIGKILL))


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        train(job)


if __name__ == "__main__":
    main()
