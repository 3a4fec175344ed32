"""One adapter for each way of checkpointing a job that is compared; see `benchmarks.peers.base`. Imported by
name, in the ranks that run it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.base import Peer

PEERS = {
    "flashckpt": ("flashckpt_job:ToDisk", "flashckpt"),
    "dcp_save": ("dcp_job:Save", "DCP save, 4 threads"),
    "dcp_async_kept": ("dcp_job:AsyncSaveKeptStager", "DCP async_save, kept stager, 4 threads"),
    "dcp_async_process": ("dcp_job:AsyncSaveInProcess", "DCP async_save, kept stager, in a process"),
    "torch_checkpointing": ("torch_checkpointing_job:Manager", "torch_checkpointing, buffered writes"),
    "dlrover": ("dlrover_job:ToDisk", "DLRover, to disk"),
    "nvrx": ("nvrx_job:AsyncCheckpoint", "NVRx TorchAsyncCheckpoint"),
}
"""Where the adapter is, and its title in the table."""


def create(name: str) -> Peer:
    module, _, attribute = PEERS[name][0].partition(":")
    peer: Peer = getattr(importlib.import_module(f"benchmarks.ranks.peers.{module}"), attribute)()
    return peer
