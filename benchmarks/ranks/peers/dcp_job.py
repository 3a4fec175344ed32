"""torch.distributed.checkpoint on several ranks. What is asynchronous has a process group of its own, as its
documentation asks: its collectives go on beside those of the loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.peers import dcp
from benchmarks.workload import Workload

_WRITER_THREADS = 4


class _Resharding:
    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        load(dict(workload.leaves()), checkpoint_id=folder / str(step))
        workload.sync()
        return {}


class Save(_Resharding, dcp.Save):
    pass


class AsyncSaveKeptStager(_Resharding, dcp.AsyncSaveKeptStager):
    _type = AsyncCheckpointerType.THREAD

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        super().setup(workload, folder, every)
        self._group: Any = dist.new_group(backend="gloo")

    def save(self, step: int) -> None:
        self.wait()
        self._response = async_save(
            self.workload.leaves(),
            storage_writer=FileSystemWriter(self.folder / str(step), thread_count=_WRITER_THREADS),
            process_group=self._group,
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )


class AsyncSaveInProcess(AsyncSaveKeptStager):
    _type = AsyncCheckpointerType.PROCESS
