"""How fast a new process has its state back, beside what that takes at least: from memory a digest, a copy
and a digest again; from disk the O_DIRECT read, or the checksum where that is slower.

`extra`: `dies` leaves by SIGKILL, so that the next process finds the snapshot in memory; without it the run
is closed in order, and the next one reads the disk.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import flashckpt
from benchmarks import direct_io, files
from benchmarks.ending import reporting
from benchmarks.settings import MIB, Job
from benchmarks.workload import Workload
from flashckpt import _native
from flashckpt.capture.devices import digest_tensors
from flashckpt.restore.step_choice import Candidate, Loaded, StepChoice
from flashckpt.store.read_plan import ReadPlan

_BLOCK = 16 * MIB


def resume(job: Job) -> tuple[flashckpt.Checkpointer, dict[str, Any]]:
    workload = Workload(job.settings)
    workload.step()
    workload.sync()
    run = Path(job.folder, "run")
    # The limit is taken before and after: a disk is not as fast at one moment as at the next, and a cache
    # below this machine has the file for the resume as for the limit.
    reads = _direct_reads(run, workload.num_bytes())
    files.forget(run)
    with _timed() as stages:
        began = time.perf_counter()
        checkpointer = flashckpt.attach(run, every=None, model=workload.model, optimizer=workload.optimizer)
        attach_s = time.perf_counter() - began
    resumed = checkpointer.resumed
    result: dict[str, Any] = {"num_bytes": workload.num_bytes(), "attach_s": attach_s, **stages}
    if resumed is not None:
        result |= {"tier": resumed.tier, "resumed_s": resumed.seconds}
        result |= _rates(workload, job.settings.repetitions)
        after = _direct_reads(run, workload.num_bytes())
        result["direct_read_s"] = [a + b for a, b in zip(reads, after, strict=True)]
    workload.step()
    checkpointer.save()
    checkpointer.wait()
    return checkpointer, result


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Seconds until the snapshot is verified in memory (`verified_s`, from when it was begun to be read) and
    of reading the file alone (`read_file_s`)."""
    stages: dict[str, float] = {}
    begins: list[float] = []
    try_, read = StepChoice._try, ReadPlan.run

    def timed_try(choice: StepChoice, content: Sequence[Candidate]) -> Loaded | None:
        began = time.perf_counter()
        loaded = try_(choice, content)
        if loaded is not None:
            stages["verified_s"] = time.perf_counter() - min([began, *begins])
        return loaded

    def timed_read(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        begins.append(began)
        try:
            return read(*arguments, **options)
        finally:
            stages["read_file_s"] = time.perf_counter() - began

    with (
        mock.patch.object(StepChoice, "_try", timed_try),
        mock.patch.object(ReadPlan, "run", timed_read),
    ):
        yield stages


def _rates(workload: Workload, count: int) -> dict[str, Any]:
    """Seconds for the bytes of the state, of each repetition."""
    leaves = [leaf.detach() for leaf in workload.leaves().values()]
    threads = torch.get_num_threads()
    return {
        "digest_s": _repeated(workload, count, lambda: digest_tensors(leaves, threads)),
        "copy_s": _repeated(workload, count, _filler(workload, leaves)),
        "checksum_s": _repeated(workload, count, _checksum(leaves, threads)),
    }


def _filler(workload: Workload, leaves: list[Tensor]) -> Callable[[], None]:
    """Into the live tensors, from host memory that the device may read by itself."""
    cuda = workload.device.type == "cuda"
    host = [leaf.cpu().pin_memory() if cuda else leaf.clone() for leaf in leaves]

    def copy() -> None:
        for leaf, source in zip(leaves, host, strict=True):
            leaf.copy_(source, non_blocking=True)

    return copy


def _checksum(leaves: list[Tensor], threads: int) -> Callable[[], None]:
    """XXH3 of as many bytes, by as many threads as read the file."""
    host = [leaf.cpu() for leaf in leaves]
    pieces = [(leaf.data_ptr(), leaf.numel() * leaf.element_size()) for leaf in host]

    def checksum() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda piece: _native.xxh3_128_at(*piece), pieces))

    return checksum


def _repeated(workload: Workload, count: int, run: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(count):
        workload.sync()
        began = time.perf_counter()
        run()
        workload.sync()
        seconds.append(time.perf_counter() - began)
    return seconds


def _direct_reads(run: Path, num_bytes: int) -> list[list[float]]:
    """For each shape of requests, seconds of O_DIRECT reads of the newest shard itself: in whole blocks, told
    for all of it. Empty where there is no shard yet or no O_DIRECT."""
    shards = sorted(run.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    seconds: list[list[float]] = [[] for _ in direct_io.SHAPES]
    if not shards:
        return seconds
    whole = shards[-1].stat().st_size // _BLOCK * _BLOCK
    try:
        for _ in range(2):
            for found, shape in zip(seconds, direct_io.SHAPES, strict=True):
                found.append(direct_io.read_s(shards[-1], whole, shape) * num_bytes / whole)
    except direct_io.DirectRefused:
        return [[] for _ in direct_io.SHAPES]
    return seconds


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        checkpointer, result = resume(job)
        job.report(result)
        if job.extra["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.close()


if __name__ == "__main__":
    main()
