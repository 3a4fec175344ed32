"""One peer, in a process of its own: what its checkpoints cost the loop. `python -m benchmarks.measure JOB`.

Blocks of steps without and with checkpoints alternate in the same process, so that a slow minute of the
machine falls on both. Then the loop is held still and single checkpoints are timed until they are durable;
last comes one after which the loop goes on at once, whose fingerprint `benchmarks.load` compares.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import files, peers
from benchmarks.ending import reporting
from benchmarks.peers.base import Peer
from benchmarks.settings import Job, Settings
from benchmarks.workload import Workload

_WARM_STEPS = 3
_WARM_LIMIT = 400
_KEPT = 2


class Measurement:
    """The loop under one peer. Times are in seconds; `phases` are monotonic, for whoever samples memory."""

    def __init__(self, settings: Settings, peer: Peer, folder: Path) -> None:
        self.settings, self.peer, self.folder = settings, peer, folder
        self.workload = Workload(settings)
        self.phases: dict[str, tuple[float, float]] = {}
        self._step = 0
        self._gate: Callable[[], None] | None = None

    def attach(self) -> None:
        self.peer.setup(self.workload, self.folder, self.settings.every)
        self._gate = self.peer.gate

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.phases[name] = (began, time.monotonic())

    def plain_steps(self, count: int) -> float:
        """Seconds of `count` steps without checkpoints."""
        self.workload.sync()
        began = time.perf_counter()
        for _ in range(count):
            self.workload.step(self._gate)
        self.workload.sync()
        return time.perf_counter() - began

    def warm(self) -> dict[str, float]:
        """The first checkpoint: it makes pools, processes and slots, and is in no other figure."""
        for _ in range(_WARM_LIMIT):
            self.workload.step(self._gate)
            self._step += 1
            began = time.perf_counter()
            if self.peer.boundary(self._step, self._step % self.settings.every == 0):
                break
        else:
            raise RuntimeError(f"no checkpoint was taken in {_WARM_LIMIT} steps")
        call_s = time.perf_counter() - began
        self.peer.gate()
        self.peer.wait()
        waited_s = time.perf_counter() - began
        # One more on time: from here on those that are due and those that are taken are the same steps.
        self.block(-self._step % self.settings.every)
        return {"call_s": call_s, "waited_s": waited_s}

    def block(self, steps: int) -> dict[str, Any]:
        """Steps with checkpoints. What the last one still does after the block is waited for outside:
        `waited_s` is from its call until the peer says that it is safe."""
        calls: list[float] = []
        boundaries: list[float] = []
        self.workload.sync()
        asked = began = time.perf_counter()
        for _ in range(steps):
            self.workload.step(self._gate)
            self._step += 1
            called = time.perf_counter()
            taken = self.peer.boundary(self._step, self._step % self.settings.every == 0)
            (calls if taken else boundaries).append(time.perf_counter() - called)
            asked = called if taken else asked
        self.peer.gate()
        self.workload.sync()
        seconds = time.perf_counter() - began
        self.peer.wait()
        waited_s = time.perf_counter() - asked
        files.keep_newest(self.folder, _KEPT)
        return {
            "with_s": seconds,
            "taken": len(calls),
            "calls_s": calls,
            "boundaries_s": boundaries,
            "waited_s": waited_s,
        }

    def rounds(self) -> list[dict[str, Any]]:
        steps = self.settings.every * self.settings.checkpoints
        measured = []
        for index in range(self.settings.rounds):
            first = self.plain_steps(steps) if index % 2 == 0 else None
            block = self.block(steps)
            plain_s = self.plain_steps(steps) if first is None else first
            measured.append({"steps": steps, "plain_s": plain_s, **block})
        return measured

    def alone(self) -> dict[str, float]:
        """One checkpoint with the loop held still: call, staged, waited for, durable; from the call on."""
        while (self._step + 1) % self.settings.every:
            self.workload.step(self._gate)
            self._step += 1
            self.peer.boundary(self._step, False)
        self.workload.step(self._gate)
        self._step += 1
        self.workload.sync()
        files.sync_all(self.folder)
        began = time.perf_counter()
        if not self.peer.boundary(self._step, True):
            raise RuntimeError("a checkpoint that was due on an idle loop was not taken")
        call_s = time.perf_counter() - began
        self.peer.gate()
        self.workload.sync()
        staged_s = time.perf_counter() - began
        self.peer.wait()
        waited_s = time.perf_counter() - began
        files.sync_all(self.folder)
        durable_s = time.perf_counter() - began
        return {"call_s": call_s, "staged_s": staged_s, "waited_s": waited_s, "durable_s": durable_s}

    def last(self) -> dict[str, Any]:
        """A checkpoint after which the loop goes on at once: what it holds must be the state at its step."""
        files.keep_newest(self.folder, 0)
        while (self._step + 1) % self.settings.every:
            self.workload.step(self._gate)
            self._step += 1
            self.peer.boundary(self._step, False)
        self.workload.step(self._gate)
        self._step += 1
        fingerprint = self.workload.fingerprint()
        self.peer.boundary(self._step, True)
        self.plain_steps(2)
        self.peer.wait()
        files.sync_all(self.folder)
        return {"step": self._step, "fingerprint": fingerprint}


def measure(settings: Settings, name: str, folder: Path) -> tuple[Peer, dict[str, Any]]:
    peer = peers.create(name)
    run = Measurement(settings, peer, folder)
    for _ in range(_WARM_STEPS):
        run.workload.step()
    with run.phase("plain"):
        plain_s = run.plain_steps(settings.every)
    device_plain = _device_peak(run.workload)
    began = time.perf_counter()
    run.attach()
    setup_s = time.perf_counter() - began
    with run.phase("checkpoints"):
        first = run.warm()
        measured = run.rounds()
        alone = [run.alone() for _ in range(settings.repetitions)]
    result: dict[str, Any] = {
        "tier": peer.tier,
        "commits": peer.commits,
        "loads": peer.loads,
        "versions": {package: importlib.metadata.version(package) for package in peer.packages},
        "state_bytes": run.workload.num_bytes(),
        "leaves": len(run.workload.leaves()),
        "plain_step_s": plain_s / settings.every,
        "setup_s": setup_s,
        "first": first,
        "rounds": measured,
        "alone": alone,
        "device_peak_bytes": _device_peak(run.workload) - device_plain,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "phases": run.phases,
        "last": run.last(),
    }
    return peer, result


def _device_peak(workload: Workload) -> int:
    """Bytes of device memory at their highest since the last call."""
    if workload.device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        peer, result = measure(job.settings, job.peer, Path(job.folder))
        job.report(result)
        if peer.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        peer.close()


if __name__ == "__main__":
    main()
