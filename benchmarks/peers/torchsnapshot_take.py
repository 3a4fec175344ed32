"""torchsnapshot: `async_take`, which copies what is on a device and writes beside the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torchsnapshot

from benchmarks.peers.base import Saver
from benchmarks.workload import Workload


class AsyncTake(Saver):
    packages = ("torchsnapshot",)

    def __init__(self) -> None:
        self._pending: Any = None

    def save(self, step: int) -> None:
        self.wait()
        self._pending = torchsnapshot.Snapshot.async_take(
            str(self.folder / str(step)), self._app(self.workload)
        )

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        torchsnapshot.Snapshot(str(folder / str(step))).restore(self._app(workload))
        workload.sync()
        return {}

    def _app(self, workload: Workload) -> dict[str, Any]:
        return {"model": workload.model, "optimizer": workload.optimizer}
