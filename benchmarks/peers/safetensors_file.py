"""safetensors: one flat file of tensors. It does not sync; the bench does, and counts it as durable."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.base import Saver
from benchmarks.workload import Workload


class SafetensorsFile(Saver):
    packages = ("safetensors",)

    def save(self, step: int) -> None:
        save_file(self.workload.leaves(), self.folder / f"{step}.safetensors")

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        saved = load_file(folder / f"{step}.safetensors", device=str(workload.device))
        with torch.no_grad():
            for name, leaf in workload.leaves().items():
                leaf.copy_(saved[name])
        workload.sync()
        return {}
