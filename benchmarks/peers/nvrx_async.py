"""NVIDIA's resiliency extension: a copy to the host, then torch.save in a process that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

from benchmarks.peers.base import Saver, join_alone, put_back
from benchmarks.workload import Workload


class AsyncCheckpoint(Saver):
    packages = ("nvidia-resiliency-ext",)

    def __init__(self) -> None:
        self._checkpoint: Any = None

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        super().setup(workload, folder, every)
        join_alone(workload.device.type)
        self._checkpoint = TorchAsyncCheckpoint(persistent_queue=True)

    def save(self, step: int) -> None:
        self.wait()
        self._checkpoint.async_save(self.nested(), str(self.folder / f"{step}.pt"))

    def wait(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True)

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        put_back(workload, torch.load(folder / f"{step}.pt", map_location=workload.device))
        return {}

    def close(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True, terminate=True)
