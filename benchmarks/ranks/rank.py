"""One rank of a measured job, started by torchrun: `python -m benchmarks.ranks.rank JOB`.

Saving: steps without and with a checkpoint in turn, then single checkpoints with the loop held still, then
one after which the loop goes on at once, whose checksums a load is compared with. Loading: into a live model
of other values. What a job takes is what its slowest rank takes; the clock is the same for all.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import files
from benchmarks.ending import reporting
from benchmarks.peers.base import Peer
from benchmarks.ranks import cpu, peers
from benchmarks.ranks.workload import JobWorkload
from benchmarks.session import TAG
from benchmarks.settings import Job

_WARM_STEPS = 2
# So many steps a block: the longest of the peers is done with its checkpoint within them, or nearly.
_BLOCK = 4


class Rank:
    def __init__(self, job: Job) -> None:
        self.folder, self.settings = Path(job.folder), job.settings
        self.peer: Peer = peers.create(job.peer)
        self.workload = JobWorkload(job.settings, job.extra["kind"])
        self._gate: Callable[[], None] | None = None
        self._step, self._gate_s = 0, 0.0

    def _train(self) -> None:
        self.workload.step(self._gate)
        self._step += 1

    def _gated(self) -> None:
        began = time.monotonic()
        self.peer.gate()
        self._gate_s += time.monotonic() - began

    # ---- saving

    def save(self) -> dict[str, Any]:
        for _ in range(_WARM_STEPS):
            self.workload.step()
        self.peer.setup(self.workload, self.folder, _BLOCK)
        self._gate = self._gated
        self._alone()  # the first makes pools, processes and slots, and is in no figure
        rounds = [self._pair(first_plain=index % 2 == 0) for index in range(self.settings.rounds)]
        return {
            "versions": {package: importlib.metadata.version(package) for package in self.peer.packages},
            "state_bytes": self.workload.num_bytes(),
            "held_bytes": _greatest(self.workload.held_bytes()),
            "rounds": rounds,
            "alone": [self._alone() for _ in range(self.settings.repetitions)],
            "last": self._last(),
        }

    def _pair(self, *, first_plain: bool) -> dict[str, float]:
        plain_s = self._block(due=False)[0] if first_plain else 0.0
        with_s, held_s = self._block(due=True)
        self.peer.wait()
        self._prune()
        plain_s = plain_s or self._block(due=False)[0]
        return {"plain_s": plain_s, "with_s": with_s, "held_s": held_s}

    def _block(self, *, due: bool) -> tuple[float, float]:
        """Seconds of some steps, the first of them with a checkpoint, and of that in its call and at the
        gate."""
        self._gate_s, call_s = 0.0, 0.0
        began = _together()
        for index in range(_BLOCK):
            self._train()
            called = time.monotonic()
            self.peer.boundary(self._step, due and index == 0)
            call_s += (time.monotonic() - called) if due and index == 0 else 0.0
        return _together() - began, _greatest(call_s + self._gate_s)

    def _alone(self) -> dict[str, float]:
        """One checkpoint with the loop held still."""
        self._train()
        before = files.sizes(self.folder)
        _together()
        cpu_s, began = self._cpu_s(), _together()
        if not self.peer.boundary(self._step, True):
            raise RuntimeError("a checkpoint that was due on an idle loop was not taken")
        call_s = time.monotonic() - began
        self.peer.gate()
        held_s = time.monotonic() - began
        self.peer.wait()
        waited_s = time.monotonic() - began
        ended = _together()
        if dist.get_rank() == 0:
            files.sync_all(self.folder)
            ended = time.monotonic()
        measured = {
            "call_s": _greatest(call_s),
            "held_s": _greatest(held_s),
            "waited_s": _greatest(waited_s),
            "durable_s": _greatest(ended - began),
            "cpu_s": self._cpu_s() - cpu_s,
            "written_bytes": sum(
                size for path, size in files.sizes(self.folder).items() if path not in before
            ),
        }
        self._prune()
        return measured

    def _cpu_s(self) -> float:
        """Of all processes of the job so far; 0 on the other ranks."""
        return cpu.seconds_of(f"{TAG}={os.environ[TAG]}") if dist.get_rank() == 0 else 0.0

    def _last(self) -> dict[str, Any]:
        self._train()
        fingerprint = self.workload.fingerprint()
        self.peer.boundary(self._step, True)
        step = self._step
        self._train()
        self._train()
        self.peer.wait()
        _together()
        files.sync_all(self.folder)
        return {"step": step, "fingerprint": fingerprint}

    def _prune(self) -> None:
        _together()
        if dist.get_rank() == 0:
            files.keep_newest(self.folder, 1)
        _together()

    def end(self) -> None:
        """Let all go in order, once all have reported: a run that nobody has ended would be watched for its
        trainers by the next job, which has a runtime folder of its own. The session ends what is left."""
        _together()
        with contextlib.suppress(Exception):
            self.peer.close()

    # ---- loading

    def load(self, last: dict[str, Any]) -> dict[str, Any]:
        self._train()
        self.workload.spoil()
        _together()
        if dist.get_rank() == 0:
            files.forget(self.folder)
        began = _together()
        self.peer.load(self.workload, self.folder, last["step"])
        own_s = time.monotonic() - began
        seconds = _together() - began
        loaded = self.workload.fingerprint()
        differ = [name for name, value in last["fingerprint"].items() if loaded.get(name) != value]
        return {"seconds": seconds, "own_s": own_s, "exact": not differ, "differ": differ[:3]}


def _together() -> float:
    """The moment in which the last rank came here, and its device was done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    return time.monotonic()


def _join(device: str) -> None:
    """NCCL where each rank has a device of its own. Where ranks share one, gloo does all."""
    backend = "gloo"
    if device == "cuda":
        devices = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % devices)
        backend = (
            "cpu:gloo,cuda:nccl" if int(os.environ["LOCAL_WORLD_SIZE"]) <= devices else "cpu:gloo,cuda:gloo"
        )
    dist.init_process_group(backend)


def _greatest(value: float) -> float:
    most = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def main() -> None:
    job = Job.read(sys.argv[1])
    number = int(os.environ["RANK"])
    # Whatever names its own things after the launch finds the tag by which the bench ends and clears them.
    os.environ["TORCHELASTIC_RUN_ID"] = os.environ[TAG]
    if number:
        job = replace(job, result=str(Path(job.result).with_stem(f"result-{number}")))
    with reporting(job):
        _join(job.settings.device)
        rank = Rank(job)
        is_load = "last" in job.extra
        job.report(rank.load(job.extra["last"]) if is_load else rank.save())
        rank.end()
        _together()
        if not is_load:
            rank.peer.close()


if __name__ == "__main__":
    main()
