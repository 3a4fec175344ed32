"""torch.save and an fsync: what most training scripts do."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.peers.base import Saver, put_back
from benchmarks.workload import Workload


class TorchSave(Saver):
    packages = ("torch",)

    def save(self, step: int) -> None:
        with open(self.folder / f"{step}.pt", "wb") as file:
            torch.save(self.nested(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        put_back(workload, torch.load(folder / f"{step}.pt", map_location=workload.device))
        return {}
