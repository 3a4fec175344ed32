"""How fast this machine moves and digests a state: on the device, to the host and to the disk. Seconds of
each repetition beside the bytes that each moved; what cannot be done here says why.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import direct_io
from benchmarks.ending import reporting
from benchmarks.settings import GIB, MIB, Job
from benchmarks.workload import Workload
from flashckpt.capture.devices import digest_tensors

_REPEATS = 3
_BLOCK = 16 * MIB
# Enough for a rate, and a few seconds of a slow disk.
_MOST_DISK = 2 * GIB
_MOST_HOST = 2 * GIB


class Rates:
    """Measured one after the other; each is reported when it is there."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.workload = Workload(job.settings)
        self.cuda = self.workload.device.type == "cuda"
        self.found: dict[str, Any] = {}

    def add(self, name: str, num_bytes: int, run: Callable[[], Any]) -> None:
        try:
            run()
            seconds = [self._timed(run) for _ in range(_REPEATS)]
            self.found[name] = {"num_bytes": num_bytes, "seconds": seconds}
        except Exception as error:  # the next rate does not depend on this one
            self.found[name] = {"failed": f"{type(error).__name__}: {error}"}
        self.job.report(self.found)

    def _timed(self, run: Callable[[], Any]) -> float:
        self.workload.sync()
        began = time.perf_counter()
        run()
        self.workload.sync()
        return time.perf_counter() - began

    def all(self) -> dict[str, Any]:
        self.workload.step()
        self.found["step_s"] = [self._timed(self.workload.step) for _ in range(_REPEATS)]
        leaves = [leaf.detach() for leaf in self.workload.leaves().values()]
        num_bytes = self.workload.num_bytes()
        threads = self.job.settings.threads
        self.found |= {"state_bytes": num_bytes, "leaves": len(leaves)}
        self._clone(leaves, num_bytes)
        self.add("digest of the state", num_bytes, lambda: digest_tensors(leaves, threads))
        one = torch.empty(min(num_bytes, _MOST_HOST) // 4, device=self.workload.device)
        self.add("digest of one leaf", one.numel() * 4, lambda: digest_tensors([one], threads))
        self._host(one)
        self._disk(Path(self.job.folder), min(num_bytes, _MOST_DISK))
        return self.found

    def _clone(self, leaves: list[Tensor], num_bytes: int) -> None:
        copies = [torch.empty_like(leaf) for leaf in leaves]
        self.add("clone", num_bytes, lambda: _copy_each(copies, leaves))

    def _host(self, source: Tensor) -> None:
        """Into memory that is pinned, that is not, and into shared memory that was registered."""
        num_bytes = source.numel() * 4
        pageable = torch.zeros(source.numel())
        self.add("to pageable memory", num_bytes, lambda: pageable.copy_(source))
        if not self.cuda:
            return
        pinned = torch.empty(source.numel(), pin_memory=True)
        self.add("to pinned memory", num_bytes, lambda: pinned.copy_(source, non_blocking=True))
        self.add("from pinned memory", num_bytes, lambda: source.copy_(pinned, non_blocking=True))
        try:
            self._registered(source)
        except Exception as error:  # too little shared memory, or a driver that refuses it
            self.found["to registered shared memory"] = {"failed": f"{type(error).__name__}: {error}"}

    def _registered(self, source: Tensor) -> None:
        num_bytes = source.numel() * 4
        # A memfd, as slots are where /dev/shm is small.
        with open(os.memfd_create("rates"), "w+b", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
        shared = torch.frombuffer(memory, dtype=torch.float32)
        shared.zero_()
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        code = driver.cudaHostRegister(shared.data_ptr(), num_bytes, 0)
        self.found["registering"] = {"num_bytes": num_bytes, "seconds": [time.perf_counter() - began]}
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister: {code}")
        try:
            name = "to registered shared memory"
            self.add(name, num_bytes, lambda: shared.copy_(source, non_blocking=True))
        finally:
            driver.cudaHostUnregister(shared.data_ptr())

    def _disk(self, folder: Path, num_bytes: int) -> None:
        """O_DIRECT, the faster shape of requests."""
        whole = max(_BLOCK, num_bytes // _BLOCK * _BLOCK)
        path = folder / "direct"
        writes, reads = [], []
        try:
            for shape in direct_io.SHAPES:
                writes.append(direct_io.write_s(path, whole, shape))
                reads.append(direct_io.read_s(path, whole, shape))
                path.unlink()
        except (direct_io.DirectRefused, OSError) as refused:
            self.found["disk write"] = self.found["disk read"] = {"failed": str(refused)}
            return
        finally:
            path.unlink(missing_ok=True)
        self.found["disk write"] = {"num_bytes": whole, "seconds": [min(writes)]}
        self.found["disk read"] = {"num_bytes": whole, "seconds": [min(reads)]}


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        job.report(Rates(job).all())


if __name__ == "__main__":
    main()
