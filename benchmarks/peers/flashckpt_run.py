"""flashckpt, by `attach` and `.step()`: every checkpoint persisted, or none but those that stay in memory.

At each step the boundary is marked, as in a training script; the library decides which ones it takes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import flashckpt
from benchmarks.peers.base import Saver
from benchmarks.workload import Workload

_TIMEOUT_S = 60.0


class ToDisk(Saver):
    packages = ("flashckpt",)
    _persists = True

    def __init__(self) -> None:
        self._checkpointer: Any = None
        self._spent_s = 0.0
        self._taken_step = 0

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        super().setup(workload, folder, every)
        self._checkpointer = flashckpt.attach(
            folder / "run",
            every=every,
            persist_every=every if self._persists else None,
            model=workload.model,
            optimizer=workload.optimizer,
        )

    def boundary(self, step: int, due: bool) -> bool:
        self._checkpointer.step()
        spent_s = self._checkpointer.report()["capture_call_seconds"]
        taken: bool = spent_s != self._spent_s
        self._spent_s = spent_s
        return taken

    def wait(self) -> None:
        self._checkpointer.wait()

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        checkpointer = flashckpt.attach(
            folder / "run", every=None, model=workload.model, optimizer=workload.optimizer
        )
        self._checkpointer = checkpointer  # its end would be that of what other ranks still read
        resumed = checkpointer.resumed
        expected = "memory" if self.tier == "memory" else "local"
        if resumed is None or resumed.step != step or resumed.tier != expected:
            raise RuntimeError(f"resumed from {resumed}, not from step {step} in the {expected} tier")
        return {"resumed_s": resumed.seconds}

    def close(self) -> None:
        self._checkpointer.close()


class ToMemory(ToDisk):
    """Snapshots that a new process finds in this node's memory after the old one was killed."""

    tier = "memory"
    commits = False
    dies = True
    _persists = False

    def wait(self) -> None:
        # Not `wait()`, which would persist it: until the newest snapshot is sealed.
        end = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            if self._checkpointer.report()["newest_sealed_step"] >= self._taken_step:
                return
            time.sleep(0.0005)
        raise TimeoutError("the snapshot was not sealed")

    def boundary(self, step: int, due: bool) -> bool:
        taken = super().boundary(step, due)
        if taken:
            self._taken_step = self._checkpointer.completed
        return taken
