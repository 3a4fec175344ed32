"""flashckpt on several ranks: `.save()` in the iterations that a checkpoint is due in, and `.step()`."""

from __future__ import annotations

from pathlib import Path

import flashckpt
from benchmarks.peers import flashckpt_run
from benchmarks.workload import Workload
from flashckpt.checkpointer import resume  # noqa: F401  as the peers import theirs: no import is measured


class ToDisk(flashckpt_run.ToDisk):
    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        self.workload, self.folder = workload, folder
        self._checkpointer = flashckpt.attach(
            folder / "run", every=None, model=workload.model, optimizer=workload.optimizer
        )

    def boundary(self, step: int, due: bool) -> bool:
        if due:
            self._checkpointer.save()
        return super().boundary(step, due)
