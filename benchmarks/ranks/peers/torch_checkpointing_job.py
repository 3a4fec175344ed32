"""torch_checkpointing on several ranks. Its resharder is to be declared from the first save and exchanges
what it needs on CUDA devices: where there are none it goes without, and only the same layout can be loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.peers import torch_checkpointing_manager
from benchmarks.workload import Workload

_ITEM = "state"


class Manager(torch_checkpointing_manager.Manager):
    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        self.workload, self.folder = workload, folder
        self._manager = CheckpointManager(_config(AsyncCheckpointSaverConfig()))

    def nested(self) -> dict[str, Any]:
        return {_ITEM: self.workload.leaves()}

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        self.workload = workload
        live = workload.leaves()
        manager = CheckpointManager(_config(SyncCheckpointSaverConfig()))
        loaded: Any = manager.load(str(folder / str(step)), into={_ITEM: live})[_ITEM]
        for name, leaf in live.items():
            if loaded[name] is not leaf:
                leaf.copy_(loaded[name])
        return {}


def _config(save: CheckpointSaverConfig) -> CheckpointManager.Config:
    resharder = DefaultResharder() if torch.cuda.is_available() else None
    return CheckpointManager.Config(
        items={_ITEM: ItemSpec(resharder=resharder)},
        save=save,
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
