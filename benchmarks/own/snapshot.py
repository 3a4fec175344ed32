"""What a snapshot costs the loop, beside torch's own copy of the same state in the same process.

On a CPU every third iteration ends with a snapshot, and the two after it without: the first of those may
still pay for caches that the copy emptied, the second is what both are compared with. On a GPU, where the
copy runs beside the loop, blocks of iterations are timed as a whole. Nothing is persisted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flashckpt
from benchmarks.ending import reporting
from benchmarks.settings import Job
from benchmarks.workload import Workload

_EVERY = 3
_LIMIT = 300


def snapshot(job: Job) -> dict[str, Any]:
    workload = Workload(job.settings)
    workload.step()
    copy = copier(workload)
    with flashckpt.attach(
        Path(job.folder, "run"),
        every=_EVERY,
        persist_every=None,
        model=workload.model,
        optimizer=workload.optimizer,
    ) as checkpointer:
        warm(workload, checkpointer)
        measure = measure_on_gpu if workload.device.type == "cuda" else _on_cpu
        result = measure(job, workload, checkpointer, copy)
    return {**result, "leaves": len(workload.leaves()), "num_bytes": workload.num_bytes()}


def copier(workload: Workload) -> Callable[[], float]:
    """Seconds of torch's copy of every leaf into memory that is there already: on a CPU a memcpy, on a
    GPU a clone."""
    leaves = list(workload.leaves().values())
    copies = [torch.zeros_like(leaf) for leaf in leaves]

    def copy() -> float:
        workload.sync()
        began = time.perf_counter()
        for target, source in zip(copies, leaves, strict=True):
            target.copy_(source.detach())
        workload.sync()
        return time.perf_counter() - began

    copy()
    return copy


def warm(workload: Workload, checkpointer: flashckpt.Checkpointer, snapshots: int = 3) -> None:
    """Until the slots stand and each was written once; then on to a step that `_EVERY` divides."""
    for _ in range(_LIMIT):
        workload.step()
        checkpointer.step()
        if checkpointer.report()["snapshots"] >= snapshots and checkpointer.completed % _EVERY == 0:
            return
    raise RuntimeError(f"fewer than {snapshots} snapshots in {_LIMIT} steps: {checkpointer.report()}")


def _on_cpu(
    job: Job, workload: Workload, checkpointer: flashckpt.Checkpointer, copy: Callable[[], float]
) -> dict[str, Any]:
    costs: list[float] = []
    calls: list[float] = []
    quiet: list[float] = []
    copies: list[float] = []
    plain: list[float] = []
    for _ in range(job.settings.pairs):
        iterations = []
        for _ in range(_EVERY):
            began = time.perf_counter()
            workload.step()
            called = time.perf_counter()
            checkpointer.step()
            ended = time.perf_counter()
            iterations.append(ended - began)
            (calls if checkpointer.completed % _EVERY == 0 else quiet).append(ended - called)
        before, last, taken = iterations
        # The iteration that ends with a snapshot and the one after the last snapshot, against the one
        # between them. The order within a triple is: after, plain, with.
        costs.append((taken + before) - 2 * last)
        plain.append(last)
        copies.append(copy())
    return {"cost_s": costs, "call_s": calls, "quiet_call_s": quiet, "copy_s": copies, "plain_s": plain}


def measure_on_gpu(
    job: Job, workload: Workload, checkpointer: flashckpt.Checkpointer, copy: Callable[[], float]
) -> dict[str, Any]:
    costs: list[float] = []
    calls: list[float] = []
    quiet: list[float] = []
    copies: list[float] = []
    plain: list[float] = []
    steps = 4 * _EVERY
    for _ in range(max(2, job.settings.pairs // 4)):
        plain_s = _block(workload, steps, None, [], [])
        checkpointer.wait()
        with_s = _block(workload, steps, checkpointer, calls, quiet)
        costs.append((with_s - plain_s) / (steps // _EVERY))
        plain.append(plain_s / steps)
        copies.append(copy())
    # How long the call itself is held: asked with nothing queued on the device.
    alone = []
    for _ in range(job.settings.repetitions * _EVERY):
        workload.step()
        workload.sync()
        began = time.perf_counter()
        checkpointer.step()
        if checkpointer.completed % _EVERY == 0:
            alone.append(time.perf_counter() - began)
    return {"cost_s": costs, "call_s": alone, "quiet_call_s": quiet, "clone_s": copies, "plain_s": plain}


def _block(
    workload: Workload,
    steps: int,
    checkpointer: flashckpt.Checkpointer | None,
    calls: list[float],
    quiet: list[float],
) -> float:
    workload.sync()
    began = time.perf_counter()
    for _ in range(steps):
        workload.step()
        if checkpointer is not None:
            called = time.perf_counter()
            checkpointer.step()
            ended = time.perf_counter()
            (calls if checkpointer.completed % _EVERY == 0 else quiet).append(ended - called)
    workload.sync()
    return time.perf_counter() - began


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        job.report(snapshot(job))


if __name__ == "__main__":
    main()
