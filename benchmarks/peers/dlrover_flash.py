"""DLRover's flash checkpoint, without its launcher: the training process starts the saver itself. A save
while the last one is being written would be skipped without a word, so the adapter waits for that one first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.trainer.torch.flash_checkpoint.engine import start_saver_process

from benchmarks.peers.base import Saver, join_alone, put_back
from benchmarks.workload import Workload

_TRACKER = "dlrover_latest.txt"
_TIMEOUT_S = 120.0
SAVER_START_S = 2.0


class ToDisk(Saver):
    packages = ("dlrover",)
    _storage = StorageType.DISK

    def __init__(self) -> None:
        self._checkpointer: Any = None
        self._saved = 0

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        super().setup(workload, folder, every)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        join_alone(workload.device.type)
        # Its saver loses what it is told before it is quite there, and the trainer then waits in vain. So
        # the saver first, as its launcher does it, and the trainer told that it was launched.
        start_saver_process()
        time.sleep(SAVER_START_S)
        os.environ["ROLE_NAME"] = "dlrover-trainer"
        self._checkpointer = DdpCheckpointer(str(folder), comm_backend="gloo")

    def save(self, step: int) -> None:
        self.wait()
        self._checkpointer.save_checkpoint(step, self.nested(), storage_type=self._storage)
        self._saved = step

    def wait(self) -> None:
        tracker = self.folder / _TRACKER
        end = time.monotonic() + _TIMEOUT_S
        while self._saved and (not tracker.exists() or tracker.read_text().strip() != str(self._saved)):
            if time.monotonic() > end:
                raise TimeoutError(f"step {self._saved} was not committed within {_TIMEOUT_S:.0f} s")
            time.sleep(0.005)

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        path = folder / str(step) / "rank_0.pt"
        put_back(workload, torch.load(path, map_location="cpu", weights_only=False))
        return {}

    def close(self) -> None:
        self._checkpointer._engine.close()


class ToMemory(ToDisk):
    commits = False
    loads = False  # its memory is gone with the process that saved, without its launcher
    _storage = StorageType.MEMORY

    def wait(self) -> None: ...
