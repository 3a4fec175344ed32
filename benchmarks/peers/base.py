"""What the benchmark asks of a peer. An adapter does what its library's documentation tells people to do
(options that are not the default are named in its title), and nothing to make it slower or faster than that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from benchmarks.workload import Workload


class Peer(Protocol):
    """packages: distributions whose versions are reported. tier: where `load` reads.
    dies: whether the saving process is killed at its end, so that a load from memory can be measured.
    commits: whether a checkpoint of this adapter ends on disk; False for one that ends in host memory.
    loads: whether a new process can load what this one saved.
    """

    packages: tuple[str, ...]
    tier: str
    dies: bool
    commits: bool
    loads: bool

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        """Once, after the loop is warm."""

    def boundary(self, step: int, due: bool) -> bool:
        """After each step. Saves if it is due; returns whether a checkpoint was taken."""

    def gate(self) -> None:
        """Before the next optimizer step: wait for what still reads the live state."""

    def wait(self) -> None:
        """Until the newest checkpoint is where the peer says it is safe."""

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        """In a new process: into the live model and optimizer. Returns seconds the peer itself reports."""

    def close(self) -> None: ...


class Saver:
    """The parts of `Peer` that most libraries answer alike: `save` at a due boundary, nothing to wait for."""

    tier = "disk"
    dies = False
    commits = True
    loads = True
    workload: Workload
    folder: Path

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        self.workload, self.folder = workload, folder

    def boundary(self, step: int, due: bool) -> bool:
        if due:
            self.save(step)
        return due

    def save(self, step: int) -> None:
        raise NotImplementedError

    def gate(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def nested(self) -> dict[str, dict[str, object]]:
        return {
            "model": self.workload.model.state_dict(),
            "optimizer": self.workload.optimizer.state_dict(),
        }


def put_back(workload: Workload, state: dict[str, dict[str, object]]) -> None:
    """What follows every load that returns state dictionaries."""
    workload.model.load_state_dict(state["model"])
    workload.optimizer.load_state_dict(state["optimizer"])
    workload.sync()


def join_alone(device: str) -> None:
    """A process group of one, for peers that ask for it. No port: an in-process store is enough."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
