"""meta-pytorch/torch_checkpointing: staging beside the loop, a lock before the optimizer, a writing process.
Its preset turns pinned memory on where there is CUDA, and off where there is none. Its direct writes are
turned off: they are not aligned, and ext4 refuses them (EINVAL when the file is closed).
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.peers.base import Saver, put_back
from benchmarks.workload import Workload


class Manager(Saver):
    packages = ("torch_checkpointing",)

    def __init__(self) -> None:
        self._manager: Any = None
        self._written: Future[Any] | None = None

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        super().setup(workload, folder, every)
        self._manager = CheckpointManager(_config(AsyncCheckpointSaverConfig()))

    def save(self, step: int) -> None:
        self.wait()
        self._written = self._manager.save(str(self.folder / str(step)), self.nested())

    def gate(self) -> None:
        with self._manager.lock():
            pass

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        self.workload = workload
        manager = CheckpointManager(_config(SyncCheckpointSaverConfig()))
        put_back(workload, dict(manager.load(str(folder / str(step)), into=self.nested())))
        return {}

    def close(self) -> None:
        self._manager.close()


def _config(save: CheckpointSaverConfig) -> CheckpointManager.Config:
    return CheckpointManager.Config(
        save=save, storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
    )
